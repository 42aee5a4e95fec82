"""PackWriter: samples in, a sealed pack out.

    add(sample) ─▶ flatten ─▶ one Column per field ─▶ at 16 MiB, or a power of two of rows: one commit of chunks
                                                                                                        │
    seal: offsets for chunks of a field that turned ragged later, small chunks merged, tables, manifest ◀┘

All fields are cut at the same rows, so that each commit ends at a sample: the progress record says which. Memory is
bounded by the chunk size: one buffer of it for all fields together, and LMDB's copy of it while a commit runs.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import MisuseError, SampleMismatch, UnsupportedField
from .bulk import Columns, take_apart
from .columns import LARGEST_CHUNK, Column, Differs, power_of_two
from .environment import Item, WriteEnvironment
from .mapping import open_pack
from .naming import name_fields
from .report import PackReport
from .schema import (
    ENCODINGS,
    MANIFEST_KEY,
    PROGRESS_KEY,
    SEAL_KEY,
    Manifest,
    chunk_key,
    json_copy,
    require_little_endian,
    table_key,
)
from .sealing import ChunkRecord, merge_small, table_of, upgrade
from .structure import Node, StructureDiffers, UnusableKey, flatten, infer
from .values import Bytes, Unstorable, Value, describe, value_of

CHUNK_BYTES = 16 << 20
_LARGEST_CHUNK_BYTES = 1 << 30


class PackWriter:
    """Writes a pack under a temporary name; sealing gives it its own. A context manager: an exception leaves nothing.

    ``chunk_bytes`` is what is read, buffered and committed at a time. ``map_bytes`` is where LMDB's map starts; it
    grows by itself. Raises PackExists, and PackError where the file cannot be made.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        field_names: Sequence[str] | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        metadata: Mapping[str, Any] | None = None,
        encodings: Mapping[str, str] | None = None,
        map_bytes: int = 64 << 20,
    ) -> None:
        require_little_endian()
        if not 4096 <= chunk_bytes <= _LARGEST_CHUNK_BYTES:
            raise ValueError(f"chunk_bytes is {chunk_bytes}; it must be 4096 to {_LARGEST_CHUNK_BYTES}")
        for name, encoding in (encodings or {}).items():
            if encoding not in ENCODINGS:
                raise ValueError(f"field {name!r}: encoding {encoding!r} is none of {', '.join(sorted(ENCODINGS))}")
        self._metadata = json_copy(metadata or {})
        self._encodings = dict(encodings or {})
        self._field_names = None if field_names is None else tuple(field_names)
        self._chunk_bytes = chunk_bytes
        self._structure: Node | None = None
        self._columns: list[Column] = []
        self._records: list[list[ChunkRecord]] = []
        self._chunks = 0
        self._waiting = 0  # bytes in the columns that are not in the file
        self._rows_per_chunk: int | None = None
        self.samples = 0
        """Samples added so far."""
        self.payload_bytes = 0
        """Bytes of values added so far."""
        self._started = time.monotonic()
        self._report: PackReport | None = None
        self._discarded = False
        self._env = WriteEnvironment(os.fspath(path), overwrite=overwrite, map_bytes=map_bytes)

    # --- samples in ---------------------------------------------------------------------------------------------------

    def add(self, sample: Any) -> None:
        """Add one sample. Copies its values. Raises SampleMismatch or UnsupportedField, and then has added nothing."""
        self._check_open()
        if self._structure is None:
            self._begin(sample)
        assert self._structure is not None
        leaves: list[Any] = []
        try:
            flatten(sample, self._structure, leaves)
        except StructureDiffers as differs:
            name = ".".join(differs.path) or "sample"
            raise SampleMismatch(self.samples, name, differs.expected, differs.found) from None
        values: list[Value] = []
        nbytes = 0
        for column, leaf in zip(self._columns, leaves, strict=True):
            try:
                value = value_of(leaf)
                nbytes += column.check(value)
            except Unstorable as fault:
                raise UnsupportedField(self.samples, column.name, fault.found) from None
            except Differs as differs:
                raise SampleMismatch(self.samples, column.name, differs.expected, differs.found) from None
            values.append(value)
        self._add_values(values, nbytes)

    def add_columns(self, columns: Columns) -> None:
        """Add many samples at once: arrays or tensors of the same first axis, sample i being made of their rows i.

        A dict of arrays makes samples that are dicts, a tuple or list tuples, one array single values. No Python per
        sample as long as the rows keep their shape. Copies. Raises SampleMismatch, UnsupportedField, ValueError.
        """
        self._check_open()
        first, arrays, count = take_apart(columns, self.samples)
        if not count:
            return
        if self._structure is None:
            self._begin(first)
        self._add_rows(first, arrays, count)

    def _add_rows(self, first: Any, arrays: list[Value], count: int) -> None:
        assert self._structure is not None
        try:
            flatten(first, self._structure, [])
        except StructureDiffers as differs:
            raise SampleMismatch(self.samples, "sample", differs.expected, differs.found) from None
        fits = True
        for column, value in zip(self._columns, arrays, strict=True):
            if column.kind != "array" or column.dtype != value.dtype or len(column.first_shape) != value.array.ndim - 1:
                found = describe("array", value.dtype, value.array.shape[1:])
                raise SampleMismatch(self.samples, column.name, column.describe(), found)
            fits = fits and column.fixed_row_bytes is not None and column.first_shape == value.array.shape[1:]
        if not fits:
            for i in range(count):
                row = [Value("array", value.dtype, np.asarray(value.array[i])) for value in arrays]
                self._add_values(row, sum([value.array.nbytes for value in row]))
            return
        row_bytes = sum([value.array[0].nbytes for value in arrays])
        at = 0
        while at < count:
            until = min(count, at + self._room(row_bytes))
            for column, value in zip(self._columns, arrays, strict=True):
                column.add_rows(value.array[at:until])
            self._count(until - at, (until - at) * row_bytes)
            at = until

    def _add_values(self, values: list[Value], nbytes: int) -> None:
        """Append one checked row of ``nbytes`` to the columns."""
        if self._waiting + nbytes > LARGEST_CHUNK:
            self._flush()
        for column, value in zip(self._columns, values, strict=True):
            if column.add(value):
                self._rows_per_chunk = self._limit()
        self._count(1, nbytes)

    def _count(self, rows: int, nbytes: int) -> None:
        self._waiting += nbytes
        self.samples += rows
        self.payload_bytes += nbytes
        self._flush_if_full()

    def _begin(self, sample: Any) -> None:
        """Learn the structure and the fields from the first sample."""
        try:
            structure, paths = infer(sample)
        except UnusableKey as fault:
            raise UnsupportedField(self.samples, ".".join(fault.path) or "sample", fault.found) from None
        names = name_fields(paths, structure, self._field_names)
        leaves: list[Any] = []
        flatten(sample, structure, leaves)
        columns = []
        for name, leaf in zip(names, leaves, strict=True):
            try:
                value = value_of(leaf)
            except Unstorable as fault:
                raise UnsupportedField(self.samples, name, fault.found) from None
            encoding = self._encodings.get(name)
            if encoding is not None and value.kind != "bytes":
                raise SampleMismatch(self.samples, name, f"bytes, to be kept as {encoding}", value.describe())
            columns.append(Column(name, encoding, value, self._chunk_bytes))
        unknown = set(self._encodings) - set(names)
        if unknown:
            raise ValueError(f"encodings name the fields {sorted(unknown)}, but the samples have {names}")
        self._structure, self._columns = structure, columns
        self._records = [[] for _ in columns]
        self._rows_per_chunk = self._limit()

    # --- chunks out ---------------------------------------------------------------------------------------------------

    def _limit(self) -> int | None:
        """Return the rows per chunk while all fields are fixed: a power of two, so that readers need only shift."""
        row_bytes = 0
        for column in self._columns:
            size = column.fixed_row_bytes
            if size is None:
                return None
            row_bytes += size
        return power_of_two(self._chunk_bytes, row_bytes)

    def _room(self, row_bytes: int) -> int:
        """Return how many rows of ``row_bytes`` may be added before the next look at whether the chunk is full."""
        if self._rows_per_chunk is not None:
            return max(1, self._rows_per_chunk - self._columns[0].rows)
        return max(1, (self._chunk_bytes - self._waiting) // max(1, row_bytes))

    def _flush_if_full(self) -> None:
        if not self._columns:
            return
        rows = self._columns[0].rows
        if self._rows_per_chunk is None:
            # Offsets take memory too; rows of no bytes at all must not collect for ever.
            full = self._waiting + 16 * rows >= self._chunk_bytes
        else:
            full = rows >= self._rows_per_chunk
        if full:
            self._flush()

    def _flush(self) -> None:
        """Commit the waiting rows of all fields as one chunk each."""
        if not self._columns or not self._columns[0].rows:
            return
        first_row = self.samples_committed
        items: list[Item] = []
        made: list[ChunkRecord] = []
        for number, column in enumerate(self._columns):
            level = column.level
            chunk = column.take()
            record = ChunkRecord.of(self._chunks, first_row, level, chunk)
            made.append(record)
            items.append((chunk_key(number, "v", self._chunks), self.padded(chunk.values)))
            if chunk.offsets is not None:
                items.append((chunk_key(number, "o", self._chunks), self.padded(chunk.offsets)))
            if chunk.shapes is not None:
                items.append((chunk_key(number, "s", self._chunks), self.padded(chunk.shapes)))
        rows = made[0].rows
        progress = {"samples": first_row + rows, "chunks": self._chunks + 1}
        items.append((PROGRESS_KEY, json.dumps(progress).encode()))
        self._env.commit(items)
        for records, record in zip(self._records, made, strict=True):
            records.append(record)
        self._chunks += 1
        self._waiting = 0

    @property
    def samples_committed(self) -> int:
        """Samples that are in the file."""
        if not self._records or not self._records[0]:
            return 0
        last = self._records[0][-1]
        return last.first_row + last.rows

    def padded(self, array: npt.NDArray[Any]) -> Bytes:
        """Return the bytes of ``array``, zeros behind them if they are so few that LMDB would not give them a page."""
        flat = array.reshape(-1).view(np.uint8)
        least = self._env.page_bytes // 2
        if len(flat) >= least:
            return flat
        wide = np.zeros(least, np.uint8)
        wide[: len(flat)] = flat
        return wide

    # --- the end ------------------------------------------------------------------------------------------------------

    def seal(self) -> PackReport:
        """Write what is left, seal, sync and rename. The report of a sealed writer is always the same."""
        if self._report is not None:
            return self._report
        self._check_open()
        try:
            self._flush()
            fields = tuple([column.field() for column in self._columns])
            for number, column in enumerate(self._columns):
                upgrade(self._env, number, column, self._records[number], self.padded)
            merge_small(self._env, self._columns, self._records, self._chunk_bytes, self.payload_bytes, self.padded)
            tables = [table_of(records) for records in self._records]
            manifest = Manifest(
                self.samples,
                fields,
                self._structure,
                self._chunk_bytes,
                self.payload_bytes,
                tuple([zlib.crc32(table.tobytes()) for table in tables]),
                self._metadata,
            )
            text = manifest.to_bytes()
            self._env.commit([(table_key(number), self.padded(table)) for number, table in enumerate(tables)])
            self._env.commit(
                [(MANIFEST_KEY, text), (SEAL_KEY, zlib.crc32(text).to_bytes(4, "little"))], deleted=[PROGRESS_KEY]
            )
            file_bytes = self._env.settle()
            open_pack(self._env.path)  # what a reader checks is checked before the name is given
            self._env.publish()
        except BaseException:
            self.discard()
            raise
        seconds = time.monotonic() - self._started
        self._report = PackReport(self._env.target, self.samples, self.payload_bytes, file_bytes, seconds, fields)
        return self._report

    def discard(self) -> None:
        """Give up: remove the temporary file. Does nothing once sealed."""
        self._discarded = self._report is None
        self._env.discard()

    def _check_open(self) -> None:
        if self._report is not None or self._discarded:
            raise MisuseError(f"{self._env.target}: this writer has {'given up' if self._discarded else 'sealed'}")

    def __enter__(self) -> PackWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.discard()
        elif not self._discarded:
            self.seal()
