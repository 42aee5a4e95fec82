"""What goes into a pack comes out of it: structures, dtypes, shapes; and a batch of it is the batch of the original."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from shmloader.packfile import PackedDataset, pack
from shmloader.packfile.schema import TORCH_DTYPES


class Point(NamedTuple):
    x: Any
    y: Any


def same(given: Any, read: Any) -> bool:
    """Whether ``read`` is what a pack should give back for ``given``."""
    if isinstance(given, (np.ndarray, np.generic)):
        given = torch.from_numpy(np.array(given, given.dtype.newbyteorder("=")))
    if isinstance(given, torch.Tensor):
        if not isinstance(read, torch.Tensor) or read.dtype != given.dtype or read.shape != given.shape:
            return False
        if not given.numel():
            return True
        bits = [each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (given, read)]
        return torch.equal(*bits)  # also for NaN
    if isinstance(given, dict):
        return type(read) is dict and list(read) == list(given) and all(same(given[k], read[k]) for k in given)
    if isinstance(given, (tuple, list)):
        return type(read) is type(given) and len(read) == len(given) and all(map(same, given, read))
    if isinstance(given, (bytearray, memoryview)):
        given = bytes(given)
    return type(read) is type(given) and bool(read == given or (read != read and given != given))


# --- properties -------------------------------------------------------------------------------------------------------

NUMPY = ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
NUMPY += ["float16", "float32", "float64", "complex64", "complex128", ">i4", ">f8"]


@st.composite
def leaves(draw: st.DrawFn) -> Any:
    """A function (random state) -> value, for one field."""
    kind = draw(st.sampled_from(["array", "tensor", "ragged", "free", "int", "float", "bool", "str", "bytes"]))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    if kind == "tensor":
        dtype = TORCH_DTYPES[draw(st.sampled_from(sorted(TORCH_DTYPES)))]

        def tensor(r: np.random.Generator) -> torch.Tensor:
            raw = bytearray(r.integers(0, 2, int(np.prod(shape)) * dtype.itemsize, np.uint8).tobytes())
            return torch.frombuffer(raw, dtype=dtype).reshape(shape) if raw else torch.empty(shape, dtype=dtype)

        return tensor
    dtype = draw(st.sampled_from(NUMPY))

    def array(r: np.random.Generator, shape: tuple[int, ...]) -> Any:
        return (r.random(shape) * 100).astype(dtype)

    return {
        "array": lambda r: array(r, shape),
        "ragged": lambda r: array(r, (int(r.integers(0, 9)), *shape[:2])),
        "free": lambda r: array(r, tuple(r.integers(0, 5, 2 + len(shape[:1])))),
        "int": lambda r: int(r.integers(-(2**63), 2**63 - 1)),
        "float": lambda r: float(r.choice([r.random(), np.inf, np.nan])),
        "bool": lambda r: bool(r.integers(2)),
        "str": lambda r: "".join(map(chr, r.integers(1, 0xD7FF, r.integers(0, 6)))),
        "bytes": lambda r: r.bytes(int(r.integers(0, 300))),
    }[kind]


def structures(leaf: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Functions (random state) -> sample."""
    keys = st.sampled_from(["a", "b", "a.b", 3, True, None, 1.5, "é"])

    def branches(child: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        lists = st.lists(child, min_size=0, max_size=3)
        return st.one_of(
            lists.map(lambda parts: lambda r: tuple([part(r) for part in parts])),
            lists.map(lambda parts: lambda r: [part(r) for part in parts]),
            st.dictionaries(keys, child, max_size=3).map(lambda d: lambda r: {k: part(r) for k, part in d.items()}),
            st.tuples(child, child).map(lambda parts: lambda r: Point(*[part(r) for part in parts])),
        )

    return st.recursive(leaf, branches, max_leaves=5)


@settings(max_examples=80)
@given(
    make=structures(leaves()),
    count=st.integers(0, 40),
    seed=st.integers(0, 99),
    chunk=st.sampled_from([4096, 1 << 20]),
)
def test_every_sample_comes_back_as_it_was(make: Any, count: int, seed: int, chunk: int) -> None:
    """Structure, types, dtypes, shapes and bits, for one chunk and for many."""
    samples = [make(np.random.default_rng((seed, i))) for i in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        report = pack(samples, Path(folder) / "p.lmdb", chunk_bytes=chunk)
        packed = PackedDataset(report.path)
        assert report.samples == len(packed) == count
        for i, sample in enumerate(samples):
            assert same(sample, packed[i]), (i, sample, packed[i])
        assert [p.name for p in Path(folder).iterdir()] == ["p.lmdb"]


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=120),
    late=st.booleans(),
    trailing=st.lists(st.integers(0, 3), max_size=2),
)
def test_ragged_fields_come_back_wherever_they_turn_ragged(lengths: list[int], late: bool, trailing: list[int]) -> None:
    """Chunks written while a field was still fixed are read as well as those after."""
    if late:
        lengths = [7] * 150 + lengths
    rows = [np.random.default_rng(i).integers(0, 99, (n, *trailing), np.int32) for i, n in enumerate(lengths)]
    with tempfile.TemporaryDirectory() as folder:
        packed = PackedDataset(pack(rows, Path(folder) / "p.lmdb", chunk_bytes=4096).path)
        assert all(same(row, packed[i]) for i, row in enumerate(rows))
        column = packed.column("0")
        if isinstance(column, tuple):
            values, offsets = column
            parts = [values[a:b] for a, b in pairwise(offsets)]
            assert all(np.array_equal(part, row) for part, row in zip(parts, rows, strict=True))
        else:
            np.testing.assert_array_equal(column, np.stack(rows))


