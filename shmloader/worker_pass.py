"""The iterator with workers: hand out tickets, take replies, deliver batches in order.

    order ──indices──▶ dispatch ──ticket──▶ worker k mod n ──reply──▶ deliver ──views of a lent slot──▶ user
                          ▲                                              │
                          └── a slot per ticket ◀── arena ◀──────────────┘ the slot comes back when its last view is gone

Rule 1: slots are granted in the order of batches. So the oldest batch that was not delivered always has a slot, and as long as one
        slot is not lent there is progress: nothing ever waits for the user.
Rule 2: every WORK ticket gets one terminal reply. An epoch that is left early is ended by making its tickets void and
        reading their replies; a slot is reused only after that.
Rule 3: a worker answers in the order of its tickets, so the next reply of worker w is for its oldest ticket.
"""

from __future__ import annotations

import itertools
import os
import pickle
import time
import weakref
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.dataloader import _DatasetKind, _sharding_worker_init_fn

from .arena import Arena, Slot
from .delivery import Counters, Delivery
from .errors import BatchTooLarge, IteratorClosed, ShmLoaderError, WorkerDied, WorkerTimeout
from .failure import WorkerFailure
from .mailbox import (
    BATCH,
    COUNT,
    EXHAUSTED,
    FAILED,
    INT64,
    KEPT,
    NEED,
    PICKLED,
    REGRANT,
    RESUME,
    RESUMED,
    SINGLE,
    WORK,
    Reply,
    Ticket,
)
from .order import index_batches
from .passes import Pass
from .pool import Pool

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

LOOK_S = 5.0
"""Longest sleep without a look around; every wait is woken by data or by death long before."""


class Task:
    """A ticket that was handed out and not answered for good."""

    __slots__ = ("indices", "refused", "slot", "worker")

    def __init__(self, worker: int, slot: Slot, indices: Any) -> None:
        self.worker = worker
        self.slot = slot
        self.indices = indices
        self.refused: ShmLoaderError | None = None
        """Why the slot that this batch needs cannot be had; its worker answers VOID then."""

    def shown_indices(self) -> tuple[object, ...]:
        """Return the indices for a message."""
        if isinstance(self.indices, np.ndarray):
            return tuple(self.indices.tolist())
        return tuple(self.indices) if isinstance(self.indices, list | tuple) else (self.indices,)


