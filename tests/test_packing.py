"""Packing sources: what workers, options, bad samples and earlier runs do to a pack, and what they do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from listed import Samples
from shmloader.errors import MisuseError, SampleMismatch
from shmloader.packfile import PackedDataset, verify
from shmloader.sources import ArrayFiles, ImageFolder, PackSettings, Part, Source, pack_parts
from shmloader.sources.reading import BLOCK_BYTES
from support import no_leaks


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 images in three unequal classes: JPEG and PNG, of several sizes."""
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for i in range(60):
        folder = root / ("ant" if i < 36 else "bee" if i < 54 else "cow")
        folder.mkdir(exist_ok=True)
        pixels = rng.integers(0, 255, (3, 4, 3), np.uint8)
        image = Image.fromarray(pixels).resize((60 + i % 7, 50), Image.Resampling.BICUBIC)
        image.save(folder / f"{i:02}.{'png' if i % 9 == 0 else 'jpg'}")
    return root


def samples_of(path: str | Path) -> list[Any]:
    return list(PackedDataset(path))


@pytest.mark.parametrize("workers", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_workers_change_nothing_but_the_time(photos: Path, tmp_path: Path, workers: int) -> None:
    """The file is the same to the last bit, whoever reads: files, pixels and strings; and nothing is left behind."""
    strings = Samples([{"s": "é" * (i % 50), "b": b"\0" * (i * 31 % 1000), "n": i} for i in range(400)])
    with no_leaks():
        for name, source in {"files": ImageFolder(photos, encoded=True), "strings": strings}.items():
            for count in (0, workers):
                settings = PackSettings(chunk_bytes=1 << 15)
                run = pack_parts(source, tmp_path / f"{name}{count}.lmdb", settings=settings, workers=count)
                assert run.workers == count
            assert (tmp_path / f"{name}0.lmdb").read_bytes() == (tmp_path / f"{name}{workers}.lmdb").read_bytes()
    assert samples_of(tmp_path / "strings0.lmdb") == strings.samples


def test_blocks_are_bounded_whatever_the_samples(tmp_path: Path) -> None:
    """Tiny samples, then giants: a batch planned for tiny ones ends early, the rest comes in order all the same."""
    rng = np.random.default_rng(0)
    samples = [rng.bytes(10) for _ in range(300)] + [rng.bytes(BLOCK_BYTES // 2 + 1) for _ in range(7)] + [b"", b"x"]
    for workers in (0, 1):
        pack_parts(Samples(samples), tmp_path / "p.lmdb", workers=workers, overwrite=True)
        assert samples_of(tmp_path / "p.lmdb") == samples


def test_an_odd_sample_is_named(tmp_path: Path) -> None:
    """E1: 99 samples (3, 8, 8) and one (1, 8, 8): the table counts both shapes, and the odd one's name is said."""
    samples: list[Any] = [torch.zeros(3, 8, 8, dtype=torch.uint8)] * 100
    samples[41] = torch.zeros(1, 8, 8, dtype=torch.uint8)
    run = pack_parts(Samples(samples), tmp_path / "p.lmdb")
    [part] = run.parts
    assert [(each.shape, each.count) for each in part.fields[0].shapes] == [((3, 8, 8), 99), ((1, 8, 8), 1)]
    assert part.odd == ("field '0': 99 samples have shape (3, 8, 8), but 1 (1, 8, 8): thing 41",)


def test_shuffled_and_limited_packs(tmp_path: Path) -> None:
    """The same seed gives the same order, by columns and sample by sample; it is recorded; a limit takes its first."""
    x = np.arange(1000)
    np.save(tmp_path / "x.npy", x)
    arrays, listed = ArrayFiles(tmp_path / "x.npy"), Samples([torch.tensor(i) for i in range(1000)])
    orders = []
    for source in (arrays, listed):
        pack_parts(source, tmp_path / "p.lmdb", settings=PackSettings(shuffle=7), overwrite=True)
        packed = PackedDataset(tmp_path / "p.lmdb")
        assert packed.manifest.metadata["order"] == "random, seed 7"
        orders.append([int(each) for each in packed])
    assert orders[0] == orders[1] != list(range(1000))
    assert sorted(orders[0]) == list(range(1000))
    pack_parts(arrays, tmp_path / "p.lmdb", settings=PackSettings(shuffle=7, limit=10), overwrite=True)
    assert [int(each) for each in PackedDataset(tmp_path / "p.lmdb")] == orders[0][:10]


@pytest.mark.parametrize("stratify", [False, True])
def test_a_split_loses_and_doubles_nothing(photos: Path, tmp_path: Path, stratify: bool) -> None:
    """Each sample is in exactly one part, in the input's order; stratified parts have the classes' shares."""
    source = ImageFolder(photos, encoded=True)
    settings = PackSettings(split=(Part("train", 0.5), Part("val", 0.5)), stratify=stratify, split_seed=3)
    run = pack_parts(source, tmp_path / "p.lmdb", settings=settings)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.train.lmdb", "p.val.lmdb"]
    whole = [(hash(source[i][0]), source[i][1]) for i in range(60)]
    parts = []
    for part in run.parts:
        packed = PackedDataset(part.report.path)
        reader = packed.gather.fields[0]
        parts.append([(hash(reader.raw_bytes(i)), int(packed.column("label")[i])) for i in range(len(packed))])
        assert [each for each in whole if each in set(parts[-1])] == parts[-1]
        assert part.labels is not None
        if stratify:
            assert part.labels.counts == {"ant": 18, "bee": 9, "cow": 3}
    assert [len(part) for part in parts] == [30, 30]
    assert sorted(parts[0] + parts[1]) == sorted(whole)


def test_fields_can_be_stored_otherwise(photos: Path, tmp_path: Path) -> None:
    """Pixels of files, files of pixels, JPEG of a quality, other dtypes: what is read is what that gives."""
    from shmloader.images import Fit, decode_chw, encode_chw

    source, pixels = ImageFolder(photos, encoded=True), ImageFolder(photos, fit=Fit(20, 30))

    def packed(what: Source, **settings: Any) -> PackedDataset:
        pack_parts(what, tmp_path / "p.lmdb", settings=PackSettings(**settings), overwrite=True)
        assert verify(tmp_path / "p.lmdb") == []
        return PackedDataset(tmp_path / "p.lmdb")

    raw = packed(source, store={"image": "raw"}, dtypes={"label": "int16"})
    assert raw.fields[0].encoding is None
    assert torch.equal(raw[5][0], torch.from_numpy(decode_chw(source[5][0])))  # type: ignore[arg-type]
    assert raw[59][1].dtype == torch.int16
    png = packed(pixels, store={"image": "encoded"})
    assert png.fields[0].encoding == "encoded-image"
    assert torch.equal(png[7][0], pixels[7][0])
    low, high = packed(source, quality=10), packed(source, quality=95)
    assert low.manifest.payload_bytes < high.manifest.payload_bytes
    expected = decode_chw(encode_chw(decode_chw(source[3][0]), 95))  # type: ignore[arg-type]
    assert torch.equal(high[3][0], torch.from_numpy(expected))


def test_numbers_that_do_not_fit_are_named(tmp_path: Path) -> None:
    """--dtype never changes a number but by rounding: by columns and sample by sample."""
    listed = [{"x": torch.tensor([1.0, 2.5]), "n": i} for i in range(300)]
    for dtypes, number in (({"n": "uint8"}, "256"), ({"x": "int8"}, "2.5"), ({"n": "int8"}, "128")):
        with pytest.raises(SampleMismatch, match=rf"holds, found {number}"):
            pack_parts(Samples(listed), tmp_path / "p.lmdb", settings=PackSettings(dtypes=dtypes))
    np.savez(tmp_path / "a.npz", x=np.array([1.0, 1e30]), n=np.array([3, 300]))
    for dtypes, number in (({"n": "uint8"}, "300"), ({"x": "float16"}, "1e")):
        with pytest.raises(SampleMismatch, match=rf"holds, found {number}"):
            pack_parts(ArrayFiles(tmp_path / "a.npz"), tmp_path / "p.lmdb", settings=PackSettings(dtypes=dtypes))
    pack_parts(ArrayFiles(tmp_path / "a.npz"), tmp_path / "p.lmdb", settings=PackSettings(dtypes={"x": "bfloat16"}))
    assert PackedDataset(tmp_path / "p.lmdb")[1]["x"].dtype == torch.bfloat16
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npz", "p.lmdb"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"store": {"nothing": "raw"}}, "there is no field 'nothing'"),
        ({"store": {"x": "raw"}}, "no image"),
        ({"quality": 90}, "quality is for image files"),
        ({"dtypes": {"s": "int8"}}, "have no dtype"),
    ],
)
def test_settings_that_do_not_fit_are_said_before_anything_is_read(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    """One sentence, no file."""
    source = Samples([{"x": torch.zeros(3), "s": "a"}] * 5)
    with pytest.raises(MisuseError, match=said):
        pack_parts(source, tmp_path / "p.lmdb", settings=PackSettings(**settings))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"store": {"x": "fast"}}, {"dtypes": {"x": "int3"}}, {"quality": 0}, {"limit": 0}, {"stratify": True},
        {"split": (Part("a", 0.9), Part("b", 0.2))}, {"split": (Part("a", 0.5), Part("a", 0.5))},
        {"split": (Part("../a", 0.5), Part("b", 0.5))}, {"store": {"x": "raw"}, "dtypes": {"x": "int8"}},
    ],
)  # fmt: skip
def test_nonsense_settings_are_refused_when_made(settings: dict[str, Any]) -> None:
    """Before anything is opened."""
    with pytest.raises(MisuseError):
        PackSettings(**settings)
