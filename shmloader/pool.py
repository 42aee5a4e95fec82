"""The worker processes of one iterator: start, talk, watch, replace, stop.

    start ──▶ n processes, each with two rings in the arena's segment, two doorbells, one life line ──▶ stop
                 ▲                                                    │ died
                 └──────────── restart: new rings, bells, line ◀──────┘

``stop`` is the one place that tears everything down. It runs once, whoever asks for it: the iterator at its end,
``close()``, garbage collection, or the interpreter's exit. It never waits longer than a second or so, whatever the
workers do.

Descriptors in the main process: per worker two bells, a life line, a process sentinel and a descriptor that tells its
death, and three per pool; constant, whatever is sent. The control block in the segment:

    ┌───────┬─────────────┬───────────────┬───────────────────────────┬──────────────────┬──────────────────┬─ ─
    │ epoch │ who listens │ who is where  │ random states (if wanted) │ tickets worker 0 │ replies worker 0 │
    └───────┴─────────────┴───────────────┴───────────────────────────┴──────────────────┴──────────────────┴─ ─
"""

from __future__ import annotations

import contextlib
import itertools
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
from .deathwatch import DeathWatch
from .doorbell import Doorbell
from .failure import find_unpicklable
from .fetch import Recipe
from .interrupts import children_without_sigint
from .lifeline import LifeLine
from .mailbox import MESSAGE_BYTES, STOP, Inbox, Outbox, Ticket
from .orders import WorkerOrders
from .randomstates import STATES_BYTES
from .segment import round_up
from .witness import Witness
from .worker import worker_main

