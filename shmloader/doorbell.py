"""Doorbells: counting signals between processes, with deadlines, that death rings too.

A ring adds one to the bell's count; taking a count resets it to zero. Whoever rings has finished writing, whoever has
taken a count may read: the system call orders memory on every CPU.

    main ──ring──▶ [bell] ──wait──▶ worker        wait() also wakes when one of the ``deaths`` descriptors becomes
    readable:
                     ▲                            a worker's sentinel for the main process, the end of the life line
                     for a
    worker dies ─────┘ sentinel                   worker. Data and death ring the same bell.

Why an eventfd and not a named posix semaphore: both were measured (2 cores, Python 3.11): 1.3 µs against 0.6 µs for a
ring and a take without a sleeper, 20 µs against 17 µs for a round trip between processes. For that microsecond a batch
the eventfd leaves no name in /dev/shm at any moment, works where /dev/shm is missing or read-only, and can be polled
together with process sentinels, so a death is noticed at once and nobody polls.
"""

from __future__ import annotations

import math
import multiprocessing.context
import multiprocessing.reduction as reduction
import os
import select
from typing import Any


class Doorbell:
    """A counting signal. Inherited by fork, or pickled while a child is being spawned; all copies are one bell."""

    __slots__ = ("_deaths", "_poll", "fd")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._poll: select.poll | None = None
        self._deaths: tuple[int, ...] = ()

    @classmethod
    def create(cls) -> Doorbell:
        """Make a bell with count 0. Takes one file descriptor."""
        return cls(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))

    def __reduce__(self) -> tuple[Any, ...]:
        multiprocessing.context.assert_spawning(self)
        return Doorbell._attach, (reduction.DupFd(self.fd),)

    @staticmethod
    def _attach(handle: Any) -> Doorbell:
        return Doorbell(handle.detach())

    def ring(self, times: int = 1) -> None:
        """Add ``times`` to the count. Never blocks."""
        os.eventfd_write(self.fd, times)

    def take(self) -> int:
        """Return the count and reset it to 0. Never blocks."""
        try:
            return os.eventfd_read(self.fd)
        except BlockingIOError:
            return 0

    def wait(self, timeout_s: float, deaths: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Sleep until the bell has a count, a descriptor of ``deaths`` is readable or closed, or ``timeout_s`` is over.

        Returns the descriptors of ``deaths`` that woke us. Takes nothing.
        """
        if self._poll is None or self._deaths != deaths:
            self._poll = select.poll()
            for fd in (self.fd, *deaths):
                self._poll.register(fd, select.POLLIN)
            self._deaths = deaths
        ready = self._poll.poll(math.ceil(timeout_s * 1000))
        if len(ready) == 1 and ready[0][0] == self.fd:  # nearly always
            return ()
        return tuple([fd for fd, _ in ready if fd != self.fd])

    def close(self) -> None:
        """Close this process's descriptor. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            self._poll = None
            os.close(fd)
