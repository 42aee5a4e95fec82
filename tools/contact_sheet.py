"""A sheet of pictures from a pack: images as they are decoded, with boxes, points and labels drawn on them.

Drawn is what fields of these names hold: ``boxes`` (n, 4) as x1, y1, x2, y2; ``labels`` (n,) for their colours and
names; ``points`` or ``landmarks`` (n, 2) and ``keypoints`` (n, k, 3) with visibility; ``label`` for the caption. All in
pixels of the image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shmloader.errors import MissingExtra, MisuseError
from shmloader.packfile import PackedDataset
from shmloader.packfile.schema import ENCODED_IMAGE

try:
    from PIL import Image, ImageDraw
except ImportError as error:
    raise MissingExtra("Pillow", "images", "draw pictures") from error

TILE = 256
"""Pixels: the longer side of an image on the sheet."""
_CAPTION = 16
_GAP = 4
_COLOURS = (
    *("#e6194b", "#3cb44b", "#ffe119", "#4363d8", "#f58231"),
    *("#911eb4", "#42d4f4", "#f032e6", "#bfef45", "#fabed4"),
)
_SHOWN = 16


def chosen(count: int, sample: int | None) -> list[int]:
    """Return the samples to show: the one that was asked for, or some from all over the pack."""
    if sample is not None:
        return [sample]
    return np.unique(np.linspace(0, count - 1, min(count, _SHOWN)).astype(int)).tolist() if count else []


def draw(packed: PackedDataset, indices: Sequence[int], path: str) -> None:
    """Write the sheet to ``path``, whose ending chooses the format. Raises MisuseError for a pack without images."""
    name = image_field(packed)
    if name is None:
        raise MisuseError(f"{packed.path} has no field of images to show; it has {', '.join(map(str, packed.fields))}")
    if not indices:
        raise MisuseError(f"{packed.path} has no samples to show")
    columns = max(1, round(len(indices) ** 0.5))
    rows = -(-len(indices) // columns)
    step = (TILE + _GAP, TILE + _CAPTION + _GAP)
    sheet = Image.new("RGB", (columns * step[0] + _GAP, rows * step[1] + _GAP), "white")
    for place, index in enumerate(indices):
        tile = _tile(named_values(packed, index), name, index, packed.classes)
        sheet.paste(tile, (_GAP + place % columns * step[0], _GAP + place // columns * step[1]))
    try:
        sheet.save(path)
    except (ValueError, KeyError) as error:  # an ending that Pillow does not know
        raise MisuseError(f"{path} cannot be written: {error}") from error


def image_field(packed: PackedDataset) -> str | None:
    """Return the first field of images: encoded ones, or uint8 of 1 or 3 channels, first axis or last."""
    for field in packed.fields:
        if field.encoding == ENCODED_IMAGE:
            return field.name
        shape = field.shape
        if field.dtype == "uint8" and (len(shape) == 2 or (len(shape) == 3 and {shape[0], shape[2]} & {1, 3})):
            return field.name
    return None


def named_values(packed: PackedDataset, index: int) -> dict[str, Any]:
    """Return the fields of one sample by their names."""
    return {reader.field.name: reader.get(index) for reader in packed.gather.fields}


def _tile(values: Mapping[str, Any], name: str, index: int, classes: list[str] | None) -> Image.Image:
    pixels = np.asarray(values[name])
    if pixels.ndim == 3 and pixels.shape[0] in (1, 3):
        pixels = pixels.transpose(1, 2, 0)
    picture = Image.fromarray(np.ascontiguousarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels))
    scale = TILE / max(picture.size)
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    tile = Image.new("RGB", (TILE, TILE + _CAPTION), "white")
    tile.paste(picture.convert("RGB").resize(size), (0, 0))
    pen = ImageDraw.Draw(tile)
    labels = np.atleast_1d(values["labels"]).tolist() if "labels" in values else []
    for number, (x1, y1, x2, y2) in enumerate(_numbers(values.get("boxes"), 4) * scale):
        label = labels[number] if number < len(labels) else number
        colour = _COLOURS[label % len(_COLOURS)]
        corners = (min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2))
        pen.rectangle(corners, outline=colour, width=2)
        if labels:
            at = (corners[0] + 3, corners[1] + 1)
            pen.rectangle(pen.textbbox(at, _class(label, classes)), fill=colour)
            pen.text(at, _class(label, classes), fill="black")
    for x, y in _points(values) * scale:
        pen.ellipse((x - 2, y - 2, x + 2, y + 2), fill="#42d4f4", outline="black")
    caption = f"{index}"
    if isinstance(values.get("label"), int):
        caption += f"  {_class(values['label'], classes)}"
    pen.text((2, TILE + 2), caption.encode("ascii", "backslashreplace").decode(), fill="black")
    return tile


def _class(label: int, classes: list[str] | None) -> str:
    name = classes[label] if classes is not None and 0 <= label < len(classes) else str(label)
    return str(name).encode("ascii", "backslashreplace").decode()


def _numbers(value: Any, columns: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return rows of ``columns`` numbers; none for a field that is missing or holds something else."""
    array = np.empty((0, columns)) if value is None else np.asarray(value, np.float64)
    fits = array.ndim == 2 and array.shape[1] == columns and bool(np.isfinite(array).all())
    return array if fits else np.empty((0, columns))


def _points(values: Mapping[str, Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    parts = [_numbers(values.get(name), 2) for name in ("points", "landmarks")]
    if "keypoints" in values:
        keypoints = np.asarray(values["keypoints"], np.float64).reshape(-1, 3)
        parts.append(keypoints[keypoints[:, 2] > 0][:, :2])
    return np.concatenate(parts)
