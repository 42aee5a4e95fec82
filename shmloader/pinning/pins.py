"""The page-locked pieces of one arena: registered as slots are made, unregistered before their pages go.

    slot 0          slot 1          slot 2 (a giant)
    ├── piece 0 ───┤├── piece 1 ───┤├── piece 2 ──────────┤      a piece is exactly one slot: no seam inside a slot

A copy must not cross a seam between two registrations: the driver refuses it or takes the slow way. So each slot is one
piece, whatever its size; slots above 1 GiB are rare (one batch of more than 1 GiB), the driver's own limit for one call
is some hundred GiB. A piece is known by its first address, which is what unregistering needs.
"""

from __future__ import annotations

import logging
import os
import time

from ..errors import PinningRefused, human_bytes
from .engine import Engine

_log = logging.getLogger("shmloader")
_GIB = 1 << 30


class Pins:
    """Registers pieces of the range that begins at ``address``. Belongs to the process that made it."""

    def __init__(self, engine: Engine, address: int) -> None:
        self._engine = engine
        self._address = address
        self._pid = os.getpid()
        self._pieces: dict[int, int] = {}
        self.seconds = 0.0
        """Spent on registering."""

    @property
    def nbytes(self) -> int:
        """Bytes that are page-locked now."""
        return sum(self._pieces.values())

    @property
    def mine(self) -> bool:
        """False in a forked child, which has inherited the books but neither the registrations nor the context."""
        return os.getpid() == self._pid

    def holds(self, offset: int) -> bool:
        """Whether the piece that begins at ``offset`` is page-locked."""
        return offset in self._pieces

    def add(self, offset: int, nbytes: int) -> None:
        """Page-lock a piece whose pages are mapped here. Raises PinningRefused, and then it is as it was.

        Does nothing in a forked child.
        """
        if not self.mine:
            return
        start = time.perf_counter()
        try:
            self._engine.register(self._address + offset, nbytes)
        except RuntimeError as error:
            if isinstance(error, PinningRefused):
                raise PinningRefused(nbytes, self._address + offset, error.code, error.meaning, error.cure) from None
            raise PinningRefused(nbytes, self._address + offset, 0, str(error).partition("\n")[0], "") from error
        seconds = time.perf_counter() - start
        self._pieces[offset] = nbytes
        self.seconds += seconds
        total = self.nbytes
        _log.info(
            "page-locked %s in %.4f s for %s (%.3f GiB in all, %.3f s, %.2f s/GiB)",
            human_bytes(nbytes),
            seconds,
            self._engine.device,
            total / _GIB,
            self.seconds,
            self.seconds / total * _GIB,
        )

    def remove(self, offset: int) -> None:
        """Unlock a piece, if it is locked. Idempotent; in a forked child it only changes the books."""
        if self._pieces.pop(offset, None) is not None and self.mine:
            self._engine.unregister(self._address + offset)
