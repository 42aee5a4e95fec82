"""Packing what is damaged, where there is no room, over what an earlier run has left."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from listed import Samples
from shmloader.errors import BrokenImage, PackError, ResumeRefused, SampleMismatch, SourceError
from shmloader.packfile import PackedDataset
from shmloader.sources import PackSettings, Problem, pack_parts
from support import small_tmpfs


def samples_of(path: str | Path) -> list[Any]:
    return list(PackedDataset(path))


BAD: dict[int, Any] = {
    0: FileNotFoundError(2, "No such file or directory", "gone.jpg"),
    17: BrokenImage("bad.jpg", 5, "truncated"),
    18: SourceError("list.txt line 18", "no label"),
    50: torch.zeros(2, 2),
    99: np.datetime64("2020-01-01"),
}


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_samples_are_left_out_counted_and_listed(tmp_path: Path, workers: int) -> None:
    """E7: missing, damaged, mismatched and unstorable samples, and those that the source rejects; warnings stay in."""
    samples: list[Any] = [torch.full((3,), float(i)) for i in range(100)]
    for index, bad in BAD.items():
        samples[index] = bad
    found = {
        30: Problem(30, "thing 30, box 2", "box-outside", "box 2 is outside"),
        31: Problem(31, "thing 31", "small", "it is small", "warning"),
    }
    report = tmp_path / "report.jsonl"
    run = pack_parts(Samples(samples, found), tmp_path / "p.lmdb", on_error="skip", report=report, workers=workers)
    good = [i for i in range(100) if i not in BAD and i != 30]
    assert [int(sample[0]) for sample in samples_of(tmp_path / "p.lmdb")] == good
    assert run.skipped == 6
    assert run.problems == {
        ("error", "missing-file"): 1,
        ("error", "unreadable-image"): 1,
        ("error", "unreadable"): 1,
        ("error", "mismatch"): 1,
        ("error", "unsupported"): 1,
        ("error", "box-outside"): 1,
        ("warning", "small"): 1,
    }
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    assert [(line["index"], line["skipped"]) for line in lines] == [
        (0, True), (17, True), (18, True), (30, True), (31, False), (50, True), (99, True),
    ]  # fmt: skip
    assert lines[5]["where"] == "thing 50"
    assert PackedDataset(tmp_path / "p.lmdb").manifest.metadata["skipped"] == 6


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("index", [0, 17, 30, 50, 99])
def test_stopping_at_the_first_bad_sample(tmp_path: Path, workers: int, index: int) -> None:
    """Its own exception with its name, the target untouched, the finding in the report."""
    samples: list[Any] = [torch.full((3,), float(i)) for i in range(100)]
    for bad in BAD:
        if bad >= index:
            samples[bad] = BAD[bad]
    found = {30: Problem(30, "thing 30, box 2", "box-outside", "box 2 is outside")} if index == 30 else {}
    kinds: dict[int, Any] = {0: FileNotFoundError, 17: BrokenImage, 30: SourceError, 50: SampleMismatch, 99: TypeError}
    with pytest.raises(kinds[index]) as caught:
        pack_parts(Samples(samples, found), tmp_path / "p.lmdb", report=tmp_path / "r", workers=workers)
    if index in (30, 50):
        assert f"thing {index}" in str(caught.value)
    [line] = (tmp_path / "r").read_text().splitlines()
    assert json.loads(line)["index"] == index
    assert [path.name for path in tmp_path.iterdir()] == ["r"]


def test_nothing_but_bad_samples_is_an_error(tmp_path: Path) -> None:
    """A pack without samples is not what was asked for."""
    with pytest.raises(SourceError, match="none of its 3 samples can be packed"):
        pack_parts(Samples([OSError("x")] * 3), tmp_path / "p.lmdb", on_error="skip")
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_is_said_before_the_work(tmp_path: Path) -> None:
    """The estimate names need and free bytes; nothing has been written."""
    source = Samples([torch.zeros(1 << 18, dtype=torch.uint8)] * 40)
    with small_tmpfs(tmp_path / "small", "4m") as folder:
        with pytest.raises(PackError, match=r"too little room: 40 samples will take about 10\.2 MiB, 4\.0 MiB"):
            pack_parts(source, folder / "p.lmdb")
        assert list(folder.iterdir()) == []


def test_a_full_disk_is_gone_on_from(tmp_path: Path) -> None:
    """D6: disk full in the middle: one sentence; after freeing space the same call gives the undisturbed file."""
    rng = np.random.default_rng(0)
    source = Samples([{"x": rng.bytes(40_000), "n": i} for i in range(60)])
    settings = PackSettings(chunk_bytes=1 << 18, shuffle=1)
    pack_parts(source, tmp_path / "p.lmdb", settings=settings)
    with small_tmpfs(tmp_path / "small", "4m") as folder:
        (folder / "filler").write_bytes(bytes(2 << 20))
        with pytest.raises(PackError, match=r"No space left on device.*are free there"):
            pack_parts(source, folder / "p.lmdb", settings=settings, check_space=False, workers=1)
        assert (folder / "p.lmdb.partial").exists()
        os.unlink(folder / "filler")
        run = pack_parts(source, folder / "p.lmdb", settings=settings)
        assert 0 < run.resumed < 60
        assert (folder / "p.lmdb").read_bytes() == (tmp_path / "p.lmdb").read_bytes()


def test_a_run_that_stopped_at_a_bad_sample_goes_on_and_skips_it(tmp_path: Path) -> None:
    """on_error may change between runs; what was found before is still in the report of the second."""
    samples: list[Any] = [torch.full((2000,), i) for i in range(100)]
    samples[5], samples[80] = OSError(5, "Input/output error"), BrokenImage("b.jpg", 3, "cut")
    settings = PackSettings(chunk_bytes=1 << 17)
    report = tmp_path / "r"
    pack_parts(Samples(samples), tmp_path / "all.lmdb", settings=settings, on_error="skip", report=report)
    expected = report.read_text()
    assert len(expected.splitlines()) == 2
    samples[5] = torch.full((2000,), 5)
    with pytest.raises(BrokenImage):
        pack_parts(Samples(samples), tmp_path / "p.lmdb", settings=settings)
    run = pack_parts(Samples(samples), tmp_path / "p.lmdb", settings=settings, on_error="skip", report=report)
    assert run.resumed == 80
    assert run.skipped == 1
    assert len(PackedDataset(tmp_path / "p.lmdb")) == 99


def test_changed_data_or_options_are_refused(tmp_path: Path) -> None:
    """Between a killed run and the next: other names, counts, settings: refused, kept; restart begins anew."""
    samples: list[Any] = [torch.full((2000,), i) for i in range(100)]
    broken = [*samples[:90], BrokenImage("b.jpg", 3, "cut"), *samples[91:]]
    settings = PackSettings(chunk_bytes=1 << 17)
    with pytest.raises(BrokenImage):
        pack_parts(Samples(broken), tmp_path / "p.lmdb", settings=settings)
    before = (tmp_path / "p.lmdb.partial").read_bytes()
    for source, other, salt in (
        (Samples(samples[:99]), settings, ""),
        (Samples(samples), PackSettings(chunk_bytes=1 << 16), ""),
        (Samples(samples), settings, "other options of the source"),
    ):
        with pytest.raises(ResumeRefused, match=r"88 samples, but the data or the options have changed"):
            pack_parts(source, tmp_path / "p.lmdb", settings=other, salt=salt)
        assert (tmp_path / "p.lmdb.partial").read_bytes() == before
    run = pack_parts(Samples(samples[:99]), tmp_path / "p.lmdb", settings=settings, restart=True)
    assert (run.resumed, run.parts[0].report.samples) == (0, 99)


def test_names_of_any_kind_are_data(tmp_path: Path) -> None:
    """Empty, equal, very long, with line breaks, NUL, surrogates of undecodable file names: read back as they were."""
    names = ["", "", "a" * 100_000, "a\nb", "\0", "ü\udcff/é", "😀", "same", "same"]
    pack_parts(Samples([{"name": name, "i": i} for i, name in enumerate(names)]), tmp_path / "p.lmdb", workers=1)
    assert [sample["name"] for sample in samples_of(tmp_path / "p.lmdb")] == names
