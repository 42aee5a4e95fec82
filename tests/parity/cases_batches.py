"""What torch's default collate makes of samples of every kind."""

from __future__ import annotations

import datetime
from collections import Counter, OrderedDict, UserDict, UserList
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from .compare import Cases
from .samples import (
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
    counts,
    plain_mapping,
)

CASES = Cases()

TORCH_DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)
NUMPY_DTYPES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)


def _tensors(dtype: torch.dtype) -> Any:
    def build() -> Any:
        items = [torch.tensor([0, index, 1]).to(torch.float32).to(dtype) for index in range(7)]
        return Fixed(items), {"batch_size": 3}

    return build


def _arrays(dtype: str) -> Any:
    def build() -> Any:
        return Fixed([np.array([[0, index, 1]]).astype(dtype) for index in range(7)]), {"batch_size": 3}

    return build


def _scalars(dtype: str) -> Any:
    def build() -> Any:
        return Fixed([np.dtype(dtype).type(index) for index in range(7)]), {"batch_size": 3}

    return build


def _zero_d_arrays(dtype: str) -> Any:
    def build() -> Any:
        return Fixed([np.array(index).astype(dtype) for index in range(7)]), {"batch_size": 3}

    return build


for _dtype in TORCH_DTYPES:
    _name = str(_dtype).removeprefix("torch.")
    CASES.add(f"tensor_{_name}", f"Tensors of {_name} keep values and dtype.", _tensors(_dtype))
for _kind in NUMPY_DTYPES:
    CASES.add(f"array_{_kind}", f"numpy arrays of {_kind} become tensors of the twin dtype.", _arrays(_kind))
    CASES.add(f"scalar_{_kind}", f"numpy scalars of {_kind} become a tensor as torch makes it.", _scalars(_kind))
    CASES.add(f"zero_d_{_kind}", f"0-d arrays of {_kind} become rank 1.", _zero_d_arrays(_kind), workers=(0,))


def _fixed(name: str, claim: str, items: Any, *, batch_size: int = 3, **options: Any) -> None:
    """Declare a case whose samples are given as a list, or as a function from 0..6 to a sample."""

    def build() -> Any:
        return Fixed([items(index) for index in range(7)] if callable(items) else items), {"batch_size": batch_size}

    CASES.add(name, claim, build, **options)


# Python's own values
_fixed("ints", "Python ints become int64.", lambda i: i - 3)
_fixed("large_ints", "Ints near the border of int64 survive.", lambda i: 2**63 - 1 - i)
_fixed("huge_ints", "An int beyond int64 fails as in torch.", lambda i: 2**70 + i)
_fixed("floats", "Python floats become float64.", lambda i: i / 7)
_fixed("special_floats", "nan, infinities and minus zero survive.", [float("nan"), float("inf"), -float("inf"), -0.0])
_fixed("bools", "Python bools become bool.", lambda i: i % 2 == 0)
_fixed("ints_and_floats", "The first element decides, as in torch.", [1, 2.5, 3, 4.5, 5, 6.5])
_fixed("floats_and_ints", "The first element decides, as in torch.", [1.5, 2, 3.5, 4, 5.5, 6])
_fixed("bools_and_ints", "A bool among ints.", [True, 2, False, 3])
_fixed("strings", "Strings stay a list of str.", lambda i: f"näme {i} ☃")
_fixed("empty_strings", "Empty strings stay.", lambda i: "")
_fixed("bytes", "bytes stay bytes.", lambda i: bytes(range(i)))
_fixed("complex_python", "A Python complex fails as in torch.", lambda i: complex(i, 1))
_fixed("nones", "None fails in default collate, as in torch.", lambda i: None, texts=("default_collate",))
_fixed("unknown_objects", "Unknown objects fail in default collate, as in torch.", Opaque, texts=("default_collate",))
_fixed("dataclasses", "A dataclass fails in default collate, as in torch.", lambda i: Record(i, i))
_fixed("frozen_dataclasses", "A frozen dataclass fails in default collate, as in torch.", lambda i: Frozen(i, i))
_fixed("namespaces", "A SimpleNamespace fails in default collate.", lambda i: SimpleNamespace(a=i))
_fixed("sets", "A set fails in default collate.", lambda i: {i})
_fixed("dates", "A date fails in default collate.", lambda i: datetime.date(2024, 1, i + 1))
_fixed("numpy_strings", "numpy strings fail, with torch's text.", lambda i: np.array(["a", "b"]))
_fixed("numpy_objects", "numpy object arrays fail, with torch's text.", lambda i: np.array([None, i], dtype=object))
_fixed("numpy_dates", "datetime64 fails as in torch.", lambda i: np.array(["2024-01-01"], dtype="datetime64[D]"))
_fixed("numpy_str_scalar", "A numpy str scalar is a str, too.", lambda i: np.str_(f"s{i}"))

