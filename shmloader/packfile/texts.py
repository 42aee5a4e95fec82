"""Whole columns of text: NumPy's arrays of strings and of bytes, laid end to end for the pack. Pure.

["ab", "", "cde"]  ─▶  values  a b c d e     lengths 2 0 3
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .block import BlockField
from .values import Value


def is_text(column: Any) -> bool:
    """Whether ``column`` is an array of one string (``U``) or of bytes (``S``) a row."""
    return isinstance(column, np.ndarray) and column.dtype.kind in "US" and column.ndim == 1


def text_value(column: npt.NDArray[Any]) -> Value:
    """Return such an array as a column to be added."""
    kind = "str" if column.dtype.kind == "U" else "bytes"
    return Value(kind, kind, column)


def first_text(column: npt.NDArray[Any]) -> str | bytes:
    """Return its first row as the ``str`` or ``bytes`` that a sample holds."""
    return str(column[0]) if column.dtype.kind == "U" else bytes(column[0])


def block_field(value: Value) -> BlockField:
    """Return a column, text or numbers of one shape, as the rows of a block."""
    array = value.array
    if value.kind == "array":
        shapes = np.broadcast_to(np.array(array.shape[1:], np.int64), (len(array), array.ndim - 1))
        row_bytes = np.full(len(array), array[:1].nbytes, np.int64)
        return BlockField(shapes, np.ascontiguousarray(array).reshape(-1).view(np.uint8), row_bytes)
    if value.kind == "str":
        array = np.char.encode(array, "utf-8", "surrogatepass")
    array = np.ascontiguousarray(array)
    lengths = np.char.str_len(array).astype(
        np.int64
    )  # as NumPy has it: what follows the last byte that is not zero is none
    width = array.dtype.itemsize
    table = array.view(np.uint8).reshape(len(array), width)
    return BlockField(lengths[:, None], table[np.arange(width) < lengths[:, None]], lengths)
