"""Waiting for workers: the next reply of one or of any, or the error that says why there is none.

Every wait ends by one of: a reply; the death of any worker, whoever is waited for; ``timeout``. A death is judged when
there is nothing left to read, so what was published before it is delivered first. Where somebody else's batch is next,
and not there yet, it gets half a second more. Then whoever waits is told.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable

from .delivery import Counters
from .errors import WorkerDied, WorkerStuckWarning, WorkerTimeout
from .oom import oom_kills_since, read_oom_kills
from .pool import HASTE_S, Pool
from .tickets import Task, oldest_indices

LOOK_S = 5.0
"""Longest sleep without a look around; every wait is woken by data or by death long before."""
LAST_BATCHES_S = 0.5
"""Seconds after a death for batches of others that come before those of the dead."""
NEVER_S = float("inf")


class Replies:
    """The replies of one pool's workers. ``tasks`` are the tickets under way, to say what a worker was at.

    ``on_death`` is called with each worker that has died and with this object, and gives it a successor or raises;
    None: deaths are told.
    """

    def __init__(self, pool: Pool, tasks: dict[int, Task], counters: Counters, warn_stuck_s: float | None) -> None:
        self._pool = pool
        self._tasks = tasks
        self._counters = counters
        self._stuck_s = warn_stuck_s or NEVER_S
        self._oom_kills = read_oom_kills()
        self._dead: dict[int, float] = {}  # who has died, and when that was noticed
        self.on_death: Callable[[int, Replies], None] | None = None
        self.early: dict[int, deque[tuple[int, ...]]] = {}
        """Replies of workers that have a successor: they come before the successor's."""

    def next_of(self, worker: int, timeout_s: float) -> tuple[int, ...]:
        """Return the numbers of the next Reply of ``worker``.

        Raises WorkerDied, and WorkerTimeout after ``timeout_s`` (0: never).
        """
        if self.early:
            message = self._early([worker])
            if message is not None:
                return message
        message = self._pool.inboxes[worker].receive()
        return self._wait([worker], timeout_s) if message is None else message

    def ready(self, workers: Iterable[int]) -> bool:
        """Whether a reply of one of ``workers`` can be had without waiting."""
        return any(worker in self.early or self._pool.inboxes[worker].has_message() for worker in workers)

    def next_of_any(self, workers: list[int], timeout_s: float) -> tuple[int, ...]:
        """Return the next reply of one of ``workers``; raises as ``next_of`` does."""
        message = self._look(workers)
        return self._wait(workers, timeout_s) if message is None else message

    def _early(self, workers: list[int]) -> tuple[int, ...] | None:
        for worker in workers:
            waiting = self.early.get(worker)
            if waiting:
                message = waiting.popleft()
                if not waiting:
                    del self.early[worker]
                return message
        return None

    def _look(self, workers: list[int]) -> tuple[int, ...] | None:
        """Return a reply that is there, or None."""
        message = self._early(workers) if self.early else None
        if message is not None:
            return message
        inboxes = self._pool.inboxes
        for worker in workers:
            message = inboxes[worker].receive()
            if message is not None:
                return message
        return None

    def _wait(self, workers: list[int], timeout_s: float) -> tuple[int, ...]:
        start = time.perf_counter()
        until = start + timeout_s if timeout_s else NEVER_S
        try:
            while True:
                now = time.perf_counter()
                if now >= until:
                    raise self._timeout_of(workers[0], timeout_s)
                stuck = start + self._stuck_s
                if now >= stuck:
                    self._stuck_s = NEVER_S  # said once
                    self._warn_stuck(workers, now - start)
                    stuck = NEVER_S
                left = min(until - now, stuck - now, LOOK_S)
                if self._dead:
                    left = min(left, self._judge(workers, now))
                if len(workers) == 1:
                    died = self._pool.wait(workers[0], left)
                else:
                    died = self._pool.wait_any(workers, left)
                self._dead.update(dict.fromkeys(died, time.perf_counter()))
                message = self._look(workers)
                if message is not None:
                    return message
        finally:
            self._counters.waited_s += time.perf_counter() - start

    def _judge(self, workers: list[int], now: float) -> float:
        """Give the dead successors; or return how long a wait for ``workers`` may go on in spite of them, or raise
        WorkerDied. All that they had sent to ``workers`` has been read."""
        if self.on_death is not None:
            for worker in list(self._dead):
                self.on_death(worker, self)
                del self._dead[worker]  # an interrupt before this, and it is done once more
            return 0.0
        awaited = [worker for worker in workers if worker in self._dead]
        missed = {task.worker for task in self._tasks.values()}.intersection(self._dead)
        first = min(awaited or missed, key=lambda worker: self._dead[worker], default=None)
        if first is None:
            return NEVER_S
        left = 0.0 if awaited else self._dead[first] + LAST_BATCHES_S - now
        if left <= 0:
            self._pool.grace_s = HASTE_S
            raise self.death_of(first)
        return left

    def death_of(self, worker: int) -> WorkerDied:
        """Return what there is to say about a worker that has died."""
        pid, code = self._pool.processes[worker].pid, self._pool.exitcode(worker)
        kills = oom_kills_since(self._oom_kills)
        return WorkerDied(worker, pid, code, oldest_indices(self._tasks, worker), kills)

    def _timeout_of(self, worker: int, timeout_s: float) -> WorkerTimeout:
        pid = self._pool.processes[worker].pid
        stack = self._pool.witness.stack_of(worker, pid)
        return WorkerTimeout(timeout_s, worker, pid, oldest_indices(self._tasks, worker), stack)

    def _warn_stuck(self, workers: list[int], waited_s: float) -> None:
        """Say who is waited for, and where it is: the one with the oldest ticket."""
        oldest = min(((batch, task.worker) for batch, task in self._tasks.items()), default=(0, workers[0]))[1]
        worker = oldest if oldest in workers else workers[0]
        pid = self._pool.processes[worker].pid
        indices = ", ".join(map(repr, oldest_indices(self._tasks, worker)[:16]))
        stack = self._pool.witness.stack_of(worker, pid)
        warnings.warn(
            f"no batch for {waited_s:.0f} s: worker {worker} (pid {pid}) is working on indices [{indices}], and is "
            "waited for still; timeout= makes this an error, warn_stuck_s= sets the time of this warning"
            + (f"\nPython stack of the worker:\n{stack}" if stack else "; it has not begun, or does not answer"),
            WorkerStuckWarning,
            stacklevel=2,
        )
