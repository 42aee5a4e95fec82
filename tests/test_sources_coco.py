"""COCO JSON: read as pycocotools reads it, segmentations readable back, and all of it placed with the image."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO

from annotated import coco, marked, photograph
from shmloader import DataLoader, ListCollate, PackedDataset
from shmloader.errors import SourceError
from shmloader.images import Fit
from shmloader.sources import CocoJson, Options, open_source, pack_source, recognise, segmentation

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of pycocotools itself

POLYGON = [50.0, 20.0, 80.0, 20.0, 80.0, 60.0, 50.0, 60.0]
PEOPLE = {"id": 1, "name": "person", "keypoints": ["nose", "left_eye", "right_eye"], "skeleton": [[1, 2]]}


def packed_rle(height: int, width: int, box: tuple[int, int, int, int]) -> dict[str, Any]:
    """A mask as pycocotools packs it, its counts as text as JSON needs it."""
    mask = np.zeros((height, width), np.uint8, order="F")
    mask[box[1] : box[3], box[0] : box[2]] = 1
    made = coco_mask.encode(mask)
    return {"size": made["size"], "counts": made["counts"].decode()}


def write(root: Path, content: dict[str, Any], name: str = "annotations/instances_train2017.json") -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """As COCO is published: images of a split in a folder of its name, all kinds of segmentation; return the JSON."""
    root = tmp_path / "coco"
    for name in ("a", "b", "c"):
        photograph(root / "train2017" / f"{name}.jpg")
    plain = {"size": [80, 120], "counts": [4000, 100, 5500]}
    annotations = [
        {"image_id": 7, "bbox": [50, 20, 30.5, 40], "area": 1200.25, "segmentation": [POLYGON, [1, 2, 5, 2, 5, 8]]},
        {"image_id": 9, "category_id": 18, "segmentation": packed_rle(80, 120, (50, 20, 80, 60)), "iscrowd": 1},
        {"image_id": 7, "category_id": 18, "segmentation": plain, "iscrowd": 1},
        {"image_id": 7, "segmentation": []},
        {"image_id": 9, "keypoints": [10, 11, 2, 20, 21, 1, 0, 0, 0], "num_keypoints": 2, "segmentation": [POLYGON]},
    ]
    images = [(9, "a.jpg", (120, 80)), (7, "b.jpg", (120, 80)), (8, "c.jpg", (120, 80))]
    return write(root, coco(images, annotations, [{"id": 18, "name": "dog"}, PEOPLE]))


def test_all_that_pycocotools_reads_is_read(published: Path) -> None:
    """Images in the file's order; per image the boxes, categories, areas, crowds and segmentations of pycocotools."""
    data = CocoJson(published)
    with contextlib.redirect_stdout(io.StringIO()):
        theirs = COCO(str(published))
    assert [data[i]["image_id"] for i in range(len(data))] == [9, 7, 8] == theirs.getImgIds()
    assert data.classes == ["person", "dog"]
    assert data.metadata["category_ids"] == [1, 18]
    assert data.metadata["categories"][0]["skeleton"] == [[1, 2]]
    for index in range(len(data)):
        sample = data[index]
        expected = theirs.loadAnns(theirs.getAnnIds(imgIds=sample["image_id"]))
        assert sample["annotation_ids"].tolist() == [each["id"] for each in expected]
        assert sample["category_ids"].tolist() == [each["category_id"] for each in expected]
        assert [data.metadata["category_ids"][label] for label in sample["labels"]] == sample["category_ids"].tolist()
        assert sample["iscrowd"].tolist() == [each["iscrowd"] for each in expected]
        assert sample["area"].tolist() == [each["area"] for each in expected]
        boxes = [[x, y, x + w, y + h] for x, y, w, h in (each["bbox"] for each in expected)]
        assert sample["boxes"].tolist() == boxes
        assert segmentation(sample) == [each["segmentation"] for each in expected]
        assert sample["keypoints"].reshape(len(expected), 9).tolist() == [
            each.get("keypoints", [0] * 9) for each in expected
        ]
        assert sample["size"].tolist() == [80, 120]
        assert list(data.problems(index, sample)) == []
    assert data.class_counts() == {"person": 3, "dog": 2}
    assert tuple(data[2]["boxes"].shape) == (0, 4)
    assert tuple(data[2]["keypoints"].shape) == (0, 3, 3)


