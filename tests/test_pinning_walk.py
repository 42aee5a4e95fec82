"""A walk over batches, late copies, streams, growth: in any order, no copy reads what was written later (B1)."""

import itertools

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from recorder import Recorder
from shmloader.arena import Arena
from shmloader.cap import Cap
from shmloader.drain import settle
from shmloader.pinning import Copying
from shmloader.segment import PAGE, Segment

STREAMS = 3
PAGES = 12


class Walk(RuleBasedStateMachine):
    """Batches are lent, copied on some stream, dropped there; the device goes on when it likes, or refuses to lock."""

    @initialize(refused=st.integers(1, 30))
    def begin(self, refused):
        """One of the registrations may fail, or none of the first thirty."""
        self.recorder = Recorder(pace=0, refuse=lambda number, nbytes: number == refused)
        for number in range(STREAMS - 1):
            self.recorder.open_stream(str(number))
        self.arena = Arena(Segment.create(100 * PAGE), Cap(PAGES * PAGE), 3, PAGE)
        self.arena.serve(Copying(self.recorder, pin=True, streams=list(self.recorder.streams)))
        self.lent, self.copies, self.stamp = [], [], 0

    @rule(pages=st.integers(0, 3))
    def lend(self, pages):
        """A batch that all slots are taken for does not come."""
        slot = self.arena.grant(pages * PAGE)
        if slot is not None:
            self.stamp = self.stamp % 98 + 1
            self.arena.segment.memory[slot.offset : slot.offset + slot.nbytes] = self.stamp
            self.arena.publish(slot)
            self.lent.append((self.arena.lend(slot, 0, slot.nbytes), self.stamp))

    @precondition(lambda self: self.lent)
    @rule(data=st.data(), drop=st.booleans(), stream=st.integers(0, STREAMS - 1))
    def copy(self, data, drop, stream):
        """On any stream; dropped at once or kept."""
        place = data.draw(st.integers(0, len(self.lent) - 1))
        with self.recorder.on(self.recorder.streams[stream]):
            lease, stamp = self.lent[place]
            self.copies.append((self.recorder.copy(torch.from_numpy(lease)), stamp))
            del lease
            if drop:
                del self.lent[place]

    @rule(stream=st.integers(0, STREAMS - 1), operations=st.integers(1, 4))
    def go_on(self, stream, operations):
        """The device does some of its work."""
        self.recorder.streams[stream].run(operations)

    @invariant()
    def the_books_are_right(self):
        """States add up, the cap holds, and lent bytes are what they were."""
        stats = self.arena.stats()
        assert stats.slots == stats.free + stats.lent + stats.draining
        assert stats.lent == len(self.lent)
        assert stats.nbytes <= PAGES * PAGE
        assert all((lease == stamp).all() for lease, stamp in self.lent)
        ranges = sorted((start, start + nbytes) for start, nbytes in self.recorder.registered.items())
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ranges))
        if stats.pinned:
            assert stats.pinned_bytes == sum(self.recorder.registered.values()) == stats.nbytes

    def teardown(self):
        """The arena is closed amid it all; then the device comes to its end: all copies right, nothing registered."""
        self.arena.close()
        self.lent.clear()
        self.recorder.run()
        settle()
        assert all((copied == stamp).all() for copied, stamp in self.copies)
        assert not self.recorder.registered


TestWalk = Walk.TestCase
TestWalk.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_a_long_queue_is_not_asked_slot_by_slot():
    """With hundreds of slots in flight a look costs a few questions; when they have passed, all come back at once."""

    class Counting(Recorder):
        asked = 0

        def own(self):
            self.asked += 1
            super().own()

    recorder = Counting(pace=0)
    arena = Arena(Segment.create(2000 * PAGE), Cap(None), 400, PAGE)
    arena.serve(Copying(recorder))
    recorder.default.work.append(lambda: None)
    leases = []
    for _ in range(300):
        slot = arena.grant()
        arena.publish(slot)
        leases.append(arena.lend(slot, 0, PAGE))
    leases.clear()
    assert arena.stats().draining == 300
    before = recorder.asked
    assert arena.stats().draining == 300
    assert recorder.asked - before < 20
    recorder.run()
    assert arena.stats().draining == 0
    arena.close()
