"""Any Python dataset as a source: named on the command line, map-style or iterable."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from shmloader import PackedDataset
from shmloader.errors import MisuseError
from shmloader.sources import Options, PythonDataset, pack_source
from support import run_script

MODULE = """
import torch
from torch.utils.data import Dataset, IterableDataset

class Squares(Dataset):
    classes = ["even", "odd"]

    def __init__(self, count=10, scale=1.0):
        self.count, self.scale = count, scale

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.full((3,), index * index * self.scale), index % 2

class Stream(IterableDataset):
    def __iter__(self):
        return iter(Squares(7)[i] for i in range(7))

class Made:
    stream = staticmethod(Stream)

def not_a_dataset():
    return 17
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_data.py").write_text(MODULE)
    return tmp_path


SCRIPT = """
import contextlib, io, json, sys
from shmloader_tools.pack import main

for words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


def commands(folder: Path, *lines: list[str]) -> list[tuple[int, str, str]]:
    """Run command lines one after another in one process whose current folder is ``folder``."""
    done = run_script(SCRIPT, args=[json.dumps(lines)], cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def test_a_function_in_the_current_folder_gives_the_dataset(folder: Path) -> None:
    """--dataset module:function, with arguments by name or by place; its classes are kept; other options may follow."""
    named = ["--dataset", "my_data:Squares", "--dataset-args", '{"count": 5, "scale": 2}', "a.lmdb", "--overwrite"]
    placed = ["--dataset", "my_data:Squares", "b.lmdb", "--dataset-args", "[4]", "--quiet"]
    (code, out, err), (quiet, _, _) = commands(folder, named, placed)
    assert (code, err, quiet) == (0, "", 0)
    assert "map-style dataset, a Squares" in out
    packed = PackedDataset(folder / "a.lmdb")
    assert len(packed) == 5
    assert packed[3][0].tolist() == [18.0] * 3
    assert packed[3][1] == 1
    assert packed.classes == ["even", "odd"]
    assert packed.manifest.metadata["source"] == 'my_data:Squares {"count": 5, "scale": 2}'
    assert len(PackedDataset(folder / "b.lmdb")) == 4


def test_an_iterable_dataset_is_packed_as_it_comes(folder: Path) -> None:
    """What has no length is packed to its end; what would need a length or a second look is refused."""
    stream = ["--dataset", "my_data:Made.stream"]
    (code, out, err), *refused = commands(
        folder,
        [*stream, "a.lmdb"],
        [*stream, "b.lmdb", "--limit", "3"],
        [*stream, "b.lmdb", "--shuffle", "1"],
        [*stream, "b.lmdb", "--on-error", "skip"],
    )
    assert (code, err) == (0, "")
    assert "iterable dataset, a Stream" in out
    assert [sample[1] for sample in PackedDataset(folder / "a.lmdb")] == [0, 1, 0, 1, 0, 1, 0]
    for code, _, err in refused:
        assert code == 1
        assert "can only be iterated" in err
    assert not (folder / "b.lmdb").exists()


def test_what_cannot_be_had_is_one_sentence(folder: Path) -> None:
    """Exit code 1 and the reason, or 2 for a wrong command line; nothing is written."""
    wanted = [
        (["--dataset", "my_data:nothing"], "my_data has no nothing"),
        (["--dataset", "my_dat:Squares"], "No module named 'my_dat'"),
        (["--dataset", "my_data"], "must name a module and a function"),
        (["--dataset", "my_data:Squares", "--dataset-args", "{"], "is no JSON"),
        (["--dataset", "my_data:Squares", "--dataset-args", "4"], "must be a JSON object or a list"),
        (["--dataset", "my_data:not_a_dataset"], "returned a int"),
    ]
    found = commands(folder, *[[*words, "a.lmdb"] for words, _ in wanted])
    for (_, says), (code, _, err) in zip(wanted, found, strict=True):
        assert code == 1
        assert says in err
        assert err.count("\n") == 1
    for code, _, err in commands(folder, ["a.lmdb"], ["photos", "a.lmdb", "--dataset", "my_data:Squares"]):
        assert code == 2
        assert "give a SOURCE, or a --dataset" in err
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == ["my_data.py"]


class Numbers(IterableDataset[int]):
    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(range(5))


def test_sources_of_python_datasets(tmp_path: Path) -> None:
    """As classes: tensors of a TensorDataset go in whole columns, streams have no length, nonsense is refused."""
    tensors = TensorDataset(torch.arange(3000).reshape(1000, 3), torch.arange(1000).to(torch.bfloat16))
    source = PythonDataset(tensors, "x:y")
    assert source.columns() is not None
    pack_source(source, tmp_path / "a.lmdb")
    packed = PackedDataset(tmp_path / "a.lmdb")
    for index in (0, 7, 999):
        assert all(torch.equal(a, b) for a, b in zip(packed[index], tensors[index], strict=True))
    assert source.name_of(7) == "sample 7 of x:y"
    stream = PythonDataset(Numbers(), "x:z")
    assert stream.streams
    with pytest.raises(TypeError, match="no length"):
        len(stream)
    pack_source(stream, tmp_path / "b.lmdb")
    assert np.array_equal(PackedDataset(tmp_path / "b.lmdb").column("0"), np.arange(5))
    for wrong in (17, {"a": 1}, "text", None):
        with pytest.raises(MisuseError, match="a dataset has"):
            PythonDataset(wrong, "x:z")
    with pytest.raises(MisuseError, match="--dataset"):
        PythonDataset.open("x", Options())
