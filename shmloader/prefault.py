"""Mapping pages before they are used: one call for a range, several threads for a large one.

    committed, not mapped here ──prefault──▶ mapped: the first use costs no fault per page

Every process maps for itself. Which bytes the pages hold is not touched, so this may run while another process writes
them. Where the kernel cannot (before Linux 5.14), a byte of every page is read instead: slower, the same in the end.

WARNING: mapping a page of shared memory that has no memory yet *gives* it some. ``populate`` is for those who mean
that; ``prefault`` is for committed ranges.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

PAGE = mmap.PAGESIZE
MADV_POPULATE_WRITE = 23  # Linux >= 5.14: map the pages now, writable
PIECE = 32 << 20
"""Bytes that are worth a thread: some 10 ms of work for one."""
MOST_THREADS = 8
"""More of them wait for each other in the kernel, and for the memory bus."""

_libc = ctypes.CDLL(None, use_errno=True)  # its calls release the GIL, which mmap.madvise does not
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def threads_for(nbytes: int) -> int:
    """Return how many threads map ``nbytes``: one for each PIECE, at most the CPUs of this process and MOST_THREADS."""
    return max(1, min(nbytes // PIECE, len(os.sched_getaffinity(0)), MOST_THREADS))


def prefault(memory: npt.NDArray[np.uint8], threads: int | None = None) -> None:
    """Map all pages under ``memory``, a contiguous array over committed shared memory, into this process.

    Returns when it is done. ``threads`` None: ``threads_for(memory.nbytes)``. Copies nothing, changes nothing; best
    effort, so there is nothing to catch.
    """
    if memory.nbytes and not populate(memory, threads):
        np.max(memory.reshape(-1).view(np.uint8)[::PAGE])  # every page is touched; NumPy releases the GIL meanwhile


def populate(memory: npt.NDArray[np.uint8], threads: int | None = None) -> bool:
    """Map all pages under ``memory``; those that have no memory yet get some. Return whether all are there.

    False if the kernel cannot, or if the file system has no space left; part of the pages may be mapped then.
    """
    first = memory.__array_interface__["data"][0]
    start, stop = first // PAGE * PAGE, -(-(first + memory.nbytes) // PAGE) * PAGE
    count = threads_for(stop - start) if threads is None else max(1, threads)
    step = -(-(stop - start) // (count * PAGE)) * PAGE
    done: list[bool] = []

    def work(begin: int, end: int) -> Callable[[], None]:
        return lambda: done.append(_libc.madvise(begin, end - begin, MADV_POPULATE_WRITE) == 0)

    pieces = [work(begin, min(begin + step, stop)) for begin in range(start, stop, step)]
    others = [threading.Thread(target=piece, name="shmloader-prefault") for piece in pieces[1:]]
    for thread in others:
        thread.start()
    try:
        pieces[0]()
    finally:
        for thread in others:
            thread.join()
    return all(done)
