"""Pascal VOC: one XML file per image, with boxes, classes, flags, and sometimes parts.

    JPEGImages/2007_000027.jpg      photos/a.jpg        images/a.png
    Annotations/2007_000027.xml     photos/a.xml        annotations/a.xml
    ImageSets/Main/train.txt        (labelImg)          (converters)

One XML file is one sample, in the order of their paths, or in that of an image set. Its image is the one of the same
stem: in the same folder; else in the folder that corresponds (``JPEGImages`` or ``images`` for ``Annotations``); else
anywhere below, if there is one only. Where no stem fits, the ``filename`` that the XML gives is looked for; between
equal stems it decides too. Images without an XML file are no samples, and are noted.

Boxes keep the numbers of their files. The VOC kits count pixels from 1 and include the last one; many converters count
from 0. No file says which: nothing is subtracted.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from ..errors import SourceError
from ..images import Fit
from .base import Annotated, NameTable, Options, StrPath, listed
from .detection import DetectionSource
from .geometry import Mask, Placing
from .pictures import Pictures, read_file
from .scan import Scan, is_image_name
from .voc_files import ImageIndex, in_image_set, is_annotation_name, looks_like_voc
from .voc_table import VocTable
from .voc_xml import Malformed, parse


class PascalVoc(DetectionSource):
    """Images and their Pascal VOC annotations, as dicts; see ``DetectionSource`` for what all of them hold.

    Beside ``image``, ``boxes``, ``labels``, ``size`` and ``name``: ``difficult`` and ``truncated``, bool (n,). Where
    any annotation of the set tells them, also ``occluded`` bool (n,); ``poses`` int64 (n,), numbers of
    ``metadata["poses"]``; ``part_boxes`` float32 (p, 4), ``part_labels`` int64 (p,), numbers of
    ``metadata["part_classes"]``, and ``part_objects`` int64 (p,), the object that each part belongs to.

    ``classes`` are the sorted names of the objects in the set. All XML files are read when it is opened. One that
    cannot be used raises SourceError with the reason when its sample is asked for, as does one without an image.
    """

    kind = "voc"
    looked_for = "a folder with images and one Pascal VOC .xml for each"
    uses = frozenset({"fit", "image_set", "annotated"})

    def __init__(
        self,
        path: StrPath,
        *,
        fit: Fit | None = None,
        encoded: bool = False,
        image_set: str | None = None,
        annotated: Annotated = "auto",
    ) -> None:
        self.path = os.fspath(path)
        scan = Scan(self.path)
        names = scan.files_below(
            self.path,
            lambda name: is_annotation_name(name) or is_image_name(name),
            "neither images nor annotations by their names",
        )
        images = [name for name in names if not is_annotation_name(name)]
        annotations = [name for name in names if is_annotation_name(name)]
        if image_set is not None:
            annotations = in_image_set(self.path, image_set, annotations)
        self._read(scan, annotations, ImageIndex(images))
        self.classes = self._set.classes
        self._set_up(self._set.found, Pictures(fit, encoded), annotated)
        self._notes += scan.notes()
        used = set(self._set.found.images)
        without = [] if image_set is not None else [image for image in images if image not in used]
        if without:
            self._notes.append(f"images without an annotation, left out: {listed(without, len(without))}")

    def _read(self, scan: Scan, annotations: list[str], images: ImageIndex) -> None:
        table = VocTable()
        kept = []
        for name in annotations:
            path = os.path.join(self.path, name)
            try:
                annotation = parse(read_file(path, path))
                if annotation is None:
                    scan.leave_out("XML of another kind", path)
                    continue
                table.add(annotation, images.find(name, annotation.filename))
            except Malformed as fault:
                table.add_fault(str(fault))
            kept.append(name)
        if not kept:
            raise SourceError(self.path, "there is no Pascal VOC annotation in it (.xml with the root <annotation>)")
        self._xml = NameTable(kept)
        self._set = table.finish(self.path)

    @classmethod
    def recognises(cls, path: str) -> bool:
        """True for a folder with an image and an annotation of the same stem where they belong together."""
        return os.path.isdir(path) and looks_like_voc(path)

    @classmethod
    def open(cls, path: str, options: Options) -> PascalVoc:
        return cls(
            path,
            fit=options.fit,
            encoded=options.fit is None,
            image_set=options.image_set,
            annotated=options.annotated,
        )

    def _more(self, index: int, placing: Placing, kept: Mask) -> dict[str, Any]:
        found = self._set
        if not found.part_classes:
            return {}
        parts = found.parts.span(index)
        boxes, inside = placing.boxes(found.parts[index])
        objects = found.part_objects[parts]
        # A part goes with its object; those that stay are numbered like the objects that stay.
        whole = kept[objects]
        return {
            "part_boxes": torch.from_numpy(boxes[whole[inside]]),
            "part_labels": torch.from_numpy(found.part_labels[parts][inside & whole]),
            "part_objects": torch.from_numpy((np.cumsum(kept) - 1)[objects][inside & whole]),
        }

    def name_of(self, index: int) -> str:
        return os.path.join(self.path, self._xml[index])

    def describe(self) -> str:
        return f"Pascal VOC, {self._pictures.describe()}"

    @property
    def metadata(self) -> dict[str, Any]:
        more = {"poses": self._set.poses, "part_classes": self._set.part_classes}
        return super().metadata | {name: list(words) for name, words in more.items() if words}
