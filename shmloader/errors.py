"""Every exception of shmloader, sorted by whose fault it is.

    ShmLoaderError
    ├── ResourceError      the host said no: too little shared memory, a limit, a lost mount
    ├── PackError          a file said no: unfinished, damaged, foreign, too new
    ├── DataError          the dataset said no: samples that do not fit together
    ├── WorkerError        a worker process ended or hangs: the world broke
    └── MisuseError        the caller asked for something that cannot be

Rules: the fields are the arguments of ``__init__`` and are passed to ``super().__init__`` unchanged, so that every
exception survives pickling; the sentence is made in ``__str__``; ``hint`` says what to do next. Each class also derives
from the built-in exception that torch or Python would raise in its place, so that existing ``except`` clauses match.
"""

from __future__ import annotations

import signal
from typing import ClassVar


def human_bytes(nbytes: int) -> str:
    """Return ``nbytes`` in the largest binary unit that keeps one digit before the point: ``'64.0 MiB'``."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{int(value)} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


class ShmLoaderError(Exception):
    """Base of all exceptions of this library."""

    hint: ClassVar[str] = ""

    def _sentence(self) -> str:
        return super().__str__()

    def __str__(self) -> str:
        sentence = self._sentence()
        return f"{sentence}; {self.hint}" if self.hint else sentence


# --- the host said no -------------------------------------------------------------------------------------------------


class ResourceError(ShmLoaderError, RuntimeError):
    """The host lacks something: memory, a mount, a descriptor."""


class SharedMemoryFull(ResourceError, MemoryError):
    """Shared memory that was asked for is not there. Nothing was kept; nothing needs cleaning."""

    hint = (
        "make the arena smaller (arena_bytes=, fewer workers, a smaller prefetch_factor or batch), give the mount or "
        "the container more shared memory (for example --shm-size=2g), or lift the memory limit that is named here"
    )

    def __init__(self, wanted: int, free: int, where: str) -> None:
        super().__init__(wanted, free, where)
        self.wanted = wanted
        """Bytes asked for."""
        self.free = free
        """Bytes that were free at ``where``."""
        self.where = where
        """The mount, file or limit that said no."""

    def _sentence(self) -> str:
        return (
            f"shared memory is full: wanted {human_bytes(self.wanted)} ({self.wanted} bytes), "
            f"free {human_bytes(self.free)} ({self.free} bytes) at {self.where}"
        )


class ArenaTooSmall(ResourceError, ValueError):
    """``arena_bytes`` cannot hold the fewest slots that a loader needs (workers + 1)."""

    def __init__(self, arena_bytes: int, minimum: int, slots: int, slot_bytes: int) -> None:
        super().__init__(arena_bytes, minimum, slots, slot_bytes)
        self.arena_bytes, self.minimum, self.slots, self.slot_bytes = arena_bytes, minimum, slots, slot_bytes

    def _sentence(self) -> str:
        return (
            f"arena_bytes={self.arena_bytes} ({human_bytes(self.arena_bytes)}) is too small: {self.slots} slots of "
            f"{human_bytes(self.slot_bytes)} need at least {self.minimum} bytes ({human_bytes(self.minimum)})"
        )

    hint = "raise arena_bytes=, or lower num_workers= or the batch size"


class BatchTooLarge(ResourceError, ValueError):
    """One batch needs more shared memory than the arena may ever have."""

    hint = "raise arena_bytes=, lower the batch size, or drop the giant sample"

    def __init__(self, need: int, available: int, limit: int) -> None:
        super().__init__(need, available, limit)
        self.need, self.available, self.limit = need, available, limit

    def _sentence(self) -> str:
        return (
            f"a batch needs {self.need} bytes ({human_bytes(self.need)}) in one slot, but the arena is limited to "
            f"{self.limit} bytes and can give one slot at most {self.available} bytes ({human_bytes(self.available)})"
        )


class CopiedOutWarning(UserWarning):
    """Batches are delivered as copies, because the user keeps so many that no more slots can be lent."""


# --- a file said no ---------------------------------------------------------------------------------------------------


class PackError(ShmLoaderError):
    """A pack cannot be read or written; ``path`` is the file, ``why`` the reason in one clause."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(path, why)
        self.path, self.why = path, why

    def _sentence(self) -> str:
        return f"{self.path}: {self.why}"


class PackNotFound(PackError, FileNotFoundError):
    """There is no file at ``path``."""

    hint = "make it with shmloader-pack SOURCE OUT.lmdb"


class PackUnfinished(PackError, ValueError):
    """The file was never sealed: its packer was killed or is still at work."""

    hint = "run the same shmloader-pack command again"


class PackDamaged(PackError, ValueError):
    """The file was a pack once: it is cut, or bytes have changed."""

    hint = "copy or pack it again; shmloader-inspect --verify lists every damaged chunk"


class NotAPack(PackError, ValueError):
    """The file is something else: a foreign LMDB, a directory, an image, an empty file."""

    hint = "make a pack with shmloader-pack SOURCE OUT.lmdb"


class PackVersionError(PackError, ValueError):
    """The pack was written by a newer format than this library reads."""

    hint = "upgrade shmloader"


class PackExists(PackError, FileExistsError):
    """The target of a packing run exists already and ``overwrite`` was not asked for."""

    hint = "choose another name, or ask for it to be replaced (--overwrite, overwrite=True)"


# --- the dataset said no ----------------------------------------------------------------------------------------------


class DataError(ShmLoaderError, ValueError):
    """Samples do not fit together, or hold something that cannot be stored."""


