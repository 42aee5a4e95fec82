"""Masks as run lengths, the way COCO writes them: column by column, beginning with a run of zeros.

{"size": [h, w], "counts": [6, 1, 40, ...]}      as numbers
{"size": [h, w], "counts": "61X13mN000`0"}       packed: five bits a character, from the third on as differences
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .geometry import Placing

Mask = npt.NDArray[np.bool_]


class BadRle(ValueError):
    """The run lengths make no mask; the text says why. Internal: the source adds the file and the object."""


def counts_of(packed: str) -> list[int]:
    """Return the run lengths of a packed string. Raises BadRle."""
    counts: list[int] = []
    value = shift = 0
    for character in packed:
        bits = ord(character) - 48
        if not 0 <= bits < 64:
            raise BadRle(f"{character!r} cannot be in packed run lengths")
        value |= (bits & 0x1F) << shift
        shift += 5
        if not bits & 0x20:
            if bits & 0x10:
                value -= 1 << shift
            counts.append(value + (counts[-2] if len(counts) > 2 else 0))
            value = shift = 0
    if shift:
        raise BadRle("its packed run lengths are cut")
    return counts


def check(rle: Any) -> None:
    """Raise BadRle unless ``rle`` has the form of a mask: a size, and counts as numbers or a string."""
    size = rle.get("size")
    numbers = isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
    if not numbers:
        raise BadRle(f"its size is {size!r}, not [height, width]")
    counts = rle.get("counts")
    if isinstance(counts, str):
        return
    if not (isinstance(counts, list) and all(type(n) is int and n >= 0 for n in counts)):
        raise BadRle("its counts are neither a string nor a list of numbers")


def to_mask(rle: dict[str, Any]) -> Mask:
    """Return the mask of checked run lengths: a new bool array (height, width). Raises BadRle."""
    height, width = rle["size"]
    counts = counts_of(rle["counts"]) if isinstance(rle["counts"], str) else rle["counts"]
    if min(counts, default=0) < 0 or sum(counts) != height * width:
        raise BadRle(f"its runs add up to {sum(counts)} pixels, but it has {width} x {height}")
    values = np.arange(len(counts)) % 2 == 1
    return np.repeat(values, counts).reshape(width, height).T


def from_mask(mask: Mask) -> dict[str, Any]:
    """Return the run lengths of a bool array (height, width), as numbers."""
    flat = np.concatenate(([False], mask.T.reshape(-1)))
    borders = np.flatnonzero(np.diff(flat))
    counts = np.diff(np.concatenate(([0], borders, [mask.size])))
    return {"size": list(mask.shape), "counts": counts.tolist()}


def place(rle: dict[str, Any], placing: Placing) -> dict[str, Any]:
    """Return run lengths turned, scaled (nearest pixel) and cropped with their image. Raises BadRle."""
    mask = placing.upright(to_mask(rle))
    if mask.shape != (placing.height, placing.width):
        height, width = rle["size"]
        raise BadRle(f"it has {width} x {height} pixels, but its image has {placing.width} x {placing.height}")
    (rows, columns), (across, down) = placing.out, placing.scale
    y = (np.arange(rows) + 0.5 + placing.cut[1]) / down
    x = (np.arange(columns) + 0.5 + placing.cut[0]) / across
    picked = np.ix_(np.clip(y, 0, placing.height - 1).astype(int), np.clip(x, 0, placing.width - 1).astype(int))
    return from_mask(mask[picked])