@pytest.mark.parametrize("fit", [None, Fit(32, 48)])
def test_a_packed_set_gives_the_segmentations_back(published: Path, tmp_path: Path, fit: Fit | None) -> None:
    """Every field comes back equal, ragged ones too, and makes the same COCO segmentation."""
    report = pack_source(open_source(published, options=Options(fit=fit)), tmp_path / "coco.lmdb")
    packed, source = PackedDataset(report.path), CocoJson(published, fit=fit)
    for index in range(3):
        ours, theirs = packed[index], source[index]
        assert list(ours) == list(theirs)
        for name, value in theirs.items():
            assert torch.equal(ours[name], value) if isinstance(value, torch.Tensor) else ours[name] == value, name
        assert segmentation(ours) == segmentation(theirs)
    assert packed.classes == ["person", "dog"]
    varying = [name for name, value in source[0].items() if isinstance(value, torch.Tensor) and name != "size"]
    with DataLoader(packed, batch_size=3, num_workers=1, collate_fn=ListCollate(*varying)) as loader:
        (batch,) = loader
    assert [len(boxes) for boxes in batch["boxes"]] == [2, 3, 0]
    assert batch["image_id"].tolist() == [9, 7, 8]


def painted(segments: Any, height: int, width: int) -> np.ndarray:
    """Return the pixels of one object's segmentation, by pycocotools."""
    packed = isinstance(segments, dict) and isinstance(segments["counts"], str)
    made = segments if packed else coco_mask.frPyObjects(segments, height, width)
    return np.asarray(coco_mask.decode(coco_mask.merge(made) if isinstance(made, list) else made)).astype(bool)


@pytest.mark.parametrize("turn", [1, 3, 6, 8])
@pytest.mark.parametrize("fit", [None, Fit(40, 60), Fit(160, 240), Fit(40, 40, 48, "center")])
def test_segmentations_and_keypoints_stay_on_their_objects(tmp_path: Path, turn: int, fit: Fit | None) -> None:
    """Annotated on the stored pixels of a turned photograph, then scaled and cropped: all cover what is bright."""
    box, (width, height) = (50, 20, 80, 60), (120, 80)
    marked(tmp_path / "a.png", box, (width, height), turn)
    x1, y1, x2, y2 = {
        1: box,
        3: (width - 80, height - 60, width - 50, height - 20),
        6: (20, width - 80, 60, width - 50),
        8: (height - 60, 50, height - 20, 80),
    }[turn]
    stored = (height, width) if turn in (6, 8) else (width, height)
    corners = [x1, y1, x2, y1, x2, y2, x1, y2]
    shape: dict[str, Any] = {"image_id": 1, "bbox": [x1, y1, x2 - x1, y2 - y1]}
    annotations = [
        shape | {"segmentation": [corners], "keypoints": [(x1 + x2) / 2, (y1 + y2) / 2, 2, 0, 0, 0]},
        shape | {"segmentation": packed_rle(stored[1], stored[0], (x1, y1, x2, y2))},
    ]
    path = write(tmp_path, coco([(1, "a.png", stored)], annotations), "all.json")
    sample = CocoJson(path, fit=fit, annotated="stored")[0]
    bright = sample["image"].numpy()[0] > 127
    for segments in segmentation(sample):
        assert (painted(segments, *bright.shape) == bright).mean() > 0.96
    x, y, visible = sample["keypoints"][0, 0].tolist()
    assert visible == 2
    rows, columns = np.nonzero(bright)
    assert abs(x - (columns.mean() + 0.5)) < 1.5
    assert abs(y - (rows.mean() + 0.5)) < 1.5
    assert sample["keypoints"][0, 1].tolist() == [0, 0, 0]
    assert sample["boxes"].tolist()[0] == sample["boxes"].tolist()[1]


