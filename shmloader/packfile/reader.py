"""Rows of fields, one by one or gathered into a batch by one call, straight from the mapped file.

    windows: the mapping seen as overlapping rows, one every ``grid`` bytes
    file    ─────┬── chunk 0: row row row row ──┬───────┬── chunk 1: row row row row ──┬───
    offset of row i (in grids)  =  shift[chunk of i] + i * (row bytes / grid)

All rows of all chunks lie on one grid, because chunks begin 16 bytes off a page border and rows follow each other
without a gap. So ONE ``torch.index_select(windows, 0, offsets, out=...)`` gathers a batch. The windows are a view of the
mapping (``as_strided``); nothing is ever made of them. Indices are checked before, so that only rows can be read.
"""

from __future__ import annotations

import bisect
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..errors import PackDamaged
from ..images import decode_chw
from .mapping import OpenPack
from .schema import TORCH_DTYPES, ChunkTable, Field

Indices = npt.NDArray[np.int64]

_UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_SHORT_ROW = 256
"""Bytes. Ragged rows up to this mean length are gathered by index, longer ones by one copy each: that is what is faster."""


class ChunkMap:
    """Which chunk holds a row."""

    def __init__(self, table: ChunkTable) -> None:
        self.first_rows = np.ascontiguousarray(table[:, 1])
        self.count = int(table[-1, 1] + table[-1, 2]) if len(table) else 0
        self._list: list[int] = self.first_rows.tolist()
        step = int(table[0, 2]) if len(table) else 1
        even = step & (step - 1) == 0 and bool(np.all(np.diff(self.first_rows) == step))
        self._bits = step.bit_length() - 1 if even and len(table) > 1 else None

    def of(self, indices: Indices) -> Indices:
        """Return the chunk of each row."""
        if self._bits is not None:
            return indices >> self._bits
        return np.searchsorted(self.first_rows, indices, side="right") - 1

    def of_one(self, index: int) -> int:
        """Return the chunk of one row."""
        return index >> self._bits if self._bits is not None else bisect.bisect_right(self._list, index) - 1

    def first_row(self, chunk: int) -> int:
        """Return the first row of a chunk."""
        return self._list[chunk]

    def check(self, indices: Indices) -> None:
        """Raise IndexError unless all are rows. One pass: a negative number is a huge unsigned one."""
        if len(indices) and int(indices.view(np.uint64).max()) >= self.count:
            wrong = indices[(indices < 0) | (indices >= self.count)]
            raise IndexError(f"index {int(wrong[0])} is out of range for a pack of {self.count} samples")


class Rows:
    """Rows of one fixed size, in the chunks of one part of a field."""

    def __init__(
        self, pack: OpenPack, raw: Any, chunks: ChunkMap, places: Indices, row_bytes: int, window: int
    ) -> None:
        """``window`` bytes are read at each row: its own, or more where a row's successor is wanted too."""
        self.chunks = chunks
        self.places = places
        self.row_bytes = row_bytes
        self._window = window
        self._raw = raw
        self._pack = pack
        self._ready: dict[int, tuple[torch.Tensor, Indices, int]] = {}
        self._single = len(places) == 1
        self._grid = 0
        if len(places) and window:
            self._base = int(places.min())
            self._grid = math.gcd(row_bytes, *np.unique(places - self._base).tolist())
            self._unit = math.gcd(self._grid, self._base, window, 8)

    def _windows(self, unit: int) -> tuple[torch.Tensor, Indices, int]:
        """Return (windows of numbers of ``unit`` bytes, shift of each chunk, row step), both in grids."""
        ready = self._ready.get(unit)
        if ready is None:
            last = int(self.places.max()) - self._base + self._last_rows_bytes()
            length = min(last, self._pack.file_bytes - self._base) // unit
            flat = torch.frombuffer(self._raw, dtype=_UNITS[unit], count=length, offset=self._base)
            numbers, stride = self._window // unit, self._grid // unit
            size = (length - numbers) // stride + 1
            windows = (
                flat.as_strided((size, numbers), (stride, 1)) if numbers > 1 else flat.as_strided((size,), (stride,))
            )
            step = self.row_bytes // self._grid
            shifts = (self.places - self._base) // self._grid - self.chunks.first_rows * step
            ready = self._ready[unit] = windows, shifts, step
        return ready

    def _last_rows_bytes(self) -> int:
        ends = np.append(self.chunks.first_rows[1:], self.chunks.count)
        # As far as the longest chunk would reach behind the last one: _windows cuts it to the file.
        return int((ends - self.chunks.first_rows).max()) * self.row_bytes + self._window - self.row_bytes

    def gather(self, indices: Indices, out: torch.Tensor) -> None:
        """Copy the windows of checked ``indices`` into the contiguous ``out``, whose rows have ``window`` bytes."""
        if not self._grid or not len(indices):
            return
        unit = self._unit
        if out.data_ptr() % unit:
            unit = 1
        windows, shifts, step = self._windows(unit)
        offsets = indices * step if step != 1 else indices
        offsets = offsets + (shifts[0] if self._single else shifts.take(self.chunks.of(indices)))
        target = out.view(-1).view(_UNITS[unit])
        if windows.dim() == 2:
            target = target.view(len(indices), -1)
        torch.index_select(windows, 0, torch.from_numpy(offsets), out=target)

    def place(self, index: int) -> int:
        """Return where a row begins in the file. ``index`` is checked already."""
        chunk = self.chunks.of_one(index)
        return int(self.places[chunk]) + (index - self.chunks.first_row(chunk)) * self.row_bytes


