"""One column of a table as arrays: numbers, lists of numbers, texts or bytes, with the rules for missing values.

Columns of numbers that would not fit beside all else go to an unnamed temporary file, which is mapped: filled a piece
at a time, they never are in memory whole, and reading one again costs the page cache.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from ..errors import SourceError
from .base import Array, NameTable
from .ragged import Ragged
from .table_read import TableFile

_PIECE_BYTES = 16 << 20  # of a column, read at a time


@dataclass(frozen=True)
class Blobs:
    """A column of bytes."""

    rows: Ragged

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> bytes:
        return bytes(self.rows[row])


Column = Array | Ragged | NameTable | Blobs
"""Numbers (n, ...), lists of numbers of different lengths, strings, or bytes."""


def read_column(file: TableFile, name: str, role: str, memory: int) -> Column:
    """Return a column as it is stored in a pack. Raises SourceError with the row and column of a missing value.

    ``role`` ``"float"``: as float64, missing values are NaN. ``"text"``: as strings, missing values are empty.
    Otherwise only a column of floats can have missing values, and they become NaN, with a note.
    Numbers of more than ``memory`` bytes are mapped from a temporary file.
    """
    try:
        return _ColumnReader(file, name, role).read(memory)
    except (file.arrow.ArrowException, TypeError) as fault:
        raise SourceError(file.path, f"column {name!r} cannot be read: {fault}") from fault


class _ColumnReader:
    def __init__(self, file: TableFile, name: str, role: str) -> None:
        self.file, self.name, self.role = file, name, role
        self.arrow = file.arrow
        self.missing = 0
        """Values that were, of those that may be."""
        self.kind = self._kind(file.kinds[file.names.index(name)])
        self._may_be_missing = role == "text" or self.arrow.types.is_floating(self.kind)

    def _kind(self, kind: Any) -> Any:
        """Return the type that a column of type ``kind`` is brought to."""
        arrow, types = self.arrow, self.arrow.types
        if types.is_dictionary(kind):
            kind = kind.value_type
        if types.is_null(kind):
            self._refuse("has no values at all")
        if self.role == "float" or types.is_decimal(kind):
            return arrow.float64()
        if self.role == "text" or types.is_string(kind) or str(kind) == "string_view":
            return arrow.large_string()
        if types.is_binary(kind) or types.is_fixed_size_binary(kind):
            return arrow.large_binary()
        if types.is_temporal(kind):
            self.file.notes.append(f"column {self.name!r} ({kind}) is kept as whole numbers, int64")
            return arrow.int64()
        return kind

    def read(self, memory: int) -> Column:
        types = self.arrow.types
        if self._is_number(self.kind):
            return self._numbers((), self.kind, memory)
        if types.is_fixed_size_list(self.kind) and self._is_number(self.kind.value_type):
            return self._numbers((self.kind.list_size,), self.kind.value_type, memory)
        lists = types.is_list(self.kind) or types.is_large_list(self.kind)
        if lists and self._is_number(self.kind.value_type):
            flat, lengths = [], []
            for chunk in self._chunks(8):
                flat.append(self._flat(chunk))
                lengths.append(np.asarray(chunk.value_lengths()))
            return Ragged(_joined(flat), _joined(lengths))
        if self.kind == self.arrow.large_string():
            return NameTable.of_bytes(*self._bytes())
        if self.kind == self.arrow.large_binary():
            return Blobs(Ragged(*self._bytes()))
        self._refuse(f"holds {self.kind}, which cannot be stored")

    def _refuse(self, why: str) -> NoReturn:
        raise SourceError(self.file.path, f"column {self.name!r} {why}: leave it out (--columns)")

    def _is_number(self, kind: Any) -> bool:
        types = self.arrow.types
        return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))

    def _numbers(self, shape: tuple[int, ...], kind: Any, memory: int) -> Array:
        dtype = np.dtype(kind.to_pandas_dtype())
        whole = _room((self.file.rows, *shape), dtype, memory)
        at = 0
        for chunk in self._chunks(max(1, whole[:1].nbytes)):
            rows = self._flat(chunk).reshape(len(chunk), *shape) if shape else self._plain(chunk)
            whole[at : at + len(chunk)] = rows
            at += len(chunk)
        if self.missing:
            self.file.notes.append(f"column {self.name!r}: {self.missing} missing values became NaN")
        return whole

    def _plain(self, chunk: Any) -> Array:
        return np.asarray(chunk.to_numpy(zero_copy_only=False))

    def _flat(self, chunk: Any) -> Array:
        values = chunk.flatten()
        if values.null_count and not self.arrow.types.is_floating(values.type):
            self._refuse("holds lists with missing values")
        self.missing += values.null_count
        return self._plain(values)

    def _bytes(self) -> tuple[Array, Array]:
        """Return (all bytes, length of each row); copies."""
        values, lengths = [], []
        for chunk in self._chunks(64):
            _, offsets, data = chunk.buffers()
            ends = np.frombuffer(offsets, np.int64)[chunk.offset : chunk.offset + len(chunk) + 1]
            whole = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
            values.append(whole[ends[0] : ends[-1]].copy())
            lengths.append(np.diff(ends))
        if self.missing:
            self.file.notes.append(f"column {self.name!r}: {self.missing} missing values are empty texts")
        return _joined(values), _joined(lengths)

    def _chunks(self, row_bytes: int) -> Iterator[Any]:
        """Yield the column, brought to its type, in pieces that are not empty; missing values are dealt with."""
        row = 0
        for part in self.file.chunks(self.name, max(1, _PIECE_BYTES // row_bytes)):
            if not len(part):
                continue
            if part.null_count and not self._may_be_missing:
                self._refuse_missing(row + int(np.flatnonzero(part.is_null().to_numpy(zero_copy_only=False))[0]))
            yield self._brought(part)
            row += len(part)

    def _brought(self, part: Any) -> Any:
        arrow = self.arrow
        if arrow.types.is_dictionary(part.type):
            part = part.dictionary_decode()
        if arrow.types.is_temporal(part.type) and part.type.bit_width == 32:
            part = part.cast(arrow.int32())
        self.missing += part.null_count
        part = part.cast(self.kind)
        return part.fill_null("") if self.role == "text" else part

    def _refuse_missing(self, row: int) -> NoReturn:
        number = self._is_number(self.kind)
        way = f", or say {self.name}=float to have NaN there" if number else ""
        way = f", or say {self.name}=text to have empty texts there" if self.kind == self.arrow.large_string() else way
        why = f"column {self.name!r} has no value here; fill it in, or leave the column out (--columns){way}"
        raise SourceError(f"{self.file.path}, row {row}", why)


def _room(shape: tuple[int, ...], dtype: np.dtype[Any], memory: int) -> Array:
    """Return an array to be filled: in memory, or mapped from an unnamed file if it has more than ``memory`` bytes."""
    nbytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
    if nbytes <= memory:
        return np.empty(shape, dtype)
    with tempfile.TemporaryFile(prefix="shmloader-table-") as file:
        return np.memmap(file, dtype, "w+", shape=shape)


def _joined(parts: Sequence[Array]) -> Array:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
