"""Slots for batches that did not fit, and slots of tickets that end without a batch.

NEED n bytes ──▶ a slot of n bytes ──▶ REGRANT        or any free slot, for pieces, if there is none now
             └─▶ the cap forbids it ──▶ REGRANT without a slot; the worker says VOID, and the user gets the reason
"""

from __future__ import annotations

from collections.abc import Callable

from .arena import Arena
from .collate import Memory
from .errors import BatchTooLarge, NoSlotLeft, ShmLoaderError
from .mailbox import REGRANT, Ticket
from .pool import Pool
from .slot import Slot
from .tickets import Task


class Room:
    """Gives the tasks of one pool larger slots, and takes slots back. ``plan`` learns how large batches are."""

    def __init__(self, pool: Pool, plan: Callable[[Arena, int], None]) -> None:
        self._pool = pool
        self._arena = pool.arena
        self._plan = plan

    def bytes_of(self, task: Task, nbytes: int) -> Memory:
        """Return the first bytes of a task's slot. Does not copy."""
        assert task.slot is not None
        return self._arena.segment.memory[task.slot.offset : task.slot.offset + nbytes]

    def take_back(self, task: Task, kept: bool = False) -> None:
        """Take the slot of a task that its worker will not touch again. ``kept``: code in there still looks at it."""
        slot, task.slot = task.slot, None
        if slot is not None:
            if kept:
                self._arena.quarantine(slot)
            else:
                self._arena.reclaim(slot)

    def answer_need(self, batch: int, task: Task, need: int, kept: bool, epoch: int) -> None:
        """Answer NEED with a larger slot; with any slot, for pieces, if there is none now; or refuse for good."""
        if kept:
            self.take_back(task, kept=True)
        task.need = need
        slot = None
        try:
            self._plan(self._arena, need)
            old, task.slot = task.slot, None
            slot = self._arena.exchange(old, need)
            if slot is None:
                task.refused = BatchTooLarge(need, self._arena.cap.room() or 0, self._arena.cap.limit or 0)
        except ShmLoaderError as error:
            task.refused = error
            self.take_back(task)  # if it was the plan that said no
        self.grant(batch, task, slot, epoch)

    def grant(self, batch: int, task: Task, slot: Slot | None, epoch: int) -> None:
        """Send the answer to NEED or PIECE: go on in ``slot``, or (None) drop the batch."""
        task.slot = slot
        index, offset, nbytes = (-1, 0, 0) if slot is None else (slot.index, slot.offset, slot.nbytes)
        self._pool.outboxes[task.worker].send(Ticket(REGRANT, batch, index, offset, nbytes, 0, 0, epoch))

    def none_left(self) -> NoSlotLeft:
        """Return why no ticket can be handed out though none is under way."""
        stats = self._arena.stats()
        if stats.granted or stats.ready:
            raise AssertionError(f"slots are out though no ticket is under way: {stats}")
        return NoSlotLeft(stats.slots, stats.lent + stats.draining, stats.quarantined, self._arena.cap.limit or 0)
