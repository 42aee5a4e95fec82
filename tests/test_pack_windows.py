"""Windows in packs: overlapping rows that are stored once and read as if each were whole."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate
from torch.utils.data.dataloader import _DatasetKind

from shmloader import DataLoader, PackedDataset
from shmloader.errors import MisuseError, PackDamaged, SampleMismatch
from shmloader.fetch import Recipe
from shmloader.gathering import Gatherer
from shmloader.packfile import PackWriter, verify
from shmloader.packfile.windows import Windows

CHUNK = 4096  # the smallest: many chunks, so many borders


def tokens(count: int, dtype: str = "uint16", seed: int = 0) -> np.ndarray[Any, Any]:
    info = np.iinfo(dtype)
    return np.random.default_rng(seed).integers(info.min, info.max, count, dtype, endpoint=True)


def packed(path: Path, windows: Windows, step: int = 1000, chunk_bytes: int = CHUNK, **options: Any) -> PackedDataset:
    with PackWriter(path, field_names=("tokens",), chunk_bytes=chunk_bytes, overwrite=True, **options) as writer:
        for start in range(0, len(windows), step):
            writer.add_columns(windows[start : start + step])
    return PackedDataset(path)


def expected(windows: Windows) -> torch.Tensor:
    return torch.from_numpy(np.stack([windows[i] for i in range(len(windows))]).astype(windows.dtype_given))


@settings(deadline=None, max_examples=60)
@given(
    count=st.integers(1, 6000),
    length=st.integers(1, 300),
    stride=st.integers(1, 330),
    step=st.integers(1, 2000),
    dtype=st.sampled_from(["uint8", "uint16", "uint32", "int64"]),
    seed=st.integers(0, 9),
)
def test_any_windows_come_back(
    tmp_path_factory: pytest.TempPathFactory, count: int, length: int, stride: int, step: int, dtype: str, seed: int
) -> None:
    """Whatever length, stride and dtype, and however many came at a time: each window is its part of the flat array."""
    windows = Windows(tokens(count, dtype, seed), length, stride, "int64")
    path = tmp_path_factory.mktemp("windows") / "a.lmdb"
    data = packed(path, windows, step)
    assert len(data) == len(windows) == max(0, (count - length) // stride + 1)
    assert verify(path) == []
    if not len(windows):
        return
    want = expected(windows)
    rows = np.random.default_rng(seed).integers(0, len(data), 50)
    out = torch.empty((50, length), dtype=torch.int64)
    data.gather.fields[0].gather(rows, out)
    assert torch.equal(out, want[torch.from_numpy(rows)])
    for index in (0, len(data) // 2, -1):
        assert torch.equal(data[index], want[index])
    assert np.array_equal(data.column("tokens"), windows.rows())


def test_windows_across_chunks_are_whole(tmp_path: Path) -> None:
    """With a stride of 1 and many chunks, every window in a row is right, also those on both sides of each border."""
    windows = Windows(tokens(30_000), 33, 1, "int64")
    data = packed(tmp_path / "a.lmdb", windows)
    chunks = len(data._pack.fields[0].table)
    assert chunks > 10
    everything = torch.cat(list(DataLoader(data, batch_size=256)))
    assert torch.equal(everything, expected(windows))


@pytest.mark.parametrize(("length", "stride"), [(1025, 1), (1025, 1024), (64, 64), (100, 7), (2000, 1)])
def test_what_windows_share_is_stored_once(tmp_path: Path, length: int, stride: int) -> None:
    """The file is hardly larger than the flat array, although the windows together may be a thousand times as large:
    at most one part in 16 is in two chunks."""
    flat = tokens(1_000_000)
    path = tmp_path / "a.lmdb"
    data = packed(path, Windows(flat, length, stride, "int64"), 100_000, chunk_bytes=1 << 18)
    stored = int(data._pack.fields[0].table[:, 3].sum())
    assert stored <= flat.nbytes * (1 + 1 / 16)
    assert path.stat().st_size <= 1.15 * flat.nbytes
    assert data.manifest.payload_bytes <= flat.nbytes
    assert np.array_equal(np.asarray(data[len(data) - 1]), flat[(len(data) - 1) * stride :][:length])


def test_loaders_gather_windows(tmp_path: Path) -> None:
    """Batches of windows take the fast way, in workers too, and equal those that are built one by one."""
    windows = Windows(tokens(20_000), 129, 128, "int64")
    data = packed(tmp_path / "a.lmdb", windows)
    want = expected(windows)
    with DataLoader(data, batch_size=16, num_workers=2) as loader:
        batches = [batch.clone() for batch in loader]
        assert loader.stats().copied_out == 0
    assert torch.equal(torch.cat(batches), want)
    assert data.gather.is_plain
    assert torch.equal(torch.stack(data.__getitems__(list(range(20)))), want[:20])
    again = pickle.loads(pickle.dumps(data))
    assert torch.equal(again[7], want[7])


def test_windows_are_gathered_not_fetched(tmp_path: Path) -> None:
    """There is a gatherer for them: no Python per sample."""
    data = packed(tmp_path / "a.lmdb", Windows(tokens(5000), 65, 64, "int64"))
    assert Gatherer.of(Recipe(_DatasetKind.Map, data, True, default_collate, False)) is not None


def test_windows_beside_other_columns(tmp_path: Path) -> None:
    """A window may be one field of a sample, and of frames that are arrays: one row of the others for each window."""
    frames = np.random.default_rng(1).normal(size=(5000, 3)).astype(np.float32)
    windows = Windows(frames, 20, 5, "float32")
    labels = np.arange(len(windows))
    path = tmp_path / "a.lmdb"
    with PackWriter(path, chunk_bytes=CHUNK) as writer:
        for at in range(0, len(windows), 300):
            writer.add_columns({"x": windows[at : at + 300], "y": labels[at : at + 300]})
    data = PackedDataset(path)
    assert [str(field) for field in data.fields] == ["x float32[20,3] (windows of float32, one every 5)", "y int64[]"]
    assert verify(path) == []
    for batch in DataLoader(data, batch_size=100):
        for x, y in zip(batch["x"], batch["y"], strict=True):
            assert np.array_equal(x.numpy(), frames[int(y) * 5 :][:20])
    assert np.array_equal(data.column("x"), windows.rows())


def test_another_dtype_may_be_read_than_stored(tmp_path: Path) -> None:
    """uint16 tokens are read as int64, or as they are."""
    flat = tokens(100)
    for given_dtype in ("int64", "int32", "uint16"):
        data = packed(tmp_path / "a.lmdb", Windows(flat, 10, 10, given_dtype))
        assert data[3].dtype == getattr(torch, given_dtype)
        assert data[3].tolist() == flat[30:40].tolist()
        batch = next(iter(DataLoader(data, batch_size=10)))
        assert batch.dtype == data[3].dtype
        assert batch.flatten().tolist() == flat.tolist()


def test_windows_that_do_not_go_on_are_refused(tmp_path: Path) -> None:
    """Only the flat array is stored, so each call must go on where the last one ended: else SampleMismatch, at once."""
    windows = Windows(tokens(5000), 50, 10, "int64")
    other = [
        (windows[100:200], "begins with the end of the one before"),
        (Windows(windows.flat, 50, 20, "int64"), "every 10"),
        (Windows(windows.flat, 50, 10, "int32"), "int64"),
        (windows.rows()[10:], "do not overlap"),
        (Windows(windows.flat, 60, 10, "int64"), r"\(50,\)"),
    ]
    path = tmp_path / "a.lmdb"
    for wrong, says in other:
        with PackWriter(path) as writer:
            writer.add_columns(windows[:10])
            with pytest.raises(SampleMismatch, match=says):
                writer.add_columns(wrong)
            writer.add_columns(windows[10:20])
        assert len(PackedDataset(path)) == 20
        path.unlink()
    with PackWriter(path) as writer:
        writer.add_columns(windows[:10])
        with pytest.raises(SampleMismatch, match="come as columns"):
            writer.add(windows[10])
        with pytest.raises(MisuseError, match="as columns"):
            writer.add_block(0, np.empty(0, np.uint8), np.empty(0, np.int64))


def test_a_killed_run_goes_on_between_windows(tmp_path: Path) -> None:
    """A run that is given up after some chunks and gone on with makes the same file, byte for byte."""
    windows = Windows(tokens(40_000), 65, 3, "int64")
    whole = tmp_path / "whole.lmdb"
    packed(whole, windows, fingerprint="same")
    path = tmp_path / "a.lmdb"
    writer = PackWriter(path, field_names=("tokens",), fingerprint="same", chunk_bytes=CHUNK)
    writer.add_columns(windows[:7000])
    writer.give_up()
    with PackWriter(path, field_names=("tokens",), fingerprint="same", chunk_bytes=CHUNK) as writer:
        assert 0 < writer.samples < 7000
        writer.add_columns(windows[writer.samples :])
    assert path.read_bytes() == whole.read_bytes()


def test_damage_in_the_table_is_found(tmp_path: Path) -> None:
    """A chunk that does not end with a whole window is refused before anything is read behind it."""
    from shmloader.packfile.mapping import open_pack
    from shmloader.packfile.window_reader import WindowReader

    packed(tmp_path / "a.lmdb", Windows(tokens(5000), 65, 64, "int64"))
    pack = open_pack(tmp_path / "a.lmdb")
    pack.fields[0].table = pack.fields[0].table.copy()
    pack.fields[0].table[0, 3] -= 2
    with pytest.raises(PackDamaged, match="not as long as their windows"):
        WindowReader(pack, pack.raw(), 0)


def test_nonsense_is_refused() -> None:
    """No windows of no length, none without a stride, none that lie outside."""
    for length, stride in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            Windows(tokens(10), length, stride, "int64")
    windows = Windows(tokens(10), 4, 2, "int64")
    assert windows.shape == (4, 4)
    assert len(windows[2:]) == 2
    assert len(windows[4:]) == 0
    with pytest.raises(IndexError):
        windows[4]
    with pytest.raises(ValueError, match="step"):
        windows[::2]
