"""The annotations of a Pascal VOC set as whole arrays, filled one XML file after another."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .base import Array, NameTable
from .detection import Annotations
from .ragged import Ragged
from .voc_xml import Annotation


class Names:
    """Numbers for names: first as they come, in the end as they sort."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, name: str) -> int:
        """Return the number of a name until now."""
        return self._numbers.setdefault(name, len(self._numbers))

    def sort(self, numbers: array[int]) -> tuple[list[str], npt.NDArray[np.int64]]:
        """Return the sorted names, and ``numbers`` as positions in them."""
        names = sorted(self._numbers)
        place = np.zeros(len(names), np.int64)
        for position, name in enumerate(names):
            place[self._numbers[name]] = position
        return names, place[np.asarray(numbers, np.int64)]


class VocTable:
    """Collects annotations; ``finish`` gives the arrays."""

    def __init__(self) -> None:
        self._images: list[str] = []
        self._faults: list[str] = []
        self._sizes = array("i")
        self._objects = array("q")
        self._boxes = array("f")
        self._classes, self._labels = Names(), array("q")
        self._poses, self._pose_numbers = Names(), array("q")
        self._flags = (array("b"), array("b"), array("b"))
        self._parts = array("q")
        self._part_boxes = array("f")
        self._part_classes, self._part_labels = Names(), array("q")
        self._part_objects = array("q")

    def add(self, annotation: Annotation, image: str) -> None:
        """Add what one file says of its image."""
        self._row(image, "", annotation.size)
        self._objects.append(len(annotation.objects))
        self._parts.append(sum(len(each.parts) for each in annotation.objects))
        for number, each in enumerate(annotation.objects):
            self._boxes.extend(each.box)
            self._labels.append(self._classes.number(each.name))
            self._pose_numbers.append(self._poses.number(each.pose or "Unspecified"))
            for flags, value in zip(self._flags, (each.difficult, each.truncated, each.occluded), strict=True):
                flags.append(value)
            for part in each.parts:
                self._part_boxes.extend(part.box)
                self._part_labels.append(self._part_classes.number(part.name))
                self._part_objects.append(number)

    def add_fault(self, why: str) -> None:
        """Add a file that cannot be used."""
        self._row("", why, (0, 0))
        self._objects.append(0)
        self._parts.append(0)

    def _row(self, image: str, fault: str, size: tuple[int, int]) -> None:
        self._images.append(image)
        self._faults.append(fault)
        self._sizes.extend(size)

    def finish(self, folder: str) -> VocSet:
        """Return all that was added; the images are relative to ``folder``."""
        classes, labels = self._classes.sort(self._labels)
        difficult, truncated, occluded = (np.asarray(flags, np.int8).astype(bool) for flags in self._flags)
        more: dict[str, Array] = {"difficult": difficult, "truncated": truncated}
        if occluded.any():
            more["occluded"] = occluded
        poses: list[str] = []
        if len(self._poses) > 1:
            poses, more["poses"] = self._poses.sort(self._pose_numbers)
        found = Annotations(
            folder,
            NameTable(self._images),
            np.asarray(self._sizes, np.int32).reshape(-1, 2),
            _boxes(self._boxes, self._objects),
            labels,
            NameTable(self._faults),
            more,
        )
        part_classes, part_labels = self._part_classes.sort(self._part_labels)
        part_objects = np.asarray(self._part_objects, np.int64)
        parts = _boxes(self._part_boxes, self._parts)
        return VocSet(found, classes, poses, part_classes, parts, part_labels, part_objects)


def _boxes(corners: array[float], lengths: array[int]) -> Ragged:
    return Ragged(np.asarray(corners, np.float32).reshape(-1, 4), np.asarray(lengths, np.int64))


@dataclass(frozen=True)
class VocSet:
    """The annotations of a set as arrays, and the names that their numbers stand for, sorted."""

    found: Annotations
    classes: list[str]
    poses: list[str]
    """Empty where no annotation tells one."""
    part_classes: list[str]
    parts: Ragged
    """Boxes float32 (p, 4), cut by sample."""
    part_labels: npt.NDArray[np.int64]
    part_objects: npt.NDArray[np.int64]
    """For each part the place of its object within the sample."""
