"""Arrays on disk: one file of them, or a folder of ``.npy`` files, one row per sample.

    images.npy                      samples are rows:     images[i]
    data.npz, data.safetensors      samples are dicts:    {"x": x[i], "y": y[i]}
    data.pt                         as it was saved:      a row, a dict or a tuple of rows
    folder/x.npy, y.npy             samples are dicts

All arrays of a set have the same first axis. They are memory-mapped wherever their format allows (array_files.py):
their size does not count against RAM.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from ..errors import MisuseError, SourceError
from .array_files import SUFFIXES, Opened, Stored, map_npy, open_arrays
from .base import Options, Source, StrPath, position
from .blocks import Columns

_TORCH_KINDS = "biufc"


def _npy_names(folder: str) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(e.name for e in entries if e.is_file() and e.name.endswith(".npy") and not e.name.startswith("."))


def _storable(dtype: np.dtype[Any]) -> bool:
    if dtype.kind in "US":
        return True
    if dtype.kind not in _TORCH_KINDS:
        return False
    try:
        torch.from_numpy(np.empty(0, dtype.newbyteorder("=")))
    except TypeError:  # float128 and the like
        return False
    return True


class ArrayFiles(Source):
    """The rows of array files, as new tensors of the file's own dtype (in this machine's byte order).

    One array gives the rows themselves, a file or folder of several gives dicts, a tuple saved by torch gives tuples. A
    one-dimensional array gives 0-d tensors, so that its dtype survives collation; arrays of strings give ``str``, of
    fixed-length bytes ``bytes``.
    Raises SourceError for files that are damaged, hold Python objects, or do not fit together: it names both lengths.
    """

    kind = "arrays"
    looked_for = "an .npy, .npz, .pt, .pth or .safetensors file, or a folder of .npy files, with one row per sample"

    def __init__(self, path: StrPath) -> None:
        self.path = os.fspath(path)
        self._open()

    def _open(self) -> None:
        self._form = self._read()
        self._arrays = self._named(self._form)
        first = ""
        for name, array in self._arrays.items():
            if array.ndim == 0:
                raise SourceError(self.path, f"array {name!r} is a single number: it has no rows")
            if isinstance(array, np.ndarray) and not _storable(array.dtype):
                raise SourceError(self.path, f"array {name!r} has dtype {array.dtype}, which torch does not know")
            first = first or name
            if len(array) != len(self._arrays[first]):
                raise SourceError(
                    self.path,
                    f"arrays of different lengths: {first!r} has {len(self._arrays[first])} rows, "
                    f"{name!r} has {len(array)}",
                )
        self._length = len(self._arrays[first])

    def _named(self, form: Opened) -> dict[str, Stored]:
        if isinstance(form, dict):
            if not form:
                raise SourceError(self.path, "there is no array in it")
            return form
        if isinstance(form, tuple):
            return {str(i): array for i, array in enumerate(form)}
        return {os.path.splitext(os.path.basename(self.path))[0]: form}

    def _read(self) -> Opened:
        if not os.path.isdir(self.path):
            return open_arrays(self.path)
        arrays: dict[str, Stored] = {}
        for name in _npy_names(self.path):
            path = os.path.join(self.path, name)
            try:
                arrays[name[: -len(".npy")]] = map_npy(path)
            except (ValueError, EOFError) as fault:
                raise SourceError(path, f"not readable as an array file: {fault}") from fault
        return arrays

    def __getstate__(self) -> dict[str, Any]:
        # A memory map would be pickled as all of its bytes.
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path = state["path"]
        self._open()

    @classmethod
    def recognises(cls, path: str) -> bool:
        if os.path.isdir(path):
            return bool(_npy_names(path))
        return path.endswith(SUFFIXES)

    @classmethod
    def open(cls, path: str, options: Options) -> ArrayFiles:
        if options.fit is not None:
            raise MisuseError(f"{path} holds arrays, not image files: they have their size, --size does not apply")
        return cls(path)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        index = position(index, self._length)
        rows = {name: _value(array, index) for name, array in self._arrays.items()}
        if isinstance(self._form, dict):
            return rows
        return tuple(rows.values()) if isinstance(self._form, tuple) else next(iter(rows.values()))

    def columns(self) -> Columns | None:
        texts = [array for array in self._arrays.values() if isinstance(array, np.ndarray) and array.dtype.kind in "US"]
        return None if any(array.ndim > 1 for array in texts) else self._form

    def name_of(self, index: int) -> str:
        return f"row {index} of {self.path}"

    def describe(self) -> str:
        return f"{len(self._arrays)} arrays" if isinstance(self._form, dict | tuple) else "array"

    @property
    def metadata(self) -> dict[str, Any]:
        return {"kind": self.kind, "source": self.path}

    @property
    def field_names(self) -> tuple[str, ...] | None:
        return None if isinstance(self._form, dict | tuple) else tuple(self._arrays)


def _value(array: Stored, index: int) -> torch.Tensor | str | bytes:
    row = array[index]
    if isinstance(row, torch.Tensor):
        return row.clone()
    if array.dtype.kind in "US":  # type: ignore[union-attr]
        if array.ndim > 1:
            raise SourceError(getattr(array, "filename", "array"), "rows of several strings cannot be stored")
        return str(row) if array.dtype.kind == "U" else bytes(row)  # type: ignore[union-attr]
    return torch.from_numpy(np.array(row, dtype=array.dtype.newbyteorder("="), order="C"))  # type: ignore[union-attr]
