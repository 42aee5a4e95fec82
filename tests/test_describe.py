"""A finished batch, described, copied into a slot and built again: the same values, types, shapes and order of axes."""

import collections
import dataclasses
import gc
import pickle
import weakref
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shmloader.batch import compile_layout
from shmloader.collate import SlotWriter
from shmloader.describe import BatchDescription
from shmloader.errors import DeviceTensor
from shmloader.layout import MappingNode, PickledNode, SplitLeaf


class Pair(NamedTuple):
    """A namedtuple."""

    x: object
    y: object


@dataclasses.dataclass
class Record:
    """A dataclass with a tensor."""

    image: torch.Tensor
    name: str


class Names(dict):
    """A dict subclass."""


def slot_of(nbytes=1 << 16, start=0):
    """A writer over a slot of its own."""
    memory = np.frombuffer(bytearray(b"\xaa" * nbytes), np.uint8)
    return SlotWriter(memory, memory.__array_interface__["data"][0], 0, nbytes, start)


def through(batch, start=24):
    """Describe, copy, send the description by pickle, build."""
    slot = slot_of(start=start)
    description = BatchDescription(batch, slot)
    assert description.end <= slot.nbytes
    description.copy_pending()
    root = pickle.loads(pickle.dumps(description.root))
    return compile_layout(root)(slot.memory), description


def assert_same(found, expected):
    """Same type all the way down; tensors and arrays also in dtype, shape and values."""
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert found.requires_grad == expected.requires_grad
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert_same(a, b)
    elif dataclasses.is_dataclass(expected):
        assert_same(vars(found), vars(expected))
    else:
        assert found == expected or (found != found and expected != expected)


BATCHES = {
    "tensor": torch.arange(12.0).view(3, 4),
    "0-d": torch.tensor(3.5),
    "empty": torch.zeros(2, 0, 3),
    "bfloat16": torch.ones(3, dtype=torch.bfloat16),
    "bool": torch.tensor([True, False]),
    "complex": torch.tensor([1 + 2j, 3]),
    "requires grad": torch.ones(3, requires_grad=True),
    "parameter": torch.nn.Parameter(torch.ones(2, 2)),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "negative": torch.tensor([1 + 2j]).conj().imag,
    "array": np.arange(6).reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "strided array": np.arange(20)[::3],
    "big endian": np.arange(4, dtype=">i4"),
    "structured": np.array([(1, 2.0)], dtype=[("a", "<i2"), ("b", "<f8")]),
    "dates": np.array(["2020-01-01"], dtype="datetime64[D]"),
    "texts": np.array(["ab", "c"]),
    "objects": np.array([None, "x", [1]], dtype=object),
    "0-d array": np.array(5),
    "numpy scalar": np.float32(2.5),
    "None": None,
    "values": [1, 2.5, "a", b"b", None, True, 1 + 2j, float("nan")],
    "big int": 1 << 200,
    "empty containers": [(), [], {}],
    "dict": {"a": torch.ones(2), "b": [1, 2], "c": {"d": np.ones(3)}},
    "int keys": {1: torch.ones(2), (2, 3): "x"},
    "namedtuple": Pair(torch.ones(2), [np.ones(2)]),
    "dataclass": Record(torch.ones(2, 3), "n"),
    "dict subclass": Names(a=torch.ones(2)),
    "ordered dict": collections.OrderedDict(b=torch.ones(1), a=2),
    "ragged": [torch.full((k, 4), k) for k in (2, 0, 5, 1)],
    "ragged tuple": tuple(torch.full((k,), k) for k in (2, 0, 5, 1)),
    "all empty": [torch.zeros(0, 4) for _ in range(5)],
    "mixed list": [torch.ones(2), torch.ones(2, dtype=torch.int8), torch.ones(1), torch.ones(3)],
    "set": {1, 2, 3},
    "set of strings": frozenset("abc"),
    "range": range(5),
}


@pytest.mark.parametrize("name", BATCHES)
def test_type_in_is_type_out(name):
    """Every kind of value comes back as itself."""
    assert_same(through(BATCHES[name])[0], BATCHES[name])


