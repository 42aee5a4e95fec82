"""One Pascal VOC annotation: from the bytes of its XML to its objects. Pure.

Read is what the VOC kits, labelImg and converters write: coordinates as integers or floats, fields that are missing
(sizes, flags, the name of the image), parts within objects, Windows paths, byte order marks, any declared encoding.

Nothing outside of the bytes is ever read. A file that declares entities of its own is refused: no annotation tool
writes them, and they are what blows up a parser.
"""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

Box = tuple[float, float, float, float]
CORNERS = ("xmin", "ymin", "xmax", "ymax")

_FLAGS = {"": False, "0": False, "false": False, "no": False, "unspecified": False}
_FLAGS |= {"1": True, "true": True, "yes": True}
_EXPAT_KNOWS = ("utf-8", "utf-16", "iso-8859-1", "us-ascii")


class Malformed(ValueError):
    """The annotation cannot be used; the text says why. Internal: the source adds the file."""


class Part(NamedTuple):
    """A part of an object, such as a head."""

    name: str
    box: Box


class Object(NamedTuple):
    """One object of an annotation."""

    name: str
    box: Box
    difficult: bool
    truncated: bool
    occluded: bool
    pose: str
    parts: tuple[Part, ...]


class Annotation(NamedTuple):
    """What one XML file says."""

    filename: str
    """The last component of the image's name; empty if it is not given."""
    size: tuple[int, int]
    """(height, width); zeros where they are missing or no numbers."""
    objects: tuple[Object, ...]


def parse(data: bytes) -> Annotation | None:
    """Return what an annotation says, None if the XML is of another kind (its root is not ``annotation``).

    Raises Malformed: not well-formed, entities, an object without a name or box, coordinates that are no numbers.
    """
    root = _tree(data)
    if root.tag != "annotation":
        return None
    filename = _text(root, "filename") or _text(root, "path")
    height, width = _pixels(_text(root, "size/height")), _pixels(_text(root, "size/width"))
    objects = tuple([_object(element, number) for number, element in enumerate(root.findall("object"))])
    return Annotation(re.split(r"[\\/]", filename)[-1], (height, width), objects)


def _tree(data: bytes) -> Element:
    text, encoding = _readable(data)
    builder = TreeBuilder()
    parser = expat.ParserCreate(encoding)

    def refuse(*declaration: Any) -> None:
        raise Malformed("it declares XML entities, which no annotation needs: refused")

    parser.EntityDeclHandler = refuse
    parser.StartElementHandler = builder.start
    parser.EndElementHandler = builder.end
    parser.CharacterDataHandler = builder.data
    parser.buffer_text = True
    try:
        parser.Parse(text, True)
    except expat.ExpatError as fault:
        raise Malformed(f"not well-formed XML: {fault}") from fault
    return builder.close()


def _readable(data: bytes) -> tuple[bytes, str | None]:
    """Return the bytes in an encoding that expat knows, and its name if it is not to go by the XML's own word."""
    declared = re.match(rb"""\s*<\?xml[^>]*?encoding\s*=\s*["']([\w.:-]+)""", data)
    name = declared[1].decode("ascii").lower() if declared else "utf-8"
    if name in _EXPAT_KNOWS:
        return data, None
    try:
        return data.decode(name).encode(), "utf-8"
    except LookupError:
        raise Malformed(f"its encoding {name!r} is unknown") from None
    except UnicodeDecodeError as fault:
        raise Malformed(f"it is not encoded in {name!r}, as it says: {fault}") from fault


def _object(element: Element, number: int) -> Object:
    name = _text(element, "name")
    what = f"object {number}" + (f" ({name!r})" if name else "")
    if not name:
        raise Malformed(f"{what} has no name")
    parts = []
    for part in element.findall("part"):
        label = _text(part, "name")
        if not label:
            raise Malformed(f"a part of {what} has no name")
        parts.append(Part(label, _box(part, f"part {label!r} of {what}")))
    return Object(
        name,
        _box(element, what),
        _flag(element, "difficult", what),
        _flag(element, "truncated", what),
        _flag(element, "occluded", what),
        _text(element, "pose"),
        tuple(parts),
    )


def _box(element: Element, what: str) -> Box:
    bounds = element.find("bndbox")
    if bounds is None:
        raise Malformed(f"{what} has no bndbox")
    corners = []
    for corner in CORNERS:
        text = _text(bounds, corner)
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise Malformed(f"the {corner} of {what} is {text!r}, no number" if text else f"{what} has no {corner}")
        corners.append(value)
    return corners[0], corners[1], corners[2], corners[3]


def _flag(element: Element, name: str, what: str) -> bool:
    text = _text(element, name)
    value = _FLAGS.get(text.lower())
    if value is None:
        raise Malformed(f"{name} of {what} is {text!r}: neither 0 nor 1")
    return value


def _text(element: Element, path: str) -> str:
    return (element.findtext(path) or "").strip()


def _pixels(text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        return 0
    return int(value) if math.isfinite(value) and 0 < value < 2**31 else 0