# shapes
_fixed("zero_d_tensors", "0-d tensors become rank 1.", lambda i: torch.tensor(float(i)))
_fixed("zero_length", "Tensors without elements keep their shape.", lambda i: torch.empty(0, 3))
_fixed("zero_length_arrays", "Arrays without elements keep dtype and shape.", lambda i: np.empty((2, 0), np.int16))
_fixed("high_rank", "Eight dimensions.", lambda i: torch.full((1, 2, 1, 2, 1, 2, 1, 2), i))
_fixed("transposed", "Non-contiguous samples are read by value.", lambda i: torch.arange(6).reshape(2, 3).t() + i)
_fixed("transposed_arrays", "Fortran order is read by value.", lambda i: np.asfortranarray(np.arange(6).reshape(2, 3)))
_fixed("strided_arrays", "Negative strides fail or work as in torch.", lambda i: np.arange(6)[::-1])
_fixed("big_endian", "Foreign byte order fails or works as in torch.", lambda i: np.arange(3, dtype=">i4"))
_fixed("expanded", "Expanded samples are read by value.", lambda i: torch.tensor([i]).expand(4))
_fixed("conjugated", "A lazy conjugate is resolved.", lambda i: torch.tensor([1 + 2j, i]).conj(),
       torch_garbles=True)  # fmt: skip
_fixed("negated", "A lazily negated view is resolved.", lambda i: torch.tensor([1 + 2j, i]).conj().imag,
       torch_garbles=True)  # fmt: skip
_fixed("requires_grad", "A sample that requires grad: stacked in main, an error of torch in workers.", workers=(0,),
       items=lambda i: torch.ones(2, requires_grad=True))  # fmt: skip
_fixed("channels_last", "channels_last samples stack by value.",
       lambda i: torch.rand(1, 3, 2, 2).contiguous(memory_format=torch.channels_last)[0])  # fmt: skip
_fixed("mixed_dtypes", "Samples of different dtype are promoted as in torch.",
       [torch.tensor([1]), torch.tensor([1.5]), torch.tensor([2], dtype=torch.int8)],
       torch_garbles=True)  # fmt: skip
_fixed("mixed_dtypes_down", "The order does not matter.",
       [torch.tensor([1.5], dtype=torch.half), torch.tensor([1.5], dtype=torch.double), torch.tensor([1])],
       torch_garbles=True)  # fmt: skip
_fixed("mixed_arrays", "Arrays of different dtype are promoted as in torch.",
       [np.array([1], np.uint8), np.array([-1], np.int64), np.array([2], np.int16)],
       torch_garbles=True)  # fmt: skip
_fixed("mixed_numpy_scalars", "numpy scalars of several dtypes.", [np.int8(1), np.int64(2), np.int8(3)])
_fixed("tensor_subclass", "A tensor subclass comes out as torch gives it.",
       lambda i: torch.full((2,), float(i)).as_subclass(MyTensor), workers=(0,))  # fmt: skip
_fixed("parameters", "nn.Parameter without grad.", lambda i: torch.nn.Parameter(torch.ones(2), requires_grad=False))
_fixed("sparse", "Sparse samples: torch stacks them to one sparse batch.", lambda i: torch.eye(3).to_sparse() * i)
_fixed("one_element_batches", "batch_size 1 keeps the axis.", lambda i: torch.full((2,), i), batch_size=1)
_fixed("large_samples", "Samples of a megabyte.", lambda i: torch.full((512, 512), i), batch_size=2)

