"""Hugging Face datasets: what their own writers wrote, feature by feature, from Arrow and from Parquet."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Sequence, Value
from datasets.arrow_writer import ArrowWriter
from PIL import Image
from shmloader_tools import pack as pack_tool

from shmloader import DataLoader, PackedDataset
from shmloader.errors import BrokenImage, MisuseError, SourceError
from shmloader.images import Fit
from shmloader.sources import HuggingFaceRows, TableRows, open_source, pack_source, recognise

Captured = pytest.CaptureFixture[str]
ROWS = 600


@pytest.fixture(autouse=True, scope="module")
def silent() -> Any:
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def png(seed: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (6 + seed % 3, 5, 3), np.uint8)).save(out, "PNG")
    return out.getvalue()


PHOTOS = Features(
    {
        "image": datasets.Image(),
        "label": ClassLabel(names=["cat", "dog", "owl"]),
        "caption": Value("string"),
        "ids": Sequence(Value("int32")),
        "score": Value("float32"),
        "good": Value("bool"),
        "raw": Value("binary"),
        "objects": {"bbox": Sequence(Sequence(Value("float32"), length=4)), "category": Sequence(Value("int64"))},
        "tags": Sequence(Value("string")),
        "matrix": datasets.Array2D((2, 3), "float32"),
    }
)


def photo(i: int) -> dict[str, Any]:
    return {
        "image": {"bytes": png(i), "path": None},
        "label": i % 3,
        "caption": f"ein Föto {i}",
        "ids": list(range(i % 5)),
        "score": i / 7,
        "good": i % 2 == 0,
        "raw": bytes([i % 256, 0]),
        "objects": {"bbox": [[i, j, 3.5, 4] for j in range(i % 3)], "category": list(range(i % 3))},
        "tags": ["a", f"ü{i}"],
        "matrix": [[i, 1, 2], [3, 4, 5]],
    }


def photos(count: int = ROWS) -> Dataset:
    return Dataset.from_list([photo(i) for i in range(count)], features=PHOTOS)


def check(sample: dict[str, Any], i: int) -> None:
    want = photo(i)
    assert list(sample) == list(PHOTOS)
    assert np.array_equal(sample["image"].numpy(), np.asarray(Image.open(io.BytesIO(png(i)))).transpose(2, 0, 1))
    assert (sample["label"], sample["caption"], sample["raw"]) == (want["label"], want["caption"], want["raw"])
    assert sample["ids"].dtype == torch.int32
    assert sample["ids"].tolist() == want["ids"]
    assert sample["score"].dtype == torch.float32
    assert float(sample["score"]) == pytest.approx(want["score"])
    assert sample["good"].dtype == torch.bool
    assert bool(sample["good"]) == want["good"]
    assert sample["objects"]["bbox"].shape == (i % 3, 4)
    assert sample["objects"]["bbox"].tolist() == want["objects"]["bbox"]
    assert sample["objects"]["category"].tolist() == want["objects"]["category"]
    assert json.loads(sample["tags"]) == want["tags"]
    assert sample["matrix"].tolist() == want["matrix"]


@pytest.mark.parametrize("shards", [1, 3])
def test_save_to_disk(tmp_path: Path, shards: int, capsys: Captured) -> None:
    """Every feature becomes the field that it is: from the folder, and from its pack; class names are kept."""
    photos().save_to_disk(str(tmp_path / "saved"), num_shards=shards)
    assert recognise(tmp_path / "saved") is HuggingFaceRows
    data = HuggingFaceRows(tmp_path / "saved")
    assert len(data) == ROWS
    for i in (0, 1, 299, 300, ROWS - 1):
        check(data[i], i)
    check(pickle.loads(pickle.dumps(data))[5], 5)
    assert data.class_counts() == {"cat": 200, "dog": 200, "owl": 200}
    assert pack_tool.main([str(tmp_path / "saved"), str(tmp_path / "a.lmdb"), "--workers", "0"]) == 0
    assert "Hugging Face dataset, images stored as their files" in capsys.readouterr().out
    packed = PackedDataset(tmp_path / "a.lmdb")
    assert packed.classes == ["cat", "dog", "owl"]
    assert packed.manifest.metadata["label_field"] == "label"
    assert [field.name for field in packed.fields][-4:] == ["objects.bbox", "objects.category", "tags", "matrix"]
    for i in (0, 7, ROWS - 1):
        check(packed[i], i)


def test_parquet_shards(tmp_path: Path) -> None:
    """Parquet files with datasets' own schema, several row groups and files; a table without it is a table."""
    photos(20).to_parquet(str(tmp_path / "a" / "train-0.parquet").replace("/a/", "/"), batch_size=7)
    (tmp_path / "shards").mkdir()
    for n in range(2):
        part = photos().select(range(300 * n, 300 * n + 300))
        part.to_parquet(str(tmp_path / "shards" / f"train-{n}.parquet"), batch_size=70)
    data = open_source(tmp_path / "shards")
    assert isinstance(data, HuggingFaceRows)
    assert data.encoded
    data = HuggingFaceRows(tmp_path / "shards")
    for i in (0, 69, 70, 299, 300, 599, 5):
        check(data[i], i)
    assert recognise(tmp_path / "train-0.parquet") is HuggingFaceRows
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"x": [1, 2]}), tmp_path / "plain.parquet")
    assert recognise(tmp_path / "plain.parquet") is TableRows


