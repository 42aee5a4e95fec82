"""The life line: a pipe whose closing tells a worker that the process that owns it is gone.

    main process ──holds the only write end── ═══pipe═══ ──read end── worker

When the main process ends, in whatever way, the kernel closes the write end. A worker that waits sees its read end
become readable at once. A worker that is busy, even in C code that never returns, is killed by the kernel: its read end
is armed to raise SIGKILL, so no orphan goes on working, sleeping or holding a GPU's device files.
"""

from __future__ import annotations

import fcntl
import multiprocessing.context
import multiprocessing.reduction as reduction
import os
import select
import signal
from typing import Any


class LifeLine:
    """A worker's end of the pipe. Inherited by fork, or pickled while a child is being spawned."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        multiprocessing.context.assert_spawning(self)
        return LifeLine._attach, (reduction.DupFd(self.fd),)

    @staticmethod
    def _attach(handle: Any) -> LifeLine:
        return LifeLine(handle.detach())

    @classmethod
    def create(cls) -> tuple[LifeLine, int]:
        """Return a worker's end, and the descriptor that the main process keeps open while it lives."""
        read_fd, write_fd = os.pipe()
        return cls(read_fd), write_fd

    def arm(self) -> None:
        """From now on the kernel kills this process when the other end closes. For the worker only.

        Ends the process at once if the other end is closed already: arm first, look second, so that there is no gap.
        """
        fcntl.fcntl(self.fd, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(self.fd, fcntl.F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        fcntl.fcntl(self.fd, fcntl.F_SETFL, flags | os.O_ASYNC)
        poll = select.poll()
        poll.register(self.fd, 0)  # a closed other end is always told
        if poll.poll(0):
            os._exit(0)

    def disarm(self) -> None:
        """Undo ``arm``, before the worker leaves in peace."""
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        fcntl.fcntl(self.fd, fcntl.F_SETFL, flags & ~os.O_ASYNC)

    def close(self) -> None:
        """Close this process's descriptor. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
