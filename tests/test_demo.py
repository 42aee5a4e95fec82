"""The demo's photographs: real, mixed, and the same on every machine with the same Pillow."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from shmloader_tools import demo_photos

from shmloader.sources import ImageFolder


def digest(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_the_photographs_are_the_same_every_time(tmp_path: Path) -> None:
    """Two builds are equal, and a smaller build is a part of a larger one."""
    demo_photos.build(tmp_path / "a", per_class=4)
    demo_photos.build(tmp_path / "b", per_class=4)
    demo_photos.build(tmp_path / "small", per_class=2)
    first = digest(tmp_path / "a")
    assert digest(tmp_path / "b") == first
    assert digest(tmp_path / "small").items() <= first.items()


def test_the_photographs_are_as_mixed_as_a_real_folder(tmp_path: Path) -> None:
    """Classes, sizes, grey, EXIF rotation, alpha, and a file that is no image."""
    written = demo_photos.build(tmp_path / "photos", per_class=9)
    data = ImageFolder(tmp_path / "photos")
    assert len(data) == written == 90
    assert data.class_counts() == dict.fromkeys(demo_photos.PHOTOGRAPHS, 9)
    assert any("about.txt" in note for note in data.notes)
    images = [Image.open(data.name_of(i)) for i in range(len(data))]
    assert len({image.size for image in images}) > 60
    assert {image.mode for image in images} == {"RGB", "L", "RGBA"}
    turned = [i for i, image in enumerate(images) if image.getexif().get(0x0112) == 6]
    assert len(turned) == 10
    for i in turned:
        assert tuple(data[i][0].shape[1:]) == images[i].size  # height and width have changed places
    for image in images:
        image.close()


def test_photographs_are_not_written_over_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What exists is left alone."""
    assert demo_photos.main([str(tmp_path)]) == 1
    assert "exists already" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_demo_runs_to_its_end(tmp_path: Path) -> None:
    """From photographs to a loss that falls, under the planned limit; and it writes nowhere but where it is told."""
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "shmloader_tools.demo_train",
            *f"--work {work} --per-class 8 --epochs 3 --rounds 1".split(),
        ],
        cwd=home,
        env={"PATH": "/usr/bin:/bin", "HOME": str(home), "TMPDIR": str(home)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "demo passed" in done.stdout
    assert done.stderr == ""
    for words in ("Samples   80", "arena_bytes", "epoch 3", "pack of pixels", "limit "):
        assert words in done.stdout
    assert list(home.iterdir()) == []