class FieldReader:
    """Reads one field. ``count``, ``field`` and the attributes of ``Field`` (``shape``, ``torch_dtype``, ...) describe it."""

    def __init__(self, pack: OpenPack, raw: Any, number: int) -> None:
        self.field: Field = pack.manifest.fields[number]
        self.name, self.dtype = self.field.name, self.field.dtype
        self.shape: tuple[Any, ...] = self.field.shape
        self.count = pack.manifest.count
        self._pack = pack
        located = pack.fields[number]
        self._chunks = ChunkMap(located.table)
        self._places = located.parts["v"]
        self._value_bytes = located.table[:, 3]
        self._numpy = self.field.numpy_dtype
        self._raw = raw
        if self._chunks.count != self.count:
            raise PackDamaged(pack.path, f"field {self.name!r} has {self._chunks.count} rows for {self.count} samples")

    @property
    def ragged(self) -> bool:
        """As ``Field.ragged``."""
        return self.field.ragged

    @property
    def is_plain(self) -> bool:
        """As ``Field.is_plain``."""
        return self.field.is_plain

    @property
    def torch_dtype(self) -> torch.dtype:
        """As ``Field.torch_dtype``."""
        return self.field.torch_dtype

    def get(self, index: int) -> Any:
        """Return the value in sample ``index`` (0 <= index < count): a new tensor, number, str or bytes."""
        raise NotImplementedError

    def gather(self, indices: Indices, out: torch.Tensor) -> None:
        """Only fields of one fixed shape (``is_plain``) gather into one array: TypeError for others."""
        raise TypeError(f"field {self.name!r} is {self.field}: its rows differ in size, use lengths and gather_ragged")

    def _tensor(self, shape: tuple[int, ...], place: int) -> torch.Tensor:
        """Return a copy of an array that begins at ``place`` in the file."""
        copy = np.ndarray(shape, self._numpy, self._pack.bytes, place).copy()
        tensor = torch.from_numpy(copy)
        wanted = TORCH_DTYPES[self.dtype]
        return tensor if tensor.dtype == wanted else tensor.view(wanted)

    def _check_out(self, out: torch.Tensor, shape: tuple[int, ...]) -> None:
        if out.dtype != self.torch_dtype or tuple(out.shape) != shape or not out.is_contiguous():
            raise ValueError(
                f"field {self.name!r}: out must be a contiguous {self.dtype} tensor of shape {shape}, "
                f"not {out.dtype} of shape {tuple(out.shape)} with strides {out.stride()}"
            )