NUMBERS = Features({"x": Sequence(Value("float32"), length=4), "y": ClassLabel(names=["a", "b"]), "z": Value("uint8")})


@pytest.mark.parametrize("how", ["saved", "arrow", "parquet"])
def test_numbers_go_in_columns(tmp_path: Path, how: str) -> None:
    """Where all columns are numbers of one shape, they are packed without Python for each row, in any order."""
    x = np.random.default_rng(0).normal(size=(3000, 4)).astype(np.float32)
    made = {"x": x.tolist(), "y": [i % 2 for i in range(3000)], "z": [i % 256 for i in range(3000)]}
    dataset = Dataset.from_dict(made, features=NUMBERS)
    path = tmp_path / "a"
    dataset.save_to_disk(str(path), num_shards=2)
    if how == "arrow":
        path = next(path.glob("data-00000*.arrow"))
    if how == "parquet":
        path = tmp_path / "a.parquet"
        dataset.to_parquet(str(path), batch_size=500)
    data = HuggingFaceRows(path)
    rows = len(data)
    assert data.columns() is not None
    assert (data[7]["y"].dtype, data[7]["z"].dtype) == (torch.int64, torch.uint8)
    pack_source(data, tmp_path / "a.lmdb")
    packed = PackedDataset(tmp_path / "a.lmdb")
    assert np.array_equal(packed.column("x"), x[:rows])
    assert all(torch.equal(packed[9][name], data[9][name]) for name in NUMBERS)
    assert pack_tool.main([str(path), str(tmp_path / "b.lmdb"), "--shuffle", "3", "--quiet"]) == 0
    shuffled = next(iter(DataLoader(PackedDataset(tmp_path / "b.lmdb"), batch_size=rows)))
    assert sorted(shuffled["x"][:, 0].tolist()) == sorted(x[:rows, 0].tolist())
    assert shuffled["x"][:, 0].tolist() != x[:rows, 0].tolist()


def test_images_may_get_one_size_and_columns_be_chosen(tmp_path: Path) -> None:
    """--size and --columns; both are refused where they cannot mean anything."""
    photos(10).save_to_disk(str(tmp_path / "saved"))
    data = HuggingFaceRows(tmp_path / "saved", columns=("label", "image"), fit=Fit(8, 8))
    assert list(data[0]) == ["label", "image"]
    batch = next(iter(DataLoader(data, batch_size=10, num_workers=1)))
    assert batch["image"].shape == (10, 3, 8, 8)
    assert batch["label"].tolist() == [i % 3 for i in range(10)]
    with pytest.raises(MisuseError, match="--size"):
        HuggingFaceRows(tmp_path / "saved", columns=("label",), fit=Fit(8, 8))
    with pytest.raises(SourceError, match=r"no column 'nothing'; there are image, label"):
        HuggingFaceRows(tmp_path / "saved", columns=("nothing",))


