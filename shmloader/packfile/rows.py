"""Rows of one fixed size in the mapped file, gathered into a batch by one call.

    windows: the mapping seen as overlapping rows, one every ``grid`` bytes
    file    ─────┬── chunk 0: row row row row ──┬───────┬── chunk 1: row row row row ──┬───
    offset of row i (in grids)  =  shift[chunk of i] + i * (row bytes / grid)

All rows of all chunks lie on one grid, because chunks begin 16 bytes off a page border and rows follow each other
without a gap. So ONE ``torch.index_select(windows, 0, offsets, out=...)`` gathers a batch. The windows are a view of
the mapping (``as_strided``); they are never made. Indices are checked first, so that nothing but rows is read.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .ahead import LARGE_ROW, Announcer
from .mapping import OpenPack
from .schema import ChunkTable

Indices = npt.NDArray[np.int64]

UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Bytes -> the dtype that copies so many at a time."""


class ChunkMap:
    """Which chunk holds a row."""

    def __init__(self, table: ChunkTable) -> None:
        self.first_rows = np.ascontiguousarray(table[:, 1])
        self.count = int(table[-1, 1] + table[-1, 2]) if len(table) else 0
        self._list: list[int] = self.first_rows.tolist()
        self._bits = self._shift(table)

    @staticmethod
    def _shift(table: ChunkTable) -> int | None:
        """Return the bits that tell a chunk from its rows, if all hold one power of two; None: search for it."""
        if len(table) < 2:
            return None
        step = int(table[0, 2])
        even = bool(np.all(np.diff(table[:, 1]) == step)) and int(table[-1, 2]) <= step  # the last may hold fewer
        return step.bit_length() - 1 if even and step & (step - 1) == 0 else None

    def of(self, indices: Indices) -> Indices:
        """Return the chunk of each row."""
        if self._bits is not None:
            return indices >> self._bits
        return np.searchsorted(self.first_rows, indices, side="right") - 1

    def of_one(self, index: int) -> int:
        """Return the chunk of one row."""
        return index >> self._bits if self._bits is not None else bisect.bisect_right(self._list, index) - 1

    def first_row(self, chunk: int) -> int:
        """Return the first row of a chunk."""
        return self._list[chunk]

    def check(self, indices: Indices) -> None:
        """Raise IndexError unless all are rows, TypeError unless they are int64."""
        if indices.dtype != np.int64 or indices.ndim != 1:
            raise TypeError(f"indices must be int64 of shape (n,), not {indices.dtype} of shape {indices.shape}")
        # One pass for both ends: seen as unsigned, a negative number is a huge one.
        if len(indices) and int(np.maximum.reduce(indices.view(np.uint64))) >= self.count:
            wrong = indices[(indices < 0) | (indices >= self.count)]
            raise IndexError(f"index {int(wrong[0])} is out of range for a pack of {self.count} samples")


class Rows:
    """Rows of one fixed size, in the chunks of one part of a field."""

    def __init__(
        self, pack: OpenPack, raw: Any, chunks: ChunkMap, places: Indices, row_bytes: int, window: int
    ) -> None:
        """``window`` bytes are read at each row: its own, or more where a row's successor is wanted too."""
        self.chunks = chunks
        self.places = places
        self.row_bytes = row_bytes
        self._window = window
        self.raw = raw
        self.pack = pack
        self._ready: dict[int, tuple[torch.Tensor, Indices, int]] = {}
        self._single = len(places) == 1
        self._announcer = Announcer(pack, window)
        self._grid = 0
        if len(places) and window:
            self._base = int(places.min())
            self._grid = math.gcd(row_bytes, int(np.gcd.reduce(places - self._base)))
            self._unit = math.gcd(self._grid, self._base, window, 8)

    def _windows(self, unit: int) -> tuple[torch.Tensor, Indices, int]:
        """Return (windows of numbers of ``unit`` bytes, shift of each chunk, row step), both in grids."""
        ready = self._ready.get(unit)
        if ready is None:
            last = int(self.places.max()) - self._base + self._last_rows_bytes()
            length = min(last, self.pack.file_bytes - self._base) // unit
            flat = torch.frombuffer(self.raw, dtype=UNITS[unit], count=length, offset=self._base)
            numbers, stride = self._window // unit, self._grid // unit
            size = (length - numbers) // stride + 1
            windows = (
                flat.as_strided((size, numbers), (stride, 1)) if numbers > 1 else flat.as_strided((size,), (stride,))
            )
            step = self.row_bytes // self._grid
            shifts = (self.places - self._base) // self._grid - self.chunks.first_rows * step
            ready = self._ready[unit] = windows, shifts, step
        return ready

    def _last_rows_bytes(self) -> int:
        ends = np.append(self.chunks.first_rows[1:], self.chunks.count)
        # As far as the longest chunk would reach behind the last one: _windows cuts it to the file.
        return int((ends - self.chunks.first_rows).max()) * self.row_bytes + self._window - self.row_bytes

    def gather(self, indices: Indices, out: torch.Tensor) -> None:
        """Copy the windows of checked ``indices`` into the contiguous ``out``, whose rows have ``window`` bytes."""
        self.bind(out, len(indices))(indices)

    def bind(self, out: torch.Tensor, count: int) -> Callable[[Indices], None]:
        """Return ``gather`` for this ``out`` and ``count`` checked indices, with all prepared that can be."""
        if not self._grid or not count:
            return _nothing
        unit = self._unit
        if out.data_ptr() % unit:
            unit = 1
        windows, shifts, step = self._windows(unit)
        target = out.view(-1).view(UNITS[unit])
        if windows.dim() == 2:
            target = target.view(count, -1)
        one_chunk, chunk_of = self._single, self.chunks.of

        def offsets_of(indices: Indices) -> Indices:
            offsets = indices * step if step != 1 else indices
            # The first chunk alone has a shift of 0.
            return offsets if one_chunk else offsets + shifts.take(chunk_of(indices))

        def gather(indices: Indices) -> None:
            torch.index_select(windows, 0, torch.from_numpy(offsets_of(indices)), out=target)

        if self._window < LARGE_ROW:
            return gather
        announcer, base, grid = self._announcer, self._base, self._grid

        def gather_large(indices: Indices) -> None:
            offsets = offsets_of(indices)
            rows = torch.from_numpy(offsets)
            announcer.around(lambda: offsets * grid + base, lambda: torch.index_select(windows, 0, rows, out=target))

        return gather_large

    def place(self, index: int) -> int:
        """Return where a row begins in the file. ``index`` is checked already."""
        chunk = self.chunks.of_one(index)
        return int(self.places[chunk]) + (index - self.chunks.first_row(chunk)) * self.row_bytes


def _nothing(indices: Indices) -> None:
    """Gather rows of no bytes, or no rows."""
