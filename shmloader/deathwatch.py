"""Who of several processes has died, told once each, by one descriptor that can be waited for.

    worker 0 dies ──▶ pidfd 0 ─┐
    worker 1      ──▶ pidfd 1 ─┼──▶ epoll ──▶ readable: every wait of the main process looks at it too
    worker 2      ──▶ pidfd 2 ─┘

A pidfd is told by the kernel when the process itself ends. multiprocessing's sentinel is a pipe, which stays open while
a child of the dead worker has a copy of it; it is used where the kernel has no pidfds.
"""

from __future__ import annotations

import os
import select
from typing import Any


class DeathWatch:
    """Watches the processes that are added. Belongs to the process that made it."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self.fds: tuple[int, ...] = (self._epoll.fileno(),)
        """What to poll: readable while there is a death that was not taken."""
        self._watched: dict[int, int] = {}
        self._own: dict[int, int] = {}

    def add(self, number: int, process: Any) -> None:
        """Watch a started ``multiprocessing`` process under ``number``."""
        try:
            fd = self._own[number] = os.pidfd_open(process.pid)
        except OSError:  # an old kernel; or a fork server has seen its end already
            fd = process.sentinel
        self._watched[fd] = number
        self._epoll.register(fd, select.EPOLLIN)

    def take(self) -> list[int]:
        """Return the numbers of those that have died since the last call, and watch them no more. Never blocks."""
        dead = [self._watched[fd] for fd, _ in self._epoll.poll(0)]
        for number in dead:
            self.forget(number)
        return dead

    def forget(self, number: int) -> None:
        """Watch a process no more. Does nothing if it is not watched."""
        for fd, watched in list(self._watched.items()):
            if watched == number:
                del self._watched[fd]
                self._epoll.unregister(fd)
        own = self._own.pop(number, None)
        if own is not None:
            os.close(own)

    def close(self) -> None:
        """Close all descriptors of this process."""
        self._epoll.close()
        self._watched.clear()
        while self._own:
            os.close(self._own.popitem()[1])
