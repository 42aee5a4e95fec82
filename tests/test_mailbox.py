"""Messages through a ring of shared memory: in order, whole, and never more than were announced."""

import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shmloader.doorbell import Doorbell
from shmloader.mailbox import BATCH, MESSAGE_BYTES, WORK, Inbox, Outbox, Reply, Ticket
from shmloader.segment import PAGE, Segment
from support import context

CAPACITY = 5
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)


def ring(bell, offset=128):
    """Both ends of one ring in plain memory."""
    memory = np.zeros(offset + CAPACITY * MESSAGE_BYTES, np.uint8)
    return Outbox(memory, offset, CAPACITY, bell), Inbox(memory, offset, CAPACITY, bell), memory


def echo(segment, bells, count):
    """Answer each ticket with a reply that carries its numbers, in a child."""
    inbox = Inbox(segment.memory, 0, CAPACITY, bells[0])
    outbox = Outbox(segment.memory, PAGE, CAPACITY, bells[1])
    for _ in range(count):
        while (message := inbox.receive()) is None:
            bells[0].wait(10.0)
        ticket = Ticket(*message)
        outbox.send(Reply(BATCH, ticket.batch, ticket.slot, -1, ticket.offset, ticket.nbytes, ticket.index_count, 0))


def test_a_message_is_one_cache_line():
    """64 bytes: eight numbers, and two messages never share a line."""
    assert MESSAGE_BYTES == 64
    assert len(Ticket._fields) == len(Reply._fields) == 8


def test_an_empty_ring_gives_nothing_without_blocking():
    """``receive`` says None, also twice."""
    bell = Doorbell.create()
    _, inbox, _ = ring(bell)
    assert inbox.receive() is None
    assert inbox.receive() is None
    bell.close()


def test_what_is_written_but_not_announced_is_not_read():
    """Only the doorbell publishes: bytes in the ring alone are not a message."""
    bell = Doorbell.create()
    outbox, inbox, _ = ring(bell)
    outbox.send(Ticket(WORK, 1, 2, 3, 4, 5, 6, 7))
    assert bell.take() == 1  # the announcement is gone
    assert inbox.receive() is None
    bell.close()


@given(st.lists(st.lists(st.tuples(*[INT64] * 8), max_size=CAPACITY), max_size=8))
@settings(max_examples=60, deadline=None)
def test_messages_arrive_whole_and_in_order_across_the_seam(rounds):
    """Any numbers, any number of rounds: the ring wraps and neither end loses its place or writes outside."""
    bell = Doorbell.create()
    outbox, inbox, memory = ring(bell)
    for messages in rounds:
        for message in messages:
            outbox.send(Ticket(*message))
        assert [inbox.receive() for _ in messages] == messages
        assert inbox.receive() is None
    assert not memory[:128].any()
    bell.close()


def test_two_processes_talk_over_one_segment():
    """300 tickets to a child and 300 replies back, one ring a direction, each number as it was sent."""
    bells = Doorbell.create(), Doorbell.create()
    segment = Segment.create(2 * PAGE)
    segment.commit(0, 2 * PAGE)
    outbox = Outbox(segment.memory, 0, CAPACITY, bells[0])
    inbox = Inbox(segment.memory, PAGE, CAPACITY, bells[1])
    process = context("fork").Process(target=echo, args=(segment, bells, 300))
    process.start()
    sent = received = 0
    deadline = time.monotonic() + 30
    while received < 300:
        while sent < 300 and sent - received < CAPACITY:
            outbox.send(Ticket(WORK, sent, sent + 1, sent + 2, sent + 3, 1, sent + 4, 0))
            sent += 1
        message = inbox.receive()
        if message is None:
            bells[1].wait(30.0)
            assert time.monotonic() < deadline
            continue
        k = received
        assert Reply(*message) == Reply(BATCH, k, k + 1, -1, k + 2, k + 3, k + 4, 0)
        received += 1
    process.join(30)
    assert process.exitcode == 0
    for bell in bells:
        bell.close()
    del outbox, inbox
    segment.close()
