"""What the columns of a list are: found out from the lines, or said by hand. Pure.

    path              an image file                          -> image
    label             a class: whole numbers, or names        -> label int64
    points            x y x y ...: as many as there are       -> points float32 (k, 2)
    boxes             x1 y1 x2 y2 ...: as many as there are   -> boxes float32 (k, 4)
    numbers           as many as there are                    -> numbers float32 (k,)
    number            one number                              -> number float
    text              one word or text                        -> text str
    skip              nothing

``name=role`` names the field. At most one column takes "as many as there are": those behind it count from the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import MisuseError
from .list_lines import is_number, is_whole

ROLES = ("path", "label", "points", "boxes", "numbers", "number", "text", "skip")
GROUPS = {"points": 2, "boxes": 4, "numbers": 1}
"""Roles that take as many columns as there are -> in groups of how many."""


@dataclass(frozen=True)
class Column:
    """One column, or one run of columns."""

    name: str
    """Of its field."""
    role: str


@dataclass(frozen=True)
class Layout:
    """The columns of all lines."""

    columns: tuple[Column, ...]

    @property
    def open(self) -> int | None:
        """Place of the column that takes as many as there are; None without one."""
        for place, column in enumerate(self.columns):
            if column.role in GROUPS:
                return place
        return None

    @property
    def path(self) -> int:
        """Place of the column with the image's name."""
        return [column.role for column in self.columns].index("path")

    def spread(self, count: int) -> list[slice]:
        """Return which of a line's ``count`` columns belong to each of ours. Raises ValueError if they do not fit."""
        at = self.open
        ours = len(self.columns)
        if at is None:
            if count != ours:
                raise ValueError(f"it has {count} columns, expected {ours}")
            return [slice(i, i + 1) for i in range(ours)]
        many = count - (ours - 1)
        group = GROUPS[self.columns[at].role]
        if many < 0 or many % group:
            each = f"a multiple of {group} numbers" if group > 1 else "numbers"
            raise ValueError(f"it has {count} columns, expected {ours - 1} and {each}")
        sizes = [1] * ours
        sizes[at] = many
        ends = [sum(sizes[: i + 1]) for i in range(ours)]
        return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]

    def describe(self) -> str:
        """Return the words that say the same by hand: ``path,points,label``."""
        default = _field_names([column.role for column in self.columns])
        words = []
        for column, name in zip(self.columns, default, strict=True):
            words.append(column.role if column.name == name else f"{column.name}={column.role}")
        return ",".join(words)


def said(words: Sequence[str]) -> Layout:
    """Return the layout that ``words`` say: ``("path", "age=number", "label")``. Raises MisuseError."""
    parts = [word.strip().rpartition("=") for word in words]
    roles = [role for _, _, role in parts]
    for role in roles:
        if role not in ROLES:
            raise MisuseError(f"a column cannot be {role!r}; it can be {', '.join(ROLES)}")
    for role in ("path", "label"):
        if roles.count(role) > 1 or (role == "path" and "path" not in roles):
            raise MisuseError(f"columns {','.join(words)}: exactly one must be the path, and at most one the label")
    if sum(role in GROUPS for role in roles) > 1:
        raise MisuseError(f"columns {','.join(words)}: only one of them can take as many as there are")
    names = [name or default for (name, _, _), default in zip(parts, _field_names(roles), strict=True)]
    used = [name for name, role in zip(names, roles, strict=True) if role != "skip"]
    if len(set(used)) < len(used) or "name" in used:
        raise MisuseError(f"columns {','.join(words)}: two fields of one name ('name' is the image's file)")
    return Layout(tuple([Column(name, role) for name, role in zip(names, roles, strict=True)]))


def _field_names(roles: Sequence[str]) -> list[str]:
    """Return the usual names: that of the role, numbered where it comes more than once."""
    names = []
    for place, role in enumerate(roles):
        many = list(roles).count(role) > 1
        usual = "image" if role == "path" else role
        names.append(f"{usual}_{list(roles[:place]).count(role)}" if many else usual)
    return names


def found(rows: Sequence[Sequence[str]]) -> Layout:
    """Return the layout of lines that begin with a path. Raises ValueError if they have none in common.

    Pairs of numbers are points, unless all of them are -1, 0 or 1: such columns are attributes. A last column behind
    pairs, and one that stands alone, is the label if it holds whole numbers or names.
    """
    counts = {len(row) - 1 for row in rows}
    tails = [row[1:] for row in rows]
    if counts == {0}:
        return said(["path"])
    numeric = [all(is_number(value) for value in tail[:-1]) for tail in tails]
    last_numeric = all(is_number(tail[-1]) for tail in tails if tail)
    last_label = all(is_whole(tail[-1]) for tail in tails if tail) or not last_numeric
    if counts == {1}:
        return said(["path", "label" if last_label else "number"])
    if all(numeric):
        if all(count % 2 == 1 for count in counts) and last_label:
            return said(["path", "points", "label"])
        if last_numeric:
            if all(value in _FLAGS for tail in tails for value in tail):
                return said(["path", "numbers"])
            if all(count % 2 == 0 for count in counts):
                return said(["path", "points"])
            return said(["path", "numbers"])
        if all(count == 2 for count in counts):
            return said(["path", "number", "label"])
    if len(counts) > 1:
        raise ValueError(f"lines have from {min(counts) + 1} to {max(counts) + 1} columns that fit no pattern")
    (count,) = counts
    roles = ["path"]
    for place in range(count):
        roles.append("number" if all(is_number(tail[place]) for tail in tails) else "text")
    if roles.count("text") == 1:
        roles[roles.index("text")] = "label"
    return said(roles)


_FLAGS = frozenset({"-1", "0", "1"})
