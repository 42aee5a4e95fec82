"""The file under a mapping: is it still as long, was it changed, and which of its chunks were found to be whole."""

from __future__ import annotations

import mmap
import os
import weakref
from typing import NoReturn

import numpy as np

from ..errors import PackDamaged


class FileWatch:
    """The file under one mapping: is it still as long, and when was it changed? Keeps a descriptor of its own."""

    def __init__(self, path: str, fd: int, mapping: mmap.mmap, chunks: list[int]) -> None:
        self._path = path
        self.fd = os.dup(fd)
        weakref.finalize(self, os.close, self.fd)
        self._nbytes = len(mapping)
        self._size = mapping.size  # of the file
        memory = mmap.mmap(-1, 8 * max(1, sum(chunks)))  # shared with what is forked from here
        marks = np.frombuffer(memory, np.int64)
        starts = [sum(chunks[:number]) for number in range(len(chunks))]
        self.marks = [marks[start : start + count] for start, count in zip(starts, chunks, strict=True)]
        """For each field one number a chunk: the time of change at which it was whole; 0: not known."""

    def look(self) -> int:
        """Return the file's time of change (in ns), or raise PackDamaged if it is shorter than what is mapped."""
        status = os.fstat(self.fd)
        if status.st_size < self._nbytes:
            self._cut(status.st_size)
        return status.st_mtime_ns

    def look_at_length(self) -> None:
        """Raise PackDamaged if the file is shorter than what is mapped. The cheapest look there is."""
        if self._size() < self._nbytes:
            self._cut(self._size())

    def _cut(self, nbytes: int) -> NoReturn:
        raise PackDamaged(
            self._path,
            f"has been cut while it was being read: {nbytes} bytes are there, {self._nbytes} were; packs are replaced "
            "by renaming a new one over them, never by writing into them",
        )
