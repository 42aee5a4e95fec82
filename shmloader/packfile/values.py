"""From what a sample holds to what is stored: one value -> its kind, dtype, shape and contiguous array. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .schema import TORCH_DTYPES, storage_dtype
from .windows import Windowing

Bytes = npt.NDArray[np.uint8]

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_SAME_IN_NUMPY = {storage_dtype(name): name for name in TORCH_DTYPES if storage_dtype(name).name == name}
_NUMPY_KNOWS = frozenset(_SAME_IN_NUMPY.values())
_LEAST, _MOST = -(2**63), 2**63 - 1


class Unstorable(Exception):
    """``found`` says what it is that cannot be stored. Internal: the packer adds sample and field."""

    def __init__(self, found: str) -> None:
        super().__init__(found)
        self.found = found


class Value(NamedTuple):
    """One leaf of one sample, ready to be stored."""

    kind: str
    dtype: str
    array: npt.NDArray[Any]
    """Contiguous, in this machine's byte order; uint8 for str and bytes. May share memory with the dataset's value."""

    windowing: Windowing | None = None
    """Of a column of windows: how its rows overlap."""

    def describe(self) -> str:
        """Say in a few words what it is, for messages: ``uint8 array of shape (3, 8, 8)``."""
        return describe(self.kind, self.dtype, self.array.shape)


def describe(kind: str, dtype: str, shape: tuple[int | None, ...]) -> str:
    """Say in a few words what a field holds; None in ``shape`` is shown as ``*``."""
    if kind != "array":
        return f"{'an' if kind == 'int' else 'a'} {kind}"
    inside = ", ".join("*" if length is None else str(length) for length in shape) + ("," if len(shape) == 1 else "")
    return f"{dtype} array of shape ({inside})"


def value_of(value: Any) -> Value:
    """Return ``value`` as it will be stored. Copies only what is not contiguous, on a device, or byte-swapped.

    Raises Unstorable.
    """
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    if isinstance(value, str):
        return Value("str", "str", np.frombuffer(value.encode("utf-8", "surrogatepass"), np.uint8))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return Value("bytes", "bytes", np.frombuffer(value, np.uint8))
    if isinstance(value, (np.ndarray, np.generic)):
        return _of_array(np.asarray(value))
    if isinstance(value, bool):
        return Value("bool", "bool", np.array(value))
    if isinstance(value, int):
        if not _LEAST <= value <= _MOST:
            raise Unstorable(f"the number {value}, which does not fit into 64 bits")
        return Value("int", "int64", np.array(value, np.int64))
    if isinstance(value, float):
        return Value("float", "float64", np.array(value, np.float64))
    if type(value).__module__.partition(".")[0] == "PIL":
        raise Unstorable("an image object of Pillow: turn it into an array, or give the bytes of its file")
    raise Unstorable("None" if value is None else f"a value of type {type(value).__name__}")


def _of_array(array: npt.NDArray[Any]) -> Value:
    name = _SAME_IN_NUMPY.get(array.dtype)
    if name is not None and array.flags.c_contiguous:
        return Value("array", name, array)
    dtype = array.dtype.newbyteorder("=")
    name = _SAME_IN_NUMPY.get(dtype)
    if name is None:
        raise Unstorable(f"a numpy array of dtype {array.dtype}, which torch does not know")
    # ascontiguousarray makes a number one-dimensional; the reshape takes that back.
    return Value("array", name, np.ascontiguousarray(array, dtype).reshape(array.shape))


def _of_tensor(tensor: torch.Tensor) -> Value:
    name = _NAMES.get(tensor.dtype)
    if name is None or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        raise Unstorable(f"a tensor of dtype {tensor.dtype} and layout {tensor.layout}")
    if name in _NUMPY_KNOWS:
        array = tensor.numpy(force=True)  # detached, on the CPU, neither conjugated nor negated lazily
        return Value("array", name, array if array.flags.c_contiguous else np.array(array, order="C"))
    if not tensor.numel():
        return Value("array", name, np.empty(tuple(tensor.shape), storage_dtype(name)))
    plain = tensor.detach().cpu().contiguous()
    bits = plain.reshape(-1).view(torch.uint8).numpy().view(storage_dtype(name)).reshape(tuple(tensor.shape))
    return Value("array", name, bits)
