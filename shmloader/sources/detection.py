"""What sources of boxes have in common: images, and for each image any number of objects.

    images    img0        img1   img2          one row per sample: name, size as the annotation tells it
    objects   o0 o1 o2    -      o3 o4         one row per object: box, label, flags, all in whole arrays

A sample is a dict. Boxes are x1, y1, x2, y2 in pixels, with the numbers of the annotation unless the image is turned,
scaled or cropped on its way: then they go with it (see ``geometry``).
"""

from __future__ import annotations

import hashlib
import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..errors import SourceError
from .base import Annotated, Array, NameTable, Source, listed, position
from .geometry import Mask, Placing
from .pictures import Pictures
from .problems import Problem, Severity
from .ragged import Ragged

SLACK = 1.0  # pixels: a box may reach so far beyond its image; rounding, and counting from 1


@dataclass
class Annotations:
    """All that is known of a set without reading its images."""

    folder: str
    """What the names of images are relative to."""
    images: NameTable
    """File of each sample's image; empty where there is none."""
    sizes: npt.NDArray[np.int32]
    """(n, 2): height and width of each image as the annotation tells them; zeros where it does not."""
    boxes: Ragged
    """float32 (m, 4) for all objects, cut by image."""
    labels: npt.NDArray[np.int64]
    """(m,)"""
    faults: NameTable
    """Why the annotation of each sample cannot be used; empty where it can."""
    more: dict[str, Array] = field(default_factory=dict)
    """Further facts about each object, under the names of their fields: (m, ...)."""


