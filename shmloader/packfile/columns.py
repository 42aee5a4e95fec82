"""One field while it is being packed: rows are appended to a buffer, which is taken away chunk by chunk.

A field starts as fixed: every row has the first row's shape. When one has not, the field turns ragged (first axis
varies) or free (other axes vary too). Chunks written before stay as they are, because the bytes of their values are the
same in all three forms: only offsets (and shapes) are added for them, when the pack is sealed.

    FIXED  values                       RAGGED  values + offsets               FREE  values + offsets + shapes
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .block import BlockField
from .outline import FieldOutline
from .schema import Field
from .values import Bytes, Value, describe
from .windows import Windowing

FIXED, RAGGED, FREE = 0, 1, 2

_SHARED = 16
"""Of a chunk of windows, at most one part in so many is stored in the next chunk as well."""

LARGEST_CHUNK = 2**32 - 2**20
"""Bytes. LMDB stores the length of a value in 32 bits."""
_LARGEST_WINDOW = 2**30
"""Bytes: a chunk ends with a whole one, and is held in memory."""


class Differs(Exception):
    """A value does not fit its field. Internal: the packer adds the sample's number."""

    def __init__(self, expected: str, found: str) -> None:
        super().__init__(expected, found)
        self.expected, self.found = expected, found


@dataclass(frozen=True)
class Chunk:
    """Rows that go into one LMDB value. Valid until the next row is added."""

    rows: int
    values: Bytes
    offsets: npt.NDArray[np.uint32] | None
    shapes: npt.NDArray[np.uint32] | None