GRACE_S = 0.7
"""Seconds that workers have to leave by themselves; then they are terminated, and killed."""
HASTE_S = 0.2
"""The same where a worker has died, and somebody waits to be told."""
TERM_S = 0.3
JOIN_S = 1.0
"""Seconds for the kernel to end and tell of a process that was killed or has died."""
NOWHERE = -1
"""Position of a worker that does not say at which sample it is."""
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
        restartable: bool = False,
    ) -> None:
        self.arena = arena
        self.processes: list[Any] = []
        self._bells: list[list[Doorbell]] = []
        self._lines: list[int] = []
        self.grace_s = GRACE_S
        self._stopped = False
        self._owner_pid = os.getpid()
        self._context = torch.multiprocessing if context is None else context
        self._orders: dict[str, Any] = {
            "num_workers": num_workers,
            "recipe": recipe,
            "worker_init_fn": worker_init_fn,
            "base_seed": base_seed,
            "shared_seed": shared_seed,
        }
        self._capacity = prefetch_factor + 4  # and an answer to NEED, RESUME, STOP, and one to spare
        self._ring_bytes = self._capacity * MESSAGE_BYTES
        positions_at = MESSAGE_BYTES + round_up(num_workers, MESSAGE_BYTES)
        self._states_at = positions_at + round_up(8 * num_workers, MESSAGE_BYTES)
        self._rings_at = self._states_at + num_workers * STATES_BYTES * restartable
        self._control_bytes = round_up(self._rings_at + 2 * num_workers * self._ring_bytes)
        self._control_at = arena.take_piece(self._control_bytes)
        self._restartable = restartable
        memory = arena.segment.memory
        memory[self._control_at : self._control_at + self._control_bytes] = 0
        self.witness = Witness(arena.segment, self._control_at + MESSAGE_BYTES)
        self._epoch = memory[self._control_at : self._control_at + 8].view(np.int64)
        positions_at += self._control_at
        self._positions = memory[positions_at : positions_at + 8 * num_workers].view(np.int64)
        self._deaths = DeathWatch()
        self.outboxes: list[Outbox] = []
        self.inboxes: list[Inbox] = []
        _POOLS.add(self)
        try:
            for worker in range(num_workers):
                self._start(worker, 0, False)
        except BaseException:
            self.stop()
            raise

    def _start(self, worker: int, redo: int, probing: bool) -> None:
        """Start a worker, or another one in place of it: see WorkerOrders for ``redo`` and ``probing``."""
        # Each is where stop() finds it before the next is made: descriptors may run out, Ctrl-C may come.
        if worker == len(self._bells):
            self._bells.append([])
            self._lines.append(-1)
        bells = self._bells[worker] = []
        bells.append(ticket_bell := Doorbell.create())
        bells.append(reply_bell := Doorbell.create())
        line, self._lines[worker] = LifeLine.create()
        tickets_at = self._control_at + self._rings_at + 2 * worker * self._ring_bytes
        replies_at = tickets_at + self._ring_bytes
        states_at = self._control_at + self._states_at + worker * STATES_BYTES
        self._positions[worker] = NOWHERE
        orders = WorkerOrders(
            worker=worker,
            segment=self.arena.segment,
            tickets_at=tickets_at,
            replies_at=replies_at,
            capacity=self._capacity,
            ticket_bell=ticket_bell,
            reply_bell=reply_bell,
            life_line=line,
            witness=self.witness.end,
            epoch_at=self._control_at,
            position_at=self._control_at + self._states_at - round_up(8 * self.count, MESSAGE_BYTES) + 8 * worker,
            states_at=states_at if self._restartable else None,
            redo=redo,
            probing=probing,
            **self._orders,
        )
        try:
            process = self._spawn(orders)
        finally:
            line.close()
        self._deaths.add(worker, process)
        memory = self.arena.segment.memory
        outbox = Outbox(memory, tickets_at, self._capacity, ticket_bell)
        inbox = Inbox(memory, replies_at, self._capacity, reply_bell)
        if worker == len(self.processes):
            self.processes.append(process)
            self.outboxes.append(outbox)
            self.inboxes.append(inbox)
        else:
            self.processes[worker], self.outboxes[worker], self.inboxes[worker] = process, outbox, inbox

    def _spawn(self, orders: WorkerOrders) -> Any:
        context = self._context
        process = context.Process(target=worker_main, args=(orders,), daemon=True)
        # A fork server outlives this call, and must not go on with SIGINT blocked.
        quiet = contextlib.nullcontext() if context.get_start_method() == "forkserver" else children_without_sigint()
        try:
            with quiet:
                process.start()
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            recipe = orders.recipe
            culprit = find_unpicklable(
                dataset=recipe.dataset, collate_fn=recipe.collate_fn, worker_init_fn=orders.worker_init_fn
            )
            if culprit is None:
                raise
            raise type(error)(
                f"{error}; start method {context.get_start_method()!r} sends the loader's arguments to its workers by "
                f"pickle, and {culprit} cannot be pickled: make it a function or class at the top of a module, or use "
                "multiprocessing_context='fork'"
            ) from error
        return process

    @property
    def count(self) -> int:
        """How many workers this pool has."""
        return len(self._positions)

    def restart(self, worker: int, *, redo: int, probing: bool) -> None:
        """Start a new process in place of a worker that has died, with empty rings. Its replies must have been read.

        See WorkerOrders for ``redo`` and ``probing``. Raises what starting a process raises; the pool can still be
        stopped then.
        """
        self._deaths.forget(worker)
        line, self._lines[worker] = self._lines[worker], -1
        if line >= 0:  # an earlier attempt may have been interrupted; what that one started ends with its line
            os.close(line)
        self.processes[worker].join(JOIN_S)
        for bell in self._bells[worker]:
            bell.close()
        self.witness.strike_off(worker)
        self._start(worker, redo, probing)

    def position(self, worker: int) -> int:
        """Return at which sample of its batch a worker is, or was when it died; or NOWHERE. Told while probing."""
        return int(self._positions[worker])

    @property
    def stopped(self) -> bool:
        return self._stopped

    def set_epoch(self, epoch: int) -> None:
        """Make all tickets of earlier epochs void. A hint: a worker that has begun one still answers it."""
        self._epoch[0] = epoch

    def wait(self, worker: int, timeout_s: float) -> list[int]:
        """Sleep until ``worker`` has rung, any worker has died, or ``timeout_s`` is over. Return who has died.

        A death is told once. The last messages of the dead may still be unread then.
        """
        if self.inboxes[worker].bell.wait(timeout_s, self._deaths.fds):
            return self._deaths.take()
        return []

    def wait_any(self, workers: list[int], timeout_s: float) -> list[int]:
        """Sleep until one of ``workers`` has rung, any worker has died, or ``timeout_s`` is over. As ``wait``."""
        poll = select.poll()
        for fd in (*self._deaths.fds, *(self.inboxes[worker].bell.fd for worker in workers)):
            poll.register(fd, select.POLLIN)
        ready = poll.poll(math.ceil(timeout_s * 1000))
        return self._deaths.take() if any(fd in self._deaths.fds for fd, _ in ready) else []

    def alive_pids(self) -> list[int]:
        """Return the process ids of the workers that live; none in a forked child, to which they do not belong."""
        if os.getpid() != self._owner_pid:
            return []
        return [process.pid for process in self.processes if process.is_alive()]

    def exitcode(self, worker: int) -> int | None:
        """Return the exit code of a worker that has died, waiting a moment for the system to know it."""
        process = self.processes[worker]
        if process.exitcode is None:
            process.join(JOIN_S)
        code: int | None = process.exitcode
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
            for bell in itertools.chain(*self._bells):
                bell.close()
            self.let_go()
            self._deaths.close()
            self.witness.close()
            self.outboxes.clear()
            self.inboxes.clear()
            del self._epoch, self._positions
            if owner:
                self.arena.give_piece(self._control_at, self._control_bytes)

    def _end_processes(self) -> None:
        self._epoch[0] = NEVER
        for outbox in self.outboxes:
            outbox.send(Ticket(STOP, 0, 0, 0, 0, 0, 0, 0))
        try:
            late = self._join(self.processes, self.grace_s)
            for process in late:
                process.terminate()
            self._join(late, TERM_S)
        finally:  # Ctrl-C ends the waiting, not the cleaning up
            for process in self.processes:
                if process.is_alive():
                    process.kill()
            self._join(self.processes, JOIN_S)

    def let_go(self) -> None:
        """Close this process's ends of the life lines: in the owner, the kernel ends workers that are left; in a forked
        child, which only has copies, workers depend on their owner alone again."""
        lines, self._lines = self._lines, []
        for fd in lines:
            if fd >= 0:
                os.close(fd)

    @staticmethod
    def _join(processes: list[Any], seconds: float) -> list[Any]:
        """Wait for processes to end, ``seconds`` in all; return those that have not."""
        deadline = time.monotonic() + seconds
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process for process in processes if process.is_alive()]


def _forget_workers_of_parent() -> None:
    """In a forked child, a worker too: leave the parent's workers alone, and do not keep them alive.

    Their life lines end when the parent does only if nobody else holds a copy of its ends.
    multiprocessing ends all daemonic children at exit, and a child made by plain ``os.fork`` has a copy of its parent's
    list of them. It would terminate its own siblings.
    """
    for pool in list(_POOLS):
        pool.let_go()
        multiprocessing.process._children.difference_update(pool.processes)  # type: ignore[attr-defined]


_POOLS: weakref.WeakSet[Pool] = weakref.WeakSet()
os.register_at_fork(after_in_child=_forget_workers_of_parent)
