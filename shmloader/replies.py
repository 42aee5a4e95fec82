"""Waiting for workers: the next reply of one or of any, or the error that says why there is none."""

from __future__ import annotations

import time

from .delivery import Counters
from .errors import WorkerDied, WorkerTimeout
from .pool import Pool
from .tickets import Task, oldest_indices

LOOK_S = 5.0
"""Longest sleep without a look around; every wait is woken by data or by death long before."""


class Replies:
    """The replies of one pool's workers. ``tasks`` are the tickets under way, to say what a worker was at."""

    def __init__(self, pool: Pool, tasks: dict[int, Task], counters: Counters) -> None:
        self._pool = pool
        self._tasks = tasks
        self._counters = counters

    def next_of(self, worker: int, timeout_s: float) -> tuple[int, ...]:
        """Return the numbers of the next Reply of ``worker``.

        Raises WorkerDied, and WorkerTimeout after ``timeout_s`` (0: never).
        """
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
        return message

    def next_of_any(self, workers: list[int], timeout_s: float) -> tuple[int, ...]:
        """Return the next reply of one of ``workers``; raises as ``next_of`` does."""
        start = time.perf_counter()
        inboxes = self._pool.inboxes
        dead: list[int] = []
        while True:
            for worker in workers:
                message = inboxes[worker].receive()
                if message is not None:
                    self._counters.waited_s += time.perf_counter() - start
                    return message
            if dead:
                raise self._death_of(dead[0])
            left = timeout_s - (time.perf_counter() - start) if timeout_s else LOOK_S
            if left <= 0:
                raise self._timeout_of(workers[0], timeout_s)
            dead = self._pool.wait_any(workers, min(left, LOOK_S))

    def _death_of(self, worker: int) -> WorkerDied:
        pid, code = self._pool.processes[worker].pid, self._pool.exitcode(worker)
        error = WorkerDied(worker, pid, code, oldest_indices(self._tasks, worker))
        return error

    def _timeout_of(self, worker: int, timeout_s: float) -> WorkerTimeout:
        pid = self._pool.processes[worker].pid
        stack = self._pool.witness.stack_of(worker, pid)
        return WorkerTimeout(timeout_s, worker, pid, oldest_indices(self._tasks, worker), stack)
