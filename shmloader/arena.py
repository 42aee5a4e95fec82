"""Slots in a segment: who has which, growth under the cap, and the numbers that tell about them. Their states: slot.py.

Rule 1: a slot in GRANTED has one writer, the worker that holds the ticket; the main process makes all moves. It
        reclaims a GRANTED slot only after its worker has answered or has been reaped, so no lock is ever shared
        between processes.
Rule 2: LENT ends by itself: the lease hangs on a buffer object over exactly this slot's bytes, which every tensor,
        slice and ``.numpy()`` keeps alive. Its finaliser may run in any thread and inside any allocation, so it only
        appends the slot to ``_returned``; the next move of the loader picks it up from there. Where a copy engine may
        still read it, it is DRAINING first, and away like a lent one (drain.py).
Rule 3: the cap counts committed bytes, over all arenas that share it. A slot may be larger than others: ragged giants
        get a slot of their own size.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

from .arena_stats import ArenaStats
from .cap import Cap
from .drain import Drain
from .errors import BatchTooLarge, SharedMemoryFull
from .pieces import Pieces
from .pinning import Copying
from .segment import PAGE, Segment, round_up
from .slot import DRAINING, FREE, GRANTED, LENT, QUARANTINED, READY, Slot
from .slot_table import SlotTable
from .watch import Watch

IN_USE = 2
"""Slots of ``slots_wanted`` that are meant for the user: the batch at hand, and the next one while it replaces it."""


class Arena:
    """Slots of one segment. Belongs to the process that made it; workers only ever see the segment.

    ``slots_wanted`` slots of ``slot_bytes`` are made one by one as they are needed. Safe to use from several threads.
    """

    def __init__(self, segment: Segment, cap: Cap, slots_wanted: int, slot_bytes: int = 0) -> None:
        self.segment = segment
        self.cap = cap
        self.slots_wanted = slots_wanted
        self.slot_bytes = slot_bytes
        self.keep_back = 0
        """Slots that are never lent, so that work goes on whatever the user keeps."""
        self._pieces = Pieces(segment, cap)
        self._returned: deque[Slot] = deque()
        self._table = SlotTable(segment, self._pieces, self._returned.append)
        self._free = self._table.free
        self._lent = 0  # or draining
        self._quarantined = 0
        self._peak_lent = 0
        self._lock = threading.Lock()

    @property
    def watch(self) -> Watch | None:
        """What looks for misuse, in debug mode."""
        return self._table.watch

    @watch.setter
    def watch(self, watch: Watch | None) -> None:
        self._table.watch = watch

    def serve(self, copying: Copying) -> None:
        """From now on a copy engine may read lent slots: page-lock them, if so asked, and wait for its copies."""
        with self._lock:
            if copying.engine is not None and self._table.drain is None:
                self._table.serve(Drain(copying, self.segment, self._returned.append))

    # --- raw pieces: control blocks

    def take_piece(self, nbytes: int) -> int:
        """Commit a piece of at least ``nbytes`` that is no slot; return its offset. Raises SharedMemoryFull."""
        with self._lock:
            return self._pieces.take_uncounted(nbytes)

    def give_piece(self, offset: int, nbytes: int) -> None:
        """Give back what ``take_piece`` returned."""
        with self._lock:
            self._pieces.give_uncounted(offset, nbytes)

    # --- a slot's life

    def _collect(self) -> None:
        """Make the slots whose last view has died FREE again. Under the lock."""
        returned = self._returned
        while returned:
            try:
                slot = returned.popleft()
            except IndexError:  # another thread was quicker
                return
            slot.lease = None
            if self._table.drain is not None and self._table.drain.is_read(slot):
                slot.move("drain")
                self._table.drain.waiting.append(slot)
                continue
            slot.move("give_back")
            self._lent -= 1
            self._table.rest(slot)
        if self._table.drain is not None and self._table.drain.waiting:
            for slot in self._table.drain.poll():
                slot.move("passed")
                self._lent -= 1
                self._table.rest(slot)

    def grant(self, need: int = 0) -> Slot | None:
        """Return a FREE slot of ``need`` bytes, now GRANTED, or None if there is none to be had now.

        ``need`` 0: whatever the next batch may take, that is ``slot_bytes``, or less if that is all there is. Raises
        BatchTooLarge if ``need`` can never be met, SharedMemoryFull if the host cannot give a first slot.
        """
        with self._lock:
            self._collect()
            return self._grant(need)

    def _grant(self, need: int) -> Slot | None:
        free = self._free
        if self._table.seeds and not need and not self._beside_seeds(self._table.seeds_out()):
            return None
        if not need and free and free[-1].nbytes >= self.slot_bytes:  # nearly always
            return self._granted(free.pop())
        want = max(need, self.slot_bytes, PAGE)
        for place in range(len(free) - 1, -1, -1):
            if free[place].nbytes >= want:
                slot: Slot | None = free.pop(place)
                break
        else:
            slot = self._make(want)
            if slot is None and not need and free:
                slot = free.pop()
        return None if slot is None else self._granted(slot)

    def _granted(self, slot: Slot) -> Slot:
        """Make the move, for a slot that was taken off the list of the free ones."""
        if self._table.watch is not None:
            self._table.watch.granted(slot, self._free)
        slot.move("grant")
        return slot

    def exchange(self, slot: Slot | None, need: int) -> Slot | None:
        """Take back a GRANTED slot that is too small, and return one of ``need`` bytes, now GRANTED.

        If there is none to be had now, the largest FREE one is returned, which may be the same; None if there is none
        (``slot`` was None). Raises BatchTooLarge or SharedMemoryFull, and then the slot is FREE or gone.
        """
        with self._lock:
            self._collect()
            if slot is not None:
                slot.move("reclaim")
                self._free.append(slot)
            try:
                found = self._grant(need) or self._table.largest()
                return found if found is None or found.state == GRANTED else self._granted(found)
            finally:
                self._table.retire_seeds()

    def _add_slot(self) -> bool:
        """Make one more FREE slot if count, cap and host allow, without taking anything from anybody."""
        if self._table.count() >= self._most():
            return False
        try:
            self._free.append(self._table.new(round_up(max(self.slot_bytes, PAGE))))
        except SharedMemoryFull:
            return False
        return True

    def _make(self, nbytes: int) -> Slot | None:
        """Make a slot that is on no list, in place of smaller free ones where count, cap or host ask for it."""
        nbytes, limit = round_up(nbytes), self.cap.limit
        if limit is not None and nbytes > limit:  # the cap itself, not the host, makes it impossible
            raise BatchTooLarge(nbytes, limit, limit)
        free = sorted(self._free, key=lambda slot: slot.nbytes)
        surplus = max(0, self._table.count() + 1 - self._most())
        if surplus > len(free):
            return None
        victims = free[:surplus]
        room = self._pieces.room(nbytes) + sum(slot.nbytes for slot in victims)
        while room < nbytes and len(victims) < len(free):
            room += free[len(victims)].nbytes
            victims.append(free[len(victims)])
        if room < nbytes and self._table.all:
            return None  # retiring slots would not help: keep them
        for slot in victims:
            self._table.retire(slot)
        try:
            return self._table.new(nbytes)
        except SharedMemoryFull:  # a neighbour was quicker
            if not self._table.all:
                raise
            return None

    def publish(self, slot: Slot) -> None:
        """The slot's worker has finished writing."""
        slot.move("publish")

    def reclaim(self, slot: Slot) -> None:
        """Take back a slot that nobody will look at: its worker failed, or its batch was dropped or copied."""
        with self._lock:
            slot.move("reclaim")
            self._table.rest(slot)

    def quarantine(self, slot: Slot) -> None:
        """Never write this slot again while its worker lives: code in there kept a view of it."""
        with self._lock:
            slot.move("quarantine")
            self._quarantined += 1

    def release_quarantined(self) -> None:
        """Take all quarantined slots back; the workers that look at them have ended."""
        with self._lock:
            for slot in list(self._table.all.values()):
                if slot.state == QUARANTINED:
                    slot.move("release")
                    self._table.rest(slot)
            self._quarantined = 0

    def lend(self, slot: Slot, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Lend bytes ``[start, stop)`` of a READY slot: returns the uint8 array that is the lease. Never copies.

        Whatever is made from the array must keep it alive; when it dies, the slot is FREE again.
        """
        with self._lock:
            return self._hand_out(slot, start, stop)

    def _hand_out(self, slot: Slot, start: int, stop: int) -> npt.NDArray[np.uint8]:
        if not slot.mapped:
            self._table.map(slot)
        base = self.segment.view(slot.offset + start, stop - start)
        slot.move("lend")
        if self._table.drain is not None:
            self._table.drain.lending(slot)
        if self._table.watch is not None:
            self._table.watch.lent(slot)
        slot.lease = weakref.ref(base, slot.on_last_view_gone)
        self._lent += 1
        self._peak_lent = max(self._peak_lent, self._lent)
        return base

    def circulating(self) -> int:
        """Return how many slots neither the user, nor a copy engine, nor code in a worker looks at."""
        return self._table.count() - self._lent - self._quarantined

    def can_spare(self) -> bool:
        """Whether one more slot can be lent so that ``keep_back`` others are not lent; makes one more if need be."""
        with self._lock:
            self._collect()
            return self._may_lend()

    def _may_lend(self) -> bool:
        if self.circulating() <= self.keep_back and not self._add_slot():
            return False
        return not self._table.seeds or self._beside_seeds(0)

    def lend_if_spare(self, slot: Slot, nbytes: int) -> npt.NDArray[np.uint8] | None:
        """Publish a GRANTED slot, and lend its first ``nbytes`` bytes if ``can_spare``, else return None: READY."""
        slot.move("publish")
        with self._lock:
            if self._returned or self._table.drain is not None:
                self._collect()
            return self._hand_out(slot, 0, nbytes) if self._may_lend() else None

    # --- before and after the size is known

    def plan(self, slot_bytes: int, slots: int) -> None:
        """From now on there are ``slots`` slots of ``slot_bytes``. Those made before go as they come back.

        They were made as small as can be, to carry the first tickets: seeds. A worker that holds one will ask for a
        larger slot, so until the last has asked, new tickets leave one for each of them, and the user leaves one.
        """
        with self._lock:
            self.slot_bytes, self.slots_wanted = slot_bytes, slots
            self.keep_back = min(self.keep_back, max(1, slots // 2))
            self._table.call_seeds(slot_bytes)

    def _beside_seeds(self, wanted: int) -> bool:
        """Whether more than ``wanted`` slots can be had; always, once no worker holds a seed any more."""
        if not self._table.seeds_out():
            return True
        room = min(self._pieces.room(self.slot_bytes) // max(self.slot_bytes, 1), self._most() - self._table.count())
        return len(self._free) + max(0, room) > wanted

    def _most(self) -> int:
        """Slots that there may be: what is wanted, and one more for each that the user keeps, up to the cap."""
        return self.slots_wanted + self._quarantined + max(0, self._lent - IN_USE)

    # --- the end

    def close(self) -> None:
        """Give all memory back that no view looks at; lent batches stay right. Idempotent.

        A forked child of the owner only lets go of its own handle.
        """
        if os.getpid() != self.segment.owner_pid:
            self.segment.close()
            return
        with self._lock:
            if self.segment.closed:
                return
            self._collect()
            for slot in list(self._table.all.values()):
                if slot.state not in (LENT, DRAINING):
                    self._table.take_down(slot)
            self.cap.adopt(self._returned, self._lent, self.segment.committed)
            self.segment.close()
            self.watch = None
            if self._table.drain is not None:
                self._table.drain.close()

    def stats(self) -> ArenaStats:
        """Return the numbers of this moment."""
        with self._lock:
            self._collect()
            states = [slot.state for slot in self._table.all.values()]
            drain = self._table.drain
            pins = None if drain is None else drain.pins
            return ArenaStats(
                address=self.segment.address,
                reserved=self.segment.nbytes,
                nbytes=self.segment.committed,
                limit=self.cap.limit,
                slot_bytes=self.slot_bytes,
                slots=len(states),
                free=states.count(FREE),
                granted=states.count(GRANTED),
                ready=states.count(READY),
                lent=states.count(LENT),
                draining=states.count(DRAINING),
                quarantined=states.count(QUARANTINED),
                peak_lent=self._peak_lent,
                pinned=drain is not None and drain.pinned,
                pinned_bytes=0 if pins is None else pins.nbytes,
                pinned_s=0.0 if pins is None else pins.seconds,
                backing=self.segment.backing,
                prefaulted=self._table.mapped,
                huge_pages=self.segment.placement.huge_pages,
                numa_node=self.segment.placement.numa_node,
            )
