"""One shared mapping: reserve a range once, commit parts of it, give parts back, close.

        reserved: address space only, costs nothing, mapped once by every process
    ┌──────────────┬───────────────┬──────────────┬────────────────────────── ─ ─ ─┐
    │  committed   │   reserved    │  committed   │   reserved                     │
    │  (has pages) │               │  (has pages) │                                │
    └──────────────┴───────────────┴──────────────┴────────────────────────── ─ ─ ─┘
    0              commit(offset, n) ▲  ▲ decommit(offset, n)                   nbytes

Rule 1: nobody touches a byte that is not committed. ``commit`` is ``posix_fallocate``: missing space is an ``ENOSPC``
        here and now (:class:`~shmloader.errors.SharedMemoryFull`), never a ``SIGBUS`` later.
Rule 2: no name outlives ``create``. The posix name is unlinked before the constructor returns; workers get the
        descriptor, by fork or by passing it, so a process that is killed at any time leaves nothing to clean.
Rule 3: ``close`` forgets the handle first. Views keep the mapping alive; it goes when the last of them does.

Backings: posix shared memory, else ``memfd_create`` (not bound to the size of /dev/shm, but to memory and the
container's limit), else a directory that the user names (an unlinked file there, for example on a hugetlbfs or tmpfs
mount).
"""

from __future__ import annotations

import errno
import mmap
import multiprocessing.context
import multiprocessing.reduction as reduction
import os
import secrets
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import posix_ipc

from .errors import SharedMemoryFull
from .placement import ANYWHERE, Placement, run_on
from .prefault import populate, prefault

PAGE = mmap.PAGESIZE
SHM_ROOT = "/dev/shm"
HUGE = 2 << 20
"""Bytes of a huge page on the CPUs that matter here; where they are larger, this is only less exact."""

_NOT_HERE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)  # "this kernel or file system cannot"


def round_up(nbytes: int, unit: int = PAGE) -> int:
    """Return the smallest multiple of ``unit`` that is at least ``nbytes``."""
    return -(-nbytes // unit) * unit


def _open_posix() -> int:
    """Return the descriptor of new posix shared memory, of size 0, that has no name any more."""
    name = f"/shmloader-{os.getpid()}-{secrets.token_hex(6)}"
    try:
        memory = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600)
    except posix_ipc.Error as error:
        raise OSError(errno.EACCES, f"cannot create posix shared memory: {error}") from error
    memory.unlink()
    fd: int = memory.fd
    return fd


def _open_memfd() -> int:
    return os.memfd_create("shmloader", os.MFD_CLOEXEC)


def _open_in(directory: str) -> int:
    with tempfile.TemporaryFile(prefix="shmloader-", dir=directory) as file:
        return os.dup(file.fileno())


