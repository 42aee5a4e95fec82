"""Where annotations end up when their image is turned upright, scaled and cropped. Pure arithmetic on arrays.

    as annotated ──turn (EXIF)──▶ upright ──scale──▶ ──cut──▶ as delivered
       (x, y)                        x' = x * scale - cut

Coordinates are continuous: 0 is the left (top) edge of the first pixel, the width (height) is the right (lower) edge of
the last one. Numbers of a file that counts pixels from 1 go through the same arithmetic and stay within a pixel.

Which way up an image lay when it was annotated is in no file. ``"auto"`` goes by the size that the annotation gives for
it: where that is the size before the EXIF rotation, and not the one after, the boxes are turned with the image. In all
other cases (no size given, square images, half turns) they are taken as drawn on the upright image, as today's viewers
show it. ``"upright"`` and ``"stored"`` say it by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..images import Fit, Seen
from .base import Annotated

Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]

_MOVES = {
    1: (False, False, False),
    2: (False, True, False),
    3: (False, True, True),
    4: (False, False, True),
    5: (True, False, False),
    6: (True, True, False),
    7: (True, True, True),
    8: (True, False, True),
}
"""EXIF orientation -> (swap x and y, then mirror x, then mirror y), which brings stored coordinates upright."""


def turn_to_apply(seen: Seen, told: tuple[int, int], annotated: Annotated) -> int:
    """Return the EXIF orientation that annotations must follow, 1 if they are upright already.

    ``told`` is the (height, width) that the annotation gives for its image, zeros if it gives none.
    """
    if annotated == "upright" or seen.turn == 1:
        return 1
    if annotated == "stored":
        return seen.turn
    upright = (seen.height, seen.width)
    lying = (seen.width, seen.height) if seen.turn >= 5 else upright
    return seen.turn if told == lying != upright else 1


@dataclass(frozen=True)
class Placing:
    """The way of one image's coordinates from its annotation to the image as it is delivered."""

    turn: int
    height: int
    """Of the upright image, before it is scaled."""
    width: int
    scale: tuple[float, float]
    """Of x and y."""
    cut: tuple[int, int]
    """(left, top) of what is cut out of the scaled image."""
    out: tuple[int, int]
    """(height, width) of the image as delivered."""
    crops: bool

    @classmethod
    def of(cls, seen: Seen, told: tuple[int, int], annotated: Annotated, fit: Fit | None) -> Placing:
        """Return the way for an image that was ``seen`` so, and is brought to size by ``fit``."""
        turn = turn_to_apply(seen, told, annotated)
        if fit is None:
            return cls(turn, seen.height, seen.width, (1.0, 1.0), (0, 0), (seen.height, seen.width), False)
        (wide, high), cut = fit.plan(seen.width, seen.height)
        scale = (wide / seen.width, high / seen.height)
        return cls(turn, seen.height, seen.width, scale, cut, (fit.height, fit.width), fit.crop is not None)

    @property
    def moves(self) -> bool:
        """Whether any coordinate changes."""
        return self.turn != 1 or self.scale != (1.0, 1.0) or self.cut != (0, 0)

    def points(self, points: Floats) -> Floats:
        """Return points (..., 2) as x and y in the delivered image; a copy. They may lie outside of it."""
        swap, mirror_x, mirror_y = _MOVES[self.turn]
        x, y = points[..., 0].astype(np.float64), points[..., 1].astype(np.float64)
        if swap:
            x, y = y, x
        if mirror_x:
            x = self.width - x
        if mirror_y:
            y = self.height - y
        placed = np.stack((x * self.scale[0] - self.cut[0], y * self.scale[1] - self.cut[1]), axis=-1)
        return placed.astype(np.float32)

    def boxes(self, boxes: Floats) -> tuple[Floats, Mask]:
        """Return boxes (n, 4) as x1, y1, x2, y2 in the delivered image, and which of the n they are; a copy.

        Where images are cropped, boxes are cut at the image's borders, and those of which nothing is left inside are
        taken out. A box whose corners were the wrong way round stays so.
        """
        kept = np.ones(len(boxes), bool)
        if not self.moves:
            return boxes.copy(), kept
        _, mirror_x, mirror_y = _MOVES[self.turn]
        corners = self.points(boxes.reshape(-1, 2, 2))
        if mirror_x:
            corners[:, :, 0] = corners[:, ::-1, 0]
        if mirror_y:
            corners[:, :, 1] = corners[:, ::-1, 1]
        if self.crops:
            size = np.array((self.out[1], self.out[0]), np.float32)
            low, high = corners.min(axis=1), corners.max(axis=1)
            kept = ((high > 0) & (low < size)).all(axis=1)
            corners = np.clip(corners[kept], 0, size)
        return corners.reshape(-1, 4), kept

    def upright(self, pixels: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return pixels (height, width) that lie as annotated, turned as the annotation is; a view."""
        swap, mirror_x, mirror_y = _MOVES[self.turn]
        if swap:
            pixels = pixels.T
        return pixels[:: -1 if mirror_y else 1, :: -1 if mirror_x else 1]

    def inside(self, points: Floats) -> Mask:
        """Return which placed points (..., 2) lie in the delivered image."""
        size = np.array((self.out[1], self.out[0]), np.float32)
        return np.asarray(((points >= 0) & (points <= size)).all(axis=-1))