# containers
_fixed("tuples", "B7: tuples become lists, as torch does.", lambda i: (torch.tensor([i]), i, str(i)))
_fixed("lists", "Lists become lists.", lambda i: [np.array([i]), float(i)])
_fixed("dicts", "B7: dicts keep keys and order.", lambda i: {"b": i, "a": torch.tensor(i)})
_fixed("int_keys", "Keys need not be strings.", lambda i: {1: i, (2, 3): i, None: float(i)})
_fixed("ordered_dicts", "B7: OrderedDict stays OrderedDict.", lambda i: OrderedDict(z=i, a=float(i)))
_fixed("defaultdicts", "B7: defaultdict stays, factory and all.", counts)
_fixed("counters", "B7: Counter as torch makes it.", lambda i: Counter(a=i, b=2))
_fixed("dict_subclass", "B7: a dict subclass stays that subclass.", lambda i: MyDict(a=i, b=torch.tensor([i])))
_fixed("dict_with_attributes", "B7: a dict subclass with an attribute.", lambda i: Tagged(a=i))
_fixed("user_dicts", "B7: a UserDict as torch makes it.", lambda i: UserDict(a=i), workers=(0,))
_fixed("mapping_proxies", "A mapping that is no dict.", lambda i: MappingProxyType({"a": i}), workers=(0,))
_fixed("list_subclass", "B7: a list subclass stays that subclass.", lambda i: MyList([i, float(i)]))
_fixed("tuple_subclass", "B7: a tuple subclass as torch makes it.", lambda i: MyTuple((i, float(i))))
_fixed("user_lists", "A UserList as torch makes it.", lambda i: UserList([i, float(i)]))
_fixed("ranges", "A range is a sequence.", lambda i: range(i, i + 3))
_fixed("namedtuples", "B7: a namedtuple stays that namedtuple.", lambda i: Point(torch.tensor([i]), str(i)))
_fixed("nested", "B7: nested structures keep every type.", plain_mapping)
_fixed("deep", "Six floors of nesting.", lambda i: {"a": [({"b": [Point(i, (float(i),))]},)]})
_fixed("empty_containers", "Empty tuples and dicts.", lambda i: (i, (), {}, []))
_fixed("many_fields", "A4: 120 small fields.", lambda i: {f"f{k}": torch.tensor([i, k]) for k in range(120)})
_fixed("many_kinds", "A4: 60 fields of mixed kinds.", lambda i: {f"f{k}": (i, float(k), f"{k}") for k in range(20)})

# samples that do not fit together
_fixed("ragged", "E1: unequal shapes are one error that shows both shapes, with and without workers.",
       [torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(1, 2), torch.ones(3, 2)], error=RuntimeError,
       our_texts=("equal size", "[3, 2]", "[1, 2]"), main_texts=("equal size", "[3, 2]", "[1, 2]"))  # fmt: skip
_fixed("ragged_field", "E1: the field is named.",
       [{"image": torch.zeros(3), "label": 1}, {"image": torch.zeros(4), "label": 2}], error=RuntimeError,
       our_texts=("equal size", "image", "[3]", "[4]"), main_texts=("equal size", "image", "[3]", "[4]"))  # fmt: skip
_fixed("ragged_arrays", "E1: unequal arrays.", [np.zeros(3), np.zeros(4)], error=RuntimeError,
       our_texts=("[3]", "[4]"), main_texts=("[3]", "[4]"))  # fmt: skip
_fixed("ragged_tuples", "Tuples of unequal length fail as in torch.", [(1, 2), (1, 2, 3)],
       texts=("each element in list of batch should be of equal size",))  # fmt: skip
_fixed("missing_keys", "A key that only some samples have fails as in torch.", [{"a": 1, "b": 2}, {"a": 1}],
       texts=("b",))  # fmt: skip
_fixed("extra_keys", "A key that only later samples have is left out, as in torch.", [{"a": 1}, {"a": 1, "b": 2}])
_fixed("tensor_then_number", "A number among tensors is an error.", [torch.tensor(1), 2], error=TypeError)
_fixed("number_then_tensor", "A tensor among numbers as in torch.", [1, torch.tensor(2), 3])
_fixed("string_then_number", "Strings and numbers mixed: torch keeps the list.", ["a", 1, "b"])
_fixed("none_in_field", "A None in a field fails as in torch.", [(1, None), (2, None)], texts=("NoneType",))


@CASES.case(free_warnings=True)
def pin_memory_without_accelerator() -> Any:
    """B7: pin_memory=True on a machine without an accelerator: right data, types kept, one warning."""
    return Fixed([plain_mapping(i) for i in range(5)]), {"batch_size": 2, "pin_memory": True}


@CASES.case(error=RuntimeError, our_texts=("40", "57", "[2]", "[1]"), main_texts=("40", "57", "[2]", "[1]"))
def ragged_by_index() -> Any:
    """E1: both samples are named by their index in the dataset, not by their place in the batch."""
    return Fixed([torch.zeros(1 if i == 57 else 2) for i in range(60)]), {"batch_sampler": [[3], [40, 41, 57, 8]]}


@CASES.case()
def defaults() -> Any:
    """No argument but the dataset."""
    return Rows(4), {}
