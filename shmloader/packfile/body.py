"""The body of a pack while it grows: rows collect in columns, leave as chunks, and are closed with tables in the end.

    rows ─▶ one Column a field ─▶ at 16 MiB, or a power of two of rows: one commit of chunks
                                                                                        │
    close: offsets for chunks of a field that turned ragged later, small chunks merged, tables ◀┘

All fields are cut at the same rows, so that each commit ends at a sample. Where the cuts are depends on the rows alone,
not on how many came at a time: a run that goes on behind a commit makes the chunks that it would have made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from .block import BlockField, part
from .columns import LARGEST_CHUNK, Column, power_of_two
from .environment import Item, WriteEnvironment
from .outline import Outline
from .schema import ChunkTable, chunk_key, table_key
from .sealing import ChunkRecord, merge_small, table_of, upgrade
from .values import Value

_ROW_COST = 16
"""Bytes that a ragged row counts beside its values: offsets take memory too, and rows of no bytes at all must not
collect for ever."""

_WINDOWS_CHUNK_BYTES = 256 << 20
"""So large a chunk may become to hold enough windows beside the one that it stores whole."""

Notes = Callable[[int], dict[str, Any]]
"""Called with the rows of a commit: what the journal is to keep for their caller."""


class Body:
    """Columns, and the chunks that they have become. ``samples`` and ``payload_bytes`` count what was added."""

    def __init__(self, env: WriteEnvironment, outline: Outline, chunk_bytes: int, notes: Notes | None = None) -> None:
        self._env = env
        self.outline = outline
        self.columns = [Column(field, chunk_bytes) for field in outline.fields]
        self._chunk_bytes = chunk_bytes
        self._notes = notes
        self._records: list[list[ChunkRecord]] = [[] for _ in self.columns]
        self._chunks = 0
        self._waiting = 0  # bytes in the columns that are not in the file
        self.samples = self.payload_bytes = 0
        self._committed = 0
        self._limit()

    @classmethod
    def restore(cls, env: WriteEnvironment, chunk_bytes: int, notes: Notes | None) -> Body:
        """Return the body that an earlier run has left in ``env.recovered``."""
        first, last = env.recovered[0].record, env.recovered[-1].record
        body = cls(env, Outline.from_json(first["outline"]), chunk_bytes, notes)
        for commit in env.recovered:
            for records, made in zip(body._records, commit.record["chunks"], strict=True):
                records.append(ChunkRecord(*made))
        for column, (level, shape) in zip(body.columns, last["columns"], strict=True):
            column.restore(level, shape)
        body._chunks = len(env.recovered)
        body.samples = body._committed = int(last["samples"])
        body.payload_bytes = int(last["payload_bytes"])
        body._limit()
        return body

    # --- rows in ------------------------------------------------------------------------------------------------------

    def add(self, values: list[Value], nbytes: int) -> None:
        """Append one checked row of ``nbytes``."""
        if self._waiting + nbytes > LARGEST_CHUNK:
            self.flush()
        changed = False
        for column, value in zip(self.columns, values, strict=True):
            changed = column.add(value) or changed
        self._count(1, nbytes, changed)

    def add_rows(self, arrays: list[Value], count: int) -> None:
        """Append ``count`` rows of fixed fields: arrays (count, *shape) of the fields' own shapes. Copies."""
        row_bytes = sum([column.fixed_row_bytes or 0 for column in self.columns])
        at = 0
        while at < count:
            until = min(count, at + self._room(row_bytes))
            for column, value in zip(self.columns, arrays, strict=True):
                column.add_rows(value.array[at:until])
            self._count(until - at, (until - at) * row_bytes, False)
            at = until

    def add_block(self, fields: list[BlockField]) -> None:
        """Append the rows of a block. Copies; no Python per row."""
        rows = fields[0].rows if fields else 0
        row_bytes = np.zeros(rows, np.int64)
        for field in fields:
            row_bytes += field.row_bytes
        at = 0
        while at < rows:
            count = self._fitting(fields, row_bytes, at)
            if not count:
                self.flush()
                continue
            changed = False
            for column, field in zip(self.columns, fields, strict=True):
                changed = column.add_block(part(field, at, at + count)) or changed
            self._count(count, int(row_bytes[at : at + count].sum()), changed)
            at += count

    def _fitting(self, fields: list[BlockField], row_bytes: npt.NDArray[np.int64], at: int) -> int:
        """Return how many rows from ``at`` on go into the waiting chunk together; 0: it must be written first."""
        rows = len(row_bytes) - at
        uniform = min(
            column.uniform_rows(field.shapes[at:]) for column, field in zip(self.columns, fields, strict=True)
        )
        rows = min(rows, max(1, uniform))  # a row that changes a field's form comes alone: what is full changes with it
        ends = self._waiting + np.cumsum(row_bytes[at : at + rows])
        if int(ends[-1]) > LARGEST_CHUNK:
            rows = int(np.searchsorted(ends, LARGEST_CHUNK, side="right"))
            if not rows:
                return 0 if self._waiting else 1
            ends = ends[:rows]
        if self._rows_per_chunk is not None:
            return min(rows, max(1, self._rows_per_chunk - self.columns[0].rows))
        full = ends + _ROW_COST * (self.columns[0].rows + 1 + np.arange(rows)) >= self._chunk_bytes
        return int(full.argmax()) + 1 if full.any() else rows

    def _count(self, rows: int, nbytes: int, changed: bool) -> None:
        if changed:
            self._limit()
        self._waiting += nbytes
        self.samples += rows
        self.payload_bytes += nbytes
        self._flush_if_full()

    # --- chunks out ---------------------------------------------------------------------------------------------------

    def _limit(self) -> None:
        """Find the rows per chunk while all fields are fixed: a power of two, so that readers need only shift."""
        row_bytes = 0
        self._rows_per_chunk: int | None = None
        for column in self.columns:
            size = column.fixed_row_bytes
            if size is None:
                return
            row_bytes += size
        windows = max([column.least_rows for column in self.columns], default=1)
        self._rows_per_chunk = max(
            power_of_two(self._chunk_bytes, row_bytes),
            min(windows, power_of_two(_WINDOWS_CHUNK_BYTES, row_bytes)),
        )

    def _room(self, row_bytes: int) -> int:
        """Return how many rows of ``row_bytes`` may be added before the next look at whether the chunk is full."""
        if self._rows_per_chunk is not None:
            return max(1, self._rows_per_chunk - self.columns[0].rows)
        left = self._chunk_bytes - self._waiting - _ROW_COST * self.columns[0].rows
        return max(1, -(-left // (row_bytes + _ROW_COST)))

    def _flush_if_full(self) -> None:
        if not self.columns:
            return
        rows = self.columns[0].rows
        if self._rows_per_chunk is None:
            full = self._waiting + _ROW_COST * rows >= self._chunk_bytes
        else:
            full = rows >= self._rows_per_chunk
        if full:
            self.flush()

    def flush(self) -> None:
        """Commit the waiting rows of all fields as one chunk each."""
        if not self.columns or not self.columns[0].rows:
            return
        items: list[Item] = []
        made: list[ChunkRecord] = []
        for number, column in enumerate(self.columns):
            level, chunk = column.level, column.take()
            record = ChunkRecord.of(self._chunks, self._committed, level, chunk)
            made.append(record)
            items.append(Item(chunk_key(number, "v", self._chunks), chunk.values, record.value_crc))
            if chunk.offsets is not None:
                items.append(Item(chunk_key(number, "o", self._chunks), chunk.offsets, record.offset_crc))
            if chunk.shapes is not None:
                items.append(Item(chunk_key(number, "s", self._chunks), chunk.shapes, record.shape_crc))
        self._env.commit(items, self._journal(made))
        for records, record in zip(self._records, made, strict=True):
            records.append(record)
        self._chunks += 1
        self._committed = self.samples
        self._waiting = 0

    def _journal(self, made: list[ChunkRecord]) -> dict[str, Any]:
        record: dict[str, Any] = {
            "samples": self.samples,
            "payload_bytes": self.payload_bytes,
            "chunks": [each.values() for each in made],
            "columns": [[column.level, column.shape] for column in self.columns],
        }
        if not self._chunks:
            record["outline"] = self.outline.to_json()
        if self._notes is not None:
            record["notes"] = self._notes(made[0].rows)
        return record

    def close(self) -> list[ChunkTable]:
        """Write what waits, then the steps of sealing up to the tables; return these."""
        self.flush()
        for number, column in enumerate(self.columns):
            upgrade(self._env, number, column, self._records[number])
        merge_small(self._env, self.columns, self._records, self._chunk_bytes, self.payload_bytes)
        tables = [table_of(records) for records in self._records]
        for number, table in enumerate(tables):
            self._env.put(Item.of(table_key(number), table))
        return tables
