"""The iterator with workers: hand out tickets, take replies, deliver batches in order.

    order ──indices──▶ dispatch ──ticket──▶ worker k mod n ──reply──▶ deliver ──views of a lent slot──▶ user
                          ▲                                              │
                          └── a slot per ticket ◀── arena ◀──────────────┘ the slot comes back when its last view is
                          gone

Rule 1: slots are granted in the order of batches. So the oldest batch that was not delivered always has a slot, and
        as long as one slot is not lent there is progress: nothing ever waits for the user.
Rule 2: every WORK ticket gets one terminal reply. An epoch that is left early is ended by making its tickets void and
        reading their replies; a slot is reused only after that.
Rule 3: a worker answers in the order of its tickets, so the next reply of worker w is for its oldest ticket.
"""

from __future__ import annotations

import os
import pickle
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.dataloader import _DatasetKind

from .arena import Arena
from .delivery import Counters, Delivery
from .dispatch import Dispatcher
from .errors import IteratorClosed, WorkerDied
from .failure import WorkerFailure
from .gathering import batch_bytes
from .interrupts import keep
from .mailbox import (
    BATCH,
    EXHAUSTED,
    FAILED,
    KEPT,
    NEED,
    PIECE,
    RESUME,
    RESUMED,
    SKIPPED,
    Reply,
    Ticket,
)
from .order import index_batches
from .passes import Pass
from .pinning import Copying
from .pool import Pool
from .replies import Replies
from .revival import Reviver
from .robustness import RESTART
from .room import Room
from .tickets import ShardingInit, Task

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


