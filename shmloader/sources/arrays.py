"""Arrays on disk: an ``.npy`` file, an ``.npz`` file, or a folder of ``.npy`` files, one row per sample.

    images.npy            samples are rows:   images[i]
    data.npz              samples are dicts:  {"x": x[i], "y": y[i]}
    folder/x.npy, y.npy   the same, and all of it memory-mapped

All arrays of a set have the same first axis. ``.npy`` files, and the members of an ``.npz`` written by ``np.savez``
(not ``savez_compressed``), are memory-mapped: their size does not count against RAM.
"""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..errors import MisuseError, SourceError
from .base import Array, Options, Source, StrPath, position

_TORCH_KINDS = "biufc"


def _npy_names(folder: str) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(e.name for e in entries if e.is_file() and e.name.endswith(".npy") and not e.name.startswith("."))


def _map_npy(path: str, offset: int = 0) -> Array:
    """Memory-map the array whose .npy header begins at ``offset``. Empty arrays cannot be mapped and are read."""
    with open(path, "rb") as file:
        file.seek(offset)
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read_header(file)
        if dtype.hasobject:
            raise ValueError("it holds Python objects, not numbers: reading them would run code from the file")
        start = file.tell()
        nbytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
        there = os.fstat(file.fileno()).st_size - start
        if there < nbytes:
            raise ValueError(f"the file is cut: {nbytes} bytes of data were announced, {there} are there")
        if not nbytes:
            return np.empty(shape, dtype)
    order: Any = "F" if fortran else "C"
    return np.memmap(path, dtype, "r", start, shape, order)


def _map_npz(path: str) -> dict[str, Array]:
    """Return the members of an .npz in the order of the file: mapped where stored plain, else read."""
    arrays: dict[str, Array] = {}
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        for member in archive.infolist():
            if not member.filename.endswith(".npy"):
                raise ValueError(f"its member {member.filename!r} is not an array")
            name = member.filename[: -len(".npy")]
            if member.compress_type == zipfile.ZIP_STORED:
                file.seek(member.header_offset)
                local = file.read(30)  # its name and extra field may differ in length from the directory's
                name_length, extra_length = struct.unpack("<HH", local[26:30])
                arrays[name] = _map_npy(path, member.header_offset + 30 + name_length + extra_length)
            else:
                with archive.open(member) as stream:
                    arrays[name] = np.lib.format.read_array(stream, allow_pickle=False)
    return arrays


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
    """The rows of ``.npy`` / ``.npz`` files, as new tensors of the file's own dtype (in this machine's byte order).

    One ``.npy`` gives the rows themselves, several arrays give dicts. A one-dimensional array gives 0-d tensors, so
    that its dtype survives collation; arrays of strings give ``str``, of fixed-length bytes ``bytes``.
    Raises SourceError for files that are damaged, hold Python objects, or do not fit together: it names both lengths.
    """

    kind = "arrays"
    looked_for = "an .npy or .npz file, or a folder of .npy files, with one row per sample"

    def __init__(self, path: StrPath) -> None:
        self.path = os.fspath(path)
        self._open()

    def _open(self) -> None:
        self._arrays = self._read()
        self._single = self.path.endswith(".npy")
        first = ""
        for name, array in self._arrays.items():
            if array.ndim == 0:
                raise SourceError(self.path, f"array {name!r} is a single number: it has no rows")
            if not _storable(array.dtype):
                raise SourceError(self.path, f"array {name!r} has dtype {array.dtype}, which torch does not know")
            first = first or name
            if len(array) != len(self._arrays[first]):
                raise SourceError(
                    self.path,
                    f"arrays of different lengths: {first!r} has {len(self._arrays[first])} rows, "
                    f"{name!r} has {len(array)}",
                )
        self._length = len(self._arrays[first])

    def _read(self) -> dict[str, Array]:
        path = self.path
        try:
            if os.path.isdir(path):
                arrays = {}
                for name in _npy_names(path):
                    path = os.path.join(self.path, name)
                    arrays[name[: -len(".npy")]] = _map_npy(path)
            elif path.endswith(".npz"):
                arrays = _map_npz(path)
            else:
                arrays = {os.path.basename(path).removesuffix(".npy"): _map_npy(path)}
        except (ValueError, EOFError, zipfile.BadZipFile, struct.error) as fault:
            raise SourceError(path, f"not readable as an array file: {fault}") from fault
        if not arrays:
            raise SourceError(self.path, "there is no array in it")
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
        return path.endswith((".npy", ".npz"))

    @classmethod
    def open(cls, path: str, options: Options) -> ArrayFiles:
        if options.fit is not None:
            raise MisuseError(f"{path} holds arrays, not image files: they have their size, --size does not apply")
        return cls(path)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        index = position(index, self._length)
        if self._single:
            return _value(next(iter(self._arrays.values())), index)
        return {name: _value(array, index) for name, array in self._arrays.items()}

    def columns(self) -> Mapping[str, Array] | Array | None:
        if any(array.dtype.kind in "US" for array in self._arrays.values()):
            return None
        return next(iter(self._arrays.values())) if self._single else dict(self._arrays)

    def name_of(self, index: int) -> str:
        return f"row {index} of {self.path}"

    def describe(self) -> str:
        return "array" if self._single else f"{len(self._arrays)} arrays"

    @property
    def metadata(self) -> dict[str, Any]:
        return {"kind": self.kind, "source": self.path}

    @property
    def field_names(self) -> tuple[str, ...] | None:
        return tuple(self._arrays) if self._single else None


def _value(array: Array, index: int) -> torch.Tensor | str | bytes:
    row = array[index]
    if array.dtype.kind in "US":
        if array.ndim > 1:
            raise SourceError(getattr(array, "filename", "array"), "rows of several strings cannot be stored")
        return str(row) if array.dtype.kind == "U" else bytes(row)
    return torch.from_numpy(np.array(row, dtype=array.dtype.newbyteorder("="), order="C"))
