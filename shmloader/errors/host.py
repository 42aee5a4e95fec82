"""The host lacks something: memory, a mount, a limit."""

from __future__ import annotations

from .base import ShmLoaderError, human_bytes


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


class NoSlotLeft(ResourceError, MemoryError):
    """Every slot that the arena may have is in use by somebody who alone can give it back."""

    hint = (
        "drop old batches and go on, raise arena_bytes=, or let the dataset or collate_fn clone() the tensors that it "
        "keeps in the worker"
    )

    def __init__(self, slots: int, lent: int, kept: int, limit: int) -> None:
        super().__init__(slots, lent, kept, limit)
        self.slots = slots
        self.lent = lent
        """Slots that hold batches of yours."""
        self.kept = kept
        """Slots that code in the workers still looks at: it has kept a tensor that it had made for a batch."""
        self.limit = limit
        """Bytes that the arena may take."""

    def _sentence(self) -> str:
        return (
            f"no slot is left for the next batch: of {self.slots} slots, {self.lent} hold batches that are in use and "
            f"{self.kept} hold tensors that code in the workers has kept, and the arena is limited to "
            f"{human_bytes(self.limit)}"
        )


class CopiedOutWarning(UserWarning):
    """Batches are delivered as copies, because the user keeps so many that no more slots can be lent."""


class PinningRefused(ResourceError):
    """The system does not page-lock a range. Batches stay right; copies to the device are slower and not asynchronous.

    Told as a NotPinnedWarning, not raised to the user.
    """

    def __init__(self, nbytes: int, address: int, code: int, meaning: str, cure: str) -> None:
        super().__init__(nbytes, address, code, meaning, cure)
        self.nbytes = nbytes
        """Bytes asked for."""
        self.address = address
        """Where the range begins."""
        self.code = code
        """The error code of the driver or runtime; 0: it came to no call."""
        self.meaning = meaning
        self.cure = cure

    def _sentence(self) -> str:
        what = (
            f"cannot page-lock {human_bytes(self.nbytes)} ({self.nbytes} bytes) at "
            f"[{self.address:#x}, {self.address + self.nbytes:#x}): error {self.code} ({self.meaning})"
        )
        return f"{what}; {self.cure}" if self.cure else what


class DeviceUnavailable(ResourceError):
    """The device that was named cannot be had."""

    hint = (
        "leave device= away and use pin_memory=True, which works everywhere, or ask first: "
        "device='cuda' if torch.cuda.is_available() else 'cpu'"
    )

    def __init__(self, device: str, why: str) -> None:
        super().__init__(device, why)
        self.device, self.why = device, why

    def _sentence(self) -> str:
        return f"device={self.device!r} cannot be had: {self.why}"


class NotPinnedWarning(UserWarning):
    """Batches are not page-locked though that was asked for."""
