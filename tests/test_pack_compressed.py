"""Fields compressed row by row: what goes in comes out, in any order, and what makes no sense is refused."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shmloader_tools import inspect_pack
from shmloader_tools import pack as pack_tool
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import TensorDataset

from shmloader import DataLoader, PackDamaged, PackedDataset, SampleMismatch, UnsupportedField, pack
from shmloader.packfile import verify
from shmloader.packfile.compressed import deflate, inflate
from shmloader.packfile.schema import Field
from shmloader.packfile.values import value_of

Captured = pytest.CaptureFixture[str]

DTYPES = [torch.uint8, torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.complex64]


def masks(count: int) -> list[dict[str, Any]]:
    """Samples with a mask of one size, one of varying size, a text and a number."""
    made = []
    for i in range(count):
        mask = torch.zeros(64, 48, dtype=torch.uint8)
        mask[i % 40 : i % 40 + 20, 8:30] = i % 5
        made.append({"mask": mask, "crop": mask[: 8 + i % 3, : 5 + i % 7].contiguous(), "text": f"{i} " * 50, "y": i})
    return made


ZLIB = {"mask": "zlib", "crop": "zlib", "text": "zlib"}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return list(one) == list(other) and all(
        torch.equal(one[k], other[k]) if isinstance(one[k], torch.Tensor) else one[k] == other[k] for k in one
    )


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(0, 2**32 - 1))
def test_any_array_comes_back(dtype: torch.dtype, shape: list[int], seed: int) -> None:
    """Bit by bit, shape and dtype too; empty ones included."""
    numbers = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    value = value_of(numbers)
    field = Field("x", "array", value.dtype, (None,) * len(shape), "zlib")
    back = inflate(deflate(value).array.tobytes(), field)
    assert back.dtype == dtype
    assert torch.equal(back, numbers)


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=50), st.binary(max_size=50))
def test_any_text_and_bytes_come_back(text: str, data: bytes) -> None:
    """Empty ones too."""
    for value, kind in ((text, "str"), (data, "bytes")):
        assert inflate(deflate(value_of(value)).array.tobytes(), Field("x", kind, kind, (), "zlib")) == value


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40), st.integers(0, 30), st.integers(1, 255))
def test_a_damaged_row_is_an_error_and_never_larger_than_it_says(data: bytes, at: int, flip: int) -> None:
    """Flipped, cut or made up: ValueError, or (a byte of the stream that means nothing) the very value."""
    field = Field("x", "bytes", "bytes", (), "zlib")
    row = bytearray(deflate(value_of(data)).array.tobytes())
    row[at % len(row)] ^= flip
    for broken in (bytes(row), bytes(row[: at % len(row)]), data):
        try:
            assert inflate(broken, field) == data
        except ValueError as error:
            assert str(error)  # noqa: PT017
    bomb = (10).to_bytes(4, "little") + zlib.compress(bytes(1 << 20))
    with pytest.raises(ValueError, match="other than the 10 bytes"):
        inflate(bomb, field)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_pack_with_compressed_fields_is_the_dataset(tmp_path: Path, num_workers: int) -> None:
    """pack(encodings=) takes arrays, ragged ones, and text; samples, batches and fields are as without."""
    samples = masks(50)
    path = tmp_path / "a.lmdb"
    report = pack(samples, path, encodings=ZLIB, chunk_bytes=4096)
    plain = pack(samples, tmp_path / "plain.lmdb")
    assert report.payload_bytes < plain.payload_bytes / 5
    packed = PackedDataset(path)
    assert len(verify(path)) == 0
    assert all(same(packed[i], samples[i]) for i in (49, 0, 7, -1, 23))
    assert str(packed.fields[0]) == "mask uint8[?,?] (zlib)"
    order = [3, 40, 3, 11, 49, 0, 1, 2]
    some = PackedDataset(path, ("mask", "text", "y"))
    with DataLoader(some, 4, sampler=order, num_workers=num_workers) as loader:
        for ours, theirs in zip(loader, TorchLoader(some, 4, sampler=order), strict=True):
            assert same(ours, theirs)


def test_a_tensor_dataset_is_compressed_too(tmp_path: Path) -> None:
    """Its fast way, in slices, is not for rows that are compressed."""
    rows = torch.arange(600).reshape(30, 20)
    pack(TensorDataset(rows), tmp_path / "a.lmdb", field_names=["x"], encodings={"x": "zlib"})
    assert torch.equal(PackedDataset(tmp_path / "a.lmdb")[17][0], rows[17])


def test_what_cannot_be_compressed_is_named(tmp_path: Path) -> None:
    """A number, another dtype, another number of axes: field and sample."""
    with pytest.raises(UnsupportedField, match="a float, which would not get smaller") as unsupported:
        pack([{"x": 1.0}], tmp_path / "a.lmdb", encodings={"x": "zlib"})
    assert unsupported.value.field == "x"
    for odd in (torch.zeros(3, dtype=torch.float64), torch.zeros(3, 1), "text"):
        with pytest.raises(SampleMismatch) as mismatch:
            pack([torch.zeros(3), odd], tmp_path / "a.lmdb", field_names=["x"], encodings={"x": "zlib"})
        assert mismatch.value.index == 1
    assert not os.listdir(tmp_path)


def test_a_row_that_does_not_expand_names_file_field_and_sample(tmp_path: Path) -> None:
    """PackDamaged, where checksums were not asked for."""
    path = tmp_path / "a.lmdb"
    pack([{"x": torch.full((1000,), i)} for i in range(4)], path, encodings={"x": "zlib"})
    row = PackedDataset(path).gather.fields[0].raw_bytes(2)  # type: ignore[attr-defined]
    whole = path.read_bytes()
    at = whole.index(row)
    path.write_bytes(whole[: at + 8] + b"\xff" * 8 + whole[at + 16 :])
    broken = PackedDataset(path)
    assert broken[1]["x"][0] == 1
    with pytest.raises(PackDamaged, match=r"field 'x', sample 2: the compressed row"):
        broken[2]
    assert verify(path)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_command_compresses_fields_by_name(tmp_path: Path, workers: int, capsys: Captured) -> None:
    """--store FIELD=zlib, with and without workers: equal packs; the report says how much smaller; inspect shows it."""
    np.savez(
        tmp_path / "set.npz", image=np.arange(4000, dtype=np.float32).reshape(40, 100), mask=np.eye(40, 90)[:, None]
    )
    words = [str(tmp_path / "set.npz"), str(tmp_path / "a.lmdb"), "--store", "mask=zlib", "--workers", str(workers)]
    assert pack_tool.main(words) == 0
    out = capsys.readouterr().out
    assert "mask: " in out
    assert "compressed to " in out
    sample = PackedDataset(tmp_path / "a.lmdb")[39]
    assert sample["mask"].tolist() == np.eye(40, 90)[39:40].tolist()
    assert inspect_pack.main([str(tmp_path / "a.lmdb"), "--sample", "3", "--verify"]) == 0
    assert "(zlib)" in capsys.readouterr().out


@pytest.mark.parametrize(("store", "said"), [("label=zlib", "holds an int"), ("image=zlib", "image files")])
def test_the_command_refuses_what_does_not_get_smaller(tmp_path: Path, store: str, said: str, capsys: Captured) -> None:
    """Labels and image files: one sentence, exit code 2 or 1, nothing left."""
    from PIL import Image

    (tmp_path / "photos" / "a").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "photos" / "a" / "0.png")
    assert pack_tool.main([str(tmp_path / "photos"), str(tmp_path / "a.lmdb"), "--store", store]) in (1, 2)
    assert said in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["photos"]
