"""Readers of fields: one value at a time, or a batch of them straight into the caller's memory."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..errors import PackDamaged
from ..images import decode_chw
from .ahead import LARGE_ROW
from .compressed import inflate
from .mapping import OpenPack
from .rows import UNITS, ChunkMap, Indices, Rows
from .schema import TORCH_DTYPES, ZLIB, Field

_SHORT_ROW = 256
"""Bytes. Ragged rows up to this mean length are gathered by index, longer ones by a copy each: measured."""


class Spans(NamedTuple):
    """Where some rows of a ragged field lie: one number a row."""

    places: Indices
    """Offsets in the file, bytes."""
    lengths: Indices
    """Items in each."""


class FieldReader(ABC):
    """Reads one field; ``field`` and the attributes of the same names say what it holds."""

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

    @abstractmethod
    def get(self, index: int) -> Any:
        """Return the value in sample ``index`` (0 <= index < count): a new tensor, number, str or bytes."""

    def get_many(self, indices: Indices) -> list[Any]:
        """Return the values of many samples. Raises IndexError for rows that are not there."""
        self._chunks.check(indices)
        return [self.get(index) for index in indices.tolist()]

    def gather(self, indices: Indices, out: torch.Tensor) -> None:
        """Only fields of one fixed shape (``is_plain``) gather into one array: TypeError for others."""
        raise TypeError(f"field {self.name!r} is {self.field}: its rows differ in size, use lengths and gather_ragged")

    def _announce(self, place: int, nbytes: int) -> None:
        """Of one large row, read all from disk at once: small beside what copying or decoding it takes."""
        if nbytes >= LARGE_ROW:
            self._pack.will_need(place, nbytes)

    def _tensor(self, shape: tuple[int, ...], place: int) -> torch.Tensor:
        """Return a copy of an array that begins at ``place`` in the file."""
        self._announce(place, self._numpy.itemsize * math.prod(shape))
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
        self.rows = Rows(pack, raw, self._chunks, self._places, self.row_bytes, self.row_bytes)
        self._is_number = self.field.kind != "array"

    def get(self, index: int) -> Any:
        """Return a new tensor (shape, dtype), or a Python number."""
        place = self.rows.place(index)
        if self._is_number:
            return np.ndarray((), self._numpy, self._pack.bytes, place).item()
        return self._tensor(self.shape, place)

    def gather(self, indices: Indices, out: torch.Tensor) -> None:
        """Copy the rows ``indices`` (int64, (n,)) into ``out`` (contiguous, (n, *shape), of the field's dtype).

        The bytes are written once. Raises, before anything is written, IndexError for an index outside of 0..count-1,
        and TypeError or ValueError for unfit indices or an unfit ``out``.
        """
        self._check_out(out, (len(indices), *self.shape))
        self._chunks.check(indices)
        self.rows.gather(indices, out)

    def get_many(self, indices: Indices) -> list[Any]:
        """As ``get`` for many samples: rows of one new tensor, or Python numbers. One gather."""
        out = torch.empty((len(indices), *self.shape), dtype=self.torch_dtype)
        self.gather(indices, out)
        return out.tolist() if self._is_number else list(out.unbind(0))

    def bind(self, out: torch.Tensor) -> Callable[[Indices], None]:
        """Return ``gather`` for this ``out``: a function of ``len(out)`` indices. It keeps ``out`` alive.

        For memory that is filled again and again: the preparation is done once.
        """
        count = len(out)
        self._check_out(out, (count, *self.shape))
        gather, check = self.rows.bind(out, count), self._chunks.check

        def bound(indices: Indices) -> None:
            if len(indices) != count:
                raise ValueError(f"field {self.name!r}: bound to {count} rows, but got {len(indices)} indices")
            check(indices)
            gather(indices)

        return bound

    def column(self) -> npt.NDArray[Any]:
        """Return all rows as a new array (count, *shape). Touches no other field."""
        all_rows = np.empty((self.count, *self.shape), self._numpy)
        flat = all_rows.reshape(-1).view(np.uint8)
        at = 0
        for place, nbytes in zip(self._places.tolist(), self._value_bytes.tolist(), strict=True):
            self._pack.will_need(place, nbytes)
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
        """Return a copy of what is stored for sample ``index``: of an encoded image its file, of zlib the row."""
        place, items = self._span(index)
        self._announce(place, items * self._item_bytes)
        return bytes(self._pack.bytes[place : place + items * self._item_bytes].data)

    def get(self, index: int) -> Any:
        """Return a new tensor, str or bytes. Decodes an encoded image to uint8 (3, height, width), expands zlib."""
        if self.field.encoding == ZLIB:
            try:
                return inflate(self.raw_bytes(index), self.field)
            except ValueError as fault:
                raise PackDamaged(self._pack.path, f"field {self.name!r}, sample {index}: {fault}") from fault
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

    def get_many(self, indices: Indices) -> list[Any]:
        """As ``get`` for many samples; arrays whose first axis varies are parts of one new tensor, by one gather."""
        if self.field.kind != "array" or self.field.stores_bytes or self.trailing is None:
            return super().get_many(indices)
        spans = self.spans(indices)
        lengths = spans.lengths.tolist()
        out = torch.empty((sum(lengths), *self.trailing), dtype=self.torch_dtype)
        self.gather_spans(spans, out)
        return list(out.split_with_sizes(lengths))

    def spans(self, indices: Indices) -> Spans:
        """Return where the rows of ``indices`` lie, checked, for ``gather_spans``."""
        self._chunks.check(indices)
        pairs = torch.empty((len(indices), 2), dtype=torch.int32)
        self._offsets.gather(indices, pairs)
        both = pairs.numpy().view(np.uint32).astype(np.int64)
        chunk = self._chunks.of(indices)
        starts, ends = both[:, 0], both[:, 1]
        if len(indices) and (np.any(starts > ends) or np.any(ends * self._item_bytes > self._value_bytes[chunk])):
            raise PackDamaged(self._pack.path, f"field {self.name!r}: offsets are wrong")
        return Spans(self._places.take(chunk) + starts * self._item_bytes, ends - starts)

    def lengths(self, indices: Indices) -> Indices:
        """Return how many items each row of ``indices`` has: elements of the first axis, bytes, or (free) numbers."""
        return self.spans(indices).lengths

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

        Of strings, bytes and encoded images the stored bytes (uint8); where several axes vary, flat numbers.
        """
        self.gather_spans(self.spans(indices), out)

    def gather_spans(self, spans: Spans, out: torch.Tensor) -> None:
        """As ``gather_ragged``, for rows that ``spans`` has found already."""
        places, lengths = spans
        total = int(lengths.sum())
        self._check_out(out, (total, *(self.trailing or ())))
        if not total or not self._item_bytes:
            return
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
        flat = torch.frombuffer(self._raw, dtype=UNITS[unit], count=self._pack.file_bytes // unit)
        torch.index_select(flat, 0, torch.from_numpy(picks), out=out.view(-1).view(UNITS[unit]))

    def _check_out(self, out: torch.Tensor, shape: tuple[int, ...]) -> None:
        wanted = torch.uint8 if self.field.stores_bytes else self.torch_dtype
        if out.dtype != wanted or tuple(out.shape) != shape or not out.is_contiguous():
            raise ValueError(
                f"field {self.name!r}: out must be a contiguous {wanted} tensor of shape {shape}, "
                f"not {out.dtype} of shape {tuple(out.shape)} with strides {out.stride()}"
            )

    def column(self) -> tuple[npt.NDArray[Any], Indices]:
        """Return (values, offsets): all rows behind each other as a new array; count + 1 offsets into it, in items."""
        offsets = np.zeros(self.count + 1, np.int64)
        for i in range(len(self._places)):
            first = self._chunks.first_row(i)
            until = self._chunks.first_row(i + 1) if i + 1 < len(self._places) else self.count
            stored = np.ndarray((until - first + 1,), np.uint32, self._pack.bytes, self._offsets.place(first))
            offsets[first : until + 1] = offsets[first] + stored
        values = np.empty((int(offsets[-1]), *(self.trailing or ())), self._numpy)
        if values.nbytes != int(self._value_bytes.sum()):
            raise PackDamaged(self._pack.path, f"field {self.name!r}: offsets are wrong")
        flat, at = values.reshape(-1).view(np.uint8), 0
        for place, nbytes in zip(self._places.tolist(), self._value_bytes.tolist(), strict=True):
            self._pack.will_need(place, nbytes)
            flat[at : at + nbytes] = self._pack.bytes[place : place + nbytes]
            at += nbytes
        return values, offsets
