"""The default collate, in place: torch's results to the last bit, born in the slot, front to back."""

import collections
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from shmloader.collate import SlotWriter, collate_in_place, in_place_collate_map, is_plain
from shmloader.layout import ALIGN


class Pair(NamedTuple):
    """A namedtuple sample."""

    x: object
    y: object


def writer(nbytes=1 << 16, origin=0, start=0):
    """A slot at ``origin`` of a larger memory full of 0xAA."""
    memory = np.full(origin + nbytes + 64, 0xAA, np.uint8)
    return SlotWriter(memory, memory.__array_interface__["data"][0], origin, nbytes, start)


def collated(samples, slot):
    """What a worker does."""
    return collate_in_place(samples, in_place_collate_map(lambda: slot))


def leaves(batch):
    """All tensors of a batch, in order."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, str | bytes):
        return []
    return [leaf for part in (batch.values() if isinstance(batch, dict) else batch) for leaf in leaves(part)]


def test_pieces_are_aligned_in_order_and_inside_the_slot():
    """Three tensors behind the indices at the front; nothing outside is touched."""
    slot = writer(1024, origin=128, start=24)
    made = [slot.empty(torch.uint8, (10,)), slot.empty(torch.float64, (3, 2)), slot.empty(torch.int16, (1,))]
    offsets = [slot.offset_of(tensor.data_ptr()) for tensor in made]
    assert offsets == [64, 128, 192]
    assert all(offset % ALIGN == 0 for offset in offsets)
    for tensor in made:
        tensor.fill_(1)
    assert slot.cursor == 194
    assert (slot.memory[:128] == 0xAA).all()
    assert (slot.memory[128 + 194 :] == 0xAA).all()


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5)])
def test_nothing_is_made_for_no_bytes(shape):
    """Zero elements take no room."""
    slot = writer()
    assert slot.empty(torch.float32, shape) is None
    assert slot.cursor == 0
    assert not slot.overflowed


def test_a_tensor_that_does_not_fit_takes_no_room_and_is_remembered():
    """The cursor stays, so that it is counted once, when it is described; smaller ones still fit."""
    slot = writer(128)
    assert slot.empty(torch.uint8, (129,)) is None
    assert slot.overflowed
    assert slot.cursor == 0
    assert slot.empty(torch.uint8, (128,)) is not None


def test_addresses_outside_of_the_slot_have_no_offset():
    """One byte before the first and one behind the last."""
    slot = writer(256, origin=64)
    begin = slot.memory.__array_interface__["data"][0] + 64
    assert [slot.offset_of(begin + k) for k in (-1, 0, 255, 256)] == [None, 0, 255, None]


SAMPLES = {
    "tensors": [torch.arange(6).view(2, 3) + k for k in range(4)],
    "scalars": [torch.tensor(float(k)) for k in range(4)],
    "arrays": [np.full((3, 1), k, np.uint16) for k in range(4)],
    "0-d arrays": [np.array(k, np.int32) for k in range(4)],
    "numpy scalars": [np.float32(k) for k in range(4)],
    "ints": [1, 2, -3, 1 << 40],
    "floats": [0.5, float("nan"), float("inf"), -0.0],
    "bools": [True, False, True, True],
    "strings": ["a", "b", "", "ü"],
    "bytes": [b"a", b"b"],
    "dicts": [{"x": torch.ones(2), "y": k, "z": "s"} for k in range(3)],
    "tuples": [(torch.ones(2, 2), k, "s") for k in range(3)],
    "namedtuples": [Pair(np.zeros(3), k) for k in range(3)],
    "nested": [{"a": [(k, {"b": torch.full((1,), k)}), Pair("t", np.arange(3))]} for k in range(3)],
    "ordered": [collections.OrderedDict(b=k, a=torch.zeros(2)) for k in range(2)],
    "complex": [torch.tensor([1 + 2j]) for _ in range(2)],
    "bfloat16": [torch.ones(3, dtype=torch.bfloat16) for _ in range(2)],
    "empty tensors": [torch.zeros(0, 4) for _ in range(3)],
    "one sample": [(torch.ones(3), 1)],
    "non-contiguous": [torch.arange(12).view(3, 4).t()[::2] + k for k in range(3)],
    "expanded": [torch.tensor([k]).expand(5) for k in range(3)],
    "mixed dtypes": [torch.ones(2), torch.ones(2, dtype=torch.float64)],
}


@pytest.mark.parametrize("name", SAMPLES)
def test_the_result_is_torchs_and_lies_in_the_slot(name):
    """Types, dtypes, shapes and values of torch's default_collate; every tensor with bytes is in the slot."""
    slot = writer()
    ours, theirs = collated(SAMPLES[name], slot), default_collate(SAMPLES[name])
    assert type(ours) is type(theirs)
    torch.testing.assert_close(leaves(ours), leaves(theirs), rtol=0, atol=0, equal_nan=True, check_stride=True)
    assert str(ours) == str(theirs)
    if name != "mixed dtypes":
        assert all(slot.offset_of(leaf.data_ptr()) is not None for leaf in leaves(ours) if leaf.numel())


@pytest.mark.parametrize(
    "samples",
    [
        [torch.ones(2), torch.ones(3)],
        [torch.ones(2), 3],
        [{"a": 1}, {"b": 1}],
        [[1, 2], [1]],
        [None, None],
        [object(), object()],
        [np.array(["a"]), np.array(["b"])],
    ],
    ids=["shapes", "tensor and int", "keys", "lengths", "None", "objects", "string arrays"],
)
def test_what_torch_refuses_is_refused_in_its_words(samples):
    """Same class, same text: users match on both."""
    with pytest.raises(Exception) as theirs:  # noqa: PT011 - whatever torch says
        default_collate(samples)
    with pytest.raises(type(theirs.value)) as ours:
        collated(samples, writer())
    assert str(ours.value) == str(theirs.value)


def test_a_function_that_a_user_registered_is_used():
    """torch's table of collate functions is open; what is added to it counts here too."""

    class Box:
        def __init__(self, side):
            self.side = side

    def collate_boxes(batch, *, collate_fn_map=None):
        return torch.tensor([box.side for box in batch])

    default_collate_fn_map[Box] = collate_boxes
    try:
        assert collated([Box(1), Box(2)], writer()).tolist() == [1, 2]
    finally:
        del default_collate_fn_map[Box]


@pytest.mark.parametrize(
    ("tensor", "plain"),
    [
        (torch.ones(2), True),
        (torch.ones(2)[::2], True),
        (torch.nn.Parameter(torch.ones(2)), False),
        (torch.eye(2).to_sparse(), False),
        (torch.ones(2, device="meta"), False),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), False),
    ],
)
def test_only_dense_memory_of_this_host_is_plain(tensor, plain):
    """All other kinds go another way."""
    assert is_plain(tensor) is plain


@given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    dtype=st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.float64, torch.bool, torch.complex64]),
    count=st.integers(1, 5),
    room=st.integers(0, 2000),
    start=st.integers(0, 100),
)
@settings(max_examples=100, deadline=None)
def test_any_slot_gives_the_same_values_and_stays_inside(shape, dtype, count, room, start):
    """However little room there is and wherever it begins: right values, and no byte outside of the slot changes."""
    slot = writer(room, origin=64, start=start)
    samples = [(torch.randint(0, 2, shape).to(dtype), k) for k in range(count)]
    ours, theirs = collated(samples, slot), default_collate(samples)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert (slot.memory[:64] == 0xAA).all()
    assert (slot.memory[64 + room :] == 0xAA).all()
