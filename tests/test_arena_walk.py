"""A walk over everything an arena can be asked: the cap holds, live slots never overlap, lent bytes never change."""

import gc
import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shmloader.arena import Arena
from shmloader.cap import Cap
from shmloader.segment import PAGE, Segment
from shmloader.slot import GRANTED, LENT, READY


class Walk(RuleBasedStateMachine):
    """A walk over everything an arena can be asked, beside a model that is a dict of slots and a number."""

    def __init__(self):
        super().__init__()
        self.cap_pages = 10
        self.arena = Arena(Segment.create(80 * PAGE), Cap(self.cap_pages * PAGE), 4, PAGE)
        self.granted, self.ready, self.lent = [], [], {}
        self.stamp = 0

    def teardown(self):
        """Everything lent outlives the arena."""
        self.arena.close()
        self._lent_bytes_are_unchanged()

    def _lent_bytes_are_unchanged(self):
        for view, stamp in self.lent.values():
            assert (view == stamp).all(), f"stamp {stamp} was overwritten"

    @rule(pages=st.integers(0, 6))
    def grant(self, pages):
        """Never a slot that somebody has."""
        slot = self.arena.grant(pages * PAGE)
        if slot is not None:
            assert slot.nbytes >= max(pages, 1) * PAGE
            assert slot not in [*self.granted, *self.ready, *[s for s, _ in self.lent]]
            self._stamp(slot)
            self.granted.append(slot)

    def _stamp(self, slot):
        self.stamp = self.stamp % 250 + 1
        self.arena.segment.memory[slot.offset : slot.offset + slot.nbytes] = self.stamp

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), pages=st.integers(1, 6))
    def regrant(self, data, pages):
        """Give a slot back for a larger one, or for whatever is free: its worker is never left without."""
        slot = data.draw(st.sampled_from(self.granted))
        self.granted.remove(slot)
        larger = self.arena.exchange(slot, pages * PAGE)
        assert larger is not None, "at least the slot that was just given back is free"
        self._stamp(larger)
        self.granted.append(larger)

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def publish(self, data):
        """GRANTED to READY."""
        slot = data.draw(st.sampled_from(self.granted))
        self.arena.publish(slot)
        self.granted.remove(slot)
        self.ready.append(slot)

    @precondition(lambda self: self.granted or self.ready)
    @rule(data=st.data())
    def reclaim(self, data):
        """What nobody will look at is free at once."""
        slot = data.draw(st.sampled_from(self.granted + self.ready))
        self.arena.reclaim(slot)
        (self.granted if slot in self.granted else self.ready).remove(slot)

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def lend(self, data):
        """Keep only a sparse view of the batch, as users do."""
        slot = data.draw(st.sampled_from(self.ready))
        self.ready.remove(slot)
        base = self.arena.lend(slot, 0, slot.nbytes)
        self.lent[slot, self.stamp + len(self.lent)] = base[3::7], int(base[0])

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def drop(self, data):
        """The last view of a batch dies."""
        del self.lent[data.draw(st.sampled_from(list(self.lent)))]

    @rule(slots=st.integers(1, 6))
    def change_plan(self, slots):
        """The loader may want other numbers at any time."""
        self.arena.slots_wanted = slots

    @rule(pages=st.integers(1, 3))
    def larger_slots(self, pages):
        """New slots may become larger."""
        self.arena.slot_bytes = max(self.arena.slot_bytes, pages * PAGE)

    @invariant()
    def nothing_is_wrong(self):
        """States, cap, overlaps and contents agree with the model."""
        gc.collect(0)
        stats = self.arena.stats()
        assert (stats.granted, stats.ready, stats.lent) == (len(self.granted), len(self.ready), len(self.lent))
        assert stats.slots == stats.free + stats.granted + stats.ready + stats.lent
        assert stats.nbytes <= self.cap_pages * PAGE
        assert self.arena.cap.used == stats.nbytes
        live = sorted(
            (slot.offset, slot.offset + slot.nbytes)
            for slot in [*self.granted, *self.ready, *[s for s, _ in self.lent]]
        )
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(live))
        assert {slot.state for slot in self.granted} <= {GRANTED}
        assert {slot.state for slot in self.ready} <= {READY}
        assert {slot.state for slot, _ in self.lent} <= {LENT}
        self._lent_bytes_are_unchanged()


TestWalk = Walk.TestCase
TestWalk.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
