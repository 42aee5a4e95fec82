"""A worker process ended or hangs."""

from __future__ import annotations

import signal
from typing import NamedTuple

from .base import ShmLoaderError, shown


class OomKills(NamedTuple):
    """How often the kernel had killed a process for want of memory, by one of its counters."""

    source: str
    """The file that counts, and what."""
    before: int
    """When the workers were started."""
    after: int
    """When the death was noticed."""


class WorkerError(ShmLoaderError, RuntimeError):
    """A worker process is gone or does not answer. RuntimeError, as torch raises.

    Made from its facts, or from a whole message alone, as torch rebuilds what was raised in another process: then it
    says that message, and ``worker`` and ``pid`` are -1.
    """


class WorkerDied(WorkerError):
    """A worker process ended without being asked to. The world broke, not the loader's user.

    ``deaths`` is 1, or how many workers in a row died at the same place, with ``on_worker_death="restart"``; then
    ``indices`` is the one sample to blame, where that could be found out.
    """

    def __init__(
        self,
        worker: int | str,
        pid: int = -1,
        exitcode: int | None = None,
        indices: tuple[object, ...] = (),
        oom_kills: tuple[OomKills, ...] = (),
        deaths: int = 1,
    ) -> None:
        super().__init__(worker, pid, exitcode, indices, oom_kills, deaths)
        self.message = worker if isinstance(worker, str) else ""
        self.worker = -1 if isinstance(worker, str) else worker
        self.pid, self.exitcode, self.indices = pid, exitcode, indices
        self.oom_kills, self.deaths = oom_kills, deaths

    @property
    def signal(self) -> int | None:
        """The signal that ended the worker, or None if it exited by itself."""
        return -self.exitcode if self.exitcode is not None and self.exitcode < 0 else None

    @property
    def end(self) -> str:
        """How it ended, in a few words: ``'killed by signal: Killed (SIGKILL)'``."""
        if self.signal is None:
            return f"exited unexpectedly with exit code {self.exitcode}"
        try:
            name = signal.strsignal(self.signal) or str(self.signal)
            return f"killed by signal: {name} ({signal.Signals(self.signal).name})"
        except ValueError:
            return f"killed by signal: {self.signal}"

    def _sentence(self) -> str:
        if self.message:
            return self.message
        verb = "" if self.signal is None else "is "
        text = f"DataLoader worker (pid {self.pid}) {verb}{self.end}."
        if self.indices:
            text += f" It was worker {self.worker}, working on indices [{shown(self.indices)}]"
        else:
            text += f" It was worker {self.worker}, which had no batch to work on"
        if self.deaths > 1:
            text += f"; {self.deaths} workers in a row have died there"
        counts = ", ".join(f"{kills.source} {kills.before} -> {kills.after}" for kills in self.oom_kills)
        return f"{text}; kills for want of memory: {counts}" if counts and self.signal == signal.SIGKILL else text

    @property
    def hint(self) -> str:  # type: ignore[override]
        if self.message:
            return ""
        if self.signal == signal.SIGKILL:
            cure = (
                "lower num_workers or the batch size, or raise the memory limit (shmloader-tune shows what a setting "
                "needs)"
            )
            if any(kills.after > kills.before for kills in self.oom_kills):
                return f"the kernel's out-of-memory killer was at work meanwhile: {cure}"
            if self.oom_kills:
                return (
                    "no kill for want of memory was counted here, so look for who sends SIGKILL (a person, a job "
                    f"scheduler, a memory watchdog outside of this container); if it is about memory: {cure}"
                )
            return f"SIGKILL often comes from the kernel's out-of-memory killer: {cure}"
        if self.signal == signal.SIGBUS:
            return (
                "SIGBUS comes from reading a mapped file that was cut meanwhile (is somebody writing over a pack or "
                "an array?), from a full file system under a mapping, or from broken memory"
            )
        if self.signal == signal.SIGSEGV:
            return "the dataset's native code crashed on one of these indices: try them with num_workers=0"
        return "run the dataset on these indices with num_workers=0 to see why"


class WorkerTimeout(WorkerError):
    """A worker has not delivered its batch within ``timeout`` seconds."""

    def __init__(
        self,
        timeout_s: float | str,
        worker: int = -1,
        pid: int = -1,
        indices: tuple[object, ...] = (),
        stack: str = "",
    ) -> None:
        super().__init__(timeout_s, worker, pid, indices, stack)
        self.message = timeout_s if isinstance(timeout_s, str) else ""
        self.timeout_s = 0.0 if isinstance(timeout_s, str) else timeout_s
        self.worker, self.pid, self.indices, self.stack = worker, pid, indices, stack

    def _sentence(self) -> str:
        if self.message:
            return self.message
        text = (
            f"DataLoader timed out after {self.timeout_s:g} seconds: worker {self.worker} (pid {self.pid}) is still "
            f"working on indices [{shown(self.indices)}]"
        )
        text += "; raise timeout=, or look at why these samples take so long"
        return f"{text}\nPython stack of the worker:\n{self.stack}" if self.stack else text


class WorkerStuckWarning(UserWarning):
    """The main process has been waiting for one batch for ``warn_stuck_s`` seconds. Given once a pass."""
