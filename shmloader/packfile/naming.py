"""Names for the fields of a sample."""

from __future__ import annotations

from ..errors import MisuseError
from .structure import Branch, Node


def name_fields(paths: list[tuple[str, ...]], structure: Node, given: tuple[str, ...] | None) -> list[str]:
    """Return a unique name for each leaf: the way to it, joined by dots; "0" for a sample that is a single value.

    ``given`` names the parts of the outermost tuple, list or dict, or the single value, instead. Raises MisuseError if
    they are not as many as the parts.
    """
    if given is not None:
        labels = _labels(structure)
        if len(given) != max(1, len(labels)) or len(set(given)) != len(given):
            raise MisuseError(
                f"field_names={list(given)} must name the {max(1, len(labels))} parts of a sample, each differently"
            )
        if not labels:
            return list(given)
        renamed = dict(zip(labels, given, strict=True))
        paths = [(renamed[path[0]], *path[1:]) for path in paths]
    names: list[str] = []
    taken: set[str] = set()
    for path in paths:
        name = base = ".".join(path) or "0"
        again = 2
        while name in taken:  # {"a.b": ..., "a": {"b": ...}}
            name, again = f"{base}~{again}", again + 1
        names.append(name)
        taken.add(name)
    return names


def _labels(structure: Node) -> list[str]:
    if not isinstance(structure, Branch):
        return []
    return [str(key) for key in structure.keys] or [str(i) for i in range(len(structure.children))]
