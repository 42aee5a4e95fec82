"""Text lists: whatever stands between the columns, their roles found or said, every line checked."""

from __future__ import annotations

import csv
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from annotated import bright, marked, photograph
from shmloader import PackedDataset
from shmloader.errors import BrokenImage, MisuseError, SourceError
from shmloader.images import Fit
from shmloader.sources import ListFile, Options, open_source, pack_source, recognise
from shmloader.sources.list_lines import SEPARATORS, cut, data_lines, find_separator, names_image
from shmloader.sources.list_roles import found, said


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three photographs, one with a blank, a comma and other letters in its name."""
    for name in ("a.jpg", "b c, ü.JPG", "deep/d.png"):
        photograph(tmp_path / name)
    return tmp_path


def listing(root: Path, text: str, name: str = "list.txt", encoding: str = "utf-8") -> Path:
    path = root / name
    path.write_text(text, encoding=encoding)
    return path


@pytest.mark.parametrize(
    "text",
    [
        "a.jpg 3\nb c, ü.JPG 0\ndeep/d.png 3\n",
        "# photographs\n\na.jpg\t3\r\n  b c, ü.JPG\t0  \r\n\n# end\ndeep/d.png\t3",
        'a.jpg,3\n"b c, ü.JPG",0\ndeep/d.png,3\n',
        'a.jpg , 3\n"b c, ü.JPG", 0\ndeep/d.png,3\n',
        "a.jpg;3\nb c, ü.JPG;0\ndeep\\d.png;3\n",
        "'a.jpg' 3\n\"b c, ü.JPG\"   0\ndeep/d.png 3\n",
        "3\nimage label\na.jpg 3\nb c, ü.JPG 0\ndeep/d.png 3\n",
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_paths_and_labels_however_they_are_written(photos: Path, text: str, encoding: str) -> None:
    """Blanks, tabs, commas, semicolons, quotes, comments, headers, empty lines, a byte order mark: the same samples."""
    path = listing(photos, text, encoding=encoding)
    assert recognise(path) is ListFile
    data = ListFile(path)
    assert [data[i][1] for i in range(3)] == [3, 0, 3]
    assert all(tuple(data[i][0].shape) == (3, 80, 120) for i in range(3))
    assert data.class_counts() == {"0": 1, "1": 0, "2": 0, "3": 2}
    assert data.classes is None
    assert "columns found: path,label, separated by" in data.notes[0]
    assert any("header" in note or "before the first image" in note for note in data.notes) == text.startswith("3\n")
    assert list(data.problems(0, data[0])) == []


def test_names_of_classes_become_labels(photos: Path) -> None:
    """Sorted, as for an image folder; numbers among names are names."""
    data = ListFile(listing(photos, "a.jpg\tgrey cat\nb c, ü.JPG\t7\ndeep/d.png\tgrey cat\n"))
    assert data.classes == ["7", "grey cat"]
    assert [data[i][1] for i in range(3)] == [1, 0, 1]
    assert data.class_counts() == {"7": 1, "grey cat": 2}
    assert data.metadata["classes"] == ["7", "grey cat"]
    labels = data.classes_of_samples()
    assert labels is not None
    assert labels.tolist() == [1, 0, 1]
    assert ListFile(listing(photos, "a.jpg\n")).classes_of_samples() is None


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (["a.jpg"], "path"),
        (["a.jpg 1", "b.jpg 0"], "path,label"),
        (["a.jpg 0.5", "b.jpg 1"], "path,number"),
        (["a.jpg 1.5 2 0", "b.jpg 3 4 1"], "path,points,label"),
        (["a.jpg 1.5 2 cat", "b.jpg 3 4 5 6 dog"], "path,points,label"),
        (["a.jpg 1 2", "b.jpg 3 4 5 6"], "path,points"),
        (["a.jpg 1 -1 -1 1", "b.jpg -1 1 1 -1"], "path,numbers"),
        (["a.jpg 0.5 1.5 2.5"], "path,numbers"),
        (["a.jpg 0.5 cat", "b.jpg 7 dog"], "path,number,label"),
        (["a.jpg cat 0.5"], "path,label,number"),
        (["a.jpg cat 0.5 red"], "path,text,number,text"),
    ],
)
def test_roles_are_found(rows: list[str], columns: str) -> None:
    """Labels, landmarks, attributes, numbers and words are told apart, and said in the words that set them."""
    layout = found([cut(row, " ") for row in rows])
    assert layout.describe() == columns
    assert said(columns.split(",")) == layout


def test_landmarks_and_classes(photos: Path) -> None:
    """`path x1 y1 ... label`, the number of points varying from line to line."""
    data = ListFile(listing(photos, "a.jpg 31 40.5 62 41 smile\nb c, ü.JPG 1 2 frown\ndeep/d.png frown\n"))
    sample = data[0]
    assert list(sample) == ["image", "points", "label", "size", "name"]
    assert sample["points"].dtype == torch.float32
    assert sample["points"].tolist() == [[31, 40.5], [62, 41]]
    assert tuple(data[2]["points"].shape) == (0, 2)
    assert [data.classes[data[i]["label"]] for i in range(3)] == ["smile", "frown", "frown"]  # type: ignore[index]
    assert data[1]["name"] == "b c, ü.JPG"
    far = ListFile(listing(photos, "a.jpg 31 40 620 41 1\n"))
    (problem,) = far.problems(0, far[0])
    assert (problem.kind, problem.severity) == ("point-outside", "warning")
    assert problem.what == "points 1 lie outside of 120 x 80 pixels"


@pytest.mark.parametrize("turn", [1, 6])
@pytest.mark.parametrize("fit", [None, Fit(40, 60), Fit(40, 40, 48, "center")])
def test_points_and_boxes_stay_on_their_objects(tmp_path: Path, turn: int, fit: Fit | None) -> None:
    """Turned, scaled and cropped with their image."""
    marked(tmp_path / "a.png", (50, 20, 80, 60), turn=turn)
    box = {1: "50 20 80 60", 6: "20 40 60 70"}[turn]
    path = listing(tmp_path, f"a.png {box}\n")
    options: dict[str, Any] = {"fit": fit, "annotated": "stored"}
    boxes = ListFile(path, columns=("path", "boxes"), **options)[0]
    expected = bright(boxes["image"])
    assert np.abs(boxes["boxes"].numpy()[0] - expected).max() <= 1
    points = ListFile(path, columns=("path", "points"), **options)[0]["points"]
    assert np.abs(np.sort(points.numpy(), axis=0).reshape(-1) - expected).max() <= 1


def test_columns_are_what_they_are_said_to_be(photos: Path) -> None:
    """Roles and names by hand: any order, names without a suffix, boxes, text; and what cannot be is refused."""
    photograph(photos / "plain.png").save(photos / "plain", "PNG")
    path = listing(photos, "cat|1\n1;plain;1 2 3 4 ;red hair\n".replace("cat|1\n", ""))
    data = ListFile(path, separator=";", columns=("id=number", "photo=path", "skip", "colour=text"))
    sample = data[0]
    assert (sample["id"], sample["colour"], sample["name"]) == (1, "red hair", "plain")
    assert tuple(sample["photo"].shape) == (3, 80, 120)
    path = listing(photos, "0 1 1 9 9 2 2 5 5 a.jpg\n")
    assert ListFile(path, columns=("label", "boxes", "path"))[0]["boxes"].tolist() == [[1, 1, 9, 9], [2, 2, 5, 5]]
    for wrong in (("label",), ("path", "path"), ("path", "cat"), ("path", "points", "boxes"), ("path", "name=text")):
        with pytest.raises(MisuseError, match="column"):
            ListFile(path, columns=wrong)
    with pytest.raises(MisuseError, match="separated by"):
        ListFile(path, separator="|")


@pytest.mark.parametrize(
    ("text", "columns", "why"),
    [
        ("a.jpg 1\na.jpg 2 3\n", ("path", "label"), "line 2: it has 3 columns, expected 2"),
        ("a.jpg 1 2 3\n", ("path", "points"), "line 1: it has 4 columns, expected 1 and a multiple of 2 numbers"),
        ("a.jpg 1 2\n# x\na.jpg 1 x\n", ("path", "points"), "line 3: 'x' is no number, and column 'points'"),
        ("a.jpg 1\na.jpg nan\n", ("path", "number"), "line 2: 'nan' is no number"),
        ("a.jpg 1 x 2\na.jpg 1 2\n", None, "lines have from 3 to 4 columns that fit no pattern; say what they are"),
        ("# nothing\n\n", None, "it has no lines"),
        ("hello world\n", None, "line 1: 'hello world': no column of these lines names images"),
        ('a.jpg,1\na.jpg,"x\n', ("path", "text"), "line 2: its quotes do not fit"),
        ("z.jpg 1\n", None, r"the images are not there: looked for z\.jpg in .*; give their folder"),
    ],
)  # fmt: skip
def test_a_line_that_does_not_fit_is_named(photos: Path, text: str, columns: Any, why: str) -> None:
    """E7: the list and the line, when it is opened."""
    with pytest.raises(SourceError, match=why):
        ListFile(listing(photos, text), columns=columns)


def test_a_missing_or_broken_image_is_named_with_its_line(photos: Path) -> None:
    """One that is not there when its sample is asked for; one that is cut; the others are read."""
    (photos / "cut.jpg").write_bytes((photos / "a.jpg").read_bytes()[:200])
    data = ListFile(listing(photos, "# x\na.jpg 1\ngone.jpg 1\ncut.jpg 1\n"), encoded=True)
    assert data[0][0] == (photos / "a.jpg").read_bytes()
    with pytest.raises(SourceError, match=r"list\.txt, line 3 \(gone\.jpg\): the file .*gone\.jpg is not there"):
        data[1]
    with pytest.raises(BrokenImage, match=r"cut\.jpg"):
        data[2]


def test_problems_are_negative_labels_and_repeated_images(photos: Path) -> None:
    """A label below 0 cannot be trained on; an image listed twice may be meant so."""
    data = ListFile(listing(photos, "a.jpg -1\ndeep/d.png 2\na.jpg 2\n"))
    found_ = [(p.kind, p.severity, p.what) for i in range(3) for p in data.problems(i, data[i])]
    assert found_ == [
        ("label-out-of-range", "error", "its label is -1"),
        ("duplicate-image", "warning", "line 1 lists the same image"),
    ]
    assert data.class_counts() == {"-1": 1, "2": 2}


def test_images_are_found_near_the_list(tmp_path: Path) -> None:
    """In its folder, in images/ of it, above it; or where it is said."""
    for folder in ("lists", "images", "elsewhere"):
        photograph(tmp_path / folder / "x" / "a.jpg", name="coffee")
    (tmp_path / "lists" / "x" / "a.jpg").unlink()
    path = listing(tmp_path / "lists", "x/a.jpg 1\n")
    assert ListFile(path).name_of(0).startswith(str(path))
    assert tuple(ListFile(path)[0][0].shape) == (3, 80, 120)
    (tmp_path / "images" / "x" / "a.jpg").unlink()
    assert tuple(ListFile(path, images=tmp_path / "elsewhere")[0][0].shape) == (3, 80, 120)
    with pytest.raises(SourceError, match="the images are not there"):
        ListFile(path)


@pytest.mark.parametrize("fit", [None, Fit(16, 16)])
@pytest.mark.parametrize("text", ["a.jpg 1\ndeep/d.png 0\n", "a.jpg 1 2 3 4 cat\ndeep/d.png 5 6 dog\n"])
def test_a_packed_list_yields_what_the_list_yields(photos: Path, fit: Fit | None, text: str) -> None:
    """Tuples as tuples, dicts as dicts, ragged landmarks as they are; encoded images decoded on reading."""
    path = listing(photos, text)
    report = pack_source(open_source(path, options=Options(fit=fit)), photos / "list.lmdb")
    packed, source = PackedDataset(report.path), ListFile(path, fit=fit)
    for index in range(2):
        ours, theirs = packed[index], source[index]
        pairs = zip(ours, theirs, strict=True) if isinstance(theirs, tuple) else ((ours[k], theirs[k]) for k in theirs)
        for one, other in pairs:
            assert torch.equal(one, other) if isinstance(other, torch.Tensor) else one == other


def test_a_list_pickles_small(photos: Path) -> None:
    """C6: a long list goes to workers as arrays, some bytes a line."""
    data = ListFile(listing(photos, "a.jpg 1 2 3\n" * 2000))
    assert len(pickle.dumps(data)) < 80 * len(data)
    assert pickle.loads(pickle.dumps(data))[1999]["label"] == 3


words = st.text(st.characters(blacklist_categories=("Cc", "Cs", "Zl", "Zp")), max_size=8)


@given(st.lists(st.tuples(words, st.integers(0, 99)), min_size=1, max_size=5), st.sampled_from(["\t", ";", ","]))
def test_what_a_csv_writer_writes_is_read(rows: list[tuple[str, int]], separator: str) -> None:
    """Any names, quoted by Python's own writer where they need it, come back but for blanks at their ends."""
    rows = [(f"x{word.strip()}.jpg", number) for word, number in rows]
    buffer = io.StringIO()
    csv.writer(buffer, delimiter=separator, lineterminator="\n").writerows(rows)
    lines = [line for _, line in data_lines(buffer.getvalue().split("\n"))]
    assert [cut(line, separator) for line in lines] == [[name, str(number)] for name, number in rows]
    good = find_separator(lines, SEPARATORS, lambda row: names_image(row[0]))
    assert good is not None
    assert all(names_image(cut(line, good[0])[0]) for line in lines)
