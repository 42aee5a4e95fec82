"""Image files to pixels: the one place that decodes.

Every decoder of this library ends here, so that an image looks the same whether it comes from a folder, a list or a
pack. Whatever the file holds, what comes out is RGB, uint8, upright:

    EXIF orientation     applied (a damaged EXIF block counts as none: the pixels are still good)
    grey, 1 bit          the same value in all three channels
    16-bit grey          the upper eight bits, so that black stays black and white stays white
    palette, CMYK, YCCK  converted; embedded colour profiles are not applied
    alpha                laid over WHITE, as a viewer shows it (dropping alpha would show what it hides)
    several frames       the first one

32-bit integer and float images have no agreed range: they are refused instead of clipped.

Pillow is imported when the first image is decoded. It comes with ``pip install shmloader[images]``.
"""

from __future__ import annotations

import io
import re
import struct
import zlib
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .errors import BrokenImage, MissingExtra

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".dib", ".gif", ".tif", ".tiff", ".webp", ".avif"}
    | {".ppm", ".pgm", ".pbm", ".pnm", ".jp2"}
)
"""Names ending so, in any case, are taken for image files."""

_ORIENTATION = 0x0112  # the EXIF tag
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""EXIF orientation -> the move of ``PIL.Image.Transpose`` that brings the image upright."""

_DAMAGE = (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, OverflowError, struct.error, zlib.error)
"""What Pillow's many readers raise for a damaged file."""


def _pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtra("Pillow", "images", "decode images") from None
    return Image


