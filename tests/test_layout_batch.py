"""Slot to batch: views at the right bytes, of the right type, that keep the slot and nothing else."""

import io
import pickle
import weakref

import numpy as np
import pytest
import torch

from shmloader.batch import MANY, compile_layout
from shmloader.layout import (
    ALIGN,
    ArrayLeaf,
    MappingNode,
    PickledNode,
    SequenceNode,
    SplitLeaf,
    TensorLeaf,
    ValueNode,
    ValuesNode,
    align,
)


def lease(nbytes=8192):
    """Bytes that stand for a lent slot: a fresh array that owns nothing else."""
    return np.frombuffer(bytearray(range(256)) * (nbytes // 256), np.uint8)


def leaf(shape=(2, 3), dtype=torch.int32, offset=64, stride=None, grad=False):
    """A tensor leaf, contiguous unless told."""
    count = int(np.prod(shape, dtype=np.int64))
    extent = count if stride is None else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    return TensorLeaf(dtype, shape, stride, offset, extent, grad)


@pytest.mark.parametrize(("offset", "expected"), [(0, 0), (1, 64), (64, 64), (65, 128)])
def test_align_rounds_up_to_a_cache_line(offset, expected):
    """Every field begins on a border that suits every dtype."""
    assert align(offset) == expected
    assert ALIGN == 64


def test_a_tensor_is_a_view_of_its_bytes():
    """Written through the slot, read through the tensor, and the other way round."""
    base = lease()
    tensor = compile_layout(leaf())(base)
    base[64:68] = (1, 0, 0, 0)
    assert tensor[0, 0] == 1
    tensor[1, 2] = -1
    assert base[64 + 20 : 64 + 24].tolist() == [255] * 4
    assert tensor.shape == (2, 3)
    assert tensor.dtype == torch.int32


def test_strides_are_kept():
    """A transposed leaf comes back transposed, over the same bytes."""
    base = lease()
    tensor = compile_layout(leaf((2, 3), stride=(1, 2)))(base)
    assert tensor.stride() == (1, 2)
    assert tensor.t().is_contiguous()
    assert tensor[1, 0] == torch.frombuffer(base, dtype=torch.int32, count=6, offset=64)[1]


def test_a_leaf_that_requires_grad_is_a_leaf_again():
    """As torch's workers deliver it."""
    tensor = compile_layout(leaf(dtype=torch.float32, grad=True))(lease())
    assert tensor.requires_grad
    assert tensor.is_leaf


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0, 4)])
def test_an_empty_tensor_holds_no_slot(shape):
    """No bytes, no lease: the slot is free while the user keeps the empty tensor."""
    base = lease()
    gone = weakref.ref(base)
    tensor = compile_layout(leaf(shape))(base)
    assert tensor.shape == shape
    assert tensor.dtype == torch.int32
    del base
    assert gone() is None


KEEPERS = {
    "the tensor": lambda tensor: tensor,
    "a row": lambda tensor: tensor[1],
    "a slice": lambda tensor: tensor[:, ::2],
    "detach": lambda tensor: tensor.detach(),
    "numpy": lambda tensor: tensor.numpy(),
    "a slice of numpy": lambda tensor: tensor.numpy()[1, ::2],
    "a memoryview of a slice of numpy": lambda tensor: memoryview(tensor.numpy()[1]),
    "asarray": lambda tensor: np.asarray(tensor)[1:, 1:],
    "the storage": lambda tensor: tensor.untyped_storage(),
    "a reshaped view": lambda tensor: tensor.reshape(-1)[3:],
    "another dtype": lambda tensor: tensor.view(torch.uint8)[0, :4],
    "an iterated row": lambda tensor: list(tensor)[1],
    "unbind": lambda tensor: tensor.unbind(1)[2],
    "expand": lambda tensor: tensor[None].expand(4, 2, 3),
    "dlpack": lambda tensor: torch.from_dlpack(tensor)[1],
}


@pytest.mark.parametrize("name", KEEPERS)
def test_whatever_the_user_keeps_of_a_tensor_keeps_the_slot(name):
    """The lease dies with the last thing that can read its bytes, and not before (B2)."""
    base = lease()
    gone = weakref.ref(base)
    kept = KEEPERS[name](compile_layout(leaf())(base))
    del base
    assert gone() is not None
    del kept
    assert gone() is None


@pytest.mark.parametrize("name", ["the array", "a slice", "a reshaped view", "a tensor of it"])
def test_whatever_the_user_keeps_of_an_array_keeps_the_slot(name):
    """NumPy shortens chains of bases; the lease must be where that stops (B2)."""
    keep = {
        "the array": lambda array: array,
        "a slice": lambda array: array[1, ::2],
        "a reshaped view": lambda array: array.reshape(-1)[3:],
        "a tensor of it": torch.from_numpy,
    }[name]
    base = lease()
    gone = weakref.ref(base)
    kept = keep(compile_layout(ArrayLeaf(np.dtype("<i4"), (2, 3), False, 64))(base))
    del base
    assert gone() is not None
    del kept
    assert gone() is None


