"""A block: some samples taken apart, field by field, in two flat arrays that cross from a worker without copies.

    values   [field 0: row row row ...][field 1: row row ...]...     uint8, each field on an 8-byte border
    shapes   [field 0: rows x axes    ][field 1: rows x axes]...     int64

Made by whoever reads (``fill``), written by ``PackWriter.add_block``: no Python per sample there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .outline import Outline
from .values import Bytes, Value

_ALIGN = 8


@dataclass(frozen=True)
class BlockField:
    """The rows of one field in a block."""

    shapes: npt.NDArray[np.int64]
    """(rows, axes)"""
    values: Bytes
    """The bytes of all rows, end to end."""
    row_bytes: npt.NDArray[np.int64]
    """(rows,)"""

    @property
    def rows(self) -> int:
        """Rows in it."""
        return len(self.shapes)


def fill(
    rows: Sequence[Sequence[Value]], fields: int, allocate: Callable[[int], Bytes]
) -> tuple[Bytes, npt.NDArray[np.int64]]:
    """Lay the values of samples out as (values, shapes). ``allocate`` gives the memory of the first, uninitialised."""
    sizes = np.zeros(fields, np.int64)
    for row in rows:
        for number, value in enumerate(row):
            sizes[number] += value.array.nbytes
    starts = _starts(sizes)
    values = allocate(int(starts[-1]))
    shapes: list[int] = []
    for number in range(fields):
        at = int(starts[number])
        for row in rows:
            array = row[number].array
            values[at : at + array.nbytes] = array.reshape(-1).view(np.uint8)
            at += array.nbytes
            shapes += array.shape
    return values, np.array(shapes, np.int64)


def _starts(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return where each field begins, and the end."""
    starts = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(-(-sizes // _ALIGN) * _ALIGN, out=starts[1:])
    return starts


def read(outline: Outline, rows: int, values: Bytes, shapes: npt.NDArray[np.int64]) -> list[BlockField]:
    """Return the fields of a block that ``fill`` made. Views, no copy."""
    fields: list[BlockField] = []
    at = place = 0
    for each in outline.fields:
        axes = len(each.shape)
        table = shapes[place : place + rows * axes].reshape(rows, axes)
        place += rows * axes
        row_bytes = table.prod(axis=1, dtype=np.int64) * each.item_bytes
        nbytes = int(row_bytes.sum())
        fields.append(BlockField(table, values[at : at + nbytes], row_bytes))
        at += -(-nbytes // _ALIGN) * _ALIGN
    return fields


def part(field: BlockField, start: int, stop: int) -> BlockField:
    """Return some of the rows of a field. Views."""
    before = int(field.row_bytes[:start].sum())
    row_bytes = field.row_bytes[start:stop]
    return BlockField(field.shapes[start:stop], field.values[before : before + int(row_bytes.sum())], row_bytes)
