"""CSV, TSV and Parquet files to whole columns: the one module that knows pyarrow.

Columns become numpy arrays and tables of bytes, one column at a time, and Arrow is done with when the file is open:
workers are forked with no Python object per row, and never call pyarrow, whose threads do not live through a fork.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import MissingExtra, SourceError
from .base import Array, NameTable
from .list_lines import is_number
from .ragged import Ragged

CSV_SUFFIXES = tuple(kind + packing for kind in (".csv", ".tsv") for packing in ("", ".gz", ".bz2", ".zst"))
PARQUET_SUFFIXES = (".parquet", ".pq")

_SEPARATORS = ("\t", ";", ",", "|")


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


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.csv
        import pyarrow.parquet
    except ImportError:
        raise MissingExtra("pyarrow", "tables", "read tables") from None
    return pyarrow


class TableFile:
    """A table whose columns can be read one after another. ``names`` are theirs, ``rows`` how many rows there are."""

    def __init__(self, path: str, separator: str | None) -> None:
        self.path = path
        self.names: list[str] = []
        self.rows = 0
        self.notes: list[str] = []
        self._pa = _pyarrow()
        try:
            if path.lower().endswith(CSV_SUFFIXES):
                self._open_csv(separator)
            else:
                self._open_parquet()
        except (self._pa.ArrowException, UnicodeDecodeError) as fault:
            raise SourceError(path, f"not readable as a table: {fault}") from fault
        doubles = [name for place, name in enumerate(self.names) if name in self.names[:place]]
        if doubles:
            raise SourceError(path, f"two columns are called {doubles[0]!r}")
        if not self.rows:
            raise SourceError(path, "it has no rows")

    # --- opening ------------------------------------------------------------------------------------------------------

    def _open_csv(self, separator: str | None) -> None:
        pa = self._pa
        with pa.input_stream(self.path) as stream:
            first = stream.read(1 << 16).decode("utf-8-sig", "replace").splitlines()
        if not first:
            raise SourceError(self.path, "it is empty")
        separator = separator or self._likely(first[0])
        headless = all(map(is_number, first[0].split(separator)))
        wrong: list[str] = []

        def refuse(row: Any) -> str:
            wrong.append(
                f"it has {row.actual_columns} columns, expected {row.expected_columns}: {str(row.text)[:60]!r}"
            )
            wrong.append(f"{self.path}, line {row.number}" if row.number is not None else self.path)
            return "error"

        try:
            table = pa.csv.read_csv(
                self.path,
                read_options=pa.csv.ReadOptions(use_threads=False, autogenerate_column_names=headless),
                parse_options=pa.csv.ParseOptions(
                    delimiter=separator, newlines_in_values=True, invalid_row_handler=refuse
                ),
            )
        except pa.ArrowInvalid as fault:
            if wrong:
                raise SourceError(wrong[1], wrong[0]) from fault
            raise
        self.names = [f"column_{i}" if headless or not name else name for i, name in enumerate(table.column_names)]
        if headless:
            self.notes.append("the first line holds numbers only: it was taken for data, the columns are numbered")
        self.rows = table.num_rows
        self._columns: Callable[[int], Any] = table.column

    def _likely(self, header: str) -> str:
        if self.path.lower().endswith(tuple(suffix for suffix in CSV_SUFFIXES if suffix.startswith(".tsv"))):
            return "\t"
        outside = "".join(header.split('"')[::2])
        return max(_SEPARATORS, key=lambda separator: (outside.count(separator), separator == ","))

    def _open_parquet(self) -> None:
        pa = self._pa
        paths = [os.path.join(self.path, name) for name in parts_of(self.path)] or [self.path]
        files = [pa.parquet.ParquetFile(path, memory_map=True) for path in paths]
        schema = files[0].schema_arrow
        for file, path in zip(files, paths, strict=True):
            if file.schema_arrow.names != schema.names:
                raise SourceError(path, f"its columns are not those of {paths[0]}")
        self.names = list(schema.names)
        self.rows = sum(file.metadata.num_rows for file in files)

        def column(place: int) -> Any:
            name = schema.names[place]
            parts = [file.read(columns=[name], use_threads=False).column(name) for file in files]
            return pa.chunked_array([chunk for part in parts for chunk in part.cast(schema.field(place).type).chunks])

        self._columns = column

    # --- columns ------------------------------------------------------------------------------------------------------

    def read(self, name: str, role: str = "") -> Column:
        """Return a column as it is stored in a pack. Raises SourceError with the row and column of a missing value.

        ``role`` ``"float"``: as float64, missing values are NaN. ``"text"``: as strings, missing values are empty.
        Otherwise only a column of floats can have missing values, and they become NaN, with a note.
        """
        try:
            return self._read(name, role)
        except (self._pa.ArrowException, TypeError) as fault:
            raise SourceError(self.path, f"column {name!r} cannot be read: {fault}") from fault

    def _read(self, name: str, role: str) -> Column:
        pa = self._pa
        types = pa.types
        column = self._columns(self.names.index(name))
        if types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if role == "float" or types.is_decimal(column.type):
            column = column.cast(pa.float64())
        elif role == "text":
            column = column.cast(pa.large_string())
            if column.null_count:
                self.notes.append(f"column {name!r}: {column.null_count} missing values are empty texts")
                column = column.fill_null("")
        kind = column.type
        if types.is_null(kind):
            raise SourceError(self.path, f"column {name!r} has no values at all: leave it out (--columns)")
        if types.is_floating(kind):
            if column.null_count:
                self.notes.append(f"column {name!r}: {column.null_count} missing values became NaN")
            return _joined([np.asarray(chunk.to_numpy(zero_copy_only=False)) for chunk in column.chunks])
        self._refuse_missing(name, column)
        if types.is_temporal(kind):
            self.notes.append(f"column {name!r} ({kind}) is kept as whole numbers, int64")
            small = kind.bit_width == 32
            column = column.cast(pa.int32()).cast(pa.int64()) if small else column.cast(pa.int64())
            kind = column.type
        if types.is_integer(kind) or types.is_boolean(kind):
            return _joined([np.asarray(chunk.to_numpy(zero_copy_only=False)) for chunk in column.chunks])
        return self._long(name, column)

    def _long(self, name: str, column: Any) -> Column:
        pa = self._pa
        kind = column.type
        if pa.types.is_string(kind) or pa.types.is_large_string(kind) or str(kind) == "string_view":
            values, lengths = _bytes_of(pa, column.cast(pa.large_string()))
            return NameTable.of_bytes(values, lengths)
        if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
            return Blobs(Ragged(*_bytes_of(pa, column.cast(pa.large_binary()))))
        lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        if lists and _is_plain(pa, kind.value_type):
            chunks = column.chunks
            flat = [chunk.flatten() for chunk in chunks]
            for part in flat:
                if part.null_count:
                    raise SourceError(self.path, f"column {name!r} holds lists with missing values")
            values = _joined([np.asarray(part.to_numpy(zero_copy_only=False)) for part in flat])
            if pa.types.is_fixed_size_list(kind):
                return values.reshape(len(column), kind.list_size)
            return Ragged(values, _joined([np.asarray(chunk.value_lengths()) for chunk in chunks]))
        raise SourceError(self.path, f"column {name!r} holds {kind}, which cannot be stored: leave it out (--columns)")

    def _refuse_missing(self, name: str, column: Any) -> None:
        if not column.null_count:
            return
        before = 0
        for chunk in column.chunks:
            if chunk.null_count:
                before += int(np.flatnonzero(chunk.is_null().to_numpy(zero_copy_only=False))[0])
                break
            before += len(chunk)
        number = self._pa.types.is_integer(column.type) or self._pa.types.is_boolean(column.type)
        way = f", or say {name}=float to have NaN there" if number else ""
        way = f", or say {name}=text to have empty texts there" if "string" in str(column.type) else way
        raise SourceError(
            f"{self.path}, row {before}",
            f"column {name!r} has no value here, nor in {column.null_count - 1} more rows; fill it in, or leave the "
            f"column out (--columns){way}",
        )


def parts_of(path: str) -> list[str]:
    """Return the names of the Parquet files of a folder, sorted; nothing for a file."""
    if not os.path.isdir(path):
        return []
    return sorted(name for name in os.listdir(path) if name.lower().endswith(PARQUET_SUFFIXES) and name[0] not in "._")


def _is_plain(pa: Any, kind: Any) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _joined(parts: Sequence[Array]) -> Array:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _bytes_of(pa: Any, column: Any) -> tuple[Array, Array]:
    """Return (all bytes of a large_string or large_binary column, length of each row); copies."""
    values, lengths = [], []
    for chunk in column.chunks:
        _, offsets, data = chunk.buffers()
        ends = np.frombuffer(offsets, np.int64)[chunk.offset : chunk.offset + len(chunk) + 1]
        whole = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
        values.append(whole[ends[0] : ends[-1]].copy() if len(chunk) else whole[:0])
        lengths.append(np.diff(ends))
    return _joined(values), _joined(lengths)


def first_texts(column: NameTable, most: int) -> Iterator[str]:
    """Yield the first few texts of a column."""
    return (column[row] for row in range(min(most, len(column))))
