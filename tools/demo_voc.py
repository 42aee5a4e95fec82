"""The demo's second set: a Pascal VOC folder whose every box is known, made from the same photographs.

    voc/JPEGImages/000000.jpg      a photograph with cut-outs of others pasted onto it
    voc/Annotations/000000.xml     where they are, as the VOC kits write it: pixels counted from 1, the last included
    voc/ImageSets/Main/train.txt, val.txt

In between, as in real sets: pictures without any object, objects cut off by the border (truncated), small ones
(difficult), and photographs that lie on their side and say so in EXIF, half of them annotated upright and half as their
pixels are stored. The same seed gives the same files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
from PIL import Image

from .demo_photos import PHOTOGRAPHS, load_photograph

SCENES = ("palace", "stars", "flower", "coffee")
OBJECTS = ("astronaut", "cat", "motorcycle", "rocket")

_SMALL = 48  # pixels: objects below are marked difficult
_TRIES = 30  # places tried for an object before it is left out

Box = tuple[int, int, int, int]


@dataclass(frozen=True)
class Pasted:
    """One object of a picture."""

    name: str
    box: Box
    """Left, top, right, bottom on the upright picture: edges, counted from 0."""
    truncated: bool

    @property
    def difficult(self) -> bool:
        return min(self.box[2] - self.box[0], self.box[3] - self.box[1]) < _SMALL


def build(folder: Path, *, pictures: int = 60, seed: int = 0) -> list[tuple[Pasted, ...]]:
    """Write pictures and their annotations into ``folder``, which must not exist; return the objects of each."""
    sources = {name: load_photograph(*PHOTOGRAPHS[name]).convert("RGB") for name in (*SCENES, *OBJECTS)}
    for part in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (folder / part).mkdir(parents=True)
    truth = []
    stems = []
    for number in range(pictures):
        rng = np.random.default_rng([seed, number])
        picture, objects = _compose(sources, rng)
        stem = f"{number:06}"
        turned = number % 8 == 3
        _save(picture, folder / "JPEGImages" / f"{stem}.jpg", turned=turned, quality=int(rng.integers(80, 96)))
        # Drawn in a program that does not know of EXIF; of a square, nothing would tell.
        lying = turned and number % 16 == 3 and picture.width != picture.height
        tree = _annotation(f"{stem}.jpg", picture.size, objects, lying=lying)
        tree.write(folder / "Annotations" / f"{stem}.xml", encoding="utf-8")
        truth.append(objects)
        stems.append(stem)
    for name, chosen in (("train", [s for s in stems if int(s) % 5]), ("val", [s for s in stems if not int(s) % 5])):
        (folder / "ImageSets" / "Main" / f"{name}.txt").write_text("".join(f"{stem}\n" for stem in chosen))
    return truth


def _compose(sources: dict[str, Image.Image], rng: np.random.Generator) -> tuple[Image.Image, tuple[Pasted, ...]]:
    """Return a scene of 240 to 400 pixels a side with up to four objects that do not cover each other."""
    width, height = (int(rng.integers(240, 401)) for _ in range(2))
    picture = _cut(sources[SCENES[rng.integers(len(SCENES))]], (width, height), rng)
    objects: list[Pasted] = []
    for _ in range(int(rng.integers(0, 5))):
        name = OBJECTS[rng.integers(len(OBJECTS))]
        wide, high = (int(rng.integers(32, 140)) for _ in range(2))
        for _ in range(_TRIES):
            left, top = int(rng.integers(-wide // 4, width - 3 * wide // 4)), int(rng.integers(0, height - high))
            box = (max(left, 0), top, min(left + wide, width), top + high)
            if all(_apart(box, other.box) for other in objects):
                picture.paste(_cut(sources[name], (wide, high), rng), (left, top))
                objects.append(Pasted(name, box, box[2] - box[0] < wide))
                break
    return picture, tuple(objects)


def _cut(source: Image.Image, size: tuple[int, int], rng: np.random.Generator) -> Image.Image:
    """Return a random window of a photograph, at least half as large as can be, scaled to ``size``."""
    scale = rng.uniform(0.5, 1.0) * min(source.width / size[0], source.height / size[1])
    across, down = size[0] * scale, size[1] * scale
    left, top = rng.uniform(0, source.width - across), rng.uniform(0, source.height - down)
    return source.resize(size, Image.Resampling.BICUBIC, box=(left, top, left + across, top + down))


def _apart(one: Box, other: Box) -> bool:
    return one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]


def _save(picture: Image.Image, path: Path, *, turned: bool, quality: int) -> None:
    exif = Image.Exif()
    if turned:  # a camera held upright: the pixels lie on their side, EXIF says how to turn them
        picture = picture.transpose(Image.Transpose.ROTATE_90)
        exif[0x0112] = 6
    picture.save(path, "JPEG", quality=quality, exif=exif)


def _annotation(
    filename: str, size: tuple[int, int], objects: tuple[Pasted, ...], *, lying: bool
) -> ElementTree.ElementTree:
    """Return the XML of one picture of upright ``size`` (width, height)."""
    width, height = (size[1], size[0]) if lying else size
    root = ElementTree.Element("annotation")
    _add(root, {"folder": "voc", "filename": filename})
    _add(ElementTree.SubElement(root, "size"), {"width": width, "height": height, "depth": 3})
    _add(root, {"segmented": 0})
    for each in objects:
        left, top, right, bottom = each.box
        if lying:  # a quarter turn to the left: right becomes up
            left, top, right, bottom = top, size[0] - right, bottom, size[0] - left
        element = ElementTree.SubElement(root, "object")
        _add(element, {"name": each.name, "pose": "Unspecified"})
        _add(element, {"truncated": int(each.truncated), "difficult": int(each.difficult)})
        box = {"xmin": left + 1, "ymin": top + 1, "xmax": right, "ymax": bottom}
        _add(ElementTree.SubElement(element, "bndbox"), box)
    tree = ElementTree.ElementTree(root)
    ElementTree.indent(tree, "\t")
    return tree


def _add(parent: ElementTree.Element, values: Mapping[str, object]) -> None:
    for name, value in values.items():
        ElementTree.SubElement(parent, name).text = str(value)
