"""From what a sample holds to what is stored: one value -> its kind, dtype, shape and contiguous array. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .schema import TORCH_DTYPES, storage_dtype

Bytes = npt.NDArray[np.uint8]

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_INT64 = range(-(2**63), 2**63)


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
    """Contiguous, in this machine's byte order; bytes for str and bytes. May share memory with what the dataset gave."""

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
        if int(value) not in _INT64:
            raise Unstorable(f"the number {value}, which does not fit into 64 bits")
        return Value("int", "int64", np.array(value, np.int64))
    if isinstance(value, float):
        return Value("float", "float64", np.array(value, np.float64))
    if type(value).__module__.partition(".")[0] == "PIL":
        raise Unstorable("an image object of Pillow: turn it into an array, or give the bytes of its file")
    raise Unstorable("None" if value is None else f"a value of type {type(value).__name__}")


def _of_array(array: npt.NDArray[Any]) -> Value:
    dtype = array.dtype.newbyteorder("=")
    if dtype.name not in TORCH_DTYPES:
        raise Unstorable(f"a numpy array of dtype {array.dtype}, which torch does not know")
    # ascontiguousarray makes a number one-dimensional; the reshape takes that back.
    return Value("array", dtype.name, np.ascontiguousarray(array, dtype).reshape(array.shape))


def _of_tensor(tensor: torch.Tensor) -> Value:
    name = _NAMES.get(tensor.dtype)
    if name is None or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        raise Unstorable(f"a tensor of dtype {tensor.dtype} and layout {tensor.layout}")
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    stored = storage_dtype(name)
    if stored.name == name:
        return Value("array", name, plain.numpy())
    bits = plain.reshape(-1).view(torch.uint8).numpy().view(stored).reshape(tuple(tensor.shape))
    return Value("array", name, bits)