class Segment:
    """A shared range of ``nbytes`` reserved bytes, of which ``committed`` have memory behind them.

    ``memory`` is the whole range as a uint8 array that never copies; ``address`` is where it begins in this process.
    The object can be inherited by a forked child, and pickled while a child is being spawned; the child maps the same
    memory.
    """

    def __init__(self, fd: int, nbytes: int, backing: str, owner_pid: int, placement: Placement = ANYWHERE) -> None:
        self._fd: int | None = fd
        self.nbytes = nbytes
        self.backing = backing
        """``'posix'``, ``'memfd'`` or the directory."""
        self.owner_pid = owner_pid
        self.placement = placement
        self.committed = 0
        self._map = mmap.mmap(fd, nbytes, mmap.MAP_SHARED)
        # A core dump of a crashed training run should not carry gigabytes of batches.
        self._advise(mmap.MADV_DONTDUMP, 0, nbytes)
        if placement.wants_huge:
            self._advise(mmap.MADV_HUGEPAGE, 0, nbytes)
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.address: int = self.memory.__array_interface__["data"][0]

    @classmethod
    def create(cls, nbytes: int, backing: str = "posix", placement: Placement = ANYWHERE) -> Segment:
        """Reserve ``nbytes`` (rounded up to pages) in new shared memory. Commits nothing.

        ``backing`` is ``'posix'``, ``'memfd'`` or the path of a directory. Raises OSError if that cannot be had.
        ``placement``: huge pages and NUMA node of what will be committed.
        """
        openers: dict[str, Callable[[], int]] = {"posix": _open_posix, "memfd": _open_memfd}
        opener = openers.get(backing)
        fd = opener() if opener is not None else _open_in(backing)
        try:
            nbytes = round_up(nbytes)
            os.ftruncate(fd, nbytes)
            return cls(fd, nbytes, backing, os.getpid(), placement)
        except BaseException:
            os.close(fd)
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        if self._fd is None:
            raise ValueError("this segment is closed")
        multiprocessing.context.assert_spawning(self)
        return Segment._attach, (reduction.DupFd(self._fd), self.nbytes, self.backing, self.owner_pid)

    @staticmethod
    def _attach(handle: Any, nbytes: int, backing: str, owner_pid: int) -> Segment:
        return Segment(handle.detach(), nbytes, backing, owner_pid)

    @property
    def closed(self) -> bool:
        return self._fd is None

    @property
    def where(self) -> str:
        """What limits this memory, in words for a message."""
        return {"posix": SHM_ROOT, "memfd": "memory (memfd)"}.get(self.backing, self.backing)

    def free_bytes(self) -> int:
        """Return the bytes that can still be committed, as far as the file system knows (memfd: available memory)."""
        if self._fd is None:
            return 0
        if self.backing == "memfd":
            return os.sysconf("SC_AVPHYS_PAGES") * PAGE
        status = os.fstatvfs(self._fd)
        return status.f_bavail * status.f_frsize

    def room(self) -> int | None:
        """Return the bytes that the backing mount has left for us, or None where there is no mount (memfd)."""
        return None if self.backing == "memfd" else self.free_bytes()

    def commit(self, offset: int, nbytes: int) -> None:
        """Put memory behind ``nbytes`` bytes at ``offset`` (both multiples of a page). Its bytes read as zero.

        Raises SharedMemoryFull, and then nothing of it stays committed.
        """
        if self._fd is None:
            raise ValueError("this segment is closed")
        try:
            run_on(self.placement.cpus, lambda: self._allocate(offset, nbytes))
        except BaseException as error:  # an interrupt too: what is not counted must not stay
            self._advise(mmap.MADV_REMOVE, offset, nbytes)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise SharedMemoryFull(nbytes, self.free_bytes(), self.where) from None
            raise
        self.committed += nbytes

    def _allocate(self, offset: int, nbytes: int) -> None:
        """Put memory behind a range. On a host that gives huge pages to those who ask, a fault asks, an allocation does
        not."""
        if self.placement.wants_huge and nbytes >= 2 * HUGE:  # smaller pieces hold no whole huge page for sure
            populate(self.view(offset, nbytes))
        assert self._fd is not None
        os.posix_fallocate(self._fd, offset, nbytes)

    def view(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return ``nbytes`` bytes at ``offset`` as an array of its own. Never copies.

        Slices and reshapes of it, and arrays made over it, keep *this object* alive, not only the mapping (NumPy makes
        them skip arrays on the way to the owner of the memory, and here the owner is no array).
        """
        return np.frombuffer(self._map, np.uint8, nbytes, offset)

    def decommit(self, offset: int, nbytes: int) -> None:
        """Give the pages of a committed part back to the system at once. The range stays reserved.

        Only for the process that created the segment: the pages are those of all who map it.
        """
        if os.getpid() != self.owner_pid:
            raise ValueError(f"process {os.getpid()} cannot give back memory of process {self.owner_pid}")
        self._advise(mmap.MADV_REMOVE, offset, nbytes)
        self.committed -= nbytes

    def trim(self, offset: int, nbytes: int, start: int, stop: int) -> None:
        """Give back what huge pages reach over a piece, inside of ``[start, stop)``, where nothing else is committed.

        The page is split where the piece ends, so that memory is what ``committed`` says, to the byte.
        """
        end = offset + nbytes
        start, stop = max(start, offset // HUGE * HUGE), min(stop, round_up(end, HUGE))
        if start < offset:
            self._advise(mmap.MADV_REMOVE, start, offset - start)
        if end < stop:
            self._advise(mmap.MADV_REMOVE, end, stop - end)

    def populate(self, offset: int, nbytes: int, threads: int | None = None) -> None:
        """Map a committed part into this process, so that its first use costs no page faults. Changes no byte.

        ``threads`` None: several for a large part. Best effort.
        """
        prefault(self.view(offset, nbytes), threads)

    def _advise(self, advice: int, offset: int, nbytes: int) -> None:
        try:
            self._map.madvise(advice, offset, nbytes)
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise

    def close(self) -> None:
        """Forget the descriptor and this object's own reference to the mapping. Live views stay valid. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            self.memory = np.empty(0, np.uint8)
            os.close(fd)
            del self._map