class WorkerPass(Pass):
    """An iterator over batches that ``num_workers`` processes make. Ends its workers with ``_shutdown_workers``."""

    def __init__(
        self,
        loader: Any,
        arena: Arena,
        counters: Counters,
        plan: Callable[[Arena, int], None],
        done: Callable[[Arena], None],
        copying: Copying,
        ahead: int,
    ) -> None:
        super().__init__(loader, arena, counters, copying, ahead)
        self._prefetch_factor = loader.prefetch_factor or 2
        self._in_order = loader.in_order
        self._plan = plan
        worker_init_fn = loader.worker_init_fn
        if isinstance(self._dataset, IterDataPipe | MapDataPipe):
            worker_init_fn = ShardingInit(worker_init_fn, self._world_size, self._rank)
        recipe = self._recipe()
        need = batch_bytes(recipe, loader.batch_size) if not arena.slot_bytes else None
        if need is not None:  # what does not fit is told before a worker starts
            plan(arena, need)
        self._pool = Pool(
            arena,
            recipe,
            num_workers=self._num_workers,
            prefetch_factor=self._prefetch_factor,
            context=loader.multiprocessing_context,
            worker_init_fn=worker_init_fn,
            base_seed=self._base_seed,
            shared_seed=self._shared_seed,
            restartable=loader.on_worker_death == RESTART,
        )
        self._tasks: dict[int, Task] = {}
        self._delivery = Delivery(arena, counters, copying.call_types and copying.copy_for is None)
        self._asked: list[bool] = []  # not empty: the end was asked for, and is no garbage collection
        self._close = weakref.finalize(self, _end, self._pool, arena, self._tasks, done, self._asked)
        self._workers = self._pool.processes
        self._replies = Replies(self._pool, self._tasks, counters, loader.warn_stuck_s)
        self._room = Room(self._pool, plan)
        self._epoch = 0
        self._resumes_owed = [0] * self._num_workers
        if loader.on_worker_death == RESTART:
            reviver = Reviver(self._pool, self._tasks, counters, self._on_bad_sample, self._resumes_owed)
            self._replies.on_death = reviver.revive
            self._reviver: Reviver | None = reviver
        else:
            self._reviver = None
        self._begin(loader)

    # --- epochs
    # --------------------------------------------------------------------------------------------------------

    def _begin(self, loader: DataLoader[Any]) -> None:
        self._num_yielded = 0
        self._IterableDataset_len_called = loader._IterableDataset_len_called
        self._next = 0
        self._turn = 0
        self._most = self._prefetch_factor * self._num_workers
        order = index_batches(self._index_sampler)  # a second time, as torch does
        self._dispatcher = Dispatcher(
            self._pool,
            self._tasks,
            order,
            epoch=self._epoch,
            prefetch_factor=self._prefetch_factor,
            in_order=self._in_order,
            iterable=self._dataset_kind == _DatasetKind.Iterable,
            batched=self._auto_collation,
        )
        if self._reviver is not None:
            self._reviver.dispatcher = self._dispatcher
        self._bad_before = self._counters.bad.count
        self._dispatcher.dispatch()

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        """Begin the next epoch with the same workers. What the last one had not delivered is dropped."""
        if self._pool.stopped:
            raise IteratorClosed("its workers were shut down")
        self.drop_ahead()
        try:
            self._cancel()
            self._reseed_data_pipes(loader)
            self._resume()
            self._delivery.forget_builds()
        except WorkerDied:
            self._shutdown_workers()
            raise
        self._begin(loader)

    @property
    def ended(self) -> bool:
        """Whether its workers are gone for good."""
        return self._pool.stopped

    def _resume(self) -> None:
        """Tell all workers that a new epoch begins, and wait until they have understood."""
        self._await_resumed()  # of an earlier attempt that was interrupted, by Ctrl-C say
        order = Ticket(RESUME, 0, -1, 0, 0, 0, self._shared_seed or 0, self._epoch)
        for worker, outbox in enumerate(self._pool.outboxes):
            self._resumes_owed[worker] += 1
            outbox.send(order)
        self._await_resumed()

    def _await_resumed(self) -> None:
        for worker in range(self._num_workers):
            while self._resumes_owed[worker]:
                self._expect(Reply(*self._replies.next_of(worker, self._timeout)), RESUMED, 0)
                self._resumes_owed[worker] -= 1

    @staticmethod
    def _expect(reply: Reply, kind: int, batch: int) -> None:
        if reply.kind != kind or reply.batch != batch:
            raise AssertionError(f"expected reply {kind} to batch {batch}, but got {reply}")

    def _cancel(self) -> None:
        """Make all tickets void and take every slot back, once its worker has answered."""
        self._epoch += 1
        self._pool.set_epoch(self._epoch)
        for batch in sorted(self._tasks):
            task = self._tasks[batch]
            while True:
                reply = Reply(*self._replies.next_of(task.worker, self._timeout))
                if reply.kind & KEPT:
                    self._room.take_back(task, kept=True)
                self._room.take_back(task)
                if reply.kind & ~KEPT not in (NEED, PIECE):
                    break
                self._room.grant(batch, task, None, self._epoch)
            del self._tasks[batch]

    def _next_data(self) -> Any:
        if self._pool.stopped:
            if self._finished:
                raise StopIteration
            raise IteratorClosed("it was closed, or a worker of it died")
        tasks, most = self._tasks, self._most
        while True:
            if len(tasks) < most:
                self._dispatcher.dispatch()
                if not tasks:
                    return self._finish()
            try:
                batch, message = self._next_reply()
            except WorkerDied:
                self._shutdown_workers()
                raise
            task = tasks[batch]
            if message[0] == BATCH and task.heap is None:
                del tasks[batch]
                self._dispatcher.done(task.worker)
                return self._deliver(task, message)
            reply = Reply(*message)
            kept, kind = bool(reply.kind & KEPT), reply.kind & ~KEPT
            if kind == NEED:
                self._room.answer_need(batch, task, reply.need, kept, self._epoch)
                continue
            if kind == PIECE:
                task.take_piece(self._room.bytes_of(task, reply.need))
                self._room.grant(batch, task, task.slot, self._epoch)
                continue
            del self._tasks[batch]
            self._dispatcher.done(task.worker)
            if kind == BATCH:
                return self._deliver_copy(task, reply, kept)
            failure = None
            if kind in (FAILED, SKIPPED):
                blob = self._room.bytes_of(
                    task, task.need - task.filled if task.heap is not None else reply.layout_bytes
                )
                pickled = (blob if task.heap is None else task.take_piece(blob)).tobytes()
                if kind == FAILED:
                    failure = WorkerFailure.from_bytes(pickled)
                else:
                    self._counters.bad.add(pickle.loads(pickled))
            elif kind == EXHAUSTED:
                self._dispatcher.exhausted(task.worker)
            self._room.take_back(task, kept)
            if task.refused is not None:
                raise task.refused
            if failure is not None:
                self._dispatcher.dispatch()
                failure.reraise()

    def _finish(self) -> Any:
        if not self._dispatcher.ended:
            raise self._room.none_left()
        if not self._persistent_workers:
            self._finished = True
            self._shutdown_workers()
        self._counters.bad.warn(self._bad_before)
        raise StopIteration

    def _deliver(self, task: Task, message: tuple[int, ...]) -> Any:
        """Turn a finished slot into the user's batch, and hand out the next ticket. The normal way, once a batch."""
        _, _, _, number, layout_offset, layout_bytes, used, copied = message
        slot, delivery = task.slot, self._delivery
        assert slot is not None
        if not self._arena.slot_bytes:
            self._plan(self._arena, slot.nbytes)
        self._counters.copied_bytes += copied
        if layout_bytes:
            start = slot.offset + layout_offset
            build = delivery.build_of(task.worker, number, self._arena.segment.memory[start : start + layout_bytes])
        else:
            build = delivery.known_build(task.worker, number)
        batch = delivery.deliver(slot, build, used)
        self._dispatcher.dispatch()
        return batch

    def _deliver_copy(self, task: Task, reply: Reply, kept: bool) -> Any:
        """Deliver from the heap a batch that came in pieces, or whose slot code in its worker still looks at."""
        delivery, layout_end = self._delivery, reply.layout_offset + reply.layout_bytes
        self._counters.copied_bytes += reply.copied
        if task.heap is not None:
            whole = task.take_piece(self._room.bytes_of(task, task.need - task.filled))
            delivery.count_giant(task.need)
        else:
            whole = self._room.bytes_of(task, max(layout_end, reply.need)).copy()
        if reply.layout_bytes:
            build = delivery.build_of(task.worker, reply.layout, whole[reply.layout_offset : layout_end])
        else:
            build = delivery.known_build(task.worker, reply.layout)
        self._room.take_back(task, kept)
        batch = delivery.deliver_copy(build, whole)
        self._dispatcher.dispatch()
        return batch

    def _next_reply(self) -> tuple[int, tuple[int, ...]]:
        """Wait for the reply to the oldest ticket, or (unordered) for any."""
        if self._in_order:
            batch, tasks = self._next, self._tasks
            while batch not in tasks:
                batch += 1
            self._next = batch
            reply = self._replies.next_of(tasks[batch].worker, self._timeout)
            if reply[1] != batch:
                raise AssertionError(f"expected a reply to batch {batch}, but got {reply}")
            return batch, reply
        self._turn += 1  # so that no worker is always asked first
        workers = sorted({task.worker for task in self._tasks.values()})
        turn = self._turn % len(workers)
        reply = self._replies.next_of_any(workers[turn:] + workers[:turn], self._timeout)
        return reply[1], reply

    def _ready(self) -> bool:
        tasks = [self._tasks[min(self._tasks)]] if self._in_order and self._tasks else self._tasks.values()
        return not self._pool.stopped and self._replies.ready(task.worker for task in tasks)

    def _shutdown_workers(self) -> None:
        """End the workers now. Lent batches stay valid; what was not delivered is dropped. Idempotent."""
        self._asked.append(True)
        self._close()

    def worker_pids(self) -> list[int]:
        """Return the process ids of the workers that live."""
        return self._pool.alive_pids()


def _end(pool: Pool, arena: Arena, tasks: dict[int, Task], done: Callable[[Arena], None], asked: list[bool]) -> None:
    """Stop the workers, take back the slots that they held, hand the arena on. The end of every WorkerPass, run once.

    An interrupt meanwhile is raised if the end was ``asked`` for, and kept if this is a finaliser, which cannot raise.
    """
    try:
        pool.stop()
    except KeyboardInterrupt:
        if asked:
            raise
        keep()
    finally:
        if arena.segment.owner_pid == os.getpid():  # a forked child has a copy of the books, not of the slots
            for task in tasks.values():
                if task.slot is not None:
                    arena.reclaim(task.slot)
            arena.release_quarantined()
            tasks.clear()
            done(arena)