class SampleMismatch(DataError):
    """A sample disagrees with the ones before it. ``field`` names the field, ``index`` the sample."""

    def __init__(self, index: int, field: str, expected: str, found: str, source: str = "") -> None:
        super().__init__(index, field, expected, found, source)
        self.index, self.field, self.expected, self.found, self.source = index, field, expected, found, source

    def _sentence(self) -> str:
        where = f" ({self.source})" if self.source else ""
        return f"sample {self.index}{where}, field {self.field!r}: expected {self.expected}, found {self.found}"


class UnsupportedField(DataError, TypeError):
    """A value of this kind cannot be stored in a pack."""

    hint = "arrays, tensors, numbers, strings, bytes and tuples, dicts and namedtuples of them can be packed"

    def __init__(self, index: int, field: str, found: str) -> None:
        super().__init__(index, field, found)
        self.index, self.field, self.found = index, field, found

    def _sentence(self) -> str:
        return f"sample {self.index}, field {self.field!r}: cannot pack {self.found}"


class BrokenImage(DataError):
    """The bytes of an image file cannot be decoded. ``name`` says which image, ``why`` what the decoder met."""

    def __init__(self, name: str, nbytes: int, why: str) -> None:
        super().__init__(name, nbytes, why)
        self.name, self.nbytes, self.why = name, nbytes, why

    def _sentence(self) -> str:
        return f"{self.name}: broken image file ({self.nbytes} bytes): {self.why}"

    hint = "replace the file or take it out, and run again"


class SourceError(DataError):
    """Data that was to be read or packed is missing or contradicts itself: ``path`` says where, ``why`` what."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(path, why)
        self.path, self.why = path, why

    def _sentence(self) -> str:
        return f"{self.path}: {self.why}"


class UnknownSource(SourceError):
    """Nothing that can be packed was recognised at ``path``. ``looked_for`` lists what would have been."""

    def __init__(self, path: str, why: str, looked_for: tuple[str, ...]) -> None:
        DataError.__init__(self, path, why, looked_for)
        self.path, self.why, self.looked_for = path, why, looked_for

    def _sentence(self) -> str:
        return f"{self.path}: {self.why}; looked for {', or '.join(self.looked_for)}"


class UnequalSamples(DataError, RuntimeError):
    """Samples of one batch have different shapes, and the default collate can only stack equal ones."""

    hint = (
        "make them equal in the dataset (resize, crop, pad), or collate them with shmloader.collate_list, "
        "shmloader.collate_padded or shmloader.collate_jagged as collate_fn"
    )

    def __init__(
        self,
        reason: str,
        field: str,
        index: object,
        shape: tuple[int, ...],
        other_index: object,
        other_shape: tuple[int, ...],
        are_dataset_indices: bool = True,
    ) -> None:
        super().__init__(reason, field, index, shape, other_index, other_shape, are_dataset_indices)
        self.reason, self.field = reason, field
        self.index, self.shape, self.other_index, self.other_shape = index, shape, other_index, other_shape
        self.are_dataset_indices = are_dataset_indices

    def _sentence(self) -> str:
        what = "dataset index" if self.are_dataset_indices else "place in the batch"
        return (
            f"{self.reason}\n{self.field} has shape {list(self.shape)} at {what} {self.index!r} but "
            f"{list(self.other_shape)} at {what} {self.other_index!r}"
        )


class DeviceTensor(DataError, RuntimeError):
    """A worker's batch holds a tensor that is not in CPU memory."""

    hint = "return CPU tensors from the dataset and collate_fn; the main process moves them to the device"

    def __init__(self, device: str, shape: str) -> None:
        super().__init__(device, shape)
        self.device, self.shape = device, shape

    def _sentence(self) -> str:
        return f"a worker produced a tensor of shape {self.shape} on device {self.device!r}"


# --- a worker ended or hangs ------------------------------------------------------------------------------------------


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
        shown = ", ".join(map(repr, self.indices[:16])) + (", ..." if len(self.indices) > 16 else "")
        at = (
            f" It was worker {self.worker}, working on indices [{shown}]"
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
        shown = ", ".join(map(repr, self.indices[:16])) + (", ..." if len(self.indices) > 16 else "")
        text = (
            f"DataLoader timed out after {self.timeout_s:g} seconds: worker {self.worker} (pid {self.pid}) is still "
            f"working on indices [{shown}]"
        )
        text += "; raise timeout=, or look at why these samples take so long"
        return f"{text}\nPython stack of the worker:\n{self.stack}" if self.stack else text


# --- the caller asked for something that cannot be --------------------------------------------------------------------


class MisuseError(ShmLoaderError, RuntimeError):
    """The library was used in a way that can never work."""


class SlotMisuse(MisuseError):
    """A slot was asked to make a move that its state does not allow."""

    def __init__(self, slot: int, state: str, event: str, legal: tuple[str, ...]) -> None:
        super().__init__(slot, state, event, legal)
        self.slot, self.state, self.event, self.legal = slot, state, event, legal

    def _sentence(self) -> str:
        return f"cannot {self.event} slot {self.slot}, which is {self.state}; legal here: {', '.join(self.legal)}"


class MissingExtra(MisuseError, ImportError):
    """Something was asked for that needs an optional package."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(package, extra, purpose)
        self.package, self.extra, self.purpose = package, extra, purpose

    def _sentence(self) -> str:
        return f"{self.package} is needed to {self.purpose}: pip install 'shmloader[{self.extra}]'"


class IteratorClosed(MisuseError):
    """The iterator was closed, or a newer one took over its workers."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why

    def _sentence(self) -> str:
        return f"this iterator has ended: {self.why}"

    hint = "start a new one with iter(loader)"
