"""How samples are put together again: names, selection, namedtuples, dicts, images, columns, metadata."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict, namedtuple
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from shmloader.packfile import PackedDataset, PackWriter, pack


class Point(NamedTuple):
    x: Any
    y: Any


def test_fields_are_named_selected_and_ordered(tmp_path: Path) -> None:
    """A name is a way into the sample; selecting keeps the kind of the outermost part."""
    samples = [{"a": {"x": i, "y": (i, float(i))}, "b": f"s{i}"} for i in range(4)]
    path = pack(samples, tmp_path / "d.lmdb").path
    assert [field.name for field in PackedDataset(path).fields] == ["a.x", "a.y.0", "a.y.1", "b"]
    chosen = PackedDataset(path, fields=("b", "a.y"))
    assert chosen[2] == {"b": "s2", "a.y": (2, 2.0)}
    assert [field.name for field in chosen.fields] == ["b", "a.y.0", "a.y.1"]
    assert PackedDataset(path, fields="a")[3] == {"x": 3, "y": (3, 3.0)}
    assert PackedDataset(path, fields="a.y.1")[3] == 3.0
    assert PackedDataset(path, fields=("b", "b"))[1] == {"b": "s1"}
    with pytest.raises(KeyError, match=r"no field 'c'; it has a\.x, a\.y\.0"):
        PackedDataset(path, fields=("a", "c"))

    path = pack([(i, str(i)) for i in range(4)], tmp_path / "t.lmdb", field_names=("image", "label")).path
    assert PackedDataset(path, fields=("label", "image"))[2] == ("2", 2)
    assert PackedDataset(path, fields=["image"])[2] == (2,)
    assert PackedDataset(path, fields="label")[2] == "2"
    with pytest.raises(RuntimeError, match="must name the 2 parts"):
        pack([(1, 2)], tmp_path / "x.lmdb", field_names=("only",))

    path = pack([Point(i, -i) for i in range(4)], tmp_path / "n.lmdb").path
    assert PackedDataset(path, fields=("y", "x"))[2]._asdict() == {"y": -2, "x": 2}
    assert type(PackedDataset(path, fields=("x", "y"))[2]) is Point
    path = pack([5, 6], tmp_path / "s.lmdb", field_names=("n",)).path
    assert PackedDataset(path, fields="n")[1] == 6
    assert PackedDataset(path, fields=("n",))[1] == (6,)


def test_an_unknown_namedtuple_is_made_anew_and_pickles(tmp_path: Path) -> None:
    """A pack from elsewhere makes no process import anything; its samples still cross processes."""
    gone = namedtuple("gone", "left right")
    path = pack([gone(i, str(i)) for i in range(3)], tmp_path / "n.lmdb").path
    sample = PackedDataset(path)[1]
    assert (type(sample).__name__, sample._fields, sample.left, sample.right) == ("gone", ("left", "right"), 1, "1")
    back = pickle.loads(pickle.dumps(sample))
    assert type(back) is type(sample)
    assert back == sample


def test_mappings_of_any_kind_come_back_as_dicts(tmp_path: Path) -> None:
    """Keys keep type and order, whatever the order in later samples."""
    samples = [OrderedDict([(2, 1), ("2", 2)]), {"2": 4, 2: 3}]
    packed = PackedDataset(pack(samples, tmp_path / "p.lmdb").path)
    assert [dict(packed[i]) for i in range(2)] == [{2: 1, "2": 2}, {2: 3, "2": 4}]
    assert list(packed[1]) == [2, "2"]
    assert [field.name for field in packed.fields] == ["2", "2~2"]


def test_indexing_says_what_it_wants(tmp_path: Path) -> None:
    """Negative and numpy integers work; what is outside, or no integer, is named."""
    packed = PackedDataset(pack(range(5), tmp_path / "p.lmdb").path)
    assert (packed[-1], packed[-5], packed[np.int64(2)], packed[torch.tensor(3)]) == (4, 0, 2, 3)
    for outside in (5, -6, 2**70):
        with pytest.raises(IndexError, match=f"index {outside} is out of range for a pack of 5 samples"):
            packed[outside]
    for wrong in (slice(0, 2), "1", 1.0, None, (1, 2)):
        with pytest.raises(TypeError, match="indexed by one integer"):
            packed[wrong]
    assert list(packed) == [0, 1, 2, 3, 4]


def test_a_transform_sees_each_sample(tmp_path: Path) -> None:
    """And what it is given may be changed without harm to the file."""

    def darken(sample: torch.Tensor) -> torch.Tensor:
        sample -= 1
        return sample

    path = pack([np.full(3, i) for i in range(4)], tmp_path / "p.lmdb").path
    packed = PackedDataset(path, transform=darken)
    assert packed[2].tolist() == [1, 1, 1]
    assert packed[2].tolist() == [1, 1, 1]
    assert PackedDataset(path)[2].tolist() == [2, 2, 2]


def test_empty_datasets_and_samples(tmp_path: Path) -> None:
    """No samples, or samples of nothing, are no special case for the reader."""
    none = PackedDataset(pack([], tmp_path / "a.lmdb", metadata={"classes": []}).path)
    assert (len(none), none.fields, none.classes, list(none)) == (0, (), [], [])
    hollow = PackedDataset(pack([(), ()], tmp_path / "b.lmdb").path)
    assert list(hollow) == [(), ()]
    zero = PackedDataset(pack([np.zeros((0, 3), np.int8)] * 9, tmp_path / "c.lmdb").path)
    assert zero[8].shape == (0, 3)
    assert zero.column("0").shape == (9, 0, 3)


def test_encoded_images_are_decoded_when_read(tmp_path: Path) -> None:
    """Bytes stay as they are in the file; a sample is pixels, upright RGB; a broken one names pack and sample."""
    image_module = pytest.importorskip("PIL.Image")
    files = []
    for i in range(3):
        out = io.BytesIO()
        image_module.fromarray(np.full((4 + i, 6), 40 * i, np.uint8)).save(out, "PNG")
        files.append(out.getvalue())
    samples = [(data, i) for i, data in enumerate([*files, b"no image"])]
    path = pack(samples, tmp_path / "p.lmdb", field_names=("im", "n"), encodings={"im": "encoded-image"}).path
    packed = PackedDataset(path)
    assert str(packed.fields[0]) == "im uint8[3,?,?] (encoded-image)"
    assert packed[2][0].shape == (3, 6, 6)
    assert packed[2][0].dtype == torch.uint8
    assert bool((packed[2][0] == 80).all())
    values, offsets = packed.column("im")
    assert bytes(values[offsets[1] : offsets[2]]) == files[1]
    with pytest.raises(ValueError, match=r"p\.lmdb, sample 3: broken image"):
        packed[3]
    assert PackedDataset(path, fields="n")[3] == 3


def test_columns_read_one_field(tmp_path: Path) -> None:
    """Whole fields as arrays, fixed and ragged, selected or not; what numpy lacks is refused."""
    samples = [(i, "ab"[: i % 3], np.arange(i % 4, dtype=np.int16), torch.tensor(1.0).bfloat16()) for i in range(50)]
    path = pack(samples, tmp_path / "p.lmdb", field_names=("n", "s", "r", "h"), chunk_bytes=4096).path
    packed = PackedDataset(path, fields="n")
    np.testing.assert_array_equal(packed.column("n"), np.arange(50))
    values, offsets = packed.column("r")
    assert all(np.array_equal(values[offsets[i] : offsets[i + 1]], samples[i][2]) for i in range(50))
    values, offsets = packed.column("s")
    assert [bytes(values[a:b]).decode() for a, b in pairwise(offsets)] == [s[1] for s in samples]
    with pytest.raises(TypeError, match="numpy has no bfloat16"):
        packed.column("h")
    with pytest.raises(KeyError, match="no field 'x'; it has n, s, r, h"):
        packed.column("x")


def test_metadata_is_kept_as_json(tmp_path: Path) -> None:
    """Classes and source can be read; what JSON cannot keep is refused before anything is written."""
    path = pack([1], tmp_path / "p.lmdb", metadata={"classes": ["é", "b"], "source": "/x", "kind": "k"}).path
    packed = PackedDataset(path)
    assert packed.classes == ["é", "b"]
    assert packed.manifest.metadata["source"] == "/x"
    assert PackedDataset(pack([1], tmp_path / "q.lmdb").path).classes is None
    with pytest.raises(RuntimeError, match="what JSON knows"):
        PackWriter(tmp_path / "z.lmdb", metadata={"x": object()})
    assert not list(tmp_path.glob("z*"))
