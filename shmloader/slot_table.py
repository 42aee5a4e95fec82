"""The slots that there are: made from pieces of the segment, listed while they are free, retired when not needed.

    new ──▶ in use ──rest──▶ free ──take──▶ in use
                               └──retire──▶ gone, its pages went back

Seeds are slots from before the batch size was known: as small as can be, made to carry the first tickets. A worker that
holds one will ask for a larger slot. They count as no slot, and go as they come back.
"""

from __future__ import annotations

from collections.abc import Callable

from .drain import Drain
from .pieces import Pieces
from .segment import Segment
from .slot import FREE, GRANTED, Slot
from .watch import Watch


class SlotTable:
    """Belongs to one arena, which makes the moves and holds the lock. ``returned`` is called when a lease has ended."""

    def __init__(self, segment: Segment, pieces: Pieces, returned: Callable[[Slot], None]) -> None:
        self._segment = segment
        self._pieces = pieces
        self._returned = returned
        self._made = 0
        self.all: dict[int, Slot] = {}
        self.free: list[Slot] = []
        """Last in, first out: the slot whose pages are warmest."""
        self.seeds: set[Slot] = set()
        self.mapped = 0
        """Bytes of slots that the main process has mapped."""
        self.drain: Drain | None = None
        """The copy engine's side, if one may read slots."""
        self.watch: Watch | None = None
        """What looks for misuse, in debug mode."""

    def serve(self, drain: Drain) -> None:
        """From now on ``drain`` looks after the copies of slots, and page-locks them if that is asked for."""
        self.drain = drain
        for slot in self.all.values():
            self._open(slot)

    def _open(self, slot: Slot) -> None:
        if self.drain is not None:
            if self.drain.pins_slots and not slot.mapped:  # locking pages that are there takes a fifth of the time
                self.map(slot)
            self.drain.opened(slot)

    def new(self, nbytes: int) -> Slot:
        """Make a slot of ``nbytes`` (whole pages), which is on no list. Raises SharedMemoryFull."""
        slot = Slot(self._made, self._pieces.take(nbytes), nbytes, self._returned)
        self._made += 1
        self.all[slot.index] = slot
        try:
            self._open(slot)
        except BaseException:  # an interrupt: the slot is there, and free
            self.free.append(slot)
            raise
        return slot

    def retire(self, slot: Slot) -> None:
        """Give the pages of a free slot back. It is gone."""
        self.free.remove(slot)
        slot.move("retire")
        del self.all[slot.index]
        self.seeds.discard(slot)
        self.take_down(slot)

    def take_down(self, slot: Slot) -> None:
        """Give the pages of a slot back that nobody looks at."""
        if slot.mapped:
            self.mapped -= slot.nbytes
        if self.drain is not None:
            self.drain.shut(slot)
        if self.watch is not None:
            self.watch.retired(slot)
        self._pieces.give(slot.offset, slot.nbytes)

    def rest(self, slot: Slot) -> None:
        """A slot has become FREE."""
        self.free.append(slot)
        if slot in self.seeds:
            self.retire(slot)
            return
        if self.drain is not None:
            self.drain.freed(slot)
        if self.watch is not None:
            self.watch.freed(slot)

    def largest(self) -> Slot | None:
        """Take the largest free slot off the list, if there is one."""
        if not self.free:
            return None
        slot = max(self.free, key=lambda slot: slot.nbytes)
        self.free.remove(slot)
        return slot

    def map(self, slot: Slot) -> None:
        """Map a slot into this process before the user reads it: once for each slot, by several threads if large."""
        self._segment.populate(slot.offset, slot.nbytes)
        slot.mapped = True
        self.mapped += slot.nbytes

    # --- seeds

    def call_seeds(self, slot_bytes: int) -> None:
        """The size is known: all slots below it are seeds from now on."""
        self.seeds = {slot for slot in self.all.values() if slot.nbytes < slot_bytes}
        self.retire_seeds()

    def retire_seeds(self) -> None:
        """Retire the seeds that are free."""
        for seed in [slot for slot in self.seeds if slot.state == FREE]:
            self.retire(seed)

    def seeds_out(self) -> int:
        """Return how many seeds workers hold."""
        return sum([slot.state == GRANTED for slot in self.seeds])

    def count(self) -> int:
        """Return how many slots there are, without the seeds that workers hold."""
        return len(self.all) - (self.seeds_out() if self.seeds else 0)