def test_deep_nesting_and_self_reference_come_back():
    """Forty lists deep, and a list that contains itself."""
    deep = torch.ones(2)
    for _ in range(40):
        deep = [deep]
    assert_same(through(deep)[0], deep)
    loop = [torch.ones(2)]
    loop.append(loop)
    found = through(loop)[0]
    assert found[1][1][0].tolist() == [1, 1]


def test_sparse_tensors_come_back():
    """Their dense parts travel in the slot, not in the pickle."""
    with torch.sparse.check_sparse_tensor_invariants(True):
        sparse = torch.sparse_coo_tensor(
            [[0, 500]], torch.ones(2, 1000), (1000, 1000), check_invariants=True
        ).coalesce()
    with torch.sparse.check_sparse_tensor_invariants(True):
        found, description = through(sparse)
    assert torch.equal(found.to_dense(), sparse.to_dense())
    assert isinstance(description.root, PickledNode)
    assert len(description.root.payload) < 2000


def test_tensors_inside_of_objects_are_lifted_out_of_their_pickle():
    """The payload of an unknown object is its structure alone, and its tensors are views of the slot."""
    record = Record(torch.arange(5000.0), "big")
    found, description = through(record)
    assert isinstance(description.root, PickledNode)
    assert len(description.root.payload) < 500
    assert torch.equal(found.image, record.image)


def test_one_object_named_twice_takes_room_once():
    """Two names of one tensor are two views of the same bytes, as torch's shared memory has it."""
    tensor = torch.arange(4.0)
    found, description = through([tensor, {"again": tensor}])
    assert found[0].data_ptr() == found[1]["again"].data_ptr()
    assert description.copied_bytes == 16


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.randn(4, 6).t(),
        lambda: torch.randn(5, 4, 3).permute(2, 0, 1),
        lambda: torch.randn(1, 3, 1, 5).to(memory_format=torch.channels_last),
        lambda: torch.randn(3, 1).expand(3, 1000),
    ],
)
def test_the_order_of_axes_is_kept_without_a_byte_more(make):
    """Channels last, transposed, expanded: same strides, and no more bytes than the elements that exist."""
    tensor = make()
    found, description = through(tensor)
    assert torch.equal(found, tensor)
    assert [s for n, s in zip(tensor.shape, found.stride(), strict=True) if n > 1] == [
        s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1
    ]
    assert description.copied_bytes <= tensor.untyped_storage().nbytes()


@given(
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    data=st.data(),
    dtype=st.sampled_from([torch.uint8, torch.int32, torch.float64, torch.complex64]),
)
@settings(max_examples=200, deadline=None)
def test_any_view_of_any_tensor_comes_back_equal(shape, data, dtype):
    """Sliced with steps, flipped, permuted, expanded, narrowed: values and shape survive, and no byte outside."""
    tensor = torch.arange(int(np.prod(shape))).view(shape).to(dtype)
    for _ in range(data.draw(st.integers(0, 3))):
        axis = data.draw(st.integers(0, tensor.dim() - 1))
        how = data.draw(st.sampled_from(["step", "permute", "expand", "narrow", "select", "unsqueeze"]))
        if how == "step":
            tensor = tensor[(slice(None),) * axis + (slice(None, None, data.draw(st.integers(1, 3))),)]
        elif how == "permute":
            tensor = tensor.permute(data.draw(st.permutations(range(tensor.dim()))))
        elif how == "expand" and tensor.shape[axis] == 1:
            tensor = tensor.expand(*[3 if k == axis else -1 for k in range(tensor.dim())])
        elif how == "narrow" and tensor.shape[axis] > 1:
            tensor = tensor.narrow(axis, 1, tensor.shape[axis] - 1)
        elif how == "select" and tensor.dim() > 1 and tensor.shape[axis]:
            tensor = tensor.select(axis, 0)
        elif how == "unsqueeze":
            tensor = tensor.unsqueeze(axis)
    slot = slot_of(8192, start=40)
    description = BatchDescription([tensor, "x"], slot)
    description.copy_pending()
    found = compile_layout(description.root)(slot.memory)
    assert torch.equal(found[0], tensor)
    assert (slot.memory[:40] == 0xAA).all()
    assert (slot.memory[description.end :] == 0xAA).all()