@dataclass(frozen=True)
class Fit:
    """How an image of any size becomes one of exactly ``height`` x ``width`` pixels.

    Without ``crop``, it is stretched. With ``crop="center"``, it keeps its proportions: it is scaled until its shorter
    side has ``short`` pixels (without ``short``: until it just covers the target), and the middle is cut out. Scaling
    is bilinear and antialiased; sizes and borders are rounded as torchvision's ``Resize`` and ``CenterCrop`` do.
    """

    height: int
    width: int
    short: int | None = None
    crop: str | None = None

    def __post_init__(self) -> None:
        if self.height < 1 or self.width < 1:
            raise ValueError(f"an image of {self.width}x{self.height} pixels cannot be: both must be at least 1")
        if self.crop not in (None, "center"):
            raise ValueError(f"crop is {self.crop!r}; only 'center' is known")
        if self.short is not None and self.crop is None:
            raise ValueError(f"a shorter side of {self.short} leaves the other side open: ask for crop='center' too")
        if self.short is not None and self.short < max(self.height, self.width):
            raise ValueError(
                f"a shorter side of {self.short} cannot hold a crop of {self.width}x{self.height}: "
                f"it must be at least {max(self.height, self.width)}"
            )

    @classmethod
    def parse(cls, size: str, resize: str | None = None, crop: str | None = None) -> Fit:
        """Read the words of the command line: ``("224x224", "short:256", "center")``; ``size`` is WIDTHxHEIGHT."""
        wide = re.fullmatch(r"(\d{1,6})(?:[xX](\d{1,6}))?", size.strip())
        if wide is None:
            raise ValueError(f"size is {size!r}; expected WIDTHxHEIGHT, as in 224x224")
        short = None
        if resize is not None:
            words = re.fullmatch(r"short:(\d{1,6})", resize.strip())
            if words is None:
                raise ValueError(f"resize is {resize!r}; expected short:PIXELS, as in short:256")
            short = int(words[1])
        return cls(height=int(wide[2] or wide[1]), width=int(wide[1]), short=short, crop=crop)

    def plan(self, width: int, height: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return what becomes of an image: ((width, height) it is scaled to, (left, top) of the cut in that)."""
        if self.crop is None:
            return (self.width, self.height), (0, 0)
        if self.short is not None:
            scaled = (
                (self.short, max(1, int(self.short * height / width)))
                if width <= height
                else (max(1, int(self.short * width / height)), self.short)
            )
        else:
            scale = max(self.width / width, self.height / height)
            scaled = (max(self.width, round(width * scale)), max(self.height, round(height * scale)))
        return scaled, (round((scaled[0] - self.width) / 2), round((scaled[1] - self.height) / 2))

    def apply(self, image: Image) -> Image:
        """Return a new image of this size, or ``image`` itself if it has it already and is not to be cropped."""
        scaled, (left, top) = self.plan(*image.size)
        if scaled != image.size:
            image = image.resize(scaled, _pillow().Resampling.BILINEAR)
        return image if self.crop is None else image.crop((left, top, left + self.width, top + self.height))

    def describe(self) -> str:
        """Say in a few words what is done: it goes into reports and manifests."""
        size = f"{self.width}x{self.height}"
        if self.crop is None:
            return f"stretched to {size}"
        return f"{'scaled to cover' if self.short is None else f'shorter side {self.short}'}, centre crop {size}"


class Seen(NamedTuple):
    """How an image is seen: its size once it is upright, before any ``Fit``, and the turn that made it so."""

    height: int
    width: int
    turn: int
    """The EXIF orientation that was applied: 1 (none) to 8. From 5 on, height and width have changed places."""


def _open(data: bytes | bytearray | memoryview, name: str) -> Image:
    try:
        return _pillow().open(io.BytesIO(data))  # type: ignore[no-any-return]
    except _DAMAGE as fault:
        raise BrokenImage(name, len(data), _clause(fault)) from fault
    except _pillow().DecompressionBombError as fault:
        raise BrokenImage(name, len(data), _clause(fault)) from fault


def _clause(fault: BaseException) -> str:
    # Pillow's own text names our in-memory file by address, which tells nobody anything.
    text = re.sub(r"<_io\.BytesIO object at 0x[0-9a-f]+>", "these bytes", str(fault))
    return " ".join(text.split()) or type(fault).__name__


def _orientation(image: Image) -> int:
    """Return the EXIF orientation, 1 (upright) to 8; 1 if there is none or the EXIF block is damaged."""
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except (*_DAMAGE, TypeError):
        return 1
    return value if value in _TURNS else 1


def _to_rgb(image: Image) -> Image:
    """Bring any mode to RGB by the rules in this module's head. ``image`` is loaded."""
    Image = _pillow()
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        # Pillow itself would clip everything above 255 to white. (Its older versions read a 16-bit PNG as mode I.)
        return Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8)).convert("RGB")  # type: ignore[no-any-return]
    if image.mode in ("I", "F"):
        raise ValueError(f"its pixels are 32-bit numbers (mode {image.mode}) whose range nobody knows")
    if "A" in image.mode or "a" in image.mode or "transparency" in image.info:
        rgba = image.convert("RGBA")
        paper = Image.new("RGB", rgba.size, (255, 255, 255))
        paper.paste(rgba, mask=rgba.getchannel("A"))
        return paper  # type: ignore[no-any-return]
    return image.convert("RGB")


def _decode(data: bytes | bytearray | memoryview, name: str) -> tuple[Image, Seen]:
    image = _open(data, name)
    try:
        told = _orientation(image) if image.format == "TIFF" else None
        image.load()
        turn = _orientation(image)  # after load: Pillow turns TIFF upright by itself, and takes the tag away
        image = _to_rgb(image)
        if turn != 1:
            image = image.transpose(_pillow().Transpose[_TURNS[turn]])
    except _DAMAGE as fault:
        raise BrokenImage(name, len(data), _clause(fault)) from fault
    return image, Seen(image.height, image.width, told or turn)


def decode_pil(data: bytes | bytearray | memoryview, *, name: str = "image", fit: Fit | None = None) -> Image:
    """Decode the bytes of an image file to an upright RGB ``PIL.Image``, brought to size by ``fit``.

    ``name`` says in errors which image it was. Raises BrokenImage, or MissingExtra without Pillow.
    """
    image, _ = _decode(data, name)
    return fit.apply(image) if fit is not None else image