class FixedReader(FieldReader):
    """Arrays of one shape, and numbers."""

    def __init__(self, pack: OpenPack, raw: Any, number: int) -> None:
        super().__init__(pack, raw, number)
        self.row_bytes = self._numpy.itemsize * math.prod(self.shape)
        if int(self._value_bytes.sum()) != self.count * self.row_bytes:
            raise PackDamaged(pack.path, f"field {self.name!r}: its chunks are not as long as its rows")
        self._rows = Rows(pack, raw, self._chunks, self._places, self.row_bytes, self.row_bytes)
        self._is_number = self.field.kind != "array"

    def get(self, index: int) -> Any:
        """Return a new tensor (shape, dtype), or a Python number."""
        place = self._rows.place(index)
        if self._is_number:
            return np.ndarray((), self._numpy, self._pack.bytes, place).item()
        return self._tensor(self.shape, place)

    def gather(self, indices: Indices, out: torch.Tensor) -> None:
        """Copy the rows ``indices`` (int64, (n,)) into ``out`` (contiguous, (n, *shape), of the field's dtype). One write.

        Raises IndexError for an index outside of 0..count-1, before anything is written, and ValueError for an unfit ``out``.
        """
        self._check_out(out, (len(indices), *self.shape))
        self._chunks.check(indices)
        self._rows.gather(indices, out)

    def column(self) -> npt.NDArray[Any]:
        """Return all rows as a new array (count, *shape). Touches no other field."""
        all_rows = np.empty((self.count, *self.shape), self._numpy)
        flat = all_rows.reshape(-1).view(np.uint8)
        at = 0
        for place, nbytes in zip(self._places.tolist(), self._value_bytes.tolist(), strict=True):
            flat[at : at + nbytes] = self._pack.bytes[place : place + nbytes]
            at += nbytes
        return all_rows