def test_tensors_born_in_the_slot_are_noted_not_copied():
    """Whole, sliced and reshaped: no byte is copied, and the batch shows the slot."""
    slot = slot_of()
    made = slot.empty(torch.int32, (4, 6))
    made.copy_(torch.arange(24).view(4, 6))
    description = BatchDescription(
        {"whole": made, "row": made[2], "columns": made[:, ::2], "flat": made.view(-1)}, slot
    )
    assert description.copied_bytes == 0
    found = compile_layout(description.root)(slot.memory)
    assert found["row"].tolist() == made[2].tolist()
    assert found["columns"].tolist() == made[:, ::2].tolist()
    made[2, 2] = -1
    assert found["flat"][14] == found["row"][2] == -1


def test_a_description_that_left_holds_neither_batch_nor_slot():
    """After ``leave`` only what is still to be copied is alive."""
    slot = slot_of()
    made = slot.empty(torch.int32, (600,))
    other = torch.ones(3)
    description = BatchDescription([made, other, {"more": made[1:]}], slot)
    memory, born = weakref.ref(slot.memory), weakref.ref(made)
    description.leave()
    slot.born.clear()
    del slot, made
    gc.collect()
    assert memory() is None
    assert born() is None
    larger = slot_of(8192)
    description.move_to(larger, np.zeros(description.born_until(), np.uint8))
    description.copy_pending()
    assert compile_layout(description.root)(larger.memory)[1].tolist() == [1, 1, 1]


def test_a_batch_too_large_says_how_much_it_needs_and_moves_on():
    """``end`` is the need; what was born in the small slot moves with what was not, into one that is large enough."""
    slot = slot_of(512)
    small = slot.empty(torch.uint8, (100,))
    small.fill_(7)
    big = torch.arange(1000)
    description = BatchDescription((small, big), slot)
    assert 8100 < description.end < 8300
    saved = slot.memory[: description.born_until()].copy()
    larger = slot_of(description.end)
    description.move_to(larger, saved)
    description.copy_pending()
    found = compile_layout(description.root)(larger.memory)
    assert (found[0] == 7).all()
    assert torch.equal(found[1], big)


def test_equal_structures_have_equal_descriptions_and_values_are_told_apart():
    """What can be sent once and for all compares equal; a batch with strings in it says that it carries values."""
    first, second = ({"x": torch.full((2,), k), "y": (torch.ones(1),)} for k in range(2))
    a, b = BatchDescription(first, slot_of()), BatchDescription(second, slot_of())
    assert a.root == b.root
    assert hash(a.root) == hash(b.root)
    assert not a.has_values
    assert isinstance(a.root, MappingNode)
    assert BatchDescription([torch.ones(1), "name"], slot_of()).has_values


def test_ragged_lists_take_one_piece():
    """Boxes of four images lie end to end."""
    boxes = [torch.full((k, 4), float(k)) for k in (3, 1, 0, 2)]
    description = BatchDescription(boxes, slot_of())
    assert isinstance(description.root, SplitLeaf)
    assert description.root.lengths == (3, 1, 0, 2)


def test_a_gradient_that_cannot_cross_is_refused_as_torch_refuses_it():
    """The text is torch's own."""
    with pytest.raises(RuntimeError, match="Cowardly refusing to serialize non-leaf tensor which requires_grad"):
        BatchDescription(torch.ones(2, requires_grad=True) * 2, slot_of())


def test_a_tensor_of_another_device_is_refused_with_advice():
    """The class for it knows device and shape."""
    error = DeviceTensor("cuda:0", "(2, 3)")
    assert "cuda:0" in str(error)
    assert "(2, 3)" in str(error)
    assert pickle.loads(pickle.dumps(error)).device == "cuda:0"