class Column:
    """Collects the rows of one field."""

    def __init__(self, outline: FieldOutline, chunk_bytes: int) -> None:
        self.name = outline.name
        self.encoding = outline.encoding
        self.kind = outline.kind
        self.dtype = outline.dtype
        self.first_shape = outline.shape
        self.windowing = outline.windowing
        self.inner = outline.inner
        self._tail: npt.NDArray[Any] | None = None  # of the last window: what the next one shares with it
        self.level = RAGGED if outline.kind in ("str", "bytes") else FIXED
        self._shape: list[int | None] = list(outline.shape)
        self._row_bytes = outline.row_bytes
        self._chunk_bytes = chunk_bytes
        self._buffer: Bytes = np.empty(chunk_bytes, np.uint8)
        self.nbytes = 0
        """Bytes waiting for the next chunk."""
        self.rows = 0
        """Rows waiting for the next chunk."""
        self._shapes: list[Any] = []  # of the waiting rows; only once the field is not fixed any more

    @property
    def shape(self) -> list[int | None]:
        """The shape of all rows so far; None for axes that vary."""
        return list(self._shape)

    def restore(self, level: int, shape: list[int | None]) -> None:
        """Take up the form that rows of an earlier run have given it. Nothing waits."""
        self.level, self._shape = level, list(shape)

    @property
    def fixed_row_bytes(self) -> int | None:
        """Bytes of one row while all rows have one shape, else None."""
        return self._row_bytes if self.level == FIXED else None

    def check(self, value: Value) -> int:
        """Return the bytes of ``value``; raise Differs unless it can be a row of this field."""
        if value.kind != self.kind or value.dtype != self.dtype or value.array.ndim != len(self._shape):
            raise Differs(self.describe(), value.describe())
        if self.windowing is not None:
            raise Differs("windows, which come as columns", value.describe())
        nbytes = value.array.nbytes
        if nbytes > LARGEST_CHUNK:
            raise Differs(f"at most {LARGEST_CHUNK} bytes", f"{nbytes} bytes")
        return nbytes

    def describe(self) -> str:
        """Say in a few words what its rows look like so far."""
        return describe(self.kind, self.dtype, tuple(self._shape))

    def add(self, value: Value) -> bool:
        """Append a checked row; return whether that changed the field's form. Copies it."""
        array = value.array
        before = self.level
        if self.level == FIXED:
            if array.shape != self.first_shape:
                self._shapes = [self.first_shape] * self.rows
                self._widen(array.shape)
                self._shapes.append(array.shape)
        else:
            self._widen(array.shape)
            self._shapes.append(array.shape)
        self._append(array)
        self.rows += 1
        return self.level != before

    def add_rows(self, rows: npt.NDArray[Any]) -> None:
        """Append many rows of a fixed field: contiguous, of this dtype, (n, *shape). Copies them."""
        if self.windowing is None:
            self._append(rows)
        else:
            self._append(np.ascontiguousarray(rows[:, : self.windowing.stride]))
            self._tail = np.array(rows[-1, self.windowing.stride :])
        self.rows += len(rows)

    @property
    def least_rows(self) -> int:
        """Rows that a chunk should have at least, a power of two: then few of its bytes are in the next one too."""
        if self.windowing is None:
            return 1
        shared = self.first_shape[0] - self.windowing.stride
        return 1 << (_SHARED * shared // self.windowing.stride).bit_length()

    def check_windows(self, value: Value) -> None:
        """Raise Differs unless the rows of ``value`` are windows like those before, and go on where they end."""
        if value.windowing != self.windowing:
            raise Differs(_windows_text(self.windowing), _windows_text(value.windowing))
        if value.array.shape[1:] != self.first_shape:
            raise Differs(self.describe(), describe(self.kind, self.dtype, value.array.shape[1:]))
        if value.array[:1].nbytes > _LARGEST_WINDOW:
            raise Differs(f"windows of at most {_LARGEST_WINDOW} bytes", f"{value.array[:1].nbytes} bytes")
        if self._tail is not None and not np.array_equal(self._tail, value.array[0, : len(self._tail)]):
            raise Differs("a window that begins with the end of the one before", "other numbers")

    def uniform_rows(self, shapes: npt.NDArray[np.int64]) -> int:
        """Return how many of these rows (n, axes) from the first on can be added without changing a fixed field."""
        if self.level != FIXED or not len(shapes) or not shapes.shape[1]:
            return len(shapes)
        odd = (shapes != np.array(self.first_shape, np.int64)).any(axis=1)
        return int(odd.argmax()) if odd.any() else len(shapes)

    def add_block(self, block: BlockField) -> bool:
        """Append many checked rows; return whether that changed the field's form. Copies them."""
        before = self.level
        if self.level == FIXED and self.uniform_rows(block.shapes) < block.rows:
            self._shapes = [self.first_shape] * self.rows
            self.level = RAGGED
        if self.level != FIXED:
            for shape in (block.shapes.min(axis=0), block.shapes.max(axis=0)):
                self._widen(tuple(shape.tolist()))
            self._shapes += block.shapes.tolist()
        self._append(block.values)
        self.rows += block.rows
        return self.level != before

    def _append(self, array: npt.NDArray[Any]) -> None:
        end = self.nbytes + array.nbytes
        if end > len(self._buffer):
            larger = np.empty(max(end, min(2 * len(self._buffer), LARGEST_CHUNK)), np.uint8)
            larger[: self.nbytes] = self._buffer[: self.nbytes]
            self._buffer = larger
        self._buffer[self.nbytes : end] = array.reshape(-1).view(np.uint8)
        self.nbytes = end

    def _widen(self, shape: tuple[int, ...]) -> None:
        for axis, length in enumerate(shape):
            if self._shape[axis] != length and self._shape[axis] is not None:
                self._shape[axis] = None
                self.level = max(self.level, RAGGED if axis == 0 else FREE)

    def take(self) -> Chunk:
        """Return the waiting rows as a chunk, and begin a new one."""
        if self._tail is not None:
            self._append(self._tail)
        offsets = shapes = None
        if self.level != FIXED:
            table = np.array(self._shapes, np.uint32).reshape(self.rows, len(self._shape))
            lengths = table[:, 0] if self.level == RAGGED else table.prod(axis=1, dtype=np.uint64)
            offsets = ends(lengths)
            shapes = table if self.level == FREE else None
        if len(self._buffer) > 2 * self._chunk_bytes:  # one giant must not be paid for until the end
            values, self._buffer = self._buffer[: self.nbytes], np.empty(self._chunk_bytes, np.uint8)
        else:
            values = self._buffer[: self.nbytes]
        chunk = Chunk(self.rows, values, offsets, shapes)
        self.nbytes = self.rows = 0
        self._shapes = []
        return chunk

    def field(self) -> Field:
        """Return what the finished field looks like."""
        if self.inner is not None:
            return self.inner.field(self.name)
        if self.encoding is not None:
            return Field(self.name, "array", "uint8", (3, None, None), self.encoding)
        if self.kind in ("str", "bytes"):
            return Field(self.name, self.kind, self.dtype, ())
        if self.windowing is not None:
            stride, given = self.windowing.stride, self.windowing.dtype
            return Field(self.name, self.kind, given, tuple(self._shape), None, stride, self.dtype)
        return Field(self.name, self.kind, self.dtype, tuple(self._shape))


def _windows_text(windowing: Windowing | None) -> str:
    return "rows that do not overlap" if windowing is None else str(windowing)


def ends(lengths: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """Return rows + 1 offsets for rows of these lengths."""
    offsets = np.zeros(len(lengths) + 1, np.uint32)
    np.cumsum(lengths, out=offsets[1:], dtype=np.uint32)
    return offsets


def power_of_two(chunk_bytes: int, row_bytes: int) -> int:
    """Return how many rows go into a chunk: the largest power of two of them that fits, at least 1."""
    return 1 << max(0, (chunk_bytes // max(1, row_bytes)).bit_length() - 1)