class WorkerPass(Pass):
    """An iterator over batches that ``num_workers`` processes make. Ends its workers with ``_shutdown_workers``."""

    def __init__(
        self,
        loader: DataLoader[Any],
        arena: Arena,
        counters: Counters,
        plan: Callable[[Arena, int], None],
        done: Callable[[Arena], None],
    ) -> None:
        super().__init__(loader, arena, counters)
        self._prefetch_factor = loader.prefetch_factor or 2
        self._in_order = loader.in_order
        self._plan = plan
        worker_init_fn = loader.worker_init_fn
        if isinstance(self._dataset, IterDataPipe | MapDataPipe):
            worker_init_fn = _ShardingInit(worker_init_fn, self._world_size, self._rank)
        self._pool = Pool(
            arena,
            self._recipe(),
            num_workers=self._num_workers,
            prefetch_factor=self._prefetch_factor,
            context=loader.multiprocessing_context,
            worker_init_fn=worker_init_fn,
            base_seed=self._base_seed,
            shared_seed=self._shared_seed,
        )
        self._tasks: dict[int, Task] = {}
        self._delivery = Delivery(arena, counters, keep_back=min(self._num_workers, max(1, arena.slots_wanted // 2)))
        self._close = weakref.finalize(self, _end, self._pool, arena, self._tasks, done)
        self._workers = self._pool.processes
        self._epoch = 0
        self._begin(loader)

    # --- epochs --------------------------------------------------------------------------------------------------------

    def _begin(self, loader: DataLoader[Any]) -> None:
        self._sampler_iter = index_batches(self._index_sampler)  # a second time, as torch does
        self._num_yielded = 0
        self._IterableDataset_len_called = loader._IterableDataset_len_called
        self._sent = 0
        self._next = 0
        self._turn = 0
        self._ended = False
        self._stash: Any = None  # indices that were drawn and not sent yet, in a tuple
        self._chosen: int | None = None  # and the worker whose turn it was
        self._active = [True] * self._num_workers
        self._loads = [0] * self._num_workers
        self._cycle = itertools.cycle(range(self._num_workers))
        self._dispatch()

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        """Begin the next epoch with the same workers. What the last one had not delivered is dropped."""
        if self._pool.stopped:
            raise IteratorClosed("its workers were shut down")
        self._cancel()
        self._reseed_data_pipes(loader)
        order = Ticket(RESUME, 0, -1, 0, 0, 0, self._shared_seed or 0, self._epoch)
        for outbox in self._pool.outboxes:
            outbox.send(order)
        for worker in range(self._num_workers):
            while self._receive(worker, 0.0).kind != RESUMED:
                raise AssertionError("a worker answered an order that it was not given")
        self._begin(loader)

    def _cancel(self) -> None:
        """Make all tickets void and take every slot back, once its worker has answered."""
        self._epoch += 1
        self._pool.set_epoch(self._epoch)
        for batch in sorted(self._tasks):
            task = self._tasks[batch]
            while True:
                reply = self._receive(task.worker, 0.0)
                if reply.kind & ~KEPT != NEED:
                    break
                self._pool.outboxes[task.worker].send(Ticket(REGRANT, batch, -1, 0, 0, 0, 0, self._epoch))
                if reply.kind & KEPT:
                    break  # its VOID says nothing of the slot any more
            if reply.kind & KEPT:
                self._arena.quarantine(task.slot)
                if reply.kind & ~KEPT == NEED:
                    self._receive(task.worker, 0.0)
            else:
                self._arena.reclaim(task.slot)
            del self._tasks[batch]

    # --- out: tickets --------------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Hand out tickets while there are slots, indices, and workers with less than ``prefetch_factor`` tickets."""
        most = self._prefetch_factor * self._num_workers
        while not self._ended and len(self._tasks) < most:
            slot = self._arena.grant()
            if slot is None:
                return
            if self._stash is None:
                try:
                    self._stash = (next(self._sampler_iter),)
                except BaseException as error:
                    self._arena.reclaim(slot)
                    if not isinstance(error, StopIteration):
                        raise
                    self._ended = True
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
        for _ in range(self._num_workers):
            worker = next(self._cycle)
            if not self._active[worker]:
                continue
            if self._loads[worker] < self._prefetch_factor:
                return worker
            if self._in_order:
                for _ in range(self._num_workers - 1):  # its turn comes again: turn the wheel back
                    next(self._cycle)
                return None
        return None

    def _send(self, worker: int, slot: Slot, indices: Any) -> bool:
        """Write the indices into the slot and send the ticket. False: no slot is large enough now, and this one is free."""
        blob: Any = b""
        if self._dataset_kind == _DatasetKind.Iterable:
            kind, count = (COUNT, len(indices)) if self._auto_collation else (SINGLE, 1)
        elif type(indices) is np.ndarray and self._auto_collation:
            kind, count, blob = INT64, len(indices), indices.view(np.uint8)
        else:
            numbers = _as_int64(indices) if self._auto_collation else None
            if numbers is not None:
                kind, count, blob = INT64, len(numbers), np.frombuffer(numbers, np.uint8)
            else:
                pickled = pickle.dumps(indices, pickle.HIGHEST_PROTOCOL)
                kind, count, blob = PICKLED, len(pickled), np.frombuffer(pickled, np.uint8)
        if len(blob) > slot.nbytes:
            larger = self._arena.regrant(slot, len(blob))
            if larger is None:
                return False
            slot = larger
        if len(blob):
            self._arena.segment.memory[slot.offset : slot.offset + len(blob)] = blob
        batch = self._sent
        self._pool.outboxes[worker].send(
            Ticket(WORK, batch, slot.index, slot.offset, slot.nbytes, kind, count, self._epoch)
        )
        self._tasks[batch] = Task(worker, slot, indices)
        self._loads[worker] += 1
        self._sent += 1
        return True

    # --- in: replies ---------------------------------------------------------------------------------------------------

    def _next_data(self) -> Any:
        if self._pool.stopped:
            if self._finished:
                raise StopIteration
            raise IteratorClosed("it was closed, or a worker of it died")
        while True:
            self._dispatch()
            if not self._tasks:
                return self._finish()
            batch, reply = self._next_reply()
            task = self._tasks[batch]
            kept = bool(reply.kind & KEPT)
            if kept:
                reply = reply._replace(kind=reply.kind & ~KEPT)
            if reply.kind == NEED:
                self._regrant(batch, task, reply.need, kept)
                continue
            del self._tasks[batch]
            self._loads[task.worker] -= 1
            if reply.kind == BATCH:
                return self._deliver(task, reply, kept)
            failure = None
            if reply.kind == FAILED:
                start = task.slot.offset + reply.layout_offset
                memory = self._arena.segment.memory
                failure = WorkerFailure.from_bytes(memory[start : start + reply.layout_bytes].tobytes())
            elif reply.kind == EXHAUSTED:
                self._active[task.worker] = False
            self._arena.reclaim(task.slot)
            if task.refused is not None:
                raise task.refused
            if failure is not None:
                self._dispatch()
                failure.reraise()

    def _finish(self) -> Any:
        if not self._ended and any(self._active):
            raise AssertionError("no slot could be granted though none is needed elsewhere")
        if not self._persistent_workers:
            self._finished = True
            self._shutdown_workers()
        raise StopIteration

    def _deliver(self, task: Task, reply: Reply, kept: bool) -> Any:
        slot = task.slot
        if not self._arena.slot_bytes:
            self._plan(self._arena, slot.nbytes)
        self._arena.publish(slot)
        build = self._delivery.build_of(slot, task.worker, reply.layout, reply.layout_offset, reply.layout_bytes)
        self._counters.copied_bytes += reply.copied
        deliver = self._delivery.deliver_kept if kept else self._delivery.deliver
        batch = deliver(slot, build, reply.need)
        self._dispatch()
        return batch

    def _regrant(self, batch: int, task: Task, need: int, kept: bool) -> None:
        """Answer NEED with a larger slot, or refuse and remember why. ``kept``: the old slot is lost to its worker."""
        arena = self._arena
        if kept:
            arena.quarantine(task.slot)
        else:
            arena.reclaim(task.slot)
        slot = None
        try:
            self._plan(arena, need)
            slot = arena.grant(need)
            if slot is None:
                limit = arena.cap.limit or 0
                task.refused = BatchTooLarge(need, arena.cap.room() or 0, limit)
        except ShmLoaderError as error:
            task.refused = error
        if slot is None:
            slot = arena.grant()  # any slot: the worker's VOID reply gives it back
            if slot is None:
                raise AssertionError("the slot that was just taken back is gone")
            nbytes = 0
        else:
            nbytes = slot.nbytes
        task.slot = slot
        self._pool.outboxes[task.worker].send(
            Ticket(REGRANT, batch, slot.index, slot.offset, nbytes, 0, 0, self._epoch)
        )

    def _next_reply(self) -> tuple[int, Reply]:
        """Wait for the reply to the oldest ticket, or (unordered) for any."""
        if self._in_order:
            batch = self._next
            while batch not in self._tasks:
                batch += 1
            self._next = batch
            return batch, self._receive(self._tasks[batch].worker, self._timeout)
        self._turn += 1  # so that no worker is always asked first
        workers = sorted({task.worker for task in self._tasks.values()})
        turn = self._turn % len(workers)
        reply = self._receive_any(workers[turn:] + workers[:turn], self._timeout)
        return reply.batch, reply

    def _receive(self, worker: int, timeout_s: float) -> Reply:
        """Return the next reply of ``worker``. Raises WorkerDied, and WorkerTimeout after ``timeout_s`` (0: never)."""
        inbox = self._pool.inboxes[worker]
        message = inbox.receive()
        if message is None:
            start = time.perf_counter()
            while message is None:
                left = timeout_s - (time.perf_counter() - start) if timeout_s else LOOK_S
                if left <= 0:
                    raise self._timeout_of(worker, timeout_s)
                died = self._pool.wait(worker, min(left, LOOK_S))
                message = inbox.receive()
                if died and message is None:
                    raise self._death_of(worker)
            self._counters.waited_s += time.perf_counter() - start
        return Reply(*message)

    def _receive_any(self, workers: list[int], timeout_s: float) -> Reply:
        """Return the next reply of one of ``workers``; raises as ``_receive`` does."""
        start = time.perf_counter()
        inboxes = self._pool.inboxes
        dead: list[int] = []
        while True:
            for worker in workers:
                message = inboxes[worker].receive()
                if message is not None:
                    self._counters.waited_s += time.perf_counter() - start
                    return Reply(*message)
            if dead:
                raise self._death_of(dead[0])
            left = timeout_s - (time.perf_counter() - start) if timeout_s else LOOK_S
            if left <= 0:
                raise self._timeout_of(workers[0], timeout_s)
            dead = self._pool.wait_any(workers, min(left, LOOK_S))

    def _oldest_task(self, worker: int) -> Task | None:
        mine = [batch for batch, task in self._tasks.items() if task.worker == worker]
        return self._tasks[min(mine)] if mine else None

    def _death_of(self, worker: int) -> WorkerDied:
        task = self._oldest_task(worker)
        process = self._workers[worker]
        error = WorkerDied(worker, process.pid, self._pool.exitcode(worker), task.shown_indices() if task else ())
        self._shutdown_workers()
        return error

    def _timeout_of(self, worker: int, timeout_s: float) -> WorkerTimeout:
        task, pid = self._oldest_task(worker), self._workers[worker].pid
        stack = self._pool.witness.stack_of(worker, pid)
        return WorkerTimeout(timeout_s, worker, pid, task.shown_indices() if task else (), stack)

    def _shutdown_workers(self) -> None:
        """End the workers now. Lent batches stay valid; what was not delivered is dropped. Idempotent."""
        self._close()


class _ShardingInit:
    """worker_init_fn of data pipes: shards them among workers and ranks, then calls the user's."""

    def __init__(self, user_fn: Callable[[int], None] | None, world_size: int, rank: int) -> None:
        self._args = (user_fn, world_size, rank)

    def __call__(self, worker: int) -> None:
        _sharding_worker_init_fn(*self._args, worker)


def _as_int64(indices: Any) -> array[int] | None:
    """Return plain ints as int64, or None if there is anything else among them, which must arrive as it is."""
    if type(indices) is not list or not indices or set(map(type, indices)) != {int}:
        return None
    try:
        return array("q", indices)
    except OverflowError:
        return None


def _end(pool: Pool, arena: Arena, tasks: dict[int, Task], done: Callable[[Arena], None]) -> None:
    """Stop the workers, take back the slots that they held, hand the arena on. The end of every WorkerPass, run once."""
    pool.stop()
    if arena.segment.owner_pid != os.getpid():  # a forked child has a copy of the books, not of the slots
        return
    for task in tasks.values():
        arena.reclaim(task.slot)
    arena.release_quarantined()
    tasks.clear()
    done(arena)
