"""The worker processes of one iterator: start, talk, watch, stop.

    start ──▶ n processes, each with two rings in the arena's segment, two doorbells, one life line ──▶ stop

``stop`` is the one place that tears everything down. It runs once, whoever asks for it: the iterator at its end,
``close()``, garbage collection, or the interpreter's exit. It never waits longer than a second or so, whatever the
workers do.

Descriptors in the main process: per worker two bells, a life line and a process sentinel, and two per pool; constant,
whatever is sent. The control block in the segment:

    ┌─────────┬───────────────┬──────────────────┬──────────────────┬─ ─
    │ epoch   │ who listens   │ tickets worker 0 │ replies worker 0 │
    └─────────┴───────────────┴──────────────────┴──────────────────┴─ ─
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing.process
import os
import pickle
import select
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch.multiprocessing

from .arena import Arena
from .doorbell import Doorbell
from .failure import find_unpicklable
from .fetch import Recipe
from .interrupts import children_without_sigint
from .lifeline import LifeLine
from .mailbox import MESSAGE_BYTES, STOP, Inbox, Outbox, Ticket
from .orders import WorkerOrders
from .segment import round_up
from .witness import Witness
from .worker import worker_main

GRACE_S = 0.7
"""Seconds that workers have to leave by themselves; then they are terminated, and killed."""
TERM_S = 0.3
NEVER = 1 << 62
"""An epoch that never comes: all tickets are void."""


class Pool:
    """``num_workers`` processes that fill slots of ``arena``. All methods are for the thread that iterates.

    ``prefetch_factor`` tickets at most are under way per worker.
    """

    def __init__(
        self,
        arena: Arena,
        recipe: Recipe,
        *,
        num_workers: int,
        prefetch_factor: int,
        context: Any,
        worker_init_fn: Callable[[int], None] | None,
        base_seed: int,
        shared_seed: int | None,
    ) -> None:
        self.arena = arena
        self.processes: list[Any] = []
        self._capacity = prefetch_factor + 4  # and an answer to NEED, RESUME, STOP, and one to spare
        self._ring_bytes = self._capacity * MESSAGE_BYTES
        self._rings_at = MESSAGE_BYTES + round_up(num_workers, MESSAGE_BYTES)
        self._control_bytes = round_up(self._rings_at + 2 * num_workers * self._ring_bytes)
        self._control_at = arena.take_piece(self._control_bytes)
        self._owner_pid = os.getpid()
        _POOLS.add(self)
        self._stopped = False
        self._bells: list[Doorbell] = []
        self._lines: list[int] = []
        self._sentinels: list[tuple[int]] = []
        memory = arena.segment.memory
        memory[self._control_at : self._control_at + self._control_bytes] = 0
        self.witness = Witness(arena.segment, self._control_at + MESSAGE_BYTES)
        self._epoch = memory[self._control_at : self._control_at + 8].view(np.int64)
        self.outboxes: list[Outbox] = []
        self.inboxes: list[Inbox] = []
        try:
            for worker in range(num_workers):
                self._start(worker, num_workers, recipe, context, worker_init_fn, base_seed, shared_seed)
        except BaseException:
            self.stop()
            raise

    def _start(
        self,
        worker: int,
        num_workers: int,
        recipe: Recipe,
        context: Any,
        worker_init_fn: Callable[[int], None] | None,
        base_seed: int,
        shared_seed: int | None,
    ) -> None:
        ticket_bell, reply_bell = Doorbell.create(), Doorbell.create()
        self._bells += (ticket_bell, reply_bell)
        line, write_end = LifeLine.create()
        self._lines.append(write_end)
        tickets_at = self._control_at + self._rings_at + 2 * worker * self._ring_bytes
        replies_at = tickets_at + self._ring_bytes
        if context is None:
            context = torch.multiprocessing
        forks = context.get_start_method() == "fork"
        orders = WorkerOrders(
            worker=worker,
            num_workers=num_workers,
            recipe=recipe,
            worker_init_fn=worker_init_fn,
            base_seed=base_seed,
            shared_seed=shared_seed,
            segment=self.arena.segment,
            tickets_at=tickets_at,
            replies_at=replies_at,
            capacity=self._capacity,
            ticket_bell=ticket_bell,
            reply_bell=reply_bell,
            life_line=line,
            witness=self.witness.end,
            epoch_at=self._control_at,
            inherited_fds=tuple(self._lines) if forks else (),
        )
        process = context.Process(target=worker_main, args=(orders,), daemon=True)
        # A fork server outlives this call, and must not go on with SIGINT blocked.
        quiet = contextlib.nullcontext() if context.get_start_method() == "forkserver" else children_without_sigint()
        try:
            with quiet:
                process.start()
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            culprit = find_unpicklable(
                dataset=recipe.dataset, collate_fn=recipe.collate_fn, worker_init_fn=worker_init_fn
            )
            if culprit is None:
                raise
            raise type(error)(
                f"{error}; start method {context.get_start_method()!r} sends the loader's arguments to its workers by "
                f"pickle, and {culprit} cannot be pickled: make it a function or class at the top of a module, or use "
                "multiprocessing_context='fork'"
            ) from error
        finally:
            line.close()
        self.processes.append(process)
        self._sentinels.append((process.sentinel,))
        memory = self.arena.segment.memory
        self.outboxes.append(Outbox(memory, tickets_at, self._capacity, ticket_bell))
        self.inboxes.append(Inbox(memory, replies_at, self._capacity, reply_bell))

    @property
    def stopped(self) -> bool:
        return self._stopped

    def set_epoch(self, epoch: int) -> None:
        """Make all tickets of earlier epochs void. A hint: a worker that has begun one still answers it."""
        self._epoch[0] = epoch

    def wait(self, worker: int, timeout_s: float) -> bool:
        """Sleep until ``worker`` has rung or died, or ``timeout_s`` is over. Return whether it died.

        Its last messages may still be unread when its death is told.
        """
        return bool(self.inboxes[worker].bell.wait(timeout_s, self._sentinels[worker]))

    def wait_any(self, workers: list[int], timeout_s: float) -> list[int]:
        """Sleep until one of ``workers`` has rung or died, or ``timeout_s`` is over. Return those that died."""
        poll = select.poll()
        sentinels = {self._sentinels[worker][0]: worker for worker in workers}
        for fd in (*sentinels, *(self.inboxes[worker].bell.fd for worker in workers)):
            poll.register(fd, select.POLLIN)
        return [sentinels[fd] for fd, _ in poll.poll(math.ceil(timeout_s * 1000)) if fd in sentinels]

    def alive_pids(self) -> list[int]:
        """Return the process ids of the workers that live; none in a forked child, to which they do not belong."""
        if os.getpid() != self._owner_pid:
            return []
        return [process.pid for process in self.processes if process.is_alive()]

    def exitcode(self, worker: int) -> int | None:
        """Return the exit code of a worker that has died, waiting a moment for the system to know it."""
        self.processes[worker].join(1.0)
        code: int | None = self.processes[worker].exitcode
        return code

    def stop(self) -> None:
        """End all workers and close all descriptors. Idempotent; in a forked child it only closes the descriptors.

        Afterwards no worker can write into the arena any more.
        """
        if self._stopped:
            return
        self._stopped = True
        owner = os.getpid() == self._owner_pid
        try:
            if owner:
                self._end_processes()
        finally:
            for bell in self._bells:
                bell.close()
            for fd in self._lines:
                os.close(fd)
            self.witness.close()
            self.outboxes.clear()
            self.inboxes.clear()
            del self._epoch
            if owner:
                self.arena.give_piece(self._control_at, self._control_bytes)

    def _end_processes(self) -> None:
        self._epoch[0] = NEVER
        for outbox in self.outboxes:
            outbox.send(Ticket(STOP, 0, 0, 0, 0, 0, 0, 0))
        try:
            late = self._join(self.processes, GRACE_S)
            for process in late:
                process.terminate()
            self._join(late, TERM_S)
        finally:  # Ctrl-C ends the waiting, not the cleaning up
            for process in self.processes:
                if process.is_alive():
                    process.kill()
                    process.join()

    @staticmethod
    def _join(processes: list[Any], seconds: float) -> list[Any]:
        """Wait for processes to end, ``seconds`` in all; return those that have not."""
        deadline = time.monotonic() + seconds
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process for process in processes if process.is_alive()]


def _forget_workers_of_parent() -> None:
    """In a forked child: leave the parent's workers alone.

    multiprocessing ends all daemonic children at exit, and a child made by plain ``os.fork`` has a copy of its parent's
    list of them. It would terminate its own siblings.
    """
    for pool in list(_POOLS):
        multiprocessing.process._children.difference_update(pool.processes)  # type: ignore[attr-defined]


_POOLS: weakref.WeakSet[Pool] = weakref.WeakSet()
os.register_at_fork(after_in_child=_forget_workers_of_parent)
