"""COCO: one JSON file that lists images, categories and annotations, and a folder of images beside it.

    annotations/instances_train.json     {"images": [...], "categories": [...], "annotations": [...]}
    train/000000000009.jpg               (or images/, or beside the JSON, or where --images says)

One listed image is one sample, in the order of the list, also one without annotations. Labels count the categories in
the order of their ids; the ids are kept beside them. A COCO box (x, y, width, height) becomes x1, y1, x2, y2.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..errors import SourceError
from ..images import Fit
from . import rle
from .base import Annotated, Options, StrPath
from .coco_read import CocoReader
from .detection import DetectionSource
from .geometry import Mask, Placing
from .pictures import Pictures, folder_of, folder_with
from .problems import Severity

_HEAD_BYTES = 1 << 16


class CocoJson(DetectionSource):
    """Images and their COCO annotations, as dicts; see ``DetectionSource`` for what all of them hold.

    Beside ``image``, ``boxes``, ``labels``, ``size`` and ``name`` (the listed ``file_name``): ``category_ids``,
    ``annotation_ids`` and ``iscrowd`` int64 (n,); ``area`` float32 (n,), as the file gives it, in pixels of the
    unscaled image; ``image_id`` int. Where any annotation of the file has them:

    - ``keypoints`` float32 (n, k, 3): x, y and visibility, k being the most of any annotation, zeros where there are
      fewer. Those that a crop cuts off become zeros.
    - ``polygons`` float32 (p, 2): the corners of all polygons of the image; ``polygon_corners`` int64 (q,): how many
      each of them has; ``polygon_objects`` int64 (q,): the object it belongs to. Crops do not clip them.
    - ``masks``: a str, JSON with one entry for each object: its run lengths ``{"size", "counts"}``, or null.

    Polygons and masks go with the image as boxes do. ``segmentation(sample)`` gives them back as COCO writes them.
    An annotation that cannot be used raises SourceError with its id when its image is asked for.
    """

    kind = "coco"
    looked_for = "a COCO .json, or a folder with one (annotations/*.json) and its images"
    uses = frozenset({"fit", "images", "annotated"})

    def __init__(
        self,
        path: StrPath,
        *,
        images: StrPath | None = None,
        fit: Fit | None = None,
        encoded: bool = False,
        annotated: Annotated = "auto",
    ) -> None:
        self.path = os.fspath(path)
        self.json = _only_json(self.path)
        reader = CocoReader(self.json)
        reader.read()
        self._set = found = reader.finish(_image_folder(self.json, reader.names, images))
        self.classes = [str(category["name"]) for category in found.categories]
        self._set_up(found.found, Pictures(fit, encoded), annotated)
        self._notes += found.notes

    @classmethod
    def recognises(cls, path: str) -> bool:
        """True for a JSON file whose head has COCO's words, and for a folder that holds one."""
        return bool(_candidates(path))

    @classmethod
    def open(cls, path: str, options: Options) -> CocoJson:
        return cls(
            path,
            images=options.images,
            fit=options.fit,
            encoded=options.fit is None,
            annotated=options.annotated,
        )

    def _more(self, index: int, placing: Placing, kept: Mask) -> dict[str, Any]:
        more: dict[str, Any] = {"image_id": int(self._set.image_ids[index])}
        objects = self._set.found.boxes.span(index)
        if "keypoints" in self._set.found.more:
            more["keypoints"] = torch.from_numpy(
                _placed_keypoints(self._set.found.more["keypoints"][objects], placing)[kept]
            )
        if len(self._set.polygons):
            more |= self._polygons(index, placing, kept)
        if self._set.masks is not None:
            more["masks"] = self._masks(index, placing, kept)
        return more

    def _polygons(self, index: int, placing: Placing, kept: Mask) -> dict[str, Any]:
        found = self._set
        counts = found.polygon_counts[index]
        objects = found.found.boxes.span(index)
        last = int(found.polygon_ends[objects.stop - 1]) if objects.stop else 0
        first = last - int(counts.sum())
        owners = np.repeat(np.arange(len(counts)), counts)
        stays = kept[owners]
        corners = found.polygons.lengths[first:last]
        begin = int(found.polygons.ends[first - 1]) if first else 0
        points = found.polygons.values[begin : begin + int(corners.sum())][np.repeat(stays, corners)]
        return {
            "polygons": torch.from_numpy(placing.points(points)),
            "polygon_corners": torch.from_numpy(corners[stays]),
            "polygon_objects": torch.from_numpy((np.cumsum(kept) - 1)[owners[stays]]),
        }

    def _masks(self, index: int, placing: Placing, kept: Mask) -> str:
        assert self._set.masks is not None
        objects = self._set.found.boxes.span(index)
        texts = []
        for at in (objects.start + np.flatnonzero(kept)).tolist():
            text = self._set.masks[at] or "null"
            if text != "null" and placing.moves:
                try:
                    text = json.dumps(rle.place(json.loads(text), placing), separators=(",", ":"))
                except rle.BadRle as fault:
                    number = int(self._set.found.more["annotation_ids"][at])
                    raise SourceError(self.name_of(index), f"the mask of annotation {number}: {fault}") from fault
            texts.append(text)
        return f"[{','.join(texts)}]"

    def _findings(self, index: int, sample: dict[str, Any]) -> Iterator[tuple[str, str, Severity]]:
        yield from super()._findings(index, sample)
        if "polygons" in sample:
            for corners, owner in zip(
                sample["polygon_corners"].tolist(), sample["polygon_objects"].tolist(), strict=True
            ):
                if corners < 3:
                    yield "polygon-of-no-area", f"a polygon of object {owner} has {corners} corners", "warning"

    def name_of(self, index: int) -> str:
        return f"{self.json}, image {int(self._set.image_ids[index])} ({self._set.found.images[index]})"

    def describe(self) -> str:
        return f"COCO, {self._pictures.describe()}"

    @property
    def metadata(self) -> dict[str, Any]:
        """As for every source of boxes; ``category_ids`` by label, and ``categories`` as the file has them."""
        ids = [category["id"] for category in self._set.categories]
        facts = {"source": self.json, "category_ids": ids, "categories": self._set.categories}
        return super().metadata | facts


