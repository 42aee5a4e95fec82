"""The lines of a text list cut into columns, whatever stands between them. Pure: knows no folder and no image.

    photos/a 1.jpg 3                   blanks: a name may hold some, it ends with its suffix
    "photos/a, b.jpg", 12.5, 80, cat   commas, semicolons, tabs: names that hold one are quoted

Empty lines and lines that begin with # are left out; so are leading lines that name no image (a header, a count).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from ..images import SUFFIXES

SEPARATORS = ("\t", ";", ",", " ")
"""What may stand between columns, in the order in which they are tried. A blank stands for any run of blanks."""

NAMES = {"\t": "tab", ";": "semicolon", ",": "comma", " ": "blanks"}

_SUFFIXES = tuple(sorted(SUFFIXES))
_SUFFIX = "|".join(sorted((re.escape(suffix) for suffix in SUFFIXES), key=len, reverse=True))
_IMAGE = re.compile(rf"(.*?(?:{_SUFFIX}))(?:\s+|$)(.*)", re.IGNORECASE | re.DOTALL)
_QUOTED = re.compile(r"""(["'])(.*?)\1(?:\s+|$)(.*)""", re.DOTALL)


class BadLine(ValueError):
    """A line cannot be cut; the text says why. Internal: the source adds file and line."""


def is_number(text: str) -> bool:
    """Say whether ``text`` is a number, whole or not; nan and inf are none."""
    try:
        value = float(text)
    except ValueError:
        return False
    return value - value == 0 and "_" not in text


def is_whole(text: str) -> bool:
    """Say whether ``text`` is a whole number, written as one."""
    return re.fullmatch(r"[+-]?\d{1,18}", text) is not None


def names_image(text: str) -> bool:
    """Say whether a column ends like the name of an image file."""
    return text.lower().endswith(_SUFFIXES)


def data_lines(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield (number from 1, stripped line) of all lines that are neither empty nor comments."""
    for number, raw in enumerate(lines, 1):
        line = raw.strip("\r\n \t\f\v")
        if line and not line.startswith("#"):
            yield number, line


def cut(line: str, separator: str, path_first: bool = True) -> list[str]:
    """Return the columns of a line without the blanks around them. Raises BadLine for a quote that does not end.

    With ``path_first``, what is separated by blanks begins with the name of an image, which may hold some itself.
    """
    if separator != " ":
        if '"' not in line:
            return [column.strip() for column in line.split(separator)]
        try:
            (columns,) = csv.reader([line], delimiter=separator, skipinitialspace=True, strict=True)
        except csv.Error as fault:
            raise BadLine(f"its quotes do not fit: {fault}") from fault
        return [column.strip() for column in columns]
    columns = line.split()
    if names_image(columns[0]) or not path_first:
        return columns
    quoted = _QUOTED.fullmatch(line)
    if quoted is not None:
        return [quoted[2], *quoted[3].split()]
    image = _IMAGE.fullmatch(line)
    if image is not None:
        return [image[1], *image[2].split()]
    return columns


def find_separator(
    lines: Sequence[str], tried: Sequence[str], fits: Callable[[list[str]], bool], path_first: bool = True
) -> tuple[str, int] | None:
    """Return (the one of ``tried`` with which most lines fit, the first line that does), None if fewer than half do.

    Of several the one that makes most columns; a list of bare names counts as cut by blanks.
    """
    best, found = (0, 0), None
    for separator in tried:
        good = [place for place, line in enumerate(lines) if _cut_fits(line, separator, fits, path_first)]
        if 2 * len(good) >= len(lines):
            columns = min(len(cut(lines[place], separator, path_first)) for place in good)
            rank = (len(good), columns)
            if rank > best and (columns > 1 or separator == " " or len(tried) == 1):
                best, found = rank, (separator, good[0])
    return found


def _cut_fits(line: str, separator: str, fits: Callable[[list[str]], bool], path_first: bool) -> bool:
    try:
        return fits(cut(line, separator, path_first))
    except BadLine:
        return False
