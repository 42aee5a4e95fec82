"""Doorbells: no ring is lost, death rings too, and no wait outlasts its deadline."""

import os
import threading
import time

import pytest

from shmloader.doorbell import Doorbell
from support import context, no_leaks, start_methods


def ring_times(bell, times):
    """Ring in a child."""
    for _ in range(times):
        bell.ring()


def test_rings_add_up_and_take_resets():
    """Three rings are one count of 6 (1 + 2 + 3), and the next take finds 0."""
    bell = Doorbell.create()
    for times in (1, 2, 3):
        bell.ring(times)
    assert bell.take() == 6
    assert bell.take() == 0
    bell.close()


def test_wait_returns_at_once_when_it_was_rung_before():
    """A ring before the wait is not lost, and waiting takes nothing."""
    bell = Doorbell.create()
    bell.ring()
    assert bell.wait(30.0) == ()
    assert bell.take() == 1
    bell.close()


def test_wait_ends_at_its_deadline():
    """Without a ring the wait is over after its seconds, not before."""
    bell = Doorbell.create()
    started = time.monotonic()
    assert bell.wait(0.05) == ()
    assert time.monotonic() - started >= 0.05
    assert bell.take() == 0
    bell.close()


def test_a_ring_wakes_a_sleeper():
    """A thread that rings ends a wait of a minute long before the minute."""
    bell = Doorbell.create()
    thread = threading.Thread(target=bell.ring)
    thread.start()
    started = time.monotonic()
    bell.wait(60.0)
    assert bell.take() == 1
    assert time.monotonic() - started < 30
    thread.join()
    bell.close()


def test_death_wakes_a_sleeper_and_is_named():
    """The closed end of a pipe ends the wait and is returned; the bell itself is not."""
    bell = Doorbell.create()
    read_end, write_end = os.pipe()
    os.close(write_end)
    assert bell.wait(60.0, (read_end,)) == (read_end,)
    bell.ring()
    assert bell.wait(60.0, (read_end,)) == (read_end,)
    assert bell.wait(60.0) == ()
    os.close(read_end)
    bell.close()


def test_close_is_idempotent_and_leaks_no_descriptor():
    """One descriptor a bell, none after close."""
    with no_leaks():
        bells = [Doorbell.create() for _ in range(8)]
        for bell in bells + bells:
            bell.close()


@pytest.mark.slow
@start_methods
def test_a_child_rings_the_same_bell(start_method):
    """Inherited or pickled, a copy in a child is the same bell, and 100 rings are 100."""
    chosen = context(start_method)
    with no_leaks():
        bell = Doorbell.create()
        process = chosen.Process(target=ring_times, args=(bell, 100))
        process.start()
        process.join(60)
        assert process.exitcode == 0
        process.close()
        assert bell.take() == 100
        bell.close()
