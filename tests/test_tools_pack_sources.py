"""shmloader-pack on annotated sets, lists and tables: what is typed, what is printed, what comes out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from shmloader_tools import pack as pack_tool

from annotated import coco, labelimg, photograph
from shmloader import PackedDataset

Captured = pytest.CaptureFixture[str]


def run(*words: str | Path) -> int:
    return pack_tool.main([str(word) for word in words])


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two photographs in a folder of their own."""
    photograph(tmp_path / "img" / "a.jpg")
    photograph(tmp_path / "img" / "b.jpg", name="coffee")
    return tmp_path


def test_a_voc_folder_is_packed_as_it_is(photos: Path, capsys: Captured) -> None:
    """Recognised, its objects counted by class; --size takes the boxes along."""
    for name in ("a", "b"):
        image = photos / "img" / f"{name}.jpg"
        image.with_suffix(".xml").write_text(labelimg(image, (120, 80), [("cat", (12, 8, 60, 40))]))
    assert run(photos / "img", photos / "a.lmdb") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "Pascal VOC, images stored as their files" in out
    assert "boxes float32" in out
    assert PackedDataset(photos / "a.lmdb")[1]["boxes"].tolist() == [[12, 8, 60, 40]]
    assert run(photos / "img", photos / "b.lmdb", "--size", "60x40", "--quiet") == 0
    sample = PackedDataset(photos / "b.lmdb")[0]
    assert sample["boxes"].tolist() == [[6, 4, 30, 20]]
    assert tuple(sample["image"].shape) == (3, 40, 60)
    (photos / "img" / "val.txt").write_text("b\n")
    assert run(photos / "img", photos / "c.lmdb", "--image-set", photos / "img" / "val.txt", "--quiet") == 0
    assert [sample["name"] for sample in PackedDataset(photos / "c.lmdb")] == ["b.jpg"]


def test_a_coco_file_is_told_where_its_images_are(photos: Path, capsys: Captured) -> None:
    """--images; without it one sentence says where they were looked for, and what would help."""
    path = photos / "deep" / "deeper" / "x.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(coco([(1, "a.jpg", (120, 80))], [{"image_id": 1}])))
    assert run(path, photos / "a.lmdb") == 1
    err = capsys.readouterr().err
    assert "looked for a.jpg in" in err
    assert "--images" in err
    assert err.count("\n") == 1
    assert run(path, photos / "a.lmdb", "--images", photos / "img", "--quiet") == 0
    assert PackedDataset(photos / "a.lmdb")[0]["image_id"] == 1


def test_columns_and_separator_of_a_list_are_found_or_said(photos: Path, capsys: Captured) -> None:
    """What was found is in the report, in the words that set it."""
    (photos / "img" / "list.txt").write_text("a.jpg\t10\t20\t3\nb.jpg\t30\t40\t5\n")
    assert run(photos / "img" / "list.txt", photos / "a.lmdb") == 0
    assert "columns found: path,points,label, separated by tab" in capsys.readouterr().out
    words = ["--separator", "tab", "--columns", "path,x=number,skip,age=number", "--overwrite", "--quiet"]
    assert run(photos / "img" / "list.txt", photos / "a.lmdb", *words) == 0
    sample = PackedDataset(photos / "a.lmdb")[1]
    assert (sample["x"], sample["age"]) == (30, 5)
    assert run(photos / "img" / "list.txt", photos / "b.lmdb", "--columns", "path,label") == 1
    assert "list.txt, line 1: it has 4 columns, expected 2" in capsys.readouterr().err


def test_columns_of_a_table_are_chosen(photos: Path, capsys: Captured) -> None:
    """Images by their paths, labels by their names; a missing value ends in one sentence with row and column."""
    (photos / "t.csv").write_text("photo;kind;size\nimg/a.jpg;cat;1\nimg/b.jpg;cup;\n")
    assert run(photos / "t.csv", photos / "a.lmdb") == 1
    assert "t.csv, row 1: column 'size' has no value here" in capsys.readouterr().err
    assert run(photos / "t.csv", photos / "a.lmdb", "--columns", "photo,kind=label") == 0
    out = capsys.readouterr().out
    assert "in 2 classes" in out
    assert "column 'photo' names images" in out
    packed = PackedDataset(photos / "a.lmdb")
    assert packed.classes == ["cat", "cup"]
    assert tuple(packed[1]["photo"].shape) == (3, 80, 120)
    assert int(packed[1]["kind"]) == 1


def test_an_option_that_means_nothing_is_an_error(photos: Path, capsys: Captured) -> None:
    """It is not ignored: the pack would not be what was asked for."""
    (photos / "t.csv").write_text("x\n1\n")
    assert run(photos / "t.csv", photos / "a.lmdb", "--image-set", "val") == 1
    assert "the option 'image_set' means nothing for table data" in capsys.readouterr().err
    assert not (photos / "a.lmdb").exists()


def test_bad_annotations_stop_or_are_left_out_and_listed(photos: Path, capsys: Captured) -> None:
    """E7: XML that is cut, a box of no area, a missing image, a box beyond its image: each told by its own file."""
    root = photos / "img"
    boxes = {"a": (1, 1, 60, 40), "b": (90, 5, 20, 40), "c": (1, 1, 9, 9), "d": (1, 1, 9, 9), "e": (100, 1, 140, 40)}
    for name, box in boxes.items():
        if name != "c":
            photograph(root / f"{name}.jpg")
        (root / f"{name}.xml").write_text(labelimg(root / f"{name}.jpg", (120, 80), [("cat", box)]))
    (root / "d.xml").write_text("<annotation><object>")
    assert run(root, photos / "a.lmdb") == 1
    assert "b.xml: box 0 (90, 5, 20, 40) has no area" in capsys.readouterr().err
    assert not (photos / "a.lmdb").exists()
    words = ["--on-error", "skip", "--report", photos / "report.jsonl", "--restart"]
    assert run(root, photos / "a.lmdb", *words) == 0
    packed = PackedDataset(photos / "a.lmdb")
    assert [sample["name"] for sample in packed] == ["a.jpg", "e.jpg"]
    told = {json.loads(line)["where"]: json.loads(line) for line in (photos / "report.jsonl").read_text().splitlines()}
    assert {Path(where).name for where in told} == {"b.xml", "c.xml", "d.xml", "e.xml"}
    assert {name: told[str(root / name)]["severity"] for name in ("b.xml", "e.xml")} == {
        "b.xml": "error",
        "e.xml": "warning",
    }


def test_a_list_is_split_by_its_labels(photos: Path) -> None:
    """--stratify knows the label column of a list, whatever it is called."""
    lines = [f"a.jpg {i} {'cat' if i % 4 else 'cup'}\n" for i in range(40)]
    (photos / "img" / "list.txt").write_text("".join(lines))
    words = ["--columns", "path,number,kind=label", "--split", "train=0.5,val=0.5", "--stratify", "--quiet"]
    assert run(photos / "img" / "list.txt", photos / "a.lmdb", *words) == 0
    for name in ("train", "val"):
        packed = PackedDataset(photos / f"a.{name}.lmdb")
        assert sorted(packed.column("kind").tolist()) == [0] * 15 + [1] * 5  # type: ignore[union-attr]
