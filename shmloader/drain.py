"""Between a slot's last view and its next writer: what a copy engine may still read, and the pages it holds locked.

       last view gone          the loader looks            it looks again
    LENT ───────────────▶ events are recorded ──▶ passed? ──yes──▶ FREE
         (any thread, at                           └─no─▶ DRAINING ──▶ passed? ─▶ FREE
          once, never waits)

A copy that was issued ``non_blocking`` goes on reading the slot after the tensor is gone, and torch, which protects its
own pinned memory, ignores memory that it did not allocate. So events are recorded behind the copies: on the streams
that were current when the batch was handed out and when its last view died, on the default streams, and on those that
the user named. Whoever copies on another stream and drops the batch before any of these streams waits for that one
has to name it.

Rule 1: registered before use, unregistered before the pages go: when a slot is retired, when the arena closes, when it
        is collected, at exit. The mapping is held here until then.
Rule 2: nothing here waits. Events are asked when a slot is wanted; a slot whose events have not passed stays away.
Rule 3: a forked child has a copy of these books and no part in them: it never calls the engine.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from .errors import PinningRefused
from .pinning import Copying, Engine, Fence, Pins, passed
from .segment import Segment
from .slot import DRAINING, LENT, Slot

_LOOKS = 4
"""Slots that are asked in vain, of the oldest and of the others, before asking stops for this time."""
_LINGERING: set[Drain] = set()
"""Those of closed arenas whose last batches are still in use, or still being copied."""


class Drain:
    """The copy engine's side of one arena. All methods but ``last_view_gone`` are called under the arena's lock."""

    def __init__(self, copying: Copying, segment: Segment, returned: Callable[[Slot], None]) -> None:
        assert copying.engine is not None
        self._copying = copying
        self._engine: Engine = copying.engine
        self._returned = returned
        self._memory: Any = segment.memory
        self._slots: dict[int, Slot] = {}
        self._late: deque[Slot] = deque()
        self._closed = False
        self._turn = 0
        self.waiting: list[Slot] = []
        """Slots in DRAINING."""
        self.pins = Pins(copying.engine, segment.address)
        weakref.finalize(self, _unlock, copying, self.pins, self._slots)
        settle()

    @property
    def pins_slots(self) -> bool:
        """Whether slots are to be page-locked, and that was not refused yet."""
        return self._copying.pin and self._copying.refused is None

    @property
    def pinned(self) -> bool:
        """Whether every slot is page-locked."""
        return bool(self._slots) and all(self.pins.holds(offset) for offset in self._slots)

    # --- slots come and go

    def opened(self, slot: Slot) -> None:
        """A slot was made: page-lock it, if that is wanted. If it is refused, all are given back; see ``refused``.

        Its pages are mapped here, if ``pins_slots``.
        """
        self._slots[slot.offset] = slot
        slot.on_last_view_gone = partial(_last_view_gone, weakref.ref(self), slot)
        if not self.pins_slots:
            return
        try:
            self.pins.add(slot.offset, slot.nbytes)
        except PinningRefused as refused:
            self._copying.refused = refused
            for other in self._slots.values():
                if other.state not in (LENT, DRAINING):  # those may be read by a copy: when they come back
                    self.pins.remove(other.offset)

    def shut(self, slot: Slot) -> None:
        """A slot that nobody reads is about to lose its pages."""
        self.pins.remove(slot.offset)
        self._slots.pop(slot.offset, None)

    # --- a slot's way back

    def lending(self, slot: Slot) -> None:
        """A slot is handed out now, to whatever runs on the current stream."""
        slot.fence = None
        slot.lent_on = self._engine.current_stream() if self._copying.drain else None

    def last_view_gone(self, slot: Slot) -> None:
        """The finaliser of a lease: any thread, any moment. Records events, and passes the slot on."""
        if sys.is_finalizing():  # nobody will write the slot again, and CUDA may be gone
            return
        if slot.fence is None:
            slot.fence = self._fence(slot)
        if not self._closed:
            self._returned(slot)
        else:
            self._late.append(slot)
            self._settle()

    def _fence(self, slot: Slot) -> Fence | None:
        copying = self._copying
        if not copying.drain or os.getpid() != copying.pid:
            return ()
        streams = copying.streams if slot.lent_on is None else [*copying.streams, slot.lent_on]
        return self._engine.fence(streams)

    def is_read(self, slot: Slot) -> bool:
        """Whether copies may still be reading ``slot``, of which no view is left."""
        if slot.fence is None:
            slot.fence = self._fence(slot)
            if slot.fence is None:
                return True
        if slot.fence and os.getpid() == self._copying.pid:
            try:
                if not passed(slot.fence):
                    return True
            except RuntimeError:  # the device has failed, as the user's own calls will say; the slot is lost
                return True
        slot.fence = slot.lent_on = None
        return False

    def poll(self) -> list[Slot]:
        """Take slots out of ``waiting`` whose events have passed: the oldest, and a few of the others in turn.

        A stream passes its events in order, so behind some that have not passed there is seldom one that has.
        """
        waiting, read = self.waiting, 0
        done: dict[int, Slot] = {}
        for slot in waiting:
            if not self.is_read(slot):
                done[slot.index] = slot
            elif (read := read + 1) == _LOOKS:
                self._turn = (self._turn + _LOOKS) % len(waiting)
                others = waiting[self._turn : self._turn + _LOOKS]
                done.update((other.index, other) for other in others if not self.is_read(other))
                break
        if done:
            self.waiting = [slot for slot in waiting if slot.index not in done]
        return list(done.values())

    def freed(self, slot: Slot) -> None:
        """A slot has come back. If page-locking was refused meanwhile, it is unlocked now."""
        if not self.pins_slots:
            self.pins.remove(slot.offset)

    # --- the end

    def close(self) -> None:
        """The arena is closed. Slots that were not ``shut`` are in use: each is unlocked when its copies are done."""
        self._closed = True
        self._late.extend(slot for slot in list(self._slots.values()) if slot.lease is None or slot.lease() is None)
        self.waiting = []
        _LINGERING.add(self)
        settle()

    def _settle(self) -> None:
        """Unlock the slots of a closed arena that have come back. May run in several threads."""
        for _ in range(len(self._late)):
            try:
                slot = self._late.popleft()
            except IndexError:  # another thread was quicker
                break
            if self.is_read(slot):
                self._late.append(slot)
            elif self._slots.pop(slot.offset, None) is not None:
                self.pins.remove(slot.offset)
                self._returned(slot)
        if not self._slots:
            _LINGERING.discard(self)
            self._memory = None


def settle() -> None:
    """Unlock what came back to closed arenas since the last look. Never waits."""
    for drain in list(_LINGERING):
        drain._settle()


def _last_view_gone(drain: weakref.ref[Drain], slot: Slot, _: object) -> None:
    found = drain()
    if found is not None:
        found.last_view_gone(slot)


def _unlock(copying: Copying, pins: Pins, slots: dict[int, Slot]) -> None:
    """At exit, or when an arena is collected that nobody closed: unlock everything that no copy reads.

    What is being read is left to the system, which stops the device first when the process ends.
    """
    if not pins.mine or copying.engine is None:
        return
    for slot in list(slots.values()):
        fence = slot.fence
        if fence is None and slot.state in (LENT, DRAINING) and copying.drain:
            fence = copying.engine.fence(copying.streams)
            if fence is None:
                continue
        try:
            if not passed(fence or ()):
                continue
        except RuntimeError:
            continue
        pins.remove(slot.offset)
