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

import math
import os
import pickle
import select
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch.multiprocessing

from .arena import Arena
from .doorbell import Doorbell
from .failure import find_unpicklable
from .fetch import Recipe
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
        try:
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
        if os.getpid() == self._owner_pid:
            self._end_processes()
        for bell in self._bells:
            bell.close()
        for fd in self._lines:
            os.close(fd)
        self.witness.close()
        self.outboxes.clear()
        self.inboxes.clear()
        del self._epoch
        if os.getpid() == self._owner_pid:
            self.arena.give_piece(self._control_at, self._control_bytes)

    def _end_processes(self) -> None:
        self._epoch[0] = NEVER
        for outbox in self.outboxes:
            outbox.send(Ticket(STOP, 0, 0, 0, 0, 0, 0, 0))
        deadline = time.monotonic() + GRACE_S
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        late = [process for process in self.processes if process.is_alive()]
        for process in late:
            process.terminate()
        deadline = time.monotonic() + TERM_S
        for process in late:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in late:
            if process.is_alive():
                process.kill()
                process.join()
