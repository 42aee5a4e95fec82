"""Pascal VOC: what labelImg, the kits and converters write, with its oddities; and boxes that stay on their objects."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader

from annotated import bright, labelimg, marked, photograph
from shmloader import DataLoader, ListCollate, PackedDataset
from shmloader.errors import BrokenImage, MisuseError, SourceError
from shmloader.images import Fit
from shmloader.sources import Options, PascalVoc, open_source, pack_source, recognise

KIT_XML = """<?xml version="1.0" encoding="UTF-8"?>
<annotation>
  <folder>VOC2012</folder>
  <filename>2007_000027.jpg</filename>
  <size><width>120</width><height>80</height><depth>3</depth></size>
  <segmented>0</segmented>
  <object>
    <name>person</name>
    <pose>Left</pose>
    <truncated>1</truncated>
    <occluded>1</occluded>
    <bndbox><xmin>10</xmin><ymin>11</ymin><xmax>60</xmax><ymax>70</ymax></bndbox>
    <difficult>0</difficult>
    <part><name>head</name><bndbox><xmin>20</xmin><ymin>12</ymin><xmax>30</xmax><ymax>22.5</ymax></bndbox></part>
    <part><name>hand</name><bndbox><xmin>11</xmin><ymin>40</ymin><xmax>18</xmax><ymax>48</ymax></bndbox></part>
  </object>
  <object>
    <name>dog</name>
    <bndbox><xmax>110</xmax><xmin>70.25</xmin><ymax>60</ymax><ymin>20</ymin></bndbox>
  </object>