def test_saving_one_field_writes_that_field_alone():
    """Every tensor's storage begins at its bytes and ends behind them: torch.save of a label is not the whole batch."""
    node = SequenceNode(False, (leaf((16, 100)), leaf((2,), offset=6464)))
    _, label = compile_layout(node)(lease())
    file = io.BytesIO()
    torch.save(label, file)
    assert label.untyped_storage().nbytes() == 8
    assert len(file.getvalue()) < 3000


def test_arrays_keep_dtype_order_and_bytes():
    """C and Fortran order, big-endian and structured dtypes, 0-d."""
    base = lease()
    for dtype in (">f4", "datetime64[s]", [("x", "<i2"), ("y", "<f8")]):
        array = compile_layout(ArrayLeaf(np.dtype(dtype), (2, 3), True, 128))(base)
        assert array.dtype == np.dtype(dtype)
        assert array.flags.f_contiguous
        assert array.__array_interface__["data"][0] == base.__array_interface__["data"][0] + 128
    assert compile_layout(ArrayLeaf(np.dtype("u1"), (), False, 65))(base).item() == 65


def test_containers_are_new_at_every_call():
    """A user may change the list or dict of one batch without a trace in the next."""
    node = MappingNode(("x", "y"), (ValuesNode(True, (1, 2)), SequenceNode(True, (ValueNode("a"),))))
    build = compile_layout(node)
    first = build(lease())
    first["x"].append(3)
    first["y"].clear()
    first["z"] = 0
    assert build(lease()) == {"x": [1, 2], "y": ["a"]}


def test_tuples_stay_tuples_and_lists_lists():
    """Type in, type out, for both ways that values travel."""
    node = SequenceNode(False, (ValuesNode(False, ("a",)), ValuesNode(True, ("a",)), SequenceNode(True, ())))
    assert compile_layout(node)(lease()) == (("a",), ["a"], [])


@pytest.mark.parametrize("as_list", [True, False])
def test_ragged_tensors_are_cut_from_one_run(as_list):
    """Boxes of three images, one of them without any, with the right rows each."""
    base = lease()
    parts = compile_layout(SplitLeaf(as_list, torch.uint8, (4,), (2, 0, 1), 64))(base)
    assert type(parts) is (list if as_list else tuple)
    assert [tuple(part.shape) for part in parts] == [(2, 4), (0, 4), (1, 4)]
    assert parts[0].tolist() == [[64, 65, 66, 67], [68, 69, 70, 71]]
    assert parts[2].tolist() == [[72, 73, 74, 75]]
    base[72] = 1
    assert parts[2][0, 0] == 1


def test_ragged_tensors_that_are_all_empty_are_built():
    """No image has a box."""
    parts = compile_layout(SplitLeaf(True, torch.float32, (4,), (0, 0, 0, 0), 0))(lease())
    assert [tuple(part.shape) for part in parts] == [(0, 4)] * 4


@pytest.mark.parametrize("count", [MANY - 1, MANY, MANY + 1, 120])
@pytest.mark.parametrize("shape", [(), (5,), (1, 3)])
def test_many_equal_fields_are_right_however_they_are_built(count, shape):
    """At and around the number from which they are cut from one view: same values, shapes and bytes (A4)."""
    base = lease(16384)
    node = MappingNode(
        tuple(f"f{k}" for k in range(count)), tuple(leaf(shape, torch.uint8, k * 64 + k % 2) for k in range(count))
    )
    even = MappingNode(node.keys, tuple(leaf(shape, torch.uint8, k * 64) for k in range(count)))
    for chosen, step in ((node, lambda k: k * 64 + k % 2), (even, lambda k: k * 64)):
        batch = compile_layout(chosen)(base)
        assert list(batch) == list(node.keys)
        for k, tensor in enumerate(batch.values()):
            assert tuple(tensor.shape) == shape
            assert tensor.is_contiguous()
            assert tensor.data_ptr() == base.__array_interface__["data"][0] + step(k)


def test_a_run_of_equal_fields_among_others_keeps_its_place():
    """Other nodes before, between and behind the run stay where they were."""
    run = tuple(leaf((2,), torch.int64, 64 + 64 * k) for k in range(MANY))
    children = (ValueNode("before"), *run, leaf((3,), torch.float32, 4096), ValueNode("behind"))
    built = compile_layout(SequenceNode(True, children))(lease())
    assert built[0] == "before"
    assert built[-1] == "behind"
    assert built[-2].dtype == torch.float32
    assert [tensor.data_ptr() - built[1].data_ptr() for tensor in built[1:-2]] == [64 * k for k in range(MANY)]


def test_an_object_that_was_named_twice_is_one_object_again():
    """Identity inside a pickled object survives, as pickle keeps it."""

    class Lifter(pickle.Pickler):
        def persistent_id(self, obj):
            return 0 if isinstance(obj, torch.Tensor) else None

    file = io.BytesIO()
    tensor = torch.zeros(2, 3, dtype=torch.int32)
    Lifter(file).dump([tensor, tensor])
    built = compile_layout(PickledNode(file.getvalue(), (leaf(),)))(lease())
    assert built[0] is built[1]
