"""Array files of torch and safetensors, and how arrays are packed: in columns, mapped, without running code."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.utils.data import TensorDataset

from shmloader import DataLoader, PackedDataset
from shmloader.errors import MisuseError, SampleMismatch, SourceError
from shmloader.packfile import PackWriter, verify
from shmloader.sources import ArrayFiles, PackSettings, pack_source, recognise

ROWS = 50
X = torch.arange(ROWS * 6, dtype=torch.float32).reshape(ROWS, 2, 3)
Y = torch.arange(ROWS)
HALF = torch.arange(ROWS * 2, dtype=torch.bfloat16).reshape(ROWS, 2)


def equal(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, dict):
        return list(ours) == list(theirs) and all(equal(ours[name], theirs[name]) for name in theirs)
    if isinstance(theirs, tuple):
        return len(ours) == len(theirs) and all(equal(a, b) for a, b in zip(ours, theirs, strict=True))
    return bool(ours.dtype == theirs.dtype and torch.equal(ours, theirs))


def row(form: Any, index: int) -> Any:
    if isinstance(form, dict):
        return {name: tensor[index] for name, tensor in form.items()}
    return tuple(tensor[index] for tensor in form) if isinstance(form, tuple) else form[index]


@pytest.mark.parametrize("old", [False, True], ids=["zip", "before torch 1.6"])
@pytest.mark.parametrize(
    "form", [X, {"x": X, "y": Y, "half": HALF}, (X, Y), [X, Y], OrderedDict(x=X), {"t": X.transpose(1, 2), "n": Y > 3}]
)
def test_what_torch_saved(tmp_path: Path, form: Any, old: bool) -> None:
    """A tensor, dicts and tuples of tensors come back as rows of them, from the file and from its pack, whole columns
    at a time: bfloat16, transposed and bool ones too."""
    path = tmp_path / "a.pt"
    torch.save(form, path, _use_new_zipfile_serialization=not old)
    want = tuple(form) if isinstance(form, list) else dict(form) if isinstance(form, dict) else form
    assert recognise(path) is ArrayFiles
    data = ArrayFiles(path)
    assert data.columns() is not None
    pack_source(data, tmp_path / "a.lmdb")
    packed = PackedDataset(tmp_path / "a.lmdb")
    assert len(data) == len(packed) == ROWS
    for index in (0, 17, -1):
        assert equal(data[index], row(want, index))
        assert equal(packed[index], row(want, index))
    again = pickle.loads(pickle.dumps(data))
    assert equal(again[3], row(want, 3))


def test_tensors_are_mapped(tmp_path: Path) -> None:
    """What torch and safetensors saved is mapped, not read: the file can be far larger than memory."""
    form = {"x": torch.zeros(1 << 20), "y": torch.zeros(1 << 20)}
    torch.save(form, tmp_path / "a.pt")
    save_file(form, tmp_path / "a.safetensors")
    for name in ("a.pt", "a.safetensors"):
        data = ArrayFiles(tmp_path / name)
        address = data.columns()["x"].ctypes.data  # type: ignore[index,call-overload,union-attr]
        with open("/proc/self/maps") as maps:
            for line in maps:
                start, end = (int(part, 16) for part in line.split()[0].split("-"))
                if start <= address < end:
                    assert line.rstrip().endswith(name), line
                    break
            else:
                raise AssertionError("not mapped at all")


def test_safetensors(tmp_path: Path) -> None:
    """A dict of arrays, bfloat16 too; a file that is cut is said to be."""
    form = {"x": X, "half": HALF, "y": Y}
    path = tmp_path / "a.safetensors"
    save_file(form, path)
    assert recognise(path) is ArrayFiles
    data = ArrayFiles(path)
    pack_source(data, tmp_path / "a.lmdb")
    packed = PackedDataset(tmp_path / "a.lmdb")
    for index in (0, 49):
        want = {name: form[name][index] for name in data[0]}
        assert equal(data[index], want)
        assert equal(packed[index], want)
    batch = next(iter(DataLoader(packed, batch_size=ROWS)))
    assert torch.equal(batch["half"], HALF)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(SourceError, match="not readable as an array file"):
        ArrayFiles(path)


class Harmless:
    """Anything that needs code to be loaded."""


@pytest.mark.skipif("safe_globals" not in vars(torch.serialization), reason="torch < 2.5 has no list for one call")
def test_a_saved_tensor_dataset(tmp_path: Path) -> None:
    """torch.save(TensorDataset(...)) gives tuples."""
    torch.save(TensorDataset(X, Y), tmp_path / "a.pt")
    before = set(torch.serialization.get_safe_globals())
    assert equal(ArrayFiles(tmp_path / "a.pt")[7], (X[7], Y[7]))
    assert set(torch.serialization.get_safe_globals()) == before


@pytest.mark.parametrize(
    ("form", "says"),
    [
        (Harmless(), "would run code: save a tensor"),
        ({"x": X, "model": Harmless()}, "would run code"),
        ({"x": X, "epoch": 3}, "holds a dict with int in it"),
        ({"model": {"w": X}}, "holds a dict with dict in it"),
        (17, "holds a int"),
        ({}, "holds a dict"),
        ({"x": X, "y": Y[:7]}, r"different lengths: 'x' has 50 rows, 'y' has 7"),
        (torch.tensor(3), "single number"),
        (X[0].to_sparse(), "no rows"),
    ],
)
def test_what_cannot_be_rows(tmp_path: Path, form: Any, says: str) -> None:
    """Checkpoints, pickles of other things, tensors without rows: one sentence, and no code is run."""
    torch.save(form, tmp_path / "a.pt")
    with pytest.raises(SourceError, match=says):
        ArrayFiles(tmp_path / "a.pt")


def test_files_that_torch_did_not_save(tmp_path: Path) -> None:
    """Cut, or something else under that name."""
    torch.save({"x": X}, tmp_path / "a.pt")
    whole = (tmp_path / "a.pt").read_bytes()
    for data in (whole[:-50], whole[:100], b"text", b""):
        (tmp_path / "a.pt").write_bytes(data)
        with pytest.raises(SourceError, match=r"a\.pt"):
            ArrayFiles(tmp_path / "a.pt")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_goes_in_columns(tmp_path: Path, save: Any) -> None:
    """Members of an .npz are packed some thousand rows at a time, compressed or not."""
    save(tmp_path / "a.npz", x=X.numpy(), y=Y.numpy())
    data = ArrayFiles(tmp_path / "a.npz")
    assert isinstance(data.columns(), dict)
    pack_source(data, tmp_path / "a.lmdb")
    assert np.array_equal(PackedDataset(tmp_path / "a.lmdb").column("x"), X.numpy())


@settings(deadline=None, max_examples=40)
@given(
    texts=st.lists(st.text(max_size=12), min_size=1, max_size=40),
    as_bytes=st.booleans(),
    step=st.integers(1, 50),
)
def test_text_goes_in_columns(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], as_bytes: bool, step: int
) -> None:
    """Arrays of strings and of bytes are packed without a step for each row, beside numbers: what NumPy gives for a row
    comes back, however many came at a time."""
    made = np.array([text.encode("utf-8", "surrogatepass") for text in texts] if as_bytes else texts)
    numbers = np.arange(len(texts) * 3, dtype=np.float32).reshape(-1, 3)
    path = tmp_path_factory.mktemp("texts") / "a.lmdb"
    with PackWriter(path, chunk_bytes=4096) as writer:
        for at in range(0, len(texts), step):
            writer.add_columns({"x": numbers[at : at + step], "name": made[at : at + step]})
    packed = PackedDataset(path)
    assert verify(path) == []
    for i in range(len(texts)):
        assert packed[i]["name"] == (bytes(made[i]) if as_bytes else str(made[i]))
        assert type(packed[i]["name"]) is (bytes if as_bytes else str)
        assert packed[i]["x"].tolist() == numbers[i].tolist()


def test_arrays_of_text_are_packed_as_they_are_read(tmp_path: Path) -> None:
    """An .npz with names: the same samples from the file and from the pack; no dtype can be asked of them."""
    names = np.array([f"näme {i}" * (i % 3) for i in range(500)])
    np.savez(tmp_path / "a.npz", name=names, tag=np.char.encode(names), y=np.arange(500))
    data = ArrayFiles(tmp_path / "a.npz")
    assert data.columns() is not None
    pack_source(data, tmp_path / "a.lmdb")
    packed = PackedDataset(tmp_path / "a.lmdb")
    assert all(packed[i] == data[i] for i in range(500))
    with pytest.raises(MisuseError, match="no dtype applies"):
        pack_source(data, tmp_path / "b.lmdb", settings=PackSettings(dtypes={"name": "int8"}))
    with PackWriter(tmp_path / "c.lmdb") as writer:
        writer.add_columns({"name": names})
        with pytest.raises(SampleMismatch, match="name"):
            writer.add_columns({"name": np.arange(3)})
