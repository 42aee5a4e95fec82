"""Handing out tickets: which indices, to which worker, into which slot.

    while there is a FREE slot, and less than prefetch_factor * workers tickets are under way:
        next indices of the order ──▶ worker whose turn it is ──▶ ticket

In order, batch k goes to worker k mod n (those that are exhausted are left out), so no queue is needed to put replies
in order. Out of order, the worker that has just delivered gets the next indices.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from .mailbox import WORK, label_of
from .pool import Pool
from .slot import Slot
from .tickets import Task, encode_indices


class Dispatcher:
    """Hands out the tickets of one epoch; ``tasks`` are those under way, by batch."""

    def __init__(
        self,
        pool: Pool,
        tasks: dict[int, Task],
        order: Iterator[Any],
        *,
        epoch: int,
        prefetch_factor: int,
        in_order: bool,
        iterable: bool,
        batched: bool,
    ) -> None:
        workers = len(pool.processes)
        self._pool = pool
        self._arena = pool.arena
        self._bytes = pool.arena.segment.memory.data
        self._tasks = tasks
        self._order = order
        self._epoch = epoch
        self._prefetch_factor = prefetch_factor
        self._most = prefetch_factor * workers
        self._in_order = in_order
        self._iterable = iterable
        self._batched = batched
        self.sent = 0
        """How many tickets were handed out: the number of the next batch."""
        self._order_ended = False
        self._stash: Any = None  # indices that were drawn and not sent yet, in a tuple
        self._chosen: int | None = None  # and the worker whose turn it was
        self._active = [True] * workers
        self._loads = [0] * workers
        self._cycle = itertools.cycle(range(workers))

    @property
    def ended(self) -> bool:
        """Whether no more tickets will be handed out."""
        return self._order_ended or not any(self._active)

    def done(self, worker: int) -> None:
        """A ticket of ``worker`` was answered for good."""
        self._loads[worker] -= 1

    def exhausted(self, worker: int) -> None:
        """The iterable dataset of ``worker`` has ended: no more tickets for it."""
        self._active[worker] = False

    def dispatch(self) -> None:
        """Hand out tickets while there are slots, indices, and workers with room for one. Raises what the sampler
        does."""
        while not self._order_ended and len(self._tasks) < self._most:
            slot = self._arena.grant()
            if slot is None:
                return
            if self._stash is None:
                try:
                    self._stash = (next(self._order),)
                except BaseException as error:
                    self._arena.reclaim(slot)
                    if not isinstance(error, StopIteration):
                        raise
                    self._order_ended = True
                    return
            if self._chosen is None:
                self._chosen = self._choose()
            if self._chosen is None:
                self._arena.reclaim(slot)
                return
            if not self._send(self._chosen, slot, self._stash[0]):
                return
            self._stash = self._chosen = None

    def _choose(self) -> int | None:
        """Return the worker that makes the next batch: in turn, or (unordered) in turn among those that have room."""
        for _ in self._active:
            worker = next(self._cycle)
            if not self._active[worker]:
                continue
            if self._loads[worker] < self._prefetch_factor:
                return worker
            if self._in_order:
                for _ in self._active[1:]:  # its turn comes again: turn the wheel back
                    next(self._cycle)
                return None
        return None

    def _send(self, worker: int, slot: Slot, indices: Any) -> bool:
        """Send a new ticket. False: no slot is large enough for its indices; this one is free."""
        task = Task(worker, slot, indices)
        if not self._write(self.sent, task):
            return False
        self._tasks[self.sent] = task
        self._loads[worker] += 1
        self.sent += 1
        return True

    def _write(self, batch: int, task: Task) -> bool:
        """Write a task's indices into its slot and send the ticket. False: see ``_send``."""
        slot = task.slot
        assert slot is not None
        kind, count, blob = encode_indices(task.indices, iterable=self._iterable, batched=self._batched)
        if len(blob) > slot.nbytes:
            self._arena.reclaim(slot)
            larger = self._arena.grant(len(blob))
            task.slot = larger
            if larger is None:
                return False
            slot = larger
        if blob:
            self._bytes[slot.offset : slot.offset + len(blob)] = blob
        ticket = (WORK, batch, slot.index, slot.offset, slot.nbytes, kind, count, self._epoch)
        self._pool.outboxes[task.worker].send(ticket)
        return True

    def send_again(self, batch: int, task: Task) -> bool:
        """Send a ticket to the successor of the worker that held it. False: there is no slot for its indices now."""
        task.begin_again()
        return self._write(batch, task)

    def label(self, batch: int) -> int:
        """Return the number of a ticket in its worker's life."""
        return label_of(self._epoch, batch)
