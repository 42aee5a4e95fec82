"""Ctrl-C that arrives at a moment when Python cannot raise it: it is kept, and raised at the next moment it can.

Python swallows exceptions in finalisers. Ending workers takes up to a second, and may happen in one: when the last
reference to an iterator goes away. A KeyboardInterrupt in that second would be printed and lost, and the program go on.
Also here: how workers are kept from Ctrl-C, which a terminal sends to them too; the main process tells about it, once.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

_kept = False


def keep() -> None:
    """A KeyboardInterrupt was caught where it cannot be raised."""
    global _kept
    _kept = True


def raise_kept() -> None:
    """Raise the KeyboardInterrupt that was kept, if there is one."""
    global _kept
    if _kept:
        _kept = False
        raise KeyboardInterrupt


@contextmanager
def children_without_sigint() -> Iterator[None]:
    """Start children inside: SIGINT waits for them (and for this thread) until they have decided to ignore it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_sigint() -> None:
    """In a worker: leave Ctrl-C to the main process, which ends its workers when it is interrupted."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
