"""WebDataset tar shards: written by webdataset itself and by tar; grouped by key, read at random, nothing unpickled."""

from __future__ import annotations

import gc
import gzip
import io
import json
import pickle
import subprocess
import tarfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image
from shmloader_tools import pack as pack_tool

from shmloader import DataLoader, PackedDataset
from shmloader.errors import BrokenImage, MisuseError, SourceError
from shmloader.images import Fit
from shmloader.sources import TarShards, open_source, pack_source, recognise
from shmloader.sources.shards import expand


def jpeg(seed: int, size: tuple[int, int] = (20, 16)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG")
    return out.getvalue()


def sample(i: int) -> dict[str, Any]:
    return {
        "__key__": f"dir.x/{i:06d}",
        "jpg": jpeg(i),
        "cls": i % 3,
        "json": {"id": i, "name": f"ü{i}"},
        "txt": f"caption {i}",
        "boxes.npy": np.full((i % 4, 4), i, np.float32),
        "raw": bytes([i, 0, 255]),
    }


def shard(path: Path, numbers: range, **changes: Any) -> Path:
    """Write a shard with webdataset's own writer."""
    path.parent.mkdir(exist_ok=True)
    with webdataset.TarWriter(str(path)) as writer:
        for i in numbers:
            made = {**sample(i), **changes}
            writer.write({name: value for name, value in made.items() if value is not None})
    return path


def archive(path: Path, files: dict[str, bytes], form: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=form) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def test_samples_of_webdatasets_own_writer(tmp_path: Path) -> None:
    """Suffixes become fields by what they hold: the same values that webdataset's own reader gives."""
    path = shard(tmp_path / "a.tar", range(7))
    data = TarShards(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # its reader leaves the file to the collector
        theirs = list(webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False))
        gc.collect()
    assert len(data) == len(theirs) == 7
    for i, their in enumerate(theirs):
        ours = data[i]
        assert list(ours) == [name for name in their if name not in ("__url__", "__local_path__")]
        assert ours["__key__"] == their["__key__"]
        assert ours["cls"] == int(their["cls"])
        assert ours["txt"] == their["txt"].decode()
        assert json.loads(ours["json"]) == json.loads(their["json"]) == {"id": i, "name": f"ü{i}"}
        assert ours["boxes.npy"].tolist() == [[i] * 4] * (i % 4)
        assert ours["raw"] == their["raw"]
        want = np.asarray(Image.open(io.BytesIO(their["jpg"]))).transpose(2, 0, 1)
        assert np.array_equal(ours["jpg"].numpy(), want)
    assert TarShards(path, encoded=True)[3]["jpg"] == theirs[3]["jpg"]
    assert TarShards(path, fit=Fit(8, 8))[3]["jpg"].shape == (3, 8, 8)


def test_folders_and_patterns_of_shards(tmp_path: Path) -> None:
    """All tars of a folder, or those of a brace pattern, one after another; each index is found in its shard."""
    for n in range(4):
        shard(tmp_path / "s" / f"t-{n:02d}.tar", range(5 * n, 5 * n + 5 - n))
    folder = TarShards(tmp_path / "s")
    assert [folder[i]["cls"] for i in range(len(folder))] == [
        i % 3 for i in (*range(5), *range(5, 9), *range(10, 13), 15, 16)
    ]
    assert folder.name_of(4).endswith("t-00.tar")
    assert folder.name_of(5).endswith("t-01.tar")
    some = open_source(f"{tmp_path}/s/t-{{01..02}}.tar")
    assert isinstance(some, TarShards)
    assert len(some) == 7
    assert recognise(tmp_path / "s") is recognise(tmp_path / "s" / "t-00.tar") is TarShards
    assert expand("a-{08..11}-{x,y}.tar")[:3] == ["a-08-x.tar", "a-08-y.tar", "a-09-x.tar"]
    assert expand("{9..11}") == ["9", "10", "11"]
    with pytest.raises(SourceError, match=r"t-04\.tar: there is no such file"):
        open_source(f"{tmp_path}/s/t-{{00..04}}.tar")


def test_a_pack_of_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command packs them: images as their files, names of any kind as data; batches as from the shards."""
    shard(tmp_path / "s" / "a.tar", range(6))
    shard(tmp_path / "s" / "b.tar", range(6, 12))
    out = tmp_path / "a.lmdb"
    assert pack_tool.main([str(tmp_path / "s"), str(out)]) == 0
    assert "WebDataset, 2 tar files, images stored as their files" in capsys.readouterr().out
    packed, source = PackedDataset(out), TarShards(tmp_path / "s")
    for i in range(12):
        ours, theirs = packed[i], source[i]
        assert {k: v for k, v in ours.items() if not isinstance(v, torch.Tensor)} == {
            k: v for k, v in theirs.items() if not isinstance(v, torch.Tensor)
        }
        assert torch.equal(ours["jpg"], theirs["jpg"])
        assert torch.equal(ours["boxes.npy"], theirs["boxes.npy"])
    assert pack_tool.main([str(tmp_path / "s"), str(out), "--overwrite", "--columns", "cls,jpg", "--size", "8x8"]) == 0
    batch = next(iter(DataLoader(PackedDataset(out), batch_size=12)))
    assert list(batch) == ["cls", "jpg"]
    halves = ["--split", "a=0.5,b=0.5", "--stratify", "--columns", "cls", "--quiet"]
    assert pack_tool.main([str(tmp_path / "s"), str(tmp_path / "half.lmdb"), *halves]) == 0
    assert sorted(PackedDataset(tmp_path / "half.a.lmdb").column("cls").tolist()) == [0, 0, 1, 1, 2, 2]  # type: ignore[union-attr]
    assert batch["jpg"].shape == (12, 3, 8, 8)


def test_workers_read_shards(tmp_path: Path) -> None:
    """The source is a plain dataset: it pickles as its path, and workers read any sample."""
    shard(tmp_path / "a.tar", range(10))
    data = TarShards(tmp_path / "a.tar", suffixes=("cls", "jpg"), fit=Fit(8, 8))
    copy = pickle.loads(pickle.dumps(data))
    batches = list(DataLoader(copy, batch_size=5, num_workers=2))
    assert torch.cat([batch["cls"] for batch in batches]).tolist() == [i % 3 for i in range(10)]


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_and_strange_names(tmp_path: Path, form: int) -> None:
    """Names of more than 100 bytes, in both ways that tar has for them, in folders, not ASCII, with several dots."""
    long = "d/" * 80 + "n" * 180
    names = [f"{long}.txt", "ünï/カギ.txt", "a b.TXT", "dir.with.dots/c.txt"]
    data = TarShards(archive(tmp_path / "a.tar", {name: name.encode() for name in names}, form))
    assert [data[i]["txt"] for i in range(4)] == names
    assert [data[i]["__key__"] for i in range(4)] == [name[:-4] for name in names]
    pack_source(data, tmp_path / "a.lmdb")
    assert [each["txt"] for each in PackedDataset(tmp_path / "a.lmdb")] == names


def test_tars_of_the_tar_command(tmp_path: Path) -> None:
    """GNU tar's own files, with folders and ./ before the names; what is in no sample is noted."""
    folder = tmp_path / "in"
    folder.mkdir()
    for i in range(3):
        (folder / f"{i}{'x' * 150}.txt").write_text(str(i))
    (folder / "README").write_text("no sample")
    (folder / ".hidden.txt").write_text("no sample")
    subprocess.run(["tar", "-cf", tmp_path / "a.tar", "--sort=name", "-C", folder, "."], check=True, timeout=60)
    data = TarShards(tmp_path / "a.tar")
    assert [data[i]["txt"] for i in range(3)] == ["0", "1", "2"]
    (note,) = data.notes
    assert "2 (" in note
    assert "README" in note


def test_a_key_that_comes_again_is_another_sample(tmp_path: Path) -> None:
    """As in webdataset: samples are runs of equal keys; two files of one suffix in a run are an error."""
    files = {"a.txt": b"1", "b.txt": b"2"}
    archive(tmp_path / "a.tar", files)
    archive(tmp_path / "b.tar", files)
    assert len(TarShards(tmp_path)) == 4
    with tarfile.open(tmp_path / "b.tar", "w") as tar:
        for _ in range(2):
            tar.addfile(tarfile.TarInfo("a.txt"))
    with pytest.raises(SourceError, match=r"'a' has two files that end in .txt"):
        TarShards(tmp_path / "b.tar")


def test_a_missing_suffix_is_named(tmp_path: Path) -> None:
    """Which sample, which suffix, how many have it; naming the suffixes that all have helps."""
    path = archive(tmp_path / "a.tar", {"a.txt": b"1", "a.cls": b"1", "b.txt": b"2", "c.txt": b"3", "c.cls": b"3"})
    with pytest.raises(SourceError, match=r"sample 'b' has no .cls, which 2 of 3 samples have.*--columns"):
        TarShards(path)
    assert [each["txt"] for each in TarShards(path, suffixes=("txt",))] == ["1", "2", "3"]
    with pytest.raises(SourceError, match=r"ends in .png"):
        TarShards(path, suffixes=("txt", "png"))


def test_contents_that_are_not_what_they_say(tmp_path: Path) -> None:
    """A broken image, a class that is no number, an array of objects: each names sample, shard and suffix."""
    objects = io.BytesIO()
    np.save(objects, np.array([{}], object), allow_pickle=True)
    files = {"a.jpg": jpeg(1)[:100], "b.cls": b"seven", "c.npy": objects.getvalue(), "d.txt": b"\xff"}
    for name, data in files.items():
        source = TarShards(archive(tmp_path / "a.tar", {name: data}))
        with pytest.raises((SourceError, BrokenImage), match=rf"sample '{name[0]}' of .*a.tar, its .{name[2:]}"):
            source[0]
    with pytest.raises(MisuseError, match="--size"):
        TarShards(tmp_path / "a.tar", fit=Fit(8, 8))


def test_files_that_are_no_whole_tars(tmp_path: Path) -> None:
    """Compressed, cut, empty or something else: one sentence each, before anything is packed."""
    whole = archive(tmp_path / "a.tar", {f"{i}.txt": b"x" * 700 for i in range(4)}).read_bytes()
    for data, says in (
        (gzip.compress(whole), "is compressed"),
        (b"no tar at all" * 100, "is no tar"),
        (whole[: 3 * 1536 + 600], "is no tar: unexpected end|is cut"),
        (whole[: 3 * 1536 + 100], "is cut"),
        (bytes(10240), "no sample in it"),
    ):
        (tmp_path / "b.tar").write_bytes(data)
        with pytest.raises(SourceError, match=says):
            TarShards(tmp_path / "b.tar")