def test_a_crop_takes_out_objects_with_all_they_have(tmp_path: Path) -> None:
    """Polygons, masks and keypoints of objects that stay are renumbered; keypoints that are cut off become zeros."""
    photograph(tmp_path / "a.jpg")
    annotations = [
        {
            "image_id": 1,
            "bbox": [0, 0, 15, 80],
            "segmentation": [[0, 0, 15, 0, 15, 80]],
            "keypoints": [5, 5, 2, 6, 6, 1],
        },
        {"image_id": 1, "bbox": [10, 10, 50, 50], "segmentation": [POLYGON], "keypoints": [12, 12, 2, 40, 40, 1]},
        {"image_id": 1, "bbox": [0, 0, 9, 9], "segmentation": packed_rle(80, 120, (0, 0, 9, 9))},
        {"image_id": 1, "bbox": [30, 30, 9, 9], "segmentation": packed_rle(80, 120, (30, 30, 39, 39))},
    ]
    data = CocoJson(write(tmp_path, coco([(1, "a.jpg", (120, 80))], annotations)), fit=Fit(80, 80, crop="center"))
    sample = data[0]
    assert sample["boxes"].tolist() == [[0, 10, 40, 60], [10, 30, 19, 39]]
    assert sample["annotation_ids"].tolist() == [101, 103]
    assert sample["keypoints"][0].tolist() == [[0, 0, 0], [20, 40, 1]]
    polygons, mask = segmentation(sample)
    assert polygons == [[30, 20, 60, 20, 60, 60, 30, 60]]
    assert painted(mask, 80, 80)[30:39, 10:19].all()
    assert [problem.kind for problem in data.problems(0, sample)] == ["box-cropped-away"]


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ({"bbox": [1, 2, 3]}, r"annotation 100 has the bbox \[1, 2, 3\], not 4 numbers"),
        ({"bbox": None}, "annotation 100 has no bbox"),
        ({"bbox": [1, 2, "3", 4]}, "has the bbox"),
        ({"category_id": 99}, "annotation 100 has the category_id 99, which is not listed"),
        ({"category_id": "person"}, "has the category_id 'person'"),
        ({"keypoints": [1, 2]}, "has 2 keypoint numbers, not three for each"),
        ({"segmentation": [[1, 2, 3]]}, "has a polygon of 3 numbers"),
        ({"segmentation": {"counts": [1, 2]}}, r"its size is None, not \[height, width\]"),
        ({"segmentation": {"size": [2, 2], "counts": [1, -2]}}, "its counts are neither"),
        ({"area": "big"}, "has the area 'big'"),
    ],
)
def test_an_annotation_that_cannot_be_used_spoils_its_image_alone(
    tmp_path: Path, broken: dict[str, Any], why: str
) -> None:
    """E7: the image's sample raises with the annotation's id, opening notes it, the other images are there."""
    photograph(tmp_path / "a.jpg")
    images = [(i, "a.jpg", (120, 80)) for i in (1, 2)]
    data = CocoJson(write(tmp_path, coco(images, [{"image_id": 1} | broken, {"image_id": 2}])))
    with pytest.raises(SourceError, match=why) as caught:
        data[0]
    assert "image 1 (a.jpg)" in caught.value.path
    assert any("cannot be used" in note for note in data.notes)
    assert len(data[1]["boxes"]) == 1
    assert [problem.kind for problem in data.problems(1, data[1])] == ["duplicate-image"]


