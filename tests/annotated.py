"""Small annotated sets as other programs write them: labelImg's XML, JSON as COCO has it, photographs with EXIF.

Test files import it as ``from annotated import photograph, labelimg``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from shmloader_tools import demo_photos

Box = Sequence[float]

LIE_DOWN = {1: None, 3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}
"""EXIF orientation -> how an upright image is laid down so that the orientation brings it upright again."""


def photograph(path: Path, size: tuple[int, int] = (120, 80), *, name: str = "cat", turn: int = 1) -> Image.Image:
    """Save a scaled photograph that is ``size`` (width, height) when upright; return it upright.

    With ``turn`` 3, 6 or 8 the file's pixels lie, and its EXIF orientation says how to bring them upright.
    """
    upright = demo_photos.load_photograph(*demo_photos.PHOTOGRAPHS[name]).convert("RGB").resize(size)
    move = LIE_DOWN[turn]
    exif = Image.Exif()
    if turn != 1:
        exif[0x0112] = turn
    path.parent.mkdir(parents=True, exist_ok=True)
    (upright if move is None else upright.transpose(move)).save(path, exif=exif)
    return upright


def marked(path: Path, box: Box, size: tuple[int, int] = (120, 80), turn: int = 1) -> None:
    """Save a black image, white where ``box`` is on the upright image: what shows whether box and image still agree."""
    pixels = np.zeros((size[1], size[0], 3), np.uint8)
    x1, y1, x2, y2 = map(int, box)
    pixels[y1:y2, x1:x2] = 255
    upright = Image.fromarray(pixels)
    exif = Image.Exif()
    if turn != 1:
        exif[0x0112] = turn
    move = LIE_DOWN[turn]
    path.parent.mkdir(parents=True, exist_ok=True)
    (upright if move is None else upright.transpose(move)).save(path, exif=exif)


def bright(image: Any) -> list[int]:
    """Return x1, y1, x2, y2 of what is bright in a uint8 (3, h, w) image."""
    pixels = np.asarray(image)[0] > 127
    (rows,), (columns,) = np.nonzero(pixels.any(axis=1)), np.nonzero(pixels.any(axis=0))
    return [int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1]


def labelimg(
    image: Path, size: tuple[int, int], objects: Sequence[tuple[str, Box]], *, depth: int = 3, difficult: int = 0
) -> str:
    """Return the XML that labelImg writes for an image of ``size`` (width, height): tabs, no declaration."""
    text = f"""<annotation>
\t<folder>{image.parent.name}</folder>
\t<filename>{image.name}</filename>
\t<path>{image}</path>
\t<source>
\t\t<database>Unknown</database>
\t</source>
\t<size>
\t\t<width>{size[0]}</width>
\t\t<height>{size[1]}</height>
\t\t<depth>{depth}</depth>
\t</size>
\t<segmented>0</segmented>
"""
    for name, (x1, y1, x2, y2) in objects:
        text += f"""\t<object>
\t\t<name>{name}</name>
\t\t<pose>Unspecified</pose>
\t\t<truncated>0</truncated>
\t\t<difficult>{difficult}</difficult>
\t\t<bndbox>
\t\t\t<xmin>{x1}</xmin>
\t\t\t<ymin>{y1}</ymin>
\t\t\t<xmax>{x2}</xmax>
\t\t\t<ymax>{y2}</ymax>
\t\t</bndbox>
\t</object>
"""
    return text + "</annotation>\n"


def coco(
    images: Sequence[tuple[int, str, tuple[int, int]]],
    annotations: Sequence[dict[str, Any]],
    categories: Sequence[dict[str, Any]] = ({"id": 18, "name": "dog"}, {"id": 1, "name": "person"}),
) -> dict[str, Any]:
    """Return what a COCO instances file holds, its parts in the order of the published ones.

    ``images`` are (id, file_name, (width, height)); missing entries of an annotation are filled in.
    """
    filled: dict[str, Any] = {"segmentation": [], "iscrowd": 0, "category_id": 1, "bbox": [10, 10, 20, 20], "area": 400}
    return {
        "info": {"description": "a set", "version": "1.0", "year": 2017, "date_created": "2017/09/01"},
        "licenses": [{"id": 1, "name": "CC0", "url": ""}],
        "images": [
            {
                "license": 1,
                "file_name": name,
                "coco_url": "",
                "height": h,
                "width": w,
                "date_captured": "",
                "id": number,
            }
            for number, name, (w, h) in images
        ],
        "annotations": [filled | {"id": 100 + i} | annotation for i, annotation in enumerate(annotations)],
        "categories": [dict(category) for category in categories],
    }
