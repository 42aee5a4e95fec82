"""Whole fields of a source, and how rows of them are read for packing: some at a time, each once.

a column is    a NumPy array, most often memory-mapped        read, in this machine's byte order
               a tensor                                       of dtypes that NumPy does not know
               Windows (packfile/windows.py)                  rows that overlap: never made, the writer takes the flat
               anything with dtype, shape and [slice]         that gives arrays: columns of files, read when asked
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ..errors import MisuseError
from ..packfile.windows import Windows

Rows = slice | npt.NDArray[np.int64]
"""Which rows: a range without a step, or numbers."""


class LazyColumn(Protocol):
    """A column that is read when rows of it are asked for."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the arrays that it gives."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all rows."""

    def __getitem__(self, rows: Rows, /) -> npt.NDArray[Any]: ...


Column: TypeAlias = npt.NDArray[Any] | torch.Tensor | Windows | LazyColumn
Columns: TypeAlias = Mapping[str, Column] | tuple[Column, ...] | Column


def named(columns: Columns, field_names: Sequence[str] | None = None) -> dict[str, Column]:
    """Return the columns by name, in their order: their own, those of ``field_names``, or their places."""
    if isinstance(columns, Mapping):
        return dict(columns)
    several = list(columns) if isinstance(columns, tuple) else [columns]
    names = field_names or [str(i) for i in range(len(several))]
    return dict(zip(names, several, strict=True))


def built(columns: Columns, parts: Sequence[Any]) -> Any:
    """Return rows of all columns, in the order of ``named``, as ``PackWriter.add_columns`` takes them."""
    if isinstance(columns, Mapping):
        return dict(zip(columns, parts, strict=True))
    return tuple(parts) if isinstance(columns, tuple) else parts[0]


def row_bytes(column: Column) -> int:
    """Return how many bytes one row takes in a pack."""
    if isinstance(column, Windows):
        return column.row_bytes
    return column.dtype.itemsize * math.prod(column.shape[1:])


def read(column: Column, rows: Rows) -> Any:
    """Return these rows, read now, in this machine's byte order, contiguous; of windows, the windows.

    Raises MisuseError for windows that are not taken in their order.
    """
    if isinstance(column, Windows):
        if not isinstance(rows, slice):
            raise MisuseError(
                "overlapping windows are stored as one run, so their order cannot be changed or cut into parts: "
                "shuffle in the DataLoader, and give each part a file of its own"
            )
        return column[rows]
    if isinstance(column, torch.Tensor):
        return column[rows].contiguous()
    found = np.asarray(column[rows])
    return np.ascontiguousarray(found, dtype=found.dtype.newbyteorder("="))
