"""Batches straight from the file into the caller's memory."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shmloader.packfile import PackedDataset, PackWriter, pack
from shmloader.packfile.reader import FixedReader, RaggedReader


def fixed(packed: PackedDataset, number: int = 0) -> FixedReader:
    field = packed.gather.fields[number]
    assert isinstance(field, FixedReader)
    return field


def ragged(packed: PackedDataset, number: int = 0) -> RaggedReader:
    field = packed.gather.fields[number]
    assert isinstance(field, RaggedReader)
    return field


@settings(max_examples=60)
@given(
    shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    dtype=st.sampled_from(["uint8", "bool", "int16", "float32", "int64", "complex128"]),
    count=st.integers(1, 3000),
    pick=st.lists(st.integers(0, 10**6), max_size=40),
    offset=st.integers(0, 3),
)
def test_a_gathered_batch_is_the_stack_of_its_samples(
    shape: tuple[int, ...], dtype: str, count: int, pick: list[int], offset: int
) -> None:
    """Any row size, any number of chunks, into memory at any address, once and bound."""
    rows = np.random.default_rng(0).integers(0, 2**15, (count, *shape)).astype(dtype)
    with tempfile.TemporaryDirectory() as folder:
        with PackWriter(Path(folder) / "p.lmdb", chunk_bytes=4096) as writer:
            writer.add_columns((rows, np.arange(count)))
        packed = PackedDataset(Path(folder) / "p.lmdb")
        indices = np.array(pick, np.int64) % count
        wide = torch.zeros((len(indices) + offset, *shape), dtype=fixed(packed).torch_dtype)
        out = wide[offset:]
        fixed(packed).gather(indices, out)
        np.testing.assert_array_equal(out.numpy(), rows[indices])
        assert not wide[:offset].any()
        out.zero_()
        fixed(packed).bind(out)(indices)
        np.testing.assert_array_equal(out.numpy(), rows[indices])
        numbers = torch.empty(len(indices), dtype=torch.int64)
        fixed(packed, 1).gather(indices, numbers)
        assert numbers.tolist() == indices.tolist()
        np.testing.assert_array_equal(packed.column("0"), rows)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=200),
    trailing=st.lists(st.integers(0, 3), max_size=2).map(tuple),
    dtype=st.sampled_from(["uint8", "int16", "float32", "float64"]),
    pick=st.lists(st.integers(0, 10**6), max_size=30),
)
def test_gathered_ragged_rows_lie_behind_each_other(
    lengths: list[int], trailing: tuple[int, ...], dtype: str, pick: list[int]
) -> None:
    """Short rows and long ones, whose ways differ: equal to concatenating the samples."""
    rows = [np.random.default_rng(i).integers(0, 2**15, (n, *trailing)).astype(dtype) for i, n in enumerate(lengths)]
    rows.append(np.zeros((301, *trailing), dtype))
    with tempfile.TemporaryDirectory() as folder:
        packed = PackedDataset(pack(rows, Path(folder) / "p.lmdb", chunk_bytes=4096).path)
        field = ragged(packed) if len(rows) > 1 else None
        if field is None:
            return
        indices = np.array(pick, np.int64) % len(rows)
        found = field.lengths(indices)
        assert found.tolist() == [len(rows[i]) for i in indices]
        out = torch.empty((int(found.sum()), *trailing), dtype=field.torch_dtype)
        field.gather_ragged(indices, out)
        np.testing.assert_array_equal(out.numpy(), np.concatenate([rows[0][:0], *[rows[i] for i in indices]]))
        assert [list(shape) for shape in field.shapes(indices)] == [list(rows[i].shape) for i in indices]


def test_strings_and_images_gather_their_bytes(tmp_path: Path) -> None:
    """What a decoder or a copy into a slot needs: lengths first, then the bytes."""
    samples = [("é" * i, b"x" * (900 * i)) for i in range(20)]
    packed = PackedDataset(pack(samples, tmp_path / "p.lmdb").path)
    assert not packed.gather.is_plain
    for number in (0, 1):
        field = ragged(packed, number)
        indices = np.array([3, 19, 0, 3])
        lengths = field.lengths(indices)
        out = torch.empty(int(lengths.sum()), dtype=torch.uint8)
        field.gather_ragged(indices, out)
        stored = [s.encode() if isinstance(s, str) else s for s in (samples[i][number] for i in indices)]
        assert bytes(out.numpy()) == b"".join(stored)


def test_a_last_chunk_that_is_longer_is_found(tmp_path: Path) -> None:
    """Ragged fields are cut by bytes, so chunks of one row may be followed by one of two."""
    rows = [np.zeros(257), np.ones(0), np.full(300, 2.0)]
    packed = PackedDataset(pack(rows, tmp_path / "p.lmdb", chunk_bytes=4096).path)
    assert [len(packed[i]) for i in range(3)] == [257, 0, 300]
    assert ragged(packed).lengths(np.array([2, 1, 0, 2])).tolist() == [300, 0, 257, 300]


@pytest.mark.parametrize("wrong", [[-1], [100], [0, 5, -(2**63)], [2**62], [3, 100, 4]])
def test_indices_outside_are_refused_before_anything_is_written(tmp_path: Path, wrong: list[int]) -> None:
    """Stray memory is never read, whatever the index; the message names it."""
    samples = [(np.full(5, i), np.zeros(i % 3)) for i in range(100)]
    packed = PackedDataset(pack(samples, tmp_path / "p.lmdb", chunk_bytes=4096).path)
    out = torch.full((len(wrong), 5), 7)
    bad = next(i for i in wrong if not 0 <= i < 100)
    for call in (
        lambda: fixed(packed).gather(np.array(wrong), out),
        lambda: fixed(packed).bind(out)(np.array(wrong)),
        lambda: ragged(packed, 1).lengths(np.array(wrong)),
        lambda: ragged(packed, 1).gather_ragged(np.array(wrong), torch.empty(0, dtype=torch.float64)),
    ):
        with pytest.raises(IndexError, match=f"index {bad} is out of range for a pack of 100 samples"):
            call()
    assert bool((out == 7).all())


def test_unfit_memory_is_refused(tmp_path: Path) -> None:
    """Wrong shape, dtype, strides or index type: a sentence, and nothing is written."""
    packed = PackedDataset(pack([np.full((2, 3), i, np.float32) for i in range(9)], tmp_path / "p.lmdb").path)
    field, two = fixed(packed), np.array([1, 2])
    for out in (
        torch.zeros(2, 6),
        torch.zeros(3, 2, 3),
        torch.zeros(2, 2, 3, dtype=torch.float64),
        torch.zeros(2, 3, 2).transpose(1, 2),
        torch.zeros(4, 2, 3)[::2],
    ):
        with pytest.raises(ValueError, match="field '0': out must be a contiguous float32 tensor"):
            field.gather(two, out)
        assert not out.any()
    good = torch.zeros(2, 2, 3)
    for indices in (two.astype(np.int32), two.astype(np.float64), two[:, None]):
        with pytest.raises((TypeError, ValueError)):
            field.gather(indices, good if indices.ndim == 1 else torch.zeros(2, 2, 3))
    with pytest.raises(ValueError, match="bound to 2 rows, but got 1 indices"):
        field.bind(good)(np.array([1]))
    assert not good.any()
    assert field.is_plain
    with pytest.raises(TypeError, match="use lengths and gather_ragged"):
        ragged(PackedDataset(pack(["a", "b"], tmp_path / "q.lmdb").path)).gather(two, good)


def test_numbers_gather_as_default_collate_would_make_them(tmp_path: Path) -> None:
    """int64, float64 and bool."""
    packed = PackedDataset(pack([(i, i / 2, i > 3) for i in range(9)], tmp_path / "p.lmdb").path)
    assert packed.gather.is_plain
    made = torch.tensor([8, 0]), torch.tensor([4.0, 0], dtype=torch.float64), torch.tensor([True, False])
    for field, expected in zip(packed.gather.fields, made, strict=True):
        out = torch.empty(2, dtype=field.torch_dtype)
        field.gather(np.array([8, 0]), out)
        assert out.dtype == expected.dtype
        assert torch.equal(out, expected)


def test_gathered_memory_is_a_copy_and_the_file_is_not_written(tmp_path: Path) -> None:
    """Samples and batches may be changed; the file keeps its bytes."""
    path = pack([np.full(4, i) for i in range(9)], tmp_path / "p.lmdb").path
    before = Path(path).read_bytes()
    packed = PackedDataset(path)
    sample = packed[3]
    sample += 100
    packed.column("0")[:] = 5
    out = torch.empty(1, 4, dtype=torch.int64)
    fixed(packed).gather(np.array([3]), out)
    assert out.tolist() == [[3, 3, 3, 3]]
    assert Path(path).read_bytes() == before


def test_the_mapping_lives_as_long_as_a_reader(tmp_path: Path) -> None:
    """A reader that is all that is left of a dataset still reads; the file may be unlinked meanwhile."""
    path = Path(pack([np.full(400, i) for i in range(900)], tmp_path / "p.lmdb", chunk_bytes=65536).path)
    field: Any = PackedDataset(path).gather.fields[0]
    path.unlink()
    out = torch.empty(900, 400, dtype=torch.int64)
    field.gather(np.arange(900), out)
    assert torch.equal(out[:, 7], torch.arange(900))
