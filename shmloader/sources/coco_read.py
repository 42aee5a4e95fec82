"""A COCO JSON file as whole arrays: read item by item, in whatever order its parts come."""

from __future__ import annotations

import json
import math
from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import SourceError
from . import rle
from .base import Array, NameTable, listed
from .detection import Annotations
from .json_walk import JsonWalk, NotJson
from .ragged import Ragged


class _Unusable(ValueError):
    """An annotation cannot be used; the text says why."""


@dataclass(frozen=True)
class CocoSet:
    """All of a COCO file."""

    found: Annotations
    image_ids: npt.NDArray[np.int64]
    categories: list[dict[str, Any]]
    """The file's own entries, in the order of their labels: by id."""
    polygons: Ragged
    """Points float32 (p, 2), cut by polygon."""
    polygon_counts: Ragged
    """Polygons of each annotation, cut by sample: int64."""
    polygon_ends: npt.NDArray[np.int64]
    """Polygons up to and with each annotation."""
    masks: NameTable | None
    """Run lengths of each annotation as JSON; empty where it has polygons or nothing. None if no annotation has any."""
    notes: list[str] = field(default_factory=list)


class CocoReader:
    """Reads one file; ``finish`` gives the arrays. Raises SourceError for what spoils the file as a whole."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._ids: dict[int, int] = {}
        self.names: list[str] = []
        """Files of the images, as they are listed."""
        self._sizes = array("i")
        self._categories: dict[int, dict[str, Any]] = {}
        self._faults: dict[int, str] = {}
        self._image = array("q")
        self._category = array("q")
        self._annotation = array("q")
        self._crowd = array("q")
        self._boxes = array("d")
        self._area = array("d")
        self._points = array("d")
        self._point_counts = array("q")
        self._polygons = array("q")
        self._corners = array("d")
        self._corner_counts = array("q")
        self._masks: list[str] = []
        self._any_mask = False

    def read(self) -> None:
        """Read the whole file."""
        takes = {"images": self._take_image, "categories": self._take_category, "annotations": self._take_annotation}
        try:
            with open(self.path, encoding="utf-8-sig") as file:
                walk = JsonWalk(file)
                for key, item in walk:
                    take = takes.get(key)
                    if take is not None:
                        if not isinstance(item, dict):
                            raise SourceError(self.path, f"{key!r} is no list of objects: {str(item)[:40]!r} is in it")
                        take(item)
        except NotJson as fault:
            raise SourceError(self.path, f"not readable as JSON: {fault}") from fault
        missing = [key for key in takes if key not in walk.keys]
        if missing:
            raise SourceError(
                self.path, f"it has no {' and no '.join(map(repr, missing))}: nothing that COCO calls instances"
            )
        if not self.names:
            raise SourceError(self.path, "it lists no images")

    def _take_image(self, item: dict[str, Any]) -> None:
        number = self._integer(item, "id", "image")
        name = item.get("file_name")
        if not isinstance(name, str) or not name:
            raise SourceError(self.path, f"image {number} has no file_name")
        if number in self._ids:
            raise SourceError(self.path, f"two images have the id {number}: {self.names[self._ids[number]]}, {name}")
        self._ids[number] = len(self.names)
        self.names.append(name)
        for side in ("height", "width"):
            value = item.get(side)
            self._sizes.append(value if type(value) is int and 0 < value < 2**31 else 0)

    def _take_category(self, item: dict[str, Any]) -> None:
        number = self._integer(item, "id", "category")
        if not isinstance(item.get("name"), str):
            raise SourceError(self.path, f"category {number} has no name")
        if number in self._categories:
            raise SourceError(self.path, f"two categories have the id {number}")
        self._categories[number] = item

    def _take_annotation(self, item: dict[str, Any]) -> None:
        number = self._integer(item, "id", "annotation") if "id" in item else -1
        image = self._integer(item, "image_id", "annotation")
        try:
            box = _numbers(item.get("bbox"), "bbox", 4)
            points = _numbers(item.get("keypoints", []), "keypoints", None)
            if len(points) % 3:
                raise _Unusable(f"has {len(points)} keypoint numbers, not three for each")
            polygons, mask = _segmentation(item.get("segmentation"))
            category = item.get("category_id")
            if type(category) is not int:
                raise _Unusable(f"has the category_id {category!r}")
            area = item.get("area", box[2] * box[3])
            if not isinstance(area, (int, float)):
                raise _Unusable(f"has the area {area!r}")
        except _Unusable as fault:
            self._faults.setdefault(image, f"annotation {number} {fault}")
            return
        self._image.append(image)
        self._category.append(category)
        self._annotation.append(number)
        self._crowd.append(1 if item.get("iscrowd") else 0)
        self._boxes.extend((box[0], box[1], box[0] + box[2], box[1] + box[3]))
        self._area.append(area)
        self._points.extend(points)
        self._point_counts.append(len(points))
        self._polygons.append(len(polygons))
        for polygon in polygons:
            self._corners.extend(polygon)
            self._corner_counts.append(len(polygon) // 2)
        self._masks.append(mask)
        self._any_mask = self._any_mask or bool(mask)

    def _integer(self, item: dict[str, Any], key: str, what: str) -> int:
        value = item.get(key)
        if type(value) is not int or not -(2**63) <= value < 2**63:
            raise SourceError(self.path, f"{what} with the {key} {value!r}: expected a whole number")
        return value

    # --- together -----------------------------------------------------------------------------------------------------

    def finish(self, folder: str) -> CocoSet:
        """Return the arrays, sorted by image; within an image in the order of the file."""
        category_ids = np.array(sorted(self._categories), np.int64)
        of_annotation = np.asarray(self._category, np.int64)
        labels = np.searchsorted(category_ids, of_annotation)
        known = np.zeros(len(labels), bool)
        if len(category_ids):
            known = category_ids[np.minimum(labels, len(category_ids) - 1)] == of_annotation
        for number in np.flatnonzero(~known).tolist():
            annotation, category = self._annotation[number], self._category[number]
            why = f"annotation {annotation} has the category_id {category}, which is not listed"
            self._faults.setdefault(self._image[number], why)
        image = np.fromiter((self._ids.get(each, -1) for each in self._image), np.int64, len(self._image))
        notes = self._strays(image)
        order = np.argsort(image, kind="stable")
        order = order[image[order] >= 0]
        per_image = np.bincount(image[order], minlength=len(self.names))
        labels[~known] = -1
        more: dict[str, Array] = {
            "category_ids": of_annotation[order],
            "annotation_ids": np.asarray(self._annotation, np.int64)[order],
            "iscrowd": np.asarray(self._crowd, np.int64)[order],
            "area": np.asarray(self._area, np.float32)[order],
        }
        if len(self._points):
            more["keypoints"] = self._keypoints()[order]
        faults = [""] * len(self.names)
        for image_id, why in self._faults.items():
            if image_id in self._ids:
                faults[self._ids[image_id]] = why
        boxes = np.asarray(self._boxes, np.float32).reshape(-1, 4)[order]
        found = Annotations(
            folder,
            NameTable(self.names),
            np.asarray(self._sizes, np.int32).reshape(-1, 2),
            Ragged(boxes, per_image),
            labels[order],
            NameTable(faults),
            more,
        )
        polygons, counts = self._sorted_polygons(order)
        return CocoSet(
            found,
            np.fromiter(self._ids, np.int64, len(self._ids)),
            [self._categories[number] for number in category_ids.tolist()],
            polygons,
            Ragged(counts, per_image),
            np.cumsum(counts),
            NameTable(self._masks[at] for at in order.tolist()) if self._any_mask else None,
            notes,
        )

    def _strays(self, image: npt.NDArray[np.int64]) -> list[str]:
        strays = np.flatnonzero(image < 0).tolist()
        if not strays:
            return []
        named = [f"{self._annotation[at]} of image {self._image[at]}" for at in strays[:5]]
        return [f"left out, annotations of images that are not listed: {len(strays)} ({listed(named, len(strays))})"]

    def _keypoints(self) -> npt.NDArray[np.float32]:
        """Return (m, most keypoints, 3): x, y and visibility; zeros where an annotation has fewer."""
        counts = np.asarray(self._point_counts, np.int64)
        table = np.zeros((len(counts), int(counts.max())), np.float32)
        table[np.arange(table.shape[1]) < counts[:, None]] = np.asarray(self._points, np.float32)
        return table.reshape(len(counts), -1, 3)

    def _sorted_polygons(self, order: npt.NDArray[np.int64]) -> tuple[Ragged, npt.NDArray[np.int64]]:
        corners = np.asarray(self._corners, np.float32).reshape(-1, 2)
        polygons = Ragged(corners, np.asarray(self._corner_counts, np.int64))
        per_annotation = np.asarray(self._polygons, np.int64)
        of_annotation = Ragged(np.arange(len(polygons)), per_annotation)
        return polygons.take(of_annotation.take(order).values), per_annotation[order]


def _numbers(value: Any, what: str, count: int | None) -> array[float]:
    """Return a list of finite numbers, ``count`` of them if given, as an array. Raises _Unusable."""
    if value is None:
        raise _Unusable(f"has no {what}")
    try:
        numbers = array("d", value if isinstance(value, list) else ["no list"])
    except TypeError:
        numbers = array("d", [math.nan])
    # One number that is not finite makes the sum so; no Python object for each of them.
    if not math.isfinite(sum(numbers)) or (count is not None and len(numbers) != count):
        raise _Unusable(f"has the {what} {str(value)[:60]}, not {count or 'a list of'} numbers")
    return numbers


def _segmentation(value: Any) -> tuple[list[array[float]], str]:
    """Return (polygons, run lengths as JSON or an empty string)."""
    if isinstance(value, dict):
        try:
            rle.check(value)
        except rle.BadRle as fault:
            raise _Unusable(f"has a segmentation that is no mask: {fault}") from fault
        return [], json.dumps({"size": value["size"], "counts": value["counts"]}, separators=(",", ":"))
    if not value:
        return [], ""
    if not isinstance(value, list):
        raise _Unusable(f"has the segmentation {str(value)[:60]}")
    polygons = [_numbers(polygon, "segmentation", None) for polygon in value]
    odd = [polygon for polygon in polygons if len(polygon) % 2 or not polygon]
    if odd:
        raise _Unusable(f"has a polygon of {len(odd[0])} numbers, not two for each corner")
    return polygons, ""
