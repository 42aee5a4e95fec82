"""Files of arrays, opened: a dict of arrays by name, a tuple, or one. Mapped where the format allows, else read.

    .npy            one            mapped
    .npz            a dict         mapped where members are stored plain (np.savez), read where compressed
    .pt .pth        as saved       mapped where saved since torch 1.6: a tensor, a tuple, list or dict of them
    .safetensors    a dict         mapped

No file runs code: pickles may hold nothing but tensors and plain containers of them.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
import zipfile
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import TensorDataset

from ..errors import MissingExtra, SourceError

Stored: TypeAlias = npt.NDArray[Any] | torch.Tensor
Opened: TypeAlias = dict[str, Stored] | tuple[Stored, ...] | Stored

SUFFIXES = (".npy", ".npz", ".pt", ".pth", ".safetensors")


def open_arrays(path: str) -> Opened:
    """Open one file. Raises SourceError if it is damaged, or holds something else than arrays; MissingExtra."""
    try:
        if path.endswith(".npz"):
            return dict(_map_npz(path))
        if path.endswith(".safetensors"):
            return _map_safetensors(path)
        if path.endswith((".pt", ".pth")):
            return _load_torch(path)
        return map_npy(path)
    except (ValueError, EOFError, zipfile.BadZipFile, struct.error) as fault:
        raise SourceError(path, f"not readable as an array file: {fault}") from fault


def map_npy(path: str, offset: int = 0) -> npt.NDArray[Any]:
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


def _map_npz(path: str) -> dict[str, npt.NDArray[Any]]:
    """Return the members of an .npz in the order of the file."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        for member in archive.infolist():
            if not member.filename.endswith(".npy"):
                raise ValueError(f"its member {member.filename!r} is not an array")
            name = member.filename[: -len(".npy")]
            if member.compress_type == zipfile.ZIP_STORED:
                file.seek(member.header_offset)
                local = file.read(30)  # its name and extra field may differ in length from the directory's
                name_length, extra_length = struct.unpack("<HH", local[26:30])
                arrays[name] = map_npy(path, member.header_offset + 30 + name_length + extra_length)
            else:
                with archive.open(member) as stream:
                    arrays[name] = np.lib.format.read_array(stream, allow_pickle=False)
    return arrays


def _map_safetensors(path: str) -> dict[str, Stored]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise MissingExtra("safetensors", "safetensors", f"read {path}") from None
    try:
        with safe_open(path, framework="pt") as file:
            names: list[str] = file.keys()
            return {name: plain(file.get_tensor(name)) for name in names}
    except SafetensorError as fault:
        raise ValueError(str(fault)) from fault


def _load_torch(path: str) -> Opened:
    try:
        found = _unpickle(path)
    except pickle.UnpicklingError as fault:
        raise SourceError(
            path,
            "its pickle holds more than tensors, and loading that would run code: save a tensor, or a dict or tuple of "
            f"tensors, with torch.save, or pack the dataset from Python (--dataset). torch says: {_first(fault)}",
        ) from fault
    except (RuntimeError, LookupError, TypeError, AttributeError) as fault:  # of torch's readers: it is no such file
        raise ValueError(f"{type(fault).__name__}: {_first(fault)}") from fault
    if isinstance(found, TensorDataset):
        found = found.tensors
    if isinstance(found, torch.Tensor):
        return plain(found)
    if isinstance(found, dict) and found and all(isinstance(each, torch.Tensor) for each in found.values()):
        return {str(name): plain(tensor) for name, tensor in found.items()}
    if isinstance(found, list | tuple) and found and all(isinstance(each, torch.Tensor) for each in found):
        return tuple([plain(tensor) for tensor in found])
    raise SourceError(path, f"holds {_what(found)}: a tensor, or a dict or tuple of tensors, was looked for")


def _unpickle(path: str) -> Any:
    allowed = contextlib.nullcontext()
    if "safe_globals" in vars(torch.serialization):  # torch >= 2.5
        allowed = torch.serialization.safe_globals([TensorDataset])  # type: ignore[assignment]
    with allowed:
        # Files of before torch 1.6 are no zip files, and cannot be mapped.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))


def _first(fault: BaseException) -> str:
    return str(fault).strip().partition("\n")[0][:300]


def _what(found: Any) -> str:
    inside = list(found.values()) if isinstance(found, dict) else list(found) if isinstance(found, list | tuple) else []
    kinds = sorted({type(each).__name__ for each in inside if not isinstance(each, torch.Tensor)})
    return f"a {type(found).__name__}" + (f" with {', '.join(kinds)} in it" if kinds else "")


def plain(tensor: torch.Tensor) -> Stored:
    """Return a tensor as the NumPy array over the same memory, or, where NumPy does not know its dtype, itself."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise ValueError(f"it holds a tensor of layout {tensor.layout} and dtype {tensor.dtype}, which has no rows")
    tensor = tensor.detach().resolve_conj().resolve_neg()
    try:
        return tensor.numpy()
    except TypeError:  # bfloat16, float8
        return tensor
