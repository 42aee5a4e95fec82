"""The Python stack of a worker that does not answer, asked for from outside.

    main ──signal──▶ stuck worker ──faulthandler──▶ ═══pipe═══ ──▶ main reads the text

faulthandler writes the stack from inside the signal handler, in C: it works while the worker sleeps, loops, or sits
in C code that never returns. The signal is a real-time one, which no library of note uses; a worker is only asked
once it has said that it listens, since the signal would end it before.
"""

from __future__ import annotations

import faulthandler
import multiprocessing.context
import multiprocessing.reduction as reduction
import os
import select
import signal
from typing import Any

from .segment import Segment

STACK_SIGNAL = signal.SIGRTMIN + 9
_FIRST_MS = 1000
"""Longest wait for the first byte of a stack."""
_QUIET_MS = 50
"""So long without a byte, and the stack is complete: faulthandler writes it in one go."""


class WitnessEnd:
    """The workers' end. Inherited by fork, or pickled while a child is being spawned."""

    def __init__(self, fd: int, segment: Segment, offset: int) -> None:
        self._fd = fd
        self._segment = segment
        self._offset = offset

    def __reduce__(self) -> tuple[Any, ...]:
        multiprocessing.context.assert_spawning(self)
        return WitnessEnd._attach, (reduction.DupFd(self._fd), self._segment, self._offset)

    @staticmethod
    def _attach(handle: Any, segment: Segment, offset: int) -> WitnessEnd:
        return WitnessEnd(handle.detach(), segment, offset)

    def enlist(self, worker: int) -> None:
        """In worker number ``worker``: listen to the signal from now on, and say so."""
        faulthandler.register(STACK_SIGNAL, file=self._fd, all_threads=True, chain=False)
        self._segment.memory[self._offset + worker] = 1


class Witness:
    """The main process's end. One byte per worker at ``offset`` of the segment tells which workers listen."""

    def __init__(self, segment: Segment, offset: int) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        self._segment = segment
        self._offset = offset
        self.end = WitnessEnd(self._write, segment, offset)

    def strike_off(self, worker: int) -> None:
        """A worker has died: its successor does not listen yet."""
        self._segment.memory[self._offset + worker] = 0

    def stack_of(self, worker: int, pid: int) -> str:
        """Return the Python stack of a living worker, or '' if it does not tell within about a second."""
        if not self._segment.memory[self._offset + worker]:
            return ""
        os.kill(pid, STACK_SIGNAL)
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        text, patience = b"", _FIRST_MS
        while poll.poll(patience):
            text += os.read(self._read, 1 << 16)
            patience = _QUIET_MS
        return text.decode(errors="replace")

    def close(self) -> None:
        """Close both descriptors of this process."""
        os.close(self._read)
        os.close(self._write)