</annotation>
"""


def one(root: Path, xml: str | bytes, image: str = "a.jpg", annotation: str = "a.xml") -> Path:
    """A set of one photograph of 120 x 80 and one annotation; return its folder."""
    photograph(root / image)
    path = root / annotation
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(xml if isinstance(xml, bytes) else xml.encode())
    return root


def plain(objects: str = "", filename: str = "") -> str:
    return f"<annotation><filename>{filename}</filename>{objects}</annotation>"


def an_object(name: str = "cat", box: tuple[object, ...] = (1, 2, 30, 40), more: str = "") -> str:
    corners = zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True)
    inside = "".join(f"<{corner}>{value}</{corner}>" for corner, value in corners)
    return f"<object><name>{name}</name>{more}<bndbox>{inside}</bndbox></object>"


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    """As the VOC kits lay it out: one annotation with parts, one without objects, sets, masks of the same stems."""
    root = tmp_path / "VOC2012"
    photograph(root / "JPEGImages" / "2007_000027.jpg")
    photograph(root / "JPEGImages" / "2007_000032.jpg", (90, 60), name="coffee")
    photograph(root / "SegmentationClass" / "2007_000027.png")
    (root / "Annotations").mkdir()
    (root / "Annotations" / "2007_000027.xml").write_text(KIT_XML)
    (root / "Annotations" / "2007_000032.xml").write_text(plain(filename="2007_000032.jpg"))
    (root / "ImageSets" / "Main").mkdir(parents=True)
    (root / "ImageSets" / "Main" / "val.txt").write_text("2007_000032  1\n\n2007_000027 -1\n")
    (root / "ImageSets" / "Main" / "wrong.txt").write_text("2007_000032\n2008_1\n")
    return root


def test_a_kits_folder_yields_boxes_flags_and_parts(kit: Path) -> None:
    """All that the XML says of an object is in the sample, under numbers of sorted names; no object is a sample too."""
    assert recognise(kit) is PascalVoc
    data = PascalVoc(kit)
    assert data.classes == ["dog", "person"]
    assert data.class_counts() == {"dog": 1, "person": 1}
    sample = data[0]
    assert tuple(sample["image"].shape) == (3, 80, 120)
    assert sample["boxes"].dtype == torch.float32
    assert sample["boxes"].tolist() == [[10, 11, 60, 70], [70.25, 20, 110, 60]]
    assert sample["labels"].tolist() == [1, 0]
    for flag, expected in (("difficult", [False, False]), ("truncated", [True, False]), ("occluded", [True, False])):
        assert sample[flag].tolist() == expected
    assert data.metadata["poses"] == ["Left", "Unspecified"]
    assert sample["poses"].tolist() == [0, 1]
    assert [data.metadata["part_classes"][label] for label in sample["part_labels"]] == ["head", "hand"]
    assert sample["part_objects"].tolist() == [0, 0]
    assert sample["part_boxes"].tolist() == [[20, 12, 30, 22.5], [11, 40, 18, 48]]
    assert sample["size"].tolist() == [80, 120]
    assert sample["name"] == "JPEGImages/2007_000027.jpg"
    empty = data[1]
    assert list(empty) == list(sample)
    assert tuple(empty["boxes"].shape) == (0, 4)
    assert tuple(empty["part_boxes"].shape) == (0, 4)
    assert any("SegmentationClass/2007_000027.png" in note for note in data.notes)
    assert list(data.problems(0, sample)) == []


def test_an_image_set_chooses_and_orders(kit: Path) -> None:
    """The lists of the kits give the samples and their order; a wrong line is named."""
    data = PascalVoc(kit, image_set="val")
    assert [data[i]["name"][-10:] for i in range(2)] == ["000032.jpg", "000027.jpg"]
    with pytest.raises(SourceError, match=r"wrong\.txt, line 2: annotation '2008_1': there is none"):
        PascalVoc(kit, image_set="wrong")
    with pytest.raises(SourceError, match="no image set 'train'"):
        PascalVoc(kit, image_set="train")


@pytest.mark.parametrize(
    ("image", "annotation", "filename"),
    [
        ("a.jpg", "a.xml", "a.jpg"),
        ("a.JPG", "a.xml", "something_else.png"),  # renamed after labelling: the stem counts
        ("images/x/a.png", "annotations/x/a.xml", "a"),  # filename without its suffix
        ("JPEGImages/größe 画像.jpg", "Annotations/größe 画像.xml", ""),
        ("a.jpg", "xmls/a.xml", "a.jpg"),
        ("Data/CLS-LOC/train/n01/a.JPEG", "Annotations/CLS-LOC/train/n01/a.xml", "a"),  # as ImageNet lays it out
        ("pictures/deep/a.jpg", "labelled/a.xml", ""),  # anywhere, if it is the only one
        ("pictures/b.jpg", "labelled/1.xml", "C:\\Users\\me\\b.jpg"),  # no stem fits: the name that is given
    ],
)
def test_an_annotation_finds_its_image(tmp_path: Path, image: str, annotation: str, filename: str) -> None:
    """By its stem, in the folder where it is expected or elsewhere; else by the name it gives, also a Windows path."""
    root = one(tmp_path / "set", plain(an_object(), filename), image, annotation)
    assert PascalVoc(root)[0]["name"] == image
    if not annotation.startswith("labelled"):
        assert recognise(root) is PascalVoc


def test_masks_with_the_stems_of_images_are_no_rivals(kit: Path) -> None:
    """The corresponding folder comes before any other; equal stems in one folder are told apart by the given name."""
    assert PascalVoc(kit)[0]["name"].startswith("JPEGImages/")
    photograph(kit / "JPEGImages" / "2007_000027.png")
    assert PascalVoc(kit)[0]["name"] == "JPEGImages/2007_000027.jpg"
    (kit / "Annotations" / "2007_000027.xml").write_text(plain())
    with pytest.raises(SourceError, match="several images could be its own"):
        PascalVoc(kit)[0]


def test_labelimg_files_beside_their_images(tmp_path: Path) -> None:
    """The layout of a labelling session: photographs and their XML in one folder; unlabelled ones are noted."""
    for number in range(3):
        image = tmp_path / f"{number}.jpg"
        photograph(image)
        image.with_suffix(".xml").write_text(labelimg(image, (120, 80), [("cat", (3, 4, 50, 60))] * number, depth=1))
    photograph(tmp_path / "new.jpg")
    (tmp_path / "pom.xml").write_text("<project/>")
    data = open_source(tmp_path)
    assert isinstance(data, PascalVoc)
    assert [len(data[i]["boxes"]) for i in range(3)] == [0, 1, 2]
    assert data[2]["image"] == (tmp_path / "2.jpg").read_bytes()
    notes = "\n".join(data.notes)
    assert "images without an annotation, left out: new.jpg" in notes
    assert "XML of another kind: 1 (pom.xml)" in notes


def declared(encoding: str, name: str) -> bytes:
    return (f'<?xml version="1.0" encoding="{encoding}"?>' + plain(an_object(name))).encode(encoding)


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"\xef\xbb\xbf" + plain(an_object("größe")).encode(), "größe"),
        (b"\xef\xbb\xbf" + declared("utf-8", "größe"), "größe"),
        (declared("utf-16", "größe"), "größe"),
        (declared("ISO-8859-1", "größe"), "größe"),
        (declared("windows-1252", "größe€"), "größe€"),
        (declared("GBK", "画像"), "画像"),
        (plain(an_object("\n\t gr&#246;&#xDF;e \r\n")).encode(), "größe"),
    ],
)
def test_any_encoding_is_read(tmp_path: Path, data: bytes, name: str) -> None:
    """Byte order marks, declared encodings, character references, blanks around a name."""
    assert PascalVoc(one(tmp_path, data)).classes == [name]


BOMB = '<!DOCTYPE a [<!ENTITY x "lol"><!ENTITY y "&x;&x;">]>' + plain(an_object("&y;"))
OUTSIDE = '<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]>' + plain(an_object("&x;"))


@pytest.mark.parametrize(
    ("xml", "why"),
    [
        ("<annotation><object>", "not well-formed XML"),
        ("", "not well-formed XML"),
        (b"\xff\xff\xff", "not well-formed XML"),
        ('<?xml version="1.0" encoding="klingon"?><annotation/>', "encoding 'klingon' is unknown"),
        (BOMB, "declares XML entities"),
        (OUTSIDE, "declares XML entities"),
        (plain("<object><name>cat</name></object>"), r"object 0 \('cat'\) has no bndbox"),
        (plain(an_object("")), "object 0 has no name"),
        (plain(an_object() + an_object(box=(1, "", 3, 4))), r"object 1 \('cat'\) has no ymin"),
        (plain(an_object(box=(1, 2, "3px", 4))), "the xmax of object 0 .* is '3px', no number"),
        (plain(an_object(box=("nan", 2, 3, 4))), "is 'nan', no number"),
        (plain(an_object(more="<difficult>maybe</difficult>")), "difficult of object 0 .* is 'maybe'"),
        (plain(an_object(more="<part><name>head</name></part>")), "part 'head' of object 0 .* has no bndbox"),
    ],
)
def test_an_annotation_that_cannot_be_used_is_named(tmp_path: Path, xml: str | bytes, why: str) -> None:
    """E7: opening notes it, asking for its sample raises with the file and the reason; the others are there."""
    one(tmp_path, xml)
    one(tmp_path, plain(an_object()), "b.jpg", "b.xml")
    data = PascalVoc(tmp_path)
    with pytest.raises(SourceError, match=why) as caught:
        data[0]
    assert caught.value.path == str(tmp_path / "a.xml")
    assert any("a.xml" in note for note in data.notes)
    assert len(data[1]["boxes"]) == 1


def test_missing_and_broken_images_are_named(tmp_path: Path) -> None:
    """An annotation without an image, one whose image went away after opening, and one whose image is cut."""
    for stem in "abc":
        one(tmp_path, plain(an_object(), "nothing.jpg"), f"{stem}.jpg", f"{stem}.xml")
    (tmp_path / "a.jpg").unlink()
    (tmp_path / "c.jpg").write_bytes((tmp_path / "c.jpg").read_bytes()[:300])
    data = PascalVoc(tmp_path)
    (tmp_path / "b.jpg").unlink()
    with pytest.raises(SourceError, match=r"a\.xml: no image has its stem 'a', nor the name 'nothing\.jpg'"):
        data[0]
    with pytest.raises(SourceError, match=r"b\.xml: the file .*b\.jpg is not there"):
        data[1]
    with pytest.raises(BrokenImage, match=r"c\.jpg"):
        data[2]
    photograph(tmp_path / "none" / "a.jpg")
    with pytest.raises(SourceError, match="no Pascal VOC annotation"):
        PascalVoc(tmp_path / "none")


def test_problems_tell_what_is_wrong_with_boxes(tmp_path: Path) -> None:
    """No area, outside, beyond, a size that differs, the same image twice: each with its numbers and a severity."""
    boxes = [(1, 1, 120, 80), (50, 5, 20, 60), (130, 5, 150, 60), (-9, 5, 30, 60), (5, 5, 5, 9)]
    (tmp_path / "x").mkdir()
    one(tmp_path, labelimg(tmp_path / "a.jpg", (100, 100), [("cat", box) for box in boxes]))
    (tmp_path / "x" / "a.xml").write_text(plain())
    data = PascalVoc(tmp_path)
    found = [(problem.kind, problem.severity, problem.what) for problem in data.problems(0, data[0])]
    assert found == [
        ("size-differs", "warning", "the image has 120 x 80 pixels, its annotation says 100 x 100"),
        ("box-without-area", "error", "box 1 (50, 5, 20, 60) has no area"),
        ("box-without-area", "error", "box 4 (5, 5, 5, 9) has no area"),
        ("box-outside", "error", "box 2 (130, 5, 150, 60) lies outside of the image of 120 x 80"),
        ("box-beyond", "warning", "box 3 (-9, 5, 30, 60) reaches beyond the image of 120 x 80"),
    ]
    (again,) = data.problems(1, data[1])
    assert (again.kind, again.severity) == ("duplicate-image", "warning")
    assert again.where == str(tmp_path / "x" / "a.xml")


@pytest.mark.parametrize("turn", [1, 3, 6, 8])
@pytest.mark.parametrize("lying", [False, True])
@pytest.mark.parametrize("fit", [None, Fit(40, 60), Fit(40, 40, 48, "center")])
def test_boxes_stay_on_their_objects(tmp_path: Path, turn: int, lying: bool, fit: Fit | None) -> None:
    """Turned by EXIF, scaled, cropped: the box is where the bright rectangle is, whichever way up it was drawn."""
    box, size = (50, 20, 80, 60), (120, 80)
    marked(tmp_path / "a.png", box, size, turn)
    x1, y1, x2, y2 = box
    if lying:  # drawn on the pixels as the file has them
        width, height = size
        box, size = {
            1: (box, size),
            3: ((width - x2, height - y2, width - x1, height - y1), size),
            6: ((y1, width - x2, y2, width - x1), (height, width)),
            8: ((height - y2, x1, height - y1, x2), (height, width)),
        }[turn]
    (tmp_path / "a.xml").write_text(labelimg(tmp_path / "a.png", size, [("cat", box)]))
    drawn = "stored" if lying and turn == 3 else "auto"  # a half turn does not show in the size
    sample = PascalVoc(tmp_path, fit=fit, annotated=drawn)[0]  # type: ignore[arg-type]
    assert np.abs(sample["boxes"].numpy()[0] - bright(sample["image"])).max() <= 1
    assert sample["size"].tolist() == [80, 120]


def test_a_crop_takes_out_what_it_cuts_off(tmp_path: Path) -> None:
    """Boxes are cut at the border; those outside go with their labels and parts, and are counted as a problem."""
    part = "<part><name>head</name><bndbox><xmin>{}</xmin><ymin>1</ymin><xmax>{}</xmax><ymax>5</ymax></bndbox></part>"
    objects = an_object("far", (0, 0, 10, 80), part.format(1, 4)) + an_object(
        "near", (0, 0, 60, 80), part.format(2, 30)
    )
    data = PascalVoc(one(tmp_path, plain(objects)), fit=Fit(80, 80, crop="center"))
    sample = data[0]
    assert sample["boxes"].tolist() == [[0, 0, 40, 80]]
    assert [data.classes[label] for label in sample["labels"]] == ["near"]
    assert sample["part_boxes"].tolist() == [[0, 1, 10, 5]]
    assert sample["part_objects"].tolist() == [0]
    assert [problem.kind for problem in data.problems(0, sample)] == ["box-cropped-away"]


def images_and_targets(samples: list[dict[str, Any]]) -> tuple[list[Any], list[dict[str, Any]]]:
    """The collate of detection code: a list of images, a list of dicts."""
    return [sample.pop("image") for sample in samples], samples


@pytest.mark.parametrize("fit", [None, Fit(32, 32)])
def test_a_packed_set_yields_what_the_source_yields(kit: Path, tmp_path: Path, fit: Fit | None) -> None:
    """Every field of every sample, files decoded on reading; and a batch as detection code expects it."""
    report = pack_source(open_source(kit, options=Options(fit=fit)), tmp_path / "voc.lmdb")
    packed, source = PackedDataset(report.path), PascalVoc(kit, fit=fit)
    assert packed.classes == source.classes
    for index in range(2):
        ours, theirs = packed[index], source[index]
        assert list(ours) == list(theirs)
        for name, value in theirs.items():
            assert torch.equal(ours[name], value) if isinstance(value, torch.Tensor) else ours[name] == value, name
    varying = [name for name in source[0] if name not in ("size", "name")]
    with DataLoader(packed, batch_size=2, num_workers=1, collate_fn=ListCollate(*varying)) as loader:
        (batch,) = loader
        assert [len(boxes) for boxes in batch["boxes"]] == [2, 0]
        assert batch["size"].tolist() == ([[80, 120], [60, 90]])
        assert batch["name"] == [source[i]["name"] for i in range(2)]
    classic = next(
        iter(
            TorchLoader(
                packed, batch_size=2, collate_fn=lambda samples: tuple(zip(*map(dict.items, samples), strict=True))
            )
        )
    )
    assert len(classic) == len(source[0])


def test_a_corrected_annotation_makes_another_set(kit: Path) -> None:
    """D6: an unfinished pack is not gone on with when a box has moved since."""
    before = PascalVoc(kit).fingerprint()
    assert PascalVoc(kit).fingerprint() == before
    xml = kit / "Annotations" / "2007_000027.xml"
    xml.write_text(xml.read_text().replace("<xmin>10<", "<xmin>11<"))
    assert PascalVoc(kit).fingerprint() != before


def test_a_set_pickles_small_and_refuses_foreign_options(kit: Path) -> None:
    """C6: workers may be started in any way. An option that means nothing here is not ignored."""
    data = pickle.loads(pickle.dumps(PascalVoc(kit, encoded=True)))
    assert data[0]["image"] == (kit / "JPEGImages" / "2007_000027.jpg").read_bytes()
    with pytest.raises(MisuseError, match="'separator' means nothing for voc data"):
        open_source(kit, options=Options(separator=","))
    with pytest.raises(IndexError, match="2 samples"):
        data[2]
