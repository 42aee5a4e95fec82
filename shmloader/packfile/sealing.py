"""The last steps of packing: give early chunks what later rows made necessary, and join chunks that are far too small.

Labels beside photographs come in chunks of a few hundred bytes, one page each, all over the file. Before sealing they
are joined into large ones, so that a column is read from one place and a batch of labels touches few pages. The pages
given up stay in the file: therefore only fields are joined that together are a small part of it.
"""

from __future__ import annotations

import zlib
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .columns import FIXED, FREE, Chunk, Column, ends, power_of_two
from .environment import Item, WriteEnvironment
from .pages import PAGE_BYTES
from .schema import CHUNK_COLUMNS, ChunkTable, chunk_key

_JOINED_SHARE = 0.02
"""At most this share of the payload is written a second time."""


@dataclass(frozen=True)
class ChunkRecord:
    """What a table says about one chunk (in the order of CHUNK_COLUMNS), and its level when it was written."""

    chunk: int
    first_row: int
    rows: int
    value_bytes: int
    value_crc: int
    offset_crc: int
    shape_crc: int
    level: int

    @classmethod
    def of(cls, number: int, first_row: int, level: int, chunk: Chunk) -> ChunkRecord:
        """Describe a chunk, checksums included."""
        return cls(
            number,
            first_row,
            chunk.rows,
            chunk.values.nbytes,
            zlib.crc32(chunk.values.data),
            0 if chunk.offsets is None else zlib.crc32(chunk.offsets.data),
            0 if chunk.shapes is None else zlib.crc32(chunk.shapes.data),
            level,
        )

    def values(self) -> list[int]:
        """Return its fields in their order."""
        return list(astuple(self))


def table_of(records: list[ChunkRecord]) -> ChunkTable:
    """Return the records as the table that is stored."""
    rows = [astuple(record)[: len(CHUNK_COLUMNS)] for record in records]
    return np.array(rows, np.int64).reshape(len(records), len(CHUNK_COLUMNS))


def upgrade(env: WriteEnvironment, number: int, column: Column, records: list[ChunkRecord]) -> None:
    """Write offsets (and shapes) for the chunks of field ``number`` that were written when it was still simpler."""
    for i, record in enumerate(records):
        if record.level == column.level:
            continue
        shape = column.first_shape
        if record.level == FIXED:
            lengths: npt.NDArray[Any] = np.full(record.rows, shape[0] if shape else 1, np.uint64)
        else:
            offsets = _stored(env, chunk_key(number, "o", record.chunk), record.rows + 1)
            lengths = (offsets[1:] - offsets[:-1]).astype(np.uint64)
        shapes = None
        if column.level == FREE:
            # While it was fixed or ragged, all axes but the first were those of the first row.
            shapes = np.empty((record.rows, len(shape)), np.uint32)
            shapes[:, 0] = lengths
            shapes[:, 1:] = shape[1:]
            lengths = lengths * np.uint64(np.prod(shape[1:], dtype=np.uint64))
            env.put(Item.of(chunk_key(number, "s", record.chunk), shapes))
        offsets = ends(lengths)
        env.put(Item.of(chunk_key(number, "o", record.chunk), offsets))
        records[i] = replace(
            record,
            offset_crc=zlib.crc32(offsets.data),
            shape_crc=0 if shapes is None else zlib.crc32(shapes.data),
            level=column.level,
        )


def _stored(env: WriteEnvironment, key: bytes, count: int) -> npt.NDArray[np.uint32]:
    return np.frombuffer(env.read(key), np.uint32, count)


def merge_small(
    env: WriteEnvironment,
    columns: list[Column],
    records: list[list[ChunkRecord]],
    chunk_bytes: int,
    payload_bytes: int,
) -> None:
    """Join the chunks of the smallest fixed fields into chunks of up to ``chunk_bytes``. Changes ``records``."""
    sizes = sorted(
        (sum(record.value_bytes for record in records[number]), number)
        for number, column in enumerate(columns)
        if column.level == FIXED and len(records[number]) > 1 and column.windowing is None
    )
    allowed = int(payload_bytes * _JOINED_SHARE)
    for _, number in sizes:
        given_up = sum(max(PAGE_BYTES, record.value_bytes) for record in records[number])
        if given_up > allowed:
            break
        allowed -= given_up
        row_bytes = columns[number].fixed_row_bytes or 0
        rows = power_of_two(chunk_bytes, row_bytes)
        records[number] = _merge(env, number, records[number], row_bytes, rows)


def _merge(
    env: WriteEnvironment,
    number: int,
    old: list[ChunkRecord],
    row_bytes: int,
    rows_per_chunk: int,
) -> list[ChunkRecord]:
    made: list[ChunkRecord] = []
    count = old[-1].first_row + old[-1].rows
    if row_bytes == 0 or len(old) <= -(-count // rows_per_chunk):
        return old
    following = old[-1].chunk + 1
    pending = bytearray()
    for record in old:
        pending += env.read(chunk_key(number, "v", record.chunk))
        last = record is old[-1]
        while len(pending) >= rows_per_chunk * row_bytes or (last and pending):
            values = np.frombuffer(bytes(pending[: rows_per_chunk * row_bytes]), np.uint8)
            del pending[: rows_per_chunk * row_bytes]
            chunk = Chunk(len(values) // row_bytes, values, None, None)
            first_row = made[-1].first_row + made[-1].rows if made else 0
            made.append(ChunkRecord.of(following + len(made), first_row, FIXED, chunk))
            env.put(Item(chunk_key(number, "v", made[-1].chunk), values, made[-1].value_crc))
    env.drop([chunk_key(number, "v", record.chunk) for record in old])
    return made
