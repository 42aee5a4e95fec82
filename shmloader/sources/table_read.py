"""CSV, TSV and Parquet files, opened; ``table_columns`` makes arrays of their columns. Both alone know pyarrow.

Columns become numpy arrays and tables of bytes, one column at a time, and Arrow is done with when the file is open:
workers are forked with no Python object per row, and never call pyarrow, whose threads do not live through a fork.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import MissingExtra, SourceError
from .base import NameTable
from .list_lines import is_number

CSV_SUFFIXES = tuple(kind + packing for kind in (".csv", ".tsv") for packing in ("", ".gz", ".bz2", ".zst"))
PARQUET_SUFFIXES = (".parquet", ".pq")

_SEPARATORS = ("\t", ";", ",", "|")


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.csv
        import pyarrow.parquet
    except ImportError:
        raise MissingExtra("pyarrow", "tables", "read tables") from None
    return pyarrow


class TableFile:
    """A table whose columns can be read one after another. ``names`` are theirs, ``rows`` how many rows there are.

    Parquet is read a piece at a time when a column is asked for; CSV is read whole, for its types are in its values.
    """

    def __init__(self, path: str, separator: str | None) -> None:
        self.path = path
        self.names: list[str] = []
        self.kinds: list[Any] = []
        """Arrow's type of each column."""
        self._chunks: Callable[[int, int], Iterator[Any]]
        self.rows = 0
        self.notes: list[str] = []
        self.arrow = _pyarrow()
        try:
            if path.lower().endswith(CSV_SUFFIXES):
                self._open_csv(separator)
            else:
                self._open_parquet()
        except (self.arrow.ArrowException, UnicodeDecodeError) as fault:
            raise SourceError(path, f"not readable as a table: {fault}") from fault
        doubles = [name for place, name in enumerate(self.names) if name in self.names[:place]]
        if doubles:
            raise SourceError(path, f"two columns are called {doubles[0]!r}")
        if not self.rows:
            raise SourceError(path, "it has no rows")

    # --- opening ------------------------------------------------------------------------------------------------------

    def _open_csv(self, separator: str | None) -> None:
        pa = self.arrow
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
        self.kinds = list(table.schema.types)
        self.rows = table.num_rows
        self._chunks = lambda place, step: iter(table.column(place).chunks)

    def _likely(self, header: str) -> str:
        if self.path.lower().endswith(tuple(suffix for suffix in CSV_SUFFIXES if suffix.startswith(".tsv"))):
            return "\t"
        outside = "".join(header.split('"')[::2])
        return max(_SEPARATORS, key=lambda separator: (outside.count(separator), separator == ","))

    def _open_parquet(self) -> None:
        pa = self.arrow
        paths = [os.path.join(self.path, name) for name in parts_of(self.path)] or [self.path]
        files = [pa.parquet.ParquetFile(path, memory_map=True) for path in paths]
        schema = files[0].schema_arrow
        for file, path in zip(files, paths, strict=True):
            if file.schema_arrow.names != schema.names:
                raise SourceError(path, f"its columns are not those of {paths[0]}")
        self.names = list(schema.names)
        self.kinds = list(schema.types)
        self.rows = sum(file.metadata.num_rows for file in files)

        def chunks(place: int, step: int) -> Iterator[Any]:
            name = self.names[place]
            for file in files:
                for batch in file.iter_batches(step, columns=[name], use_threads=False):
                    yield batch.column(0).cast(self.kinds[place])

        self._chunks = chunks

    def chunks(self, name: str, step: int) -> Iterator[Any]:
        """Yield a column as Arrow arrays, in order, of at most ``step`` rows where it is not in memory already."""
        return self._chunks(self.names.index(name), step)


def parts_of(path: str) -> list[str]:
    """Return the names of the Parquet files of a folder, sorted; nothing for a file."""
    if not os.path.isdir(path):
        return []
    return sorted(name for name in os.listdir(path) if name.lower().endswith(PARQUET_SUFFIXES) and name[0] not in "._")


def first_texts(column: NameTable, most: int) -> Iterator[str]:
    """Yield the first few texts of a column."""
    return (column[row] for row in range(min(most, len(column))))
