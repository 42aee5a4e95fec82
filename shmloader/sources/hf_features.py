"""From a column of Hugging Face's ``datasets`` to the field of a sample, by the feature that the column was written as.

Image                     the bytes of its file          List of numbers           a tensor, its length may vary
Audio, Video              the bytes of its file          Array2D ... Array5D       a tensor
ClassLabel                int                            List of lists of numbers  a tensor: rows must be alike
Value: numbers, bool      a tensor () of its dtype       List of other things      its JSON text
Value: string, binary     str, bytes                     dict, List of a dict      a dict of fields
"""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import torch

from ..errors import SourceError

_FILES = frozenset({"Image", "Audio", "Video", "Pdf"})
_LISTS = frozenset({"Sequence", "List", "LargeList"})
_ARRAYS = frozenset({"Array2D", "Array3D", "Array4D", "Array5D"})
_NUMBERS = {
    **{name: np.dtype(name) for name in ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")},
    **{name: np.dtype(name) for name in ("uint64", "float16", "float32", "float64")},
}
_TEXTS = frozenset({"string", "large_string", "string_view"})
_BYTES = frozenset({"binary", "large_binary", "binary_view"})


class Unfit(Exception):
    """A value cannot be stored. ``why`` is a clause; internal: the source adds where."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


def name_of(feature: Any) -> str:
    """Return the kind of a feature: the name of its class, ``dict``, or ``List`` for the ``[feature]`` of old."""
    return "List" if isinstance(feature, list) else type(feature).__name__


def number_dtype(feature: Any) -> np.dtype[Any] | None:
    """Return the dtype of a feature that is one number; None for others."""
    if name_of(feature) == "ClassLabel":
        return np.dtype(np.int64)
    return _NUMBERS.get(feature.dtype) if name_of(feature) == "Value" else None


def inner(feature: Any) -> Any:
    """Return the feature of a list's items."""
    return feature[0] if isinstance(feature, list) else feature.feature


def fixed_shape(feature: Any) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
    """Return dtype and shape of a feature that is numbers of one shape in all rows; None for others."""
    dtype = number_dtype(feature)
    if dtype is not None:
        return dtype, ()
    if name_of(feature) in _LISTS and not isinstance(feature, list) and getattr(feature, "length", -1) > 0:
        found = fixed_shape(inner(feature))
        return None if found is None else (found[0], (int(feature.length), *found[1]))
    return None


def supported(feature: Any) -> bool:
    """Whether a column of this feature can be a field."""
    kind = name_of(feature)
    if kind == "dict":
        return all(supported(each) for each in feature.values())
    if kind == "Value":
        return feature.dtype in _NUMBERS or feature.dtype in _TEXTS or feature.dtype in _BYTES
    if kind in _LISTS and name_of(inner(feature)) in _FILES:
        return False
    return kind in _FILES or kind in _LISTS or kind in _ARRAYS or kind == "ClassLabel"


def value(feature: Any, column: Any, row: int, folder: str) -> Any:
    """Return row ``row`` of an Arrow array as the value of a field. ``folder``: where relative file names begin.

    Raises Unfit for what is missing, or is no rectangle of numbers.
    """
    if not column[row].is_valid:
        raise Unfit("is missing (null)")
    kind = name_of(feature)
    if kind == "dict":
        return {name: value(each, column.field(name), row, folder) for name, each in feature.items()}
    if kind in _FILES:
        return _file(column[row].as_py(), folder)
    if kind == "ClassLabel":
        return int(column[row].as_py())
    if kind == "Value":
        found = column[row].as_py()
        return found if isinstance(found, str | bytes) else torch.from_numpy(np.array(found, _NUMBERS[feature.dtype]))
    if kind in _ARRAYS:
        return torch.from_numpy(
            np.array(column[row].as_py(), _NUMBERS[feature.dtype]).reshape(_of(feature, column[row]))
        )
    if isinstance(inner(feature), dict):
        return _dict_of_lists(feature, column, row, folder)
    return _list(inner(feature), column[row].values)


def _of(feature: Any, scalar: Any) -> tuple[int, ...]:
    first = len(scalar.as_py()) if feature.shape[0] is None else feature.shape[0]
    return (first, *feature.shape[1:])


def _file(stored: Any, folder: str) -> bytes:
    if isinstance(stored, dict):
        if stored.get("bytes") is not None:
            return bytes(stored["bytes"])
        stored = stored.get("path")
    if not isinstance(stored, str):
        raise Unfit("has neither bytes nor a path")
    path = os.path.join(folder, stored)
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as fault:
        raise Unfit(f"lies in the file {path}, which cannot be read: {fault.strerror}") from fault


def _dict_of_lists(feature: Any, column: Any, row: int, folder: str) -> dict[str, Any]:
    made: dict[str, Any] = {}
    fields = inner(feature)
    structs = column[row].values if _is_list(column) else None
    for name, each in fields.items():
        if structs is None:  # as datasets before 4.0 stored it: a struct of lists
            made[name] = _list(each, column.field(name)[row].values)
        else:
            made[name] = _list(each, structs.field(name))
    return made


def _is_list(column: Any) -> bool:
    """Whether an Arrow array is one of lists, not of structs."""
    from pyarrow import types

    kind = column.type
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _list(feature: Any, items: Any) -> torch.Tensor | str:
    """Return the items of one list: numbers, at any depth, as a tensor, others as JSON text."""
    dtype, depth = number_dtype(feature), 0
    leaf = feature
    while dtype is None and name_of(leaf) in _LISTS:
        leaf, depth = inner(leaf), depth + 1
        dtype = number_dtype(leaf)
    if dtype is None:
        try:
            return json.dumps(items.to_pylist(), ensure_ascii=False)
        except TypeError as fault:
            raise Unfit(f"is a list of what JSON cannot hold: {fault}") from fault
    if depth == 0:
        if items.null_count:
            raise Unfit("has a missing number (null) in it")
        return torch.from_numpy(np.array(items.to_numpy(zero_copy_only=False), dtype))
    rows = items.to_pylist()
    try:
        made = np.array(rows, dtype)
    except (ValueError, TypeError) as fault:
        raise Unfit(f"is a list of lists that differ in length, or miss numbers: {fault}") from fault
    if not rows:
        made = made.reshape(0, *_inner_shape(feature))
    if made.ndim != depth + 1:
        made = made.reshape(*made.shape, *[0] * (depth + 1 - made.ndim))
    return torch.from_numpy(made)


def _inner_shape(feature: Any) -> tuple[int, ...]:
    """Of a list without items: the shape that its items would have; 0 where it is not known."""
    if name_of(feature) not in _LISTS:
        return ()
    length = -1 if isinstance(feature, list) else getattr(feature, "length", -1)
    return (max(0, length), *_inner_shape(inner(feature)))


def check_columns(path: str, features: dict[str, Any], names: tuple[str, ...]) -> None:
    """Raise SourceError for a column that is not there, or of a feature that cannot be stored."""
    for name in names:
        if name not in features:
            raise SourceError(path, f"there is no column {name!r}; there are {', '.join(features)}")
        if not supported(features[name]):
            others = ",".join(each for each in names if supported(features[each]))
            raise SourceError(
                path, f"column {name!r} ({features[name]}) cannot be stored: leave it out, as in --columns {others}"
            )
