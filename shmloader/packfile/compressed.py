"""Rows that are stored compressed, each by itself: any sample can be read without its neighbours.

    stored row     length of each axis, uint32      zlib stream of the values
                   (of str and bytes: one axis)

It pays for masks, label maps and text; photographs in their files and noise do not get smaller. Reading such a field
costs the time to expand it, sample by sample, and its batches are collated from tensors: it is for data that would not
fit otherwise.
"""

from __future__ import annotations

import math
import zlib
from typing import Any, NamedTuple

import numpy as np
import torch

from .schema import TORCH_DTYPES, ZLIB, Field, storage_dtype
from .values import Unstorable, Value, describe

_LEVEL = 6
_LARGEST = 2**32 - 1


class Inner(NamedTuple):
    """What a compressed field holds, as the first sample has it."""

    kind: str
    dtype: str
    axes: int

    @classmethod
    def of(cls, value: Value) -> Inner:
        """Raises Unstorable for single numbers, which only grow."""
        if value.kind not in ("array", "str", "bytes") or not value.array.ndim:
            raise Unstorable(f"{value.describe()}, which would not get smaller by {ZLIB}")
        return cls(value.kind, value.dtype, value.array.ndim)

    def fits(self, value: Value) -> bool:
        """Say whether ``value`` can be a row of this field: shapes may differ, their number of axes may not."""
        return self == (value.kind, value.dtype, value.array.ndim)

    def describe(self) -> str:
        """Say in a few words what a row looks like."""
        return describe(self.kind, self.dtype, (None,) * self.axes)

    def field(self, name: str) -> Field:
        """Return the finished field; what its axes are is known row by row only."""
        return Field(name, self.kind, self.dtype, (None,) * self.axes if self.kind == "array" else (), ZLIB)


def deflate(value: Value) -> Value:
    """Return ``value`` compressed, as bytes. Raises Unstorable for an axis of more than 2**32 - 1."""
    if max(value.array.shape) > _LARGEST:
        raise Unstorable(f"{value.describe()}: an axis is longer than {_LARGEST}")
    head = np.array(value.array.shape, "<u4").tobytes()
    values = np.ascontiguousarray(value.array).reshape(-1).view(np.uint8)
    return Value("bytes", "bytes", np.frombuffer(head + zlib.compress(values.data, _LEVEL), np.uint8))


def inflated_bytes(row: bytes, field: Field) -> int:
    """Return how many bytes the values of a stored row have, which its head says."""
    axes = max(1, len(field.shape))
    item = 1 if field.kind in ("str", "bytes") else storage_dtype(field.dtype).itemsize
    return int(math.prod(np.frombuffer(row, "<u4", axes).tolist()) * item)


def inflate(row: bytes, field: Field) -> Any:
    """Return the value of a stored row of ``field``: a new tensor, str or bytes.

    Raises ValueError with a clause for messages if the row is damaged. Never expands to more than it says at its head.
    """
    axes = max(1, len(field.shape))
    if len(row) < 4 * axes:
        raise ValueError(f"{len(row)} bytes are no compressed row of {axes} axes")
    shape = tuple(np.frombuffer(row, "<u4", axes).tolist())
    dtype = np.dtype(np.uint8) if field.kind in ("str", "bytes") else storage_dtype(field.dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    stream = zlib.decompressobj()
    try:
        values = stream.decompress(memoryview(row)[4 * axes :], nbytes + 1)
    except zlib.error as fault:
        raise ValueError(f"the compressed row is damaged: {fault}") from fault
    if len(values) != nbytes or not stream.eof or stream.unused_data:
        raise ValueError(f"the compressed row holds other than the {nbytes} bytes that it says it does")
    if field.kind == "bytes":
        return values
    if field.kind == "str":
        return values.decode("utf-8", "surrogatepass")
    made = torch.from_numpy(np.frombuffer(values, dtype).reshape(shape).copy())
    wanted = TORCH_DTYPES[field.dtype]
    return made if made.dtype == wanted else made.view(wanted)