def test_problems_and_strays_are_told(tmp_path: Path) -> None:
    """A box of no area, a polygon of two corners, an annotation of an image that is not listed."""
    photograph(tmp_path / "a.jpg")
    annotations = [
        {"image_id": 1, "bbox": [10, 10, 0, 5]},
        {"image_id": 1, "segmentation": [[1, 2, 3, 4]]},
        {"image_id": 5},
    ]
    data = CocoJson(write(tmp_path, coco([(1, "a.jpg", (120, 80))], annotations)))
    found = [(problem.kind, problem.severity) for problem in data.problems(0, data[0])]
    assert found == [("box-without-area", "error"), ("polygon-of-no-area", "warning")]
    assert "left out, annotations of images that are not listed: 1 (102 of image 5)" in data.notes


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "not readable as JSON"),
        ('{"images": [', "not readable as JSON: .* at character 12"),
        ('{"images": [1 2]}', "no list of objects|not readable"),
        ("[1, 2]", "not readable as JSON: expected '{'"),
        ('{"images": [{"id": 1, "file_name": "a.jpg"}], "annotations": []}', "it has no 'categories'"),
        ('{"images": [], "annotations": [], "categories": []}', "it lists no images"),
        ('{"images": [{"id": 1}]}', "image 1 has no file_name"),
        ('{"images": [{"file_name": "a"}]}', "image with the id None"),
        ('{"images": [{"id": 1, "file_name": "a"}, {"id": 1, "file_name": "b"}]}', "two images have the id 1: a, b"),
        ('{"images": 5}', "'images' is no list of objects: '5' is in it"),
        ('{"info": {}} x', "expected the end"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_coco_is_refused_in_one_sentence(tmp_path: Path, content: str, why: str) -> None:
    """What spoils the whole file is said when it is opened."""
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(SourceError, match=why):
        CocoJson(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("annotations/instances_train2017.json", "train2017"),
        ("annotations/instances_val.json", "images/val"),
        ("annotations/all.json", "images"),
        ("train/_annotations.coco.json", "train"),
        ("result.json", "."),
    ],
)
def test_the_images_are_found(tmp_path: Path, name: str, folder: str) -> None:
    """Where COCO's own archives, labelling tools and exports put them; else the error says where they were not."""
    path = write(tmp_path, coco([(1, "sub/a.jpg", (120, 80))], []), name)
    with pytest.raises(SourceError, match=r"looked for sub/a\.jpg in "):
        CocoJson(path)
    photograph(tmp_path / folder / "sub" / "a.jpg")
    assert recognise(path) is CocoJson
    assert Path(CocoJson(path).image_path(0)) == tmp_path / folder / "sub" / "a.jpg"
    photograph(tmp_path / "elsewhere" / "sub" / "a.jpg")
    assert CocoJson(path, images=tmp_path / "elsewhere").image_path(0) == str(tmp_path / "elsewhere" / "sub" / "a.jpg")


def test_a_folder_with_one_file_is_enough_and_several_are_a_choice(published: Path) -> None:
    """The folder is recognised; where it holds two files, they are named."""
    root = published.parent.parent
    assert recognise(root) is CocoJson
    assert len(open_source(root)) == 3
    write(root, coco([(1, "a.jpg", (1, 1))], []), "annotations/instances_val2017.json")
    with pytest.raises(SourceError, match=r"several COCO files: give one of them: .*train2017\.json, .*val2017\.json"):
        CocoJson(root)


def test_a_set_pickles_and_goes_on(published: Path) -> None:
    """C6: workers may be started in any way."""
    data = pickle.loads(pickle.dumps(CocoJson(published, encoded=True)))
    assert segmentation(data[1]) == segmentation(CocoJson(published)[1])
    (published.parent.parent / "train2017" / "b.jpg").unlink()
    with pytest.raises(SourceError, match=r"image 7 \(b\.jpg\): the file .*b\.jpg is not there"):
        data[1]