class DetectionSource(Source):
    """Base of the sources that yield an image and its objects as a dict.

    ``image`` is ``bytes`` with ``encoded``, else uint8 (3, h, w); ``boxes`` float32 (n, 4), ``labels`` int64 (n,);
    ``size`` int64 (2,) is the height and width of the upright image before any scaling; ``name`` is the image's file
    as its folder knows it. All tensors are new.
    """

    path: str
    classes: list[str]
    """Names of the classes in the order of their labels."""

    def _set_up(self, found: Annotations, pictures: Pictures, annotated: Annotated) -> None:
        self._found = found
        self._pictures = pictures
        self._annotated: Annotated = annotated
        self._notes: list[str] = []
        broken = [f"{self.name_of(i)} ({fault})" for i, fault in enumerate(found.faults) if fault]
        if broken:
            self._notes.append(f"annotations that cannot be used: {listed(broken, len(broken), 3)}")
        first = found.images.first_of()
        self._repeats = np.flatnonzero(first != np.arange(len(first)))
        self._repeat_of = first[self._repeats]

    def __len__(self) -> int:
        return len(self._found.images)

    def image_path(self, index: int) -> str:
        """Return the file of the image of sample ``index``."""
        return os.path.join(self._found.folder, self._found.images[index])

    @abstractmethod
    def _more(self, index: int, placing: Placing, kept: Mask) -> dict[str, Any]:
        """Return the fields of this sample that are not one row per object."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = position(index, len(self))
        found = self._found
        fault = found.faults[index]
        if fault:
            raise SourceError(self.name_of(index), fault)
        image, seen = self._pictures.read(self.image_path(index), self.name_of(index))
        told = (int(found.sizes[index, 0]), int(found.sizes[index, 1]))
        placing = Placing.of(seen, told, self._annotated, self._pictures.fit)
        objects = found.boxes.span(index)
        boxes, kept = placing.boxes(found.boxes[index])
        sample: dict[str, Any] = {
            "image": image,
            "boxes": torch.from_numpy(boxes),
            "labels": torch.from_numpy(found.labels[objects][kept]),
        }
        for name, column in found.more.items():
            sample[name] = torch.from_numpy(column[objects][kept])
        sample.update(self._more(index, placing, kept))
        sample["size"] = torch.tensor([seen.height, seen.width])
        sample["name"] = found.images[index]
        return sample

    def fingerprint(self) -> str:
        """As for every source, and of all annotations too: they are at hand, and are often corrected between runs."""
        digest = hashlib.sha256(super().fingerprint().encode())
        found = self._found
        for column in (found.sizes, found.boxes.values, found.boxes.ends, found.labels, *found.more.values()):
            digest.update(column.tobytes())
        return digest.hexdigest()

    @property
    def metadata(self) -> dict[str, Any]:
        fit = self._pictures.fit
        boxes = "x1, y1, x2, y2 in pixels, " + ("placed as the image" if fit else "as annotated")
        return {
            "kind": self.kind,
            "source": self.path,
            "classes": list(self.classes),
            "images": self._pictures.describe(),
            "boxes": boxes,
        }

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self._notes)

    @property
    def encodings(self) -> dict[str, str]:
        return {"image": "encoded-image"} if self._pictures.encoded else {}

    def class_counts(self) -> Mapping[str, int]:
        """Return objects (not images) per class, in label order."""
        counts = np.bincount(self._found.labels[self._found.labels >= 0], minlength=len(self.classes))
        return dict(zip(self.classes, counts.tolist(), strict=True))

    # --- problems -----------------------------------------------------------------------------------------------------

    def problems(self, index: int, sample: Any) -> Iterable[Problem]:
        where = self.name_of(index)
        for kind, what, severity in self._findings(index, sample):
            yield Problem(index, where, kind, what, severity)

    def _findings(self, index: int, sample: dict[str, Any]) -> Iterator[tuple[str, str, Severity]]:
        at = int(np.searchsorted(self._repeats, index))
        if at < len(self._repeats) and self._repeats[at] == index:
            first = int(self._repeat_of[at])
            yield "duplicate-image", f"sample {first} has the same image {self._found.images[index]!r}", "warning"
        height, width = sample["size"].tolist()
        told = tuple(self._found.sizes[index].tolist())
        if all(told) and told not in ((height, width), (width, height)):
            what = f"the image has {width} x {height} pixels, its annotation says {told[1]} x {told[0]}"
            yield "size-differs", what, "warning"
        if self._pictures.fit is not None:
            height, width = self._pictures.fit.height, self._pictures.fit.width
        yield from box_findings(sample["boxes"].numpy(), sample["labels"].numpy(), height, width, len(self.classes))
        lost = int(self._found.boxes.lengths[index]) - len(sample["boxes"]) if self._pictures.fit else 0
        if lost:
            yield "box-cropped-away", f"{lost} of its boxes lie outside of the crop and were taken out", "warning"


def box_findings(
    boxes: Array, labels: Array, height: int, width: int, classes: int
) -> Iterator[tuple[str, str, Severity]]:
    """Yield (kind, what, severity) for each box (x1, y1, x2, y2) that does not suit an image of this size."""
    for number in np.flatnonzero((labels < 0) | (labels >= classes)).tolist():
        yield "label-out-of-range", f"object {number} has label {labels[number]}, of {classes} classes", "error"
    flat: Array = np.asarray((boxes[:, 2:] <= boxes[:, :2]).any(axis=1))
    size = np.array([width, height], np.float32)
    away: Array = ((boxes[:, :2] >= size) | (boxes[:, 2:] <= 0)).any(axis=1) & ~flat
    beyond: Array = ((boxes[:, :2] < -SLACK) | (boxes[:, 2:] > size + SLACK)).any(axis=1) & ~flat & ~away
    groups: tuple[tuple[Array, str, str, Severity], ...] = (
        (flat, "box-without-area", "has no area", "error"),
        (away, "box-outside", f"lies outside of the image of {width} x {height}", "error"),
        (beyond, "box-beyond", f"reaches beyond the image of {width} x {height}", "warning"),
    )
    for wrong, kind, what, severity in groups:
        for number in np.flatnonzero(wrong).tolist():
            corners = ", ".join(f"{corner:g}" for corner in boxes[number].tolist())
            yield kind, f"box {number} ({corners}) {what}", severity
