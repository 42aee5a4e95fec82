"""Whole columns at once: what they are, checked, before they are packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UnsupportedField
from .texts import first_text, is_text, text_value
from .values import Unstorable, Value, value_of
from .windows import Windows

Columns = Mapping[str, Any] | Sequence[Any] | npt.NDArray[Any] | Windows


def take_apart(columns: Columns, index: int) -> tuple[Any, list[Value], int]:
    """Return (the first sample, the columns as arrays, rows). ``index`` is that of the first sample, for messages.

    Raises UnsupportedField, and ValueError for columns of different lengths.
    """
    parts: list[Any]
    if isinstance(columns, Mapping):
        names, parts = [str(name) for name in columns], list(columns.values())
    elif isinstance(columns, (tuple, list)):
        names, parts = [str(i) for i in range(len(columns))], list(columns)
    else:
        names, parts = ["0"], [columns]
    arrays: list[Value] = []
    for name, part in zip(names, parts, strict=True):
        try:
            value = _column(part)
        except Unstorable as fault:
            raise UnsupportedField(index, name, fault.found) from None
        if (value.kind != "array" and not is_text(part)) or value.array.ndim == 0:
            raise UnsupportedField(index, name, f"{value.describe()} as a whole column")
        arrays.append(value)
    count = len(arrays[0].array) if arrays else 0
    for name, value in zip(names, arrays, strict=True):
        if len(value.array) != count:
            raise ValueError(f"column {name!r} has {len(value.array)} rows, column {names[0]!r} has {count}")
    if not count:
        return None, arrays, 0
    rows = [_first(part) for part in parts]
    if isinstance(columns, Mapping):
        return dict(zip(columns, rows, strict=True)), arrays, count
    return (tuple(rows) if isinstance(columns, (tuple, list)) else rows[0]), arrays, count


def _column(part: Any) -> Value:
    if isinstance(part, Windows):
        return _windows(part)
    return text_value(part) if is_text(part) else value_of(part)


def _first(part: Any) -> Any:
    if is_text(part):
        return first_text(part)
    return np.asarray(part[0]) if isinstance(part, np.ndarray | Windows) else part[0]


def _windows(windows: Windows) -> Value:
    """Return windows as a column whose rows share memory with each other."""
    flat = value_of(windows.flat)
    same = Windows(flat.array, windows.length, windows.stride, windows.dtype_given)
    return Value("array", flat.dtype, same.rows(), windows.windowing)
