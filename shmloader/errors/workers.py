"""A worker process ended or hangs."""

from __future__ import annotations

import signal

from .base import ShmLoaderError


def _shown(indices: tuple[object, ...]) -> str:
    return ", ".join(map(repr, indices[:16])) + (", ..." if len(indices) > 16 else "")


class WorkerError(ShmLoaderError, RuntimeError):
    """A worker process is gone or does not answer. RuntimeError, as torch raises."""


class WorkerDied(WorkerError):
    """A worker process ended without being asked to. The world broke, not the loader's user."""

    def __init__(self, worker: int, pid: int, exitcode: int | None, indices: tuple[object, ...] = ()) -> None:
        super().__init__(worker, pid, exitcode, indices)
        self.worker, self.pid, self.exitcode, self.indices = worker, pid, exitcode, indices

    @property
    def signal(self) -> int | None:
        """The signal that ended the worker, or None if it exited by itself."""
        return -self.exitcode if self.exitcode is not None and self.exitcode < 0 else None

    def _sentence(self) -> str:
        if self.signal is not None:
            try:
                name = signal.strsignal(self.signal) or str(self.signal)
                name = f"{name} ({signal.Signals(self.signal).name})"
            except ValueError:
                name = str(self.signal)
            end = f"DataLoader worker (pid {self.pid}) is killed by signal: {name}."
        else:
            end = f"DataLoader worker (pid {self.pid}) exited unexpectedly with exit code {self.exitcode}."
        at = (
            f" It was worker {self.worker}, working on indices [{_shown(self.indices)}]"
            if self.indices
            else (f" It was worker {self.worker}, which had no batch to work on")
        )
        return end + at

    @property
    def hint(self) -> str:  # type: ignore[override]
        if self.signal == signal.SIGKILL:
            return (
                "SIGKILL often comes from the kernel's out-of-memory killer: lower num_workers or the batch size, or "
                "raise the memory limit (shmloader-tune shows what a setting needs)"
            )
        if self.signal in (signal.SIGSEGV, signal.SIGBUS):
            return "the dataset's native code crashed on one of these indices: try them with num_workers=0"
        return "run the dataset on these indices with num_workers=0 to see why"


class WorkerTimeout(WorkerError):
    """A worker has not delivered its batch within ``timeout`` seconds."""

    def __init__(self, timeout_s: float, worker: int, pid: int, indices: tuple[object, ...], stack: str = "") -> None:
        super().__init__(timeout_s, worker, pid, indices, stack)
        self.timeout_s, self.worker, self.pid, self.indices, self.stack = timeout_s, worker, pid, indices, stack

    def _sentence(self) -> str:
        text = (
            f"DataLoader timed out after {self.timeout_s:g} seconds: worker {self.worker} (pid {self.pid}) is still "
            f"working on indices [{_shown(self.indices)}]"
        )
        text += "; raise timeout=, or look at why these samples take so long"
        return f"{text}\nPython stack of the worker:\n{self.stack}" if self.stack else text
