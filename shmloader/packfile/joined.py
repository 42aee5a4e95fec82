"""Fields of equal rows in equal chunks, gathered by one call for all of them.

    file    ── chunk 0 of a: row row row ── chunk 0 of b: row row row ── ... ── chunk 1 of a ── chunk 1 of b ── ...
    offset of row i of field f (in grids)  =  shift[f, chunk of i] + i * (row bytes / grid)
    out     ── batch of a ── batch of b ── ...        behind each other without a gap

A batch of 120 small fields then costs about what one field of the same bytes costs. All in one window view of the file,
as in rows.py; the table of offsets is made by NumPy, (fields, batch).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from .ahead import LARGE_ROW
from .rows import UNITS, Indices, Rows


def joinable(one: Rows, other: Rows) -> bool:
    """Whether rows of two fields of one pack can be gathered by one call."""
    return (
        one.pack is other.pack
        and 0 < one.row_bytes == other.row_bytes < LARGE_ROW
        and len(one.places) > 0
        and np.array_equal(one.chunks.first_rows, other.chunks.first_rows)
    )


def bind_joined(fields: Sequence[Rows], out: torch.Tensor, count: int) -> Callable[[Indices], None]:
    """Return a function that copies the rows of ``count`` indices of all ``fields`` into ``out``, field after field.

    ``out`` is uint8 of shape (fields * count * row bytes,), contiguous; the function keeps it alive. It raises
    IndexError, before anything is written, for an index that is no row. All fields are ``joinable`` with the first.
    """
    pack, chunks, row_bytes = fields[0].pack, fields[0].chunks, fields[0].row_bytes
    places = np.stack([rows.places for rows in fields])
    base = int(places.min())
    grid = math.gcd(row_bytes, int(np.gcd.reduce(places - base, axis=None)))
    unit = math.gcd(grid, base, out.data_ptr(), 8)
    length = (pack.file_bytes - base) // unit
    flat = torch.frombuffer(fields[0].raw, dtype=UNITS[unit], count=length, offset=base)
    numbers, stride, step = row_bytes // unit, grid // unit, row_bytes // grid
    windows = flat.as_strided(((length - numbers) // stride + 1, numbers), (stride, 1))
    shifts = (places - base) // grid - chunks.first_rows * step
    target = out.view(UNITS[unit]).view(len(fields) * count, numbers)

    def gather(indices: Indices) -> None:
        if len(indices) != count:
            raise ValueError(f"{len(fields)} fields are bound to {count} rows, but got {len(indices)} indices")
        chunks.check(indices)
        offsets = shifts.take(chunks.of(indices), axis=1)
        offsets += indices * step
        torch.index_select(windows, 0, torch.from_numpy(offsets.reshape(-1)), out=target)

    return gather
