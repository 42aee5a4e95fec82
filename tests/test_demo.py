"""The demo's photographs: real, mixed, and the same on every machine with the same Pillow."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from shmloader_tools import demo_detect, demo_photos, demo_voc

from shmloader.sources import ImageFolder, PascalVoc


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


def test_the_pictures_are_the_same_every_time_and_their_boxes_are_known(tmp_path: Path) -> None:
    """Two builds are equal; the source reads every box where it was pasted, whichever way up it was annotated."""
    truth = demo_voc.build(tmp_path / "a", pictures=24)
    assert demo_voc.build(tmp_path / "b", pictures=24) == truth
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    data = PascalVoc(tmp_path / "a")
    assert sum(data.class_counts().values()) == sum(map(len, truth)) > 30
    for index, objects in enumerate(truth):
        sample = data[index]
        assert [data.classes[label] for label in sample["labels"]] == [each.name for each in objects]
        assert sample["truncated"].tolist() == [each.truncated for each in objects]
        expected = np.array([each.box for each in objects], np.float32).reshape(-1, 4)
        assert np.abs(sample["boxes"].numpy() - expected).max(initial=0) <= 1
        kinds = {problem.kind for problem in data.problems(index, sample)}
        assert not kinds
    assert len(PascalVoc(tmp_path / "a", image_set="val")) == 5


def test_the_detection_step_finds_every_box(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Packed and drawn by the commands, read in batches, compared with what was pasted."""
    sheet = tmp_path / "sheet.png"
    assert demo_detect.detect(str(tmp_path / "voc"), str(tmp_path / "voc.lmdb"), str(sheet), pictures=10)
    assert "10 pictures with" in capsys.readouterr().out
    with Image.open(sheet) as drawn:
        assert drawn.width > 700  # three pictures abreast


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
            *f"--work {work} --per-class 8 --epochs 3 --rounds 1 --pictures 20".split(),
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
    for words in ("Samples   80", "arena_bytes", "epoch 3", "pack of pixels", "limit ", "Pascal VOC", "20 pictures"):
        assert words in done.stdout
    assert list(home.iterdir()) == []