def decode_rgb(
    data: bytes | bytearray | memoryview, *, name: str = "image", fit: Fit | None = None
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Decode the bytes of an image file to a new, writable uint8 array of shape (height, width, 3)."""
    return np.array(decode_pil(data, name=name, fit=fit))


def decode_chw(
    data: bytes | bytearray | memoryview,
    *,
    name: str = "image",
    fit: Fit | None = None,
    out: np.ndarray[Any, np.dtype[np.uint8]] | None = None,
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Decode the bytes of an image file to uint8 (3, height, width), C-contiguous: torch's layout.

    The pixels are written once: into ``out`` if given (it must have the image's shape), else into a new array.
    """
    pixels = np.asarray(decode_pil(data, name=name, fit=fit)).transpose(2, 0, 1)
    if out is None:
        return np.array(pixels, order="C")
    np.copyto(out, pixels)
    return out


def encode_chw(pixels: np.ndarray[Any, np.dtype[np.uint8]], quality: int | None = None) -> bytes:
    """Return uint8 (3, height, width) as an image file: JPEG of this quality, or PNG, which loses nothing."""
    image = _pillow().fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0)))
    buffer = io.BytesIO()
    if quality is None:
        image.save(buffer, "PNG")
    else:
        image.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def size_of(data: bytes | bytearray | memoryview) -> tuple[int, int]:
    """Return (height, width) as the head of an image file has them, before it is turned upright; nothing is decoded.

    The heads of JPEG and PNG are read here: opening a small file with Pillow takes as long as a quarter of its check.
    """
    view = memoryview(data)
    head = bytes(view[:16])
    if head[:8] == b"\x89PNG\r\n\x1a\n" and head[12:] == b"IHDR":
        width, height = struct.unpack_from(">II", view, 16)
        return height, width
    found = _jpeg_size(view) if head[:2] == b"\xff\xd8" else None
    if found is not None:
        return found
    width, height = _open(data, "image").size
    return height, width


def _jpeg_size(view: memoryview) -> tuple[int, int] | None:
    """Return (height, width) from the first frame head; None if the segments before it are not as they should be."""
    at = 2
    while at + 9 <= len(view) and view[at] == 0xFF:
        marker = view[at + 1]
        if marker == 0xFF:  # padding
            at += 1
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", view, at + 5)
            return (height, width) if height and width else None
        else:
            at += 2 + int(struct.unpack_from(">H", view, at + 2)[0])
    return None


def decode_seen(
    data: bytes | bytearray | memoryview, *, name: str = "image", fit: Fit | None = None
) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], Seen]:
    """Decode as ``decode_chw`` does; return the pixels and how the image was seen, which places its annotations."""
    image, seen = _decode(data, name)
    pixels = np.asarray(image if fit is None else fit.apply(image)).transpose(2, 0, 1)
    return np.array(pixels, order="C"), seen


def examine(data: bytes | bytearray | memoryview, *, name: str = "image") -> Seen:
    """Prove that an image file can be decoded to its end; return how a decoder would see it.

    A JPEG is decoded at an eighth of its size: all of its bytes are read, which is what finds a cut file, at a third
    of the time.
    """
    image = _open(data, name)
    width, height = image.size
    try:
        told = _orientation(image) if image.format == "TIFF" else None
        if image.format == "JPEG":
            image.draft(None, (max(1, width // 8), max(1, height // 8)))
        image.load()
        if image.mode in ("I", "F"):
            _to_rgb(image)
        if image.format == "TIFF":  # Pillow turns these upright as it loads them
            width, height = image.size
        turn = _orientation(image)
        if turn >= 5:
            width, height = height, width
    except _DAMAGE as fault:
        raise BrokenImage(name, len(data), _clause(fault)) from fault
    return Seen(height, width, told or turn)


def check(data: bytes | bytearray | memoryview, *, name: str = "image") -> tuple[int, int]:
    """Return (height, width) of an image file as ``examine`` sees it, which proves it decodable."""
    seen = examine(data, name=name)
    return seen.height, seen.width