class RaggedReader(FieldReader):
    """Arrays whose axes vary, strings, bytes, encoded images: values and offsets."""

    def __init__(self, pack: OpenPack, raw: Any, number: int) -> None:
        super().__init__(pack, raw, number)
        located = pack.fields[number]
        self._offsets = Rows(pack, raw, self._chunks, located.parts["o"], 4, 8)
        self.trailing = self.field.trailing
        self._item_bytes = self._numpy.itemsize * math.prod(self.trailing or ())
        self._shapes = None
        if self.trailing is None:
            width = 4 * len(self.field.shape)
            self._shapes = Rows(pack, raw, self._chunks, located.parts["s"], width, width)
        self._mean_bytes = int(self._value_bytes.sum()) // max(1, self.count)

    def _span(self, index: int) -> tuple[int, int]:
        """Return (place in the file, items) of one row."""
        start, end = np.ndarray((2,), np.uint32, self._pack.bytes, self._offsets.place(index)).tolist()
        chunk = self._chunks.of_one(index)
        if not 0 <= start <= end or end * self._item_bytes > self._value_bytes[chunk]:
            raise PackDamaged(self._pack.path, f"field {self.name!r}: the offsets of sample {index} are wrong")
        return int(self._places[chunk]) + start * self._item_bytes, end - start

    def raw_bytes(self, index: int) -> bytes:
        """Return a copy of what is stored for sample ``index``: of an encoded image, the bytes of its file."""
        place, items = self._span(index)
        return bytes(self._pack.bytes[place : place + items * self._item_bytes].data)

    def get(self, index: int) -> Any:
        """Return a new tensor, str or bytes. Decodes an encoded image to uint8 (3, height, width)."""
        if self.field.encoding is not None:
            return torch.from_numpy(decode_chw(self.raw_bytes(index), name=f"{self._pack.path}, sample {index}"))
        if self.field.kind == "bytes":
            return self.raw_bytes(index)
        if self.field.kind == "str":
            return self.raw_bytes(index).decode("utf-8", "surrogatepass")
        place, items = self._span(index)
        if self._shapes is not None:
            ndim = len(self.field.shape)
            shape = tuple(np.ndarray((ndim,), np.uint32, self._pack.bytes, self._shapes.place(index)).tolist())
            if math.prod(shape) != items:
                raise PackDamaged(self._pack.path, f"field {self.name!r}: the shape of sample {index} is wrong")
            return self._tensor(shape, place)
        return self._tensor((items, *(self.trailing or ())), place)

    def _bounds(self, indices: Indices) -> tuple[Indices, Indices, Indices]:
        """Return (chunk, start, end) of each row, checked, in items."""
        self._chunks.check(indices)
        pairs = torch.empty((len(indices), 2), dtype=torch.int32)
        self._offsets.gather(indices, pairs)
        both = pairs.numpy().view(np.uint32).astype(np.int64)
        chunk = self._chunks.of(indices)
        starts, ends = both[:, 0], both[:, 1]
        if len(indices) and (np.any(starts > ends) or np.any(ends * self._item_bytes > self._value_bytes[chunk])):
            raise PackDamaged(self._pack.path, f"field {self.name!r}: offsets are wrong")
        return chunk, starts, ends

    def lengths(self, indices: Indices) -> Indices:
        """Return how many items each row of ``indices`` has: elements of the first axis, bytes, or (free) numbers."""
        _, starts, ends = self._bounds(indices)
        return ends - starts

    def shapes(self, indices: Indices) -> npt.NDArray[np.int64]:
        """Return the shape of each row, (n, ndim)."""
        if self._shapes is None:
            lengths = self.lengths(indices)[:, None]
            return np.concatenate([lengths, np.tile(np.array(self.trailing, np.int64), (len(indices), 1))], axis=1)
        self._chunks.check(indices)
        found = torch.empty((len(indices), len(self.field.shape)), dtype=torch.int32)
        self._shapes.gather(indices, found)
        return found.numpy().view(np.uint32).astype(np.int64)

    def gather_ragged(self, indices: Indices, out: torch.Tensor) -> None:
        """Copy the rows ``indices`` behind each other into ``out``: contiguous, (sum of lengths, *trailing).

        Of strings, bytes and encoded images the stored bytes (uint8); of a field where several axes vary its flat numbers.
        """
        chunk, starts, ends = self._bounds(indices)
        lengths = ends - starts
        total = int(lengths.sum())
        self._check_out(out, (total, *(self.trailing or ())))
        if not total or not self._item_bytes:
            return
        places = self._places.take(chunk) + starts * self._item_bytes
        target = out.view(-1).view(torch.uint8).numpy()
        if self._mean_bytes > _SHORT_ROW:
            source, at = self._pack.bytes, 0
            for place, nbytes in zip(places.tolist(), (lengths * self._item_bytes).tolist(), strict=True):
                target[at : at + nbytes] = source[place : place + nbytes]
                at += nbytes
            return
        # One index per unit of 1 to 8 bytes, whatever rows they belong to.
        unit = math.gcd(self._item_bytes, 8)
        if out.data_ptr() % unit:
            unit = 1
        counts = lengths * (self._item_bytes // unit)
        before = np.cumsum(counts) - counts
        picks = np.repeat(places // unit - before, counts)
        picks += np.arange(len(picks))
        flat = torch.frombuffer(self._raw, dtype=_UNITS[unit], count=self._pack.file_bytes // unit)
        torch.index_select(flat, 0, torch.from_numpy(picks), out=out.view(-1).view(_UNITS[unit]))

    def _check_out(self, out: torch.Tensor, shape: tuple[int, ...]) -> None:
        wanted = torch.uint8 if self.field.stores_bytes else self.torch_dtype
        if out.dtype != wanted or tuple(out.shape) != shape or not out.is_contiguous():
            raise ValueError(
                f"field {self.name!r}: out must be a contiguous {wanted} tensor of shape {shape}, "
                f"not {out.dtype} of shape {tuple(out.shape)} with strides {out.stride()}"
            )

    def column(self) -> tuple[npt.NDArray[Any], Indices]:
        """Return (values, offsets): all rows behind each other as a new array, and count + 1 offsets into it, in items."""
        values = np.empty(
            (int(self._value_bytes.sum()) // max(1, self._item_bytes), *(self.trailing or ())), self._numpy
        )
        flat = values.reshape(-1).view(np.uint8)
        offsets = np.zeros(self.count + 1, np.int64)
        at = 0
        for i, (place, nbytes) in enumerate(zip(self._places.tolist(), self._value_bytes.tolist(), strict=True)):
            flat[at : at + nbytes] = self._pack.bytes[place : place + nbytes]
            first = self._chunks.first_row(i)
            until = self._chunks.first_row(i + 1) if i + 1 < len(self._places) else self.count
            stored = np.ndarray((until - first + 1,), np.uint32, self._pack.bytes, self._offsets.place(first))
            offsets[first : until + 1] = offsets[first] + stored
            at += nbytes
        return values, offsets


def open_fields(pack: OpenPack) -> tuple[FixedReader | RaggedReader, ...]:
    """Return a reader for each field of the pack."""
    raw = pack.raw()
    return tuple(
        [
            (RaggedReader if field.ragged else FixedReader)(pack, raw, number)
            for number, field in enumerate(pack.manifest.fields)
        ]
    )