def test_what_is_missing_or_cannot_be_stored(tmp_path: Path) -> None:
    """Nulls, lists of lists of different lengths, times, broken and missing images: row, column and reason."""
    made = {"n": [1, None, 3], "r": [[[1], [2]], [[1], [2, 3]], []], "s": ["a", None, "c"]}
    Dataset.from_dict(made).save_to_disk(str(tmp_path / "a"))
    for column, says in (
        ("n", r"row 1 of .*column 'n': is missing"),
        ("r", r"row 1 of .*'r': is a list of lists that differ"),
        ("s", "'s': is missing"),
    ):
        data = HuggingFaceRows(tmp_path / "a", columns=(column,))
        data[0]
        with pytest.raises(SourceError, match=says):
            data[1]
    with pytest.raises(SourceError, match="column 'n': numbers are missing"):
        pack_source(HuggingFaceRows(tmp_path / "a", columns=("n",)), tmp_path / "n.lmdb")
    features = Features({"t": Value("timestamp[s]"), "n": Value("int64")})
    Dataset.from_dict({"t": [0], "n": [1]}, features=features).save_to_disk(str(tmp_path / "b"))
    with pytest.raises(SourceError, match=r"column 't' .* cannot be stored: leave it out, as in --columns n"):
        HuggingFaceRows(tmp_path / "b")
    photo_file = tmp_path / "gone.png"
    photo_file.write_bytes(png(2))
    only_image = Features({"image": datasets.Image()})
    with ArrowWriter(features=only_image, path=str(tmp_path / "c.arrow")) as writer:
        writer.write({"image": {"bytes": png(1)[:40], "path": None}})
        writer.write({"image": {"bytes": None, "path": str(photo_file)}})
        writer.finalize()
    data = HuggingFaceRows(tmp_path / "c.arrow", encoded=True)
    assert data[1] == {"image": png(2)}
    photo_file.unlink()
    with pytest.raises(BrokenImage, match="row 0 of"):
        data[0]
    with pytest.raises(SourceError, match=r"row 1 of .*gone\.png"):
        data[1]


def test_labels_that_are_kept_secret(tmp_path: Path) -> None:
    """-1 stands for no label in test sets: packed as it is, with a warning."""
    features = Features({"x": Value("string"), "label": ClassLabel(names=["a", "b"])})
    Dataset.from_dict({"x": ["p", "q"], "label": [1, -1]}, features=features).save_to_disk(str(tmp_path / "a"))
    data = HuggingFaceRows(tmp_path / "a")
    assert list(data.problems(0, data[0])) == []
    (problem,) = data.problems(1, data[1])
    assert (problem.kind, problem.severity) == ("label-outside", "warning")
    assert data.class_counts() == {"a": 0, "b": 1}


def test_splits_and_other_folders(tmp_path: Path) -> None:
    """A DatasetDict names its splits; an empty set, and files that are cut, are refused."""
    DatasetDict(train=photos(3), test=photos(2)).save_to_disk(str(tmp_path / "all"))
    with pytest.raises(SourceError, match=r"holds several splits: pack one of its folders: test, train"):
        open_source(tmp_path / "all")
    assert len(open_source(tmp_path / "all" / "train")) == 3
    with pytest.raises(SourceError, match="is nothing that datasets wrote"):
        open_source(tmp_path, "huggingface")
    Dataset.from_dict({"x": []}).save_to_disk(str(tmp_path / "empty"))
    with pytest.raises(SourceError, match="no row"):
        open_source(tmp_path / "empty")
    photos(50).to_parquet(str(tmp_path / "a.parquet"))
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole[:200] + whole[300:])
    with pytest.raises(SourceError, match=r"a\.parquet"):
        HuggingFaceRows(tmp_path / "a.parquet")[0]