def test_fixed_then_ragged_then_free(tmp_path: Path) -> None:
    """All three forms of a field, in chunks of their own, in one pack."""
    rows = [np.full((4, 6), i, np.float32) for i in range(200)]
    rows += [np.full((i % 5, 6), i, np.float32) for i in range(200)]
    rows += [np.full((i % 5, i % 7), i, np.float32) for i in range(200)]
    report = pack(rows, tmp_path / "p.lmdb", chunk_bytes=4096)
    packed = PackedDataset(report.path)
    assert str(report.fields[0]) == "0 float32[?,?]"
    assert all(same(row, packed[i]) for i, row in enumerate(rows))
    assert packed.gather.fields[0].shapes(np.array([0, 201, 599])).tolist() == [[4, 6], [1, 6], [4, 3]]


# --- a batch of it ----------------------------------------------------------------------------------------------------


def test_collated_batches_equal_those_of_the_original(tmp_path: Path) -> None:
    """default_collate cannot tell a pack from what was packed."""
    rng = np.random.default_rng(0)
    samples = [
        {
            "image": rng.integers(0, 255, (3, 4, 5), np.uint8),
            "label": i,
            "weight": i / 7,
            "flag": i % 3 == 0,
            "small": np.int16(i),
            "half": np.float16(i),
            "double": np.float64(i),
            "yes": np.bool_(i % 2),
            "name": f"n{i}",
            "raw": bytes([i]),
            "pair": (torch.tensor(i), [torch.rand(2)]),
            "point": Point(i, rng.random(3)),
        }
        for i in range(16)
    ]
    packed = PackedDataset(pack(samples, tmp_path / "p.lmdb").path)
    expected, found = default_collate(samples), default_collate([packed[i] for i in range(16)])
    assert same(expected, found), (expected, found)
    assert same(expected, default_collate(packed.__getitems__(list(range(16)))))


def test_a_tensor_dataset_is_packed_whole(tmp_path: Path) -> None:
    """Packed in slices, it reads as the samples that it yields one by one; ragged is no question."""
    data = TensorDataset(torch.rand(9000, 3), torch.arange(9000), torch.rand(9000, 2, 1).bfloat16())
    seen: list[tuple[int, int | None, int]] = []
    packed = PackedDataset(pack(data, tmp_path / "p.lmdb", progress=lambda *now: seen.append(now)).path)
    assert len(packed) == 9000
    assert all(same(data[i], packed[i]) for i in range(0, 9000, 97))
    assert seen[-1] == (9000, 9000, 9000 * (12 + 8 + 4))


def test_iterables_are_packed_in_order(tmp_path: Path) -> None:
    """Generators, iterable datasets, and classes with only len and []."""

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(5))

    class Old:
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> int:
            return range(5)[index]

    for i, data in enumerate((Stream(), (k for k in range(5)), Old(), range(5))):
        packed = PackedDataset(pack(data, tmp_path / f"{i}.lmdb").path)
        assert [packed[k] for k in range(5)] == [0, 1, 2, 3, 4]


def test_a_reused_buffer_is_copied_at_once(tmp_path: Path) -> None:
    """A dataset that yields the same array again and again, refilled, is packed right."""
    buffer = np.zeros(100, np.int64)

    def refill() -> Iterator[np.ndarray[Any, Any]]:
        for i in range(50):
            buffer[:] = i
            yield buffer

    packed = PackedDataset(pack(refill(), tmp_path / "p.lmdb", chunk_bytes=4096).path)
    assert [int(packed[i][99]) for i in range(50)] == list(range(50))


def test_odd_memory_is_packed_by_value(tmp_path: Path) -> None:
    """Transposed, sliced, broadcast, byte-swapped, conjugated, and tensors that want a gradient."""
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    samples = [
        (
            base.T,
            base[::2, ::-1],
            np.broadcast_to(base[0], (3, 6)),
            base.astype(">f4"),
            torch.arange(6).float().requires_grad_(),
            torch.tensor([1 + 2j]).conj(),
            torch.tensor([1 + 2j]).conj().imag,
            np.asfortranarray(base),
            torch.arange(6).bfloat16()[::2],
        )
    ] * 3
    packed = PackedDataset(pack(samples, tmp_path / "p.lmdb").path)
    assert same([*samples[2]][:5], [*packed[2]][:5])
    assert packed[1][5].item() == 1 - 2j
    assert packed[1][6].item() == -2
    assert same(base, packed[1][7])
    assert packed[1][8].tolist() == [0, 2, 4]
