"""What a loader must carry through untouched: no default collate, so anything may come out of the dataset."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import pathlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pack_sequence

from .compare import Cases
from .samples import (
    Custom,
    Fixed,
    Frozen,
    MyDict,
    MyList,
    MyTensor,
    MyTuple,
    Opaque,
    Point,
    Record,
    Rows,
    Tagged,
    TwoArguments,
    counts,
    plain_mapping,
)

CASES = Cases()


class Colour(enum.Enum):
    """An enum for a leaf."""

    RED = 1


def identity(samples: list[Any]) -> list[Any]:
    """Return the samples as they are."""
    return samples


def first(samples: list[Any]) -> Any:
    """Return the first sample: the batch is whatever the sample was."""
    return samples[0]


def _carried(name: str, claim: str, make: Any, **options: Any) -> None:
    """Declare two cases: three samples in a list (identity collate), and each sample alone (batch_size=None)."""

    def in_list() -> Any:
        return Fixed([make(index) for index in range(5)]), {"batch_size": 3, "collate_fn": identity}

    def alone() -> Any:
        return Fixed([make(index) for index in range(3)]), {"batch_size": None}

    CASES.add(f"{name}_in_list", f"{claim} (identity collate)", in_list, **options)
    CASES.add(f"{name}_alone", f"{claim} (batch_size=None)", alone, **options)


def _sparse(index: int) -> torch.Tensor:
    indices = torch.tensor([[0, 1, 1], [2, 0, 0]])
    return torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0, float(index)]), (2, 3), check_invariants=False)


def _csr(index: int) -> torch.Tensor:
    crow, col = torch.tensor([0, 1, 2]), torch.tensor([0, 1])
    return torch.sparse_csr_tensor(crow, col, torch.tensor([1.0, float(index)]), (2, 2), check_invariants=False)


def _quantized(index: int) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.tensor([0.0, 1.0, index]), 0.1, 10, torch.quint8)


def _per_channel(index: int) -> torch.Tensor:
    scales, zeros = torch.tensor([0.1, 0.5]), torch.tensor([0, 3])
    return torch.quantize_per_channel(torch.tensor([[1.0, 2.0], [index, 4.0]]), scales, zeros, 0, torch.qint8)


def _nested_strided(index: int) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(index + 1, 2), torch.zeros(2, 2)])


def _packed(index: int) -> Any:
    return pack_sequence([torch.arange(3.0), torch.full((2,), index)], enforce_sorted=False)


def _sharing(index: int) -> Any:
    base = torch.arange(6.0) + index
    return base, base[2:4], base.view(2, 3)


def _leaf(index: int) -> torch.Tensor:
    return torch.full((2,), float(index), requires_grad=True)


def _structured(index: int) -> np.ndarray[Any, Any]:
    return np.array([(index, 1.5)], dtype=[("i", "i4"), ("f", "f8")])


# tensors that are no plain array
_carried("sparse_coo", "An uncoalesced sparse tensor keeps its parts.", _sparse)
_carried("sparse_coalesced", "A coalesced sparse tensor stays coalesced.", lambda i: _sparse(i).coalesce())
_carried("sparse_csr", "A CSR tensor keeps its layout.", _csr)
_carried("quantized", "A quantised tensor keeps scale and zero point.", _quantized, torch_garbles=True)
_carried("quantized_channels", "A per-channel quantised tensor keeps all scales.", _per_channel,
         torch_garbles=True)  # fmt: skip
_carried("nested_strided", "A nested tensor keeps its parts.", _nested_strided)
_carried("packed_sequence", "B7: a PackedSequence stays one.", _packed)
_carried("leaves", "A leaf that requires grad still does.", _leaf)
_carried("parameters", "An nn.Parameter comes out as torch gives it.", lambda i: torch.nn.Parameter(torch.ones(i + 1)))
_carried("tensor_subclass", "A tensor subclass.", lambda i: torch.ones(2).as_subclass(MyTensor))
_carried("transposed", "Non-contiguous tensors keep their values.", lambda i: torch.arange(6).reshape(2, 3).t() + i)
_carried("expanded", "Expanded tensors keep shape and values.", lambda i: torch.tensor([[i]]).expand(3, 4))
_carried("strided", "Every other element.", lambda i: (torch.arange(9) + i)[::2])
_carried("sharing", "Views that share one storage.", _sharing)
_carried("zero_d", "0-d tensors stay 0-d.", torch.tensor)
_carried("zero_length", "Tensors without elements.", lambda i: torch.empty(0, i, 2))
_carried("bfloat16", "bfloat16 survives.", lambda i: torch.tensor([1.5, i], dtype=torch.bfloat16))
_carried("uint64", "uint64 survives.", lambda i: torch.tensor([2**40, i]).to(torch.uint64))
_carried("complex", "complex64 survives.", lambda i: torch.tensor([1j, i]))
_carried("conjugated", "A lazy conjugate keeps its value.", lambda i: torch.tensor([1j, i + 2j]).conj(),
         torch_garbles=True)  # fmt: skip
_carried("bool", "bool survives.", lambda i: torch.tensor([True, i % 2 == 0]))

# numpy
_carried("arrays", "Arrays: kept as arrays by identity, converted by batch_size=None.", lambda i: np.arange(i + 1))
_carried("zero_d_arrays", "0-d arrays.", lambda i: np.array(i, dtype=np.int16))
_carried("fortran", "Fortran-ordered arrays.", lambda i: np.asfortranarray(np.arange(6).reshape(2, 3) + i))
_carried("big_endian", "Foreign byte order stays or fails.", lambda i: np.array([i, 258], dtype=">i4"),
         torch_garbles=True)  # fmt: skip
_carried("structured", "Structured arrays fail or survive as in torch.", _structured)
_carried("object_arrays", "Object arrays.", lambda i: np.array([None, "x", i], dtype=object))
_carried("string_arrays", "Arrays of strings.", lambda i: np.array(["a", "b" * i]))
_carried("dates_numpy", "datetime64 arrays.", lambda i: np.array(["2024-01-01"], dtype="datetime64[D]"))
_carried("numpy_scalars", "numpy scalars of several types.", lambda i: (np.float32(i), np.int8(i), np.bool_(i % 2)))
_carried("numpy_complex", "numpy complex.", lambda i: np.array([1j, i]))

# containers
_carried("tuples", "A tuple stays a tuple.", lambda i: (torch.tensor([i]), i, f"s{i}", None))
_carried("empty", "Empty containers.", lambda i: ((), [], {}, "", b""))
_carried("namedtuples", "B7: a namedtuple stays.", lambda i: Point(torch.tensor([i]), Point(i, None)))
_carried("dataclasses", "B7: a dataclass stays, tensors inside.", lambda i: Record(torch.tensor([i]), i, [f"n{i}"]))
_carried("frozen_slots", "B7: a frozen dataclass with slots.", lambda i: Frozen(torch.tensor([i]), np.arange(i)))
_carried("ordered_dict", "B7: OrderedDict.", lambda i: collections.OrderedDict(b=torch.tensor(i), a=i))
_carried("defaultdict", "B7: defaultdict keeps its factory.", counts)
_carried("counter", "B7: Counter.", lambda i: collections.Counter("abca" * i))
_carried("dict_subclass", "B7: a dict subclass.", lambda i: MyDict(a=torch.tensor([i])))
_carried("dict_with_attribute", "B7: a dict subclass with an attribute.", lambda i: Tagged(a=i))
_carried("list_subclass", "B7: a list subclass.", lambda i: MyList([torch.tensor([i]), i]))
_carried("tuple_subclass", "B7: a tuple subclass.", lambda i: MyTuple((i, torch.tensor([i]))))
_carried("deque", "A deque.", lambda i: collections.deque([i, torch.tensor([i])], maxlen=7))
_carried("sets", "Sets.", lambda i: ({i, "a"}, frozenset({i})))
_carried("plain_mapping", "A sample as people write them.", plain_mapping)
_carried("keys", "Keys of any type.", lambda i: {1: i, (2, "x"): torch.tensor(i), None: [], Colour.RED: i})

# leaves of Python
_carried("none", "None is a batch like any other.", lambda i: None)
_carried("strings", "Strings, also with surrogates.", lambda i: f"ä☃ {i} \ud800")
_carried("bytes", "bytes and bytearray.", lambda i: (bytes(range(i)), bytearray(range(i))))
_carried("long_text", "A text of 300 kB.", lambda i: f"{i} " * 100_000)
_carried("numbers", "int, float, bool, complex, huge int.", lambda i: (i, i / 3, i > 1, complex(i, 1), 2**80 + i))
_carried("fractions", "Fraction and Decimal.", lambda i: (fractions.Fraction(i, 7), decimal.Decimal(i) / 7))
_carried("dates", "Dates and paths.", lambda i: (datetime.datetime(2024, 1, i + 1), pathlib.PurePosixPath(f"a/{i}")))
_carried("enums", "Enum members.", lambda i: Colour.RED)
_carried("ellipsis", "Ellipsis, slices, ranges.", lambda i: (..., slice(1, i), range(i)))
_carried("classes", "Classes and functions are values.", lambda i: (Point, identity, int))
_carried("torch_values", "Size, dtype, device.", lambda i: (torch.Size([i, 2]), torch.int8, torch.device("cpu")))
_carried("opaque", "An object of an unknown class, tensor inside.", Opaque)
_carried("namespaces", "A SimpleNamespace with an array.", lambda i: SimpleNamespace(a=np.arange(i), b="x"))
_carried("exceptions", "C4: an exception may be data, not an error.", lambda i: (Custom(f"no {i}"), KeyError(i)))
_carried("odd_exceptions", "C4: data that cannot be rebuilt from its pickle fails or not as in torch, never hangs.",
         lambda i: TwoArguments(i, "x"), workers=(0,))  # fmt: skip
_carried("modules", "A torch module.", lambda i: torch.nn.Linear(1, 1, bias=False).requires_grad_(False).state_dict())


@CASES.case()
def grows_from_batch_to_batch() -> Any:
    """A batch far larger than the first ones fits, too: nobody knows the largest beforehand."""
    items = [torch.full((10 ** (index % 6),), index) for index in range(12)]
    return Fixed(items), {"batch_size": 2, "collate_fn": identity}


@CASES.case()
def alternating_structures() -> Any:
    """No two batches have the same structure."""
    items = [torch.ones(3), "text", {"a": np.arange(2)}, None, (1, [torch.eye(0)]), b"raw", Opaque(2), 7, torch.eye(2)]
    return Fixed(items), {"batch_size": 1, "collate_fn": first}


@CASES.case()
def jagged_nested_alone() -> Any:
    """A jagged nested tensor: values and offsets arrive."""
    items = [torch.nested.nested_tensor([torch.ones(i + 1), torch.zeros(2)], layout=torch.jagged) for i in range(3)]
    return Fixed(items), {"batch_size": None}


@CASES.case(free_warnings=True)
def pinning_keeps_types() -> Any:
    """B7: pin_memory=True changes no type, accelerator or not."""
    sample = (Point(1, torch.ones(2)), Tagged(a=1), MyList([1]), Record(torch.ones(1), 2), _packed(1))
    items = [sample] * 4
    return Fixed(items), {"batch_size": 2, "collate_fn": identity, "pin_memory": True}


@CASES.case()
def rows_alone() -> Any:
    """batch_size=None on an ordinary dataset: samples one by one, unbatched."""
    return Rows(6), {"batch_size": None}


@CASES.case()
def rows_alone_shuffled() -> Any:
    """batch_size=None with shuffle."""
    return Rows(9), {"batch_size": None, "shuffle": True}