def _placed_keypoints(points: Any, placing: Placing) -> Any:
    """Return (n, k, 3) keypoints in the delivered image. Unlabelled ones stay zeros, those cut off become zeros."""
    if not placing.moves:
        return points.copy()
    placed = points.copy()
    placed[..., :2] = placing.points(points[..., :2])
    gone = points[..., 2] == 0
    if placing.crops:
        gone |= ~placing.inside(placed[..., :2])
    placed[gone] = 0
    return placed


def segmentation(sample: dict[str, Any]) -> list[Any]:
    """Return what COCO calls ``segmentation`` for each object of a sample of ``CocoJson``, or of a pack of one.

    A list of polygons (lists of x, y, x, y, ... as floats), a dict of run lengths, or an empty list: what
    ``pycocotools.mask.frPyObjects`` takes. Raises KeyError for a sample without ``boxes``.
    """
    found: list[Any] = [[] for _ in range(len(sample["boxes"]))]
    if "polygons" in sample:
        corners = sample["polygon_corners"].tolist()
        points = torch.as_tensor(sample["polygons"]).split(corners)
        for owner, polygon in zip(sample["polygon_objects"].tolist(), points, strict=True):
            found[owner].append(polygon.reshape(-1).tolist())
    for number, mask in enumerate(json.loads(sample.get("masks", "[]"))):
        if mask is not None:
            found[number] = mask
    return found


# --- where things lie -------------------------------------------------------------------------------------------------


def _candidates(path: str) -> list[str]:
    """Return the files at ``path`` that begin like COCO's: ``path`` itself, or those in it and in its annotations."""
    if not os.path.isdir(path):
        return [path] if path.lower().endswith(".json") and _begins_like_coco(path) else []
    found = []
    for folder in (path, os.path.join(path, "annotations")):
        if os.path.isdir(folder):
            names = sorted(name for name in os.listdir(folder) if name.lower().endswith(".json") and name[0] != ".")
            found += [os.path.join(folder, name) for name in names]
    return [each for each in found if os.path.isfile(each) and _begins_like_coco(each)]


def _begins_like_coco(path: str) -> bool:
    with open(path, "rb") as file:
        head = file.read(_HEAD_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
    return head.startswith(b"{") and re.search(rb'"(images|annotations|categories)"\s*:\s*\[', head) is not None


def _only_json(path: str) -> str:
    if not os.path.isdir(path):
        return path
    found = _candidates(path)
    if not found:
        raise SourceError(path, "there is no COCO .json in it, nor in its folder annotations")
    if len(found) > 1:
        raise SourceError(path, f"there are several COCO files: give one of them: {', '.join(found)}")
    return found[0]


def _image_folder(annotations: str, names: list[str], given: StrPath | None) -> str:
    """Return the folder that the listed images are in. Raises SourceError with all that were looked in."""
    if given is not None:
        return os.fspath(given)
    here = folder_of(annotations)
    above = os.path.join(here, os.pardir)
    split = os.path.splitext(os.path.basename(annotations))[0].rpartition("_")[2]
    inside = ("", "images", split, os.path.join("images", split), os.path.join(split, "images"))
    return folder_with(annotations, names, [os.path.join(base, each) for base in (here, above) for each in inside])
