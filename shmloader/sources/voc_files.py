"""Which image belongs to which Pascal VOC annotation, by the names of files alone."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence

from ..errors import SourceError
from .base import listed
from .scan import is_image_name
from .voc_xml import Malformed

_ANNOTATION_FOLDERS = frozenset({"annotations", "annotation", "xmls", "xml", "labels"})
_IMAGE_FOLDERS = frozenset({"jpegimages", "images", "image", "imgs", "img", "data"})
_TELLING = _ANNOTATION_FOLDERS | _IMAGE_FOLDERS
_LOOK_AT = 20_000  # files, before a folder without a matching pair is taken for something else


def is_annotation_name(name: str) -> bool:
    """Say whether a file name ends like that of an annotation."""
    return name.lower().endswith(".xml")


def _place(folder: str) -> str:
    """Return a folder's path without those parts that only tell images from annotations."""
    parts = [part for part in folder.split(os.sep) if part.lower() not in _TELLING]
    return os.sep.join(parts)


def _stem(path: str) -> str:
    return os.path.splitext(os.path.basename(path))[0]


def looks_like_voc(root: str) -> bool:
    """Say whether there is an image with an annotation of its stem where one is looked for first; names only."""
    images: set[tuple[str, str]] = set()
    annotations: set[tuple[str, str]] = set()
    seen = 0
    for folder, folders, names in os.walk(root):
        # Those that hold the rarer kind of file first: a folder of a million images is then never listed.
        folders.sort(key=lambda name: (name.lower() not in _ANNOTATION_FOLDERS, name))
        folders[:] = [name for name in folders if not name.startswith(".")]
        place = _place(folder[len(root) :].strip(os.sep))
        for name in names:
            if name.startswith("."):
                continue
            if is_annotation_name(name):
                annotations.add((place, _stem(name)))
            elif is_image_name(name):
                images.add((place, _stem(name)))
        if images and annotations and not images.isdisjoint(annotations):
            return True
        seen += len(names)
        if seen > _LOOK_AT and not annotations:
            return False
    return False


class ImageIndex:
    """Finds the image of an annotation among the images of a tree, whose paths are relative to its root."""

    def __init__(self, images: Iterable[str]) -> None:
        self._beside: dict[tuple[str, str], list[str]] = defaultdict(list)
        self._across: dict[tuple[str, str], list[str]] = defaultdict(list)
        self._anywhere: dict[str, list[str]] = defaultdict(list)
        self._named: dict[str, list[str]] = defaultdict(list)
        for image in images:
            folder, name = os.path.split(image)
            stem = _stem(name)
            self._beside[folder, stem].append(image)
            self._across[_place(folder), stem].append(image)
            self._anywhere[stem].append(image)
            self._named[name].append(image)

    def find(self, annotation: str, filename: str) -> str:
        """Return the image of an annotation, whose XML gives ``filename``; Malformed if there is none, or several."""
        folder, stem = os.path.split(os.path.splitext(annotation)[0])
        found = (
            self._beside.get((folder, stem))
            or self._across.get((_place(folder), stem))
            or self._anywhere.get(stem)
            or self._named.get(filename)
            or self._anywhere.get(os.path.splitext(filename)[0] if is_image_name(filename) else filename)
        )
        if not found:
            told = f", nor the name {filename!r} that it gives" if filename else ""
            raise Malformed(f"no image has its stem {stem!r}{told}")
        if len(found) > 1:
            found = [image for image in found if os.path.basename(image) == filename] or found
        if len(found) > 1:
            raise Malformed(f"several images could be its own: {listed(found, len(found))}")
        return found[0]


def in_image_set(root: str, image_set: str, annotations: Sequence[str]) -> list[str]:
    """Return the annotations that an image set lists, in its order.

    ``image_set`` is the name of a list in ``ImageSets/Main`` or ``ImageSets``, or the path of one. Its lines begin with
    the stem of an annotation; what may follow is not read. Raises SourceError: no such list, no such annotation.
    """
    known = [os.path.join(root, "ImageSets", "Main"), os.path.join(root, "ImageSets")]
    tried = [os.path.join(folder, image_set + ".txt") for folder in known] + [image_set]
    there = [path for path in tried if os.path.isfile(path)]
    if not there:
        raise SourceError(root, f"there is no image set {image_set!r}; looked for {', '.join(tried)}")
    by_stem: dict[str, list[str]] = defaultdict(list)
    for annotation in annotations:
        by_stem[_stem(annotation)].append(annotation)
    chosen = []
    with open(there[0], encoding="utf-8-sig", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, 1):
            whole = line.strip()
            if not whole:
                continue
            found = by_stem.get(whole) or by_stem.get(whole.split()[0], [])
            if len(found) != 1:
                why = f"there are several: {listed(found, len(found))}" if found else "there is none"
                raise SourceError(f"{there[0]}, line {number}", f"annotation {whole.split()[0]!r}: {why}")
            chosen.append(found[0])
    return chosen
