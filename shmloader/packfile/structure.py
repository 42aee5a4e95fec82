"""How a sample is put together: tuples, lists, dicts and namedtuples, nested, with fields as their leaves. Pure.

    (image, {"boxes": b, "name": n})   ⇄   Branch("tuple", [Leaf 0, Branch("dict", keys boxes, name, [Leaf 1, Leaf 2])])

``flatten`` takes a sample apart into the values of its leaves, ``builder`` makes the function that does the reverse.
"""

from __future__ import annotations

import sys
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Key: TypeAlias = str | int | float | bool | None


@dataclass(frozen=True)
class Leaf:
    """One field: the ``number``-th value of a flattened sample."""

    number: int


@dataclass(frozen=True)
class Branch:
    """A tuple, list, dict or namedtuple of further nodes."""

    kind: str
    """``"tuple"``, ``"list"``, ``"dict"`` or ``"namedtuple"``."""
    children: tuple[Node, ...]
    keys: tuple[Key, ...] = ()
    """Of a dict its keys, of a namedtuple its field names, else empty."""
    type_name: str = ""
    """Of a namedtuple: ``module:qualified name`` of its class."""


Node: TypeAlias = Leaf | Branch


class StructureDiffers(Exception):
    """A sample is built differently. ``path`` says where; internal: the packer adds the sample's number."""

    def __init__(self, path: tuple[str, ...], expected: str, found: str) -> None:
        super().__init__(path, expected, found)
        self.path, self.expected, self.found = path, expected, found


class UnusableKey(Exception):
    """A dict key that JSON cannot keep. Internal, as above."""

    def __init__(self, path: tuple[str, ...], found: str) -> None:
        super().__init__(path, found)
        self.path, self.found = path, found


def _kind(value: Any) -> str | None:
    """Return the kind of branch that ``value`` is, or None for a leaf."""
    if isinstance(value, tuple):
        return "namedtuple" if _is_namedtuple(type(value)) else "tuple"
    if isinstance(value, list):
        return "list"
    if isinstance(value, Mapping):
        return "dict"
    return None


def _is_namedtuple(cls: type) -> bool:
    names = getattr(cls, "_fields", None)
    return isinstance(names, tuple) and all(isinstance(name, str) for name in names)


def infer(sample: Any) -> tuple[Node, list[tuple[str, ...]]]:
    """Return the structure of a sample, and for each leaf its path: dict keys, attribute names and positions."""
    paths: list[tuple[str, ...]] = []

    def walk(value: Any, path: tuple[str, ...]) -> Node:
        kind = _kind(value)
        if kind is None:
            paths.append(path)
            return Leaf(len(paths) - 1)
        if kind == "dict":
            for key in value:
                if not (key is None or type(key) in (str, int, float, bool)):
                    raise UnusableKey(path, f"a dict with the key {key!r} of type {type(key).__name__}")
            children = tuple([walk(child, (*path, str(key))) for key, child in value.items()])
            return Branch(kind, children, tuple(value))
        if kind == "namedtuple":
            names = tuple(type(value)._fields)
            children = tuple([walk(child, (*path, name)) for name, child in zip(names, value, strict=True)])
            return Branch(kind, children, names, f"{type(value).__module__}:{type(value).__qualname__}")
        return Branch(kind, tuple([walk(child, (*path, str(i))) for i, child in enumerate(value)]))

    return walk(sample, ()), paths


def flatten(sample: Any, node: Node, into: list[Any], path: tuple[str, ...] = ()) -> None:
    """Append the leaves of ``sample`` to ``into``; StructureDiffers unless it is built as ``node`` says."""
    if isinstance(node, Leaf):
        if isinstance(sample, (tuple, list, Mapping)):
            raise StructureDiffers(path, "a single value", _describe(sample))
        into.append(sample)
        return
    kind = _kind(sample)
    if kind != node.kind:
        raise StructureDiffers(path, _describe_node(node), _describe(sample))
    if kind == "dict":
        if len(sample) != len(node.keys):
            raise StructureDiffers(path, _describe_node(node), _describe(sample))
        for key, child in zip(node.keys, node.children, strict=True):
            if key not in sample:
                raise StructureDiffers(path, _describe_node(node), _describe(sample))
            value = sample[key]
            if isinstance(child, Leaf) and not isinstance(value, (tuple, list, Mapping)):
                into.append(value)
            else:
                flatten(value, child, into, (*path, str(key)))
        return
    if len(sample) != len(node.children) or (kind == "namedtuple" and type(sample)._fields != node.keys):
        raise StructureDiffers(path, _describe_node(node), _describe(sample))
    for i, (value, child) in enumerate(zip(sample, node.children, strict=True)):
        if isinstance(child, Leaf) and not isinstance(value, (tuple, list, Mapping)):
            into.append(value)
        else:
            flatten(value, child, into, (*path, str(node.keys[i]) if node.keys else str(i)))


def _describe(value: Any) -> str:
    kind = _kind(value)
    if kind is None:
        return f"a single value of type {type(value).__name__}"
    if kind == "dict":
        return f"a dict with the keys {list(value)}"
    if kind == "namedtuple":
        return f"a namedtuple of {', '.join(type(value)._fields)}"
    return f"a {kind} of {len(value)}"


def _describe_node(node: Branch) -> str:
    if node.kind == "dict":
        return f"a dict with the keys {list(node.keys)}"
    if node.kind == "namedtuple":
        return f"a namedtuple of {', '.join(map(str, node.keys))}"
    return f"a {node.kind} of {len(node.children)}"


# --- back together ----------------------------------------------------------------------------------------------------


def builder(node: Node) -> Callable[[Sequence[Any]], Any]:
    """Return the function that makes a sample from the values of the leaves, numbered as in ``node``."""
    if isinstance(node, Leaf):
        number = node.number
        return lambda values: values[number]
    if node.children and all(isinstance(child, Leaf) for child in node.children):
        numbers = [child.number for child in node.children if isinstance(child, Leaf)]
        if numbers == list(range(len(numbers))):
            if node.kind == "tuple":
                return lambda values: tuple(values[: len(numbers)])
            if node.kind == "dict":
                keys = node.keys
                return lambda values: dict(zip(keys, values, strict=False))
    parts = [builder(child) for child in node.children]
    if node.kind == "tuple":
        return lambda values: tuple([part(values) for part in parts])
    if node.kind == "list":
        return lambda values: [part(values) for part in parts]
    if node.kind == "dict":
        keyed = list(zip(node.keys, parts, strict=True))
        return lambda values: {key: part(values) for key, part in keyed}
    cls = _namedtuple_class(node.type_name, tuple(map(str, node.keys)))
    return lambda values: cls._make([part(values) for part in parts])


_RECREATED: dict[tuple[str, tuple[str, ...]], Any] = {}


def _namedtuple_class(type_name: str, names: tuple[str, ...]) -> Any:
    """Return the namedtuple's own class if this process has loaded it already, else a new one with the same fields.

    A pack never makes a process import anything.
    """
    module, _, qualified = type_name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type) and issubclass(found, tuple) and getattr(found, "_fields", None) == names:
        return found
    made = _RECREATED.get((type_name, names))
    if made is None:
        name = qualified.rpartition(".")[2] or "Sample"
        plain: Any = namedtuple(name, names)  # type: ignore[misc]

        class Recreated(plain):
            __slots__ = ()

            def __reduce__(self) -> tuple[Any, ...]:  # its class cannot be found by name in another process
                return _remake, (type_name, names, tuple(self))

        Recreated.__name__ = Recreated.__qualname__ = plain.__name__
        made = _RECREATED[type_name, names] = Recreated
    return made


def _remake(type_name: str, names: tuple[str, ...], values: tuple[Any, ...]) -> Any:
    return _namedtuple_class(type_name, names)._make(values)


def select(node: Node, names: Sequence[str], field_names: Sequence[str]) -> Node:
    """Return the structure that keeps only ``names``, in this order; KeyError for a name that is not there.

    A name is that of a field, or of a whole part of a sample: the dots of field names are the way down to it. The
    result is of the kind of the sample's outermost part. Leaves keep their numbers.
    """
    chosen = [_find(node, name, field_names) for name in names]
    if not isinstance(node, Branch):
        return Branch("tuple", tuple([each for _, each in chosen]))
    if node.kind == "dict":
        keys = [name if key is _DEEPER else key for name, (key, _) in zip(names, chosen, strict=True)]
        return Branch("dict", tuple([each for _, each in chosen]), tuple(keys))
    if node.kind == "namedtuple" and all(key is not _DEEPER for key, _ in chosen):
        keys = [key for key, _ in chosen]
        type_name = (
            node.type_name if tuple(keys) == node.keys else ":" + node.type_name.rpartition(".")[2].split(":")[-1]
        )
        return Branch("namedtuple", tuple([each for _, each in chosen]), tuple(keys), type_name)
    return Branch("list" if node.kind == "list" else "tuple", tuple([each for _, each in chosen]))


_DEEPER: Any = object()


def _find(node: Node, name: str, field_names: Sequence[str]) -> tuple[Any, Node]:
    """Return (key in the outermost part or _DEEPER, node) for a name."""
    if isinstance(node, Branch):
        for i, child in enumerate(node.children):
            label = str(node.keys[i]) if node.keys else str(i)
            if name == label or (isinstance(child, Leaf) and name == field_names[child.number]):
                return (node.keys[i] if node.keys else i), child
    if name in field_names:
        return _DEEPER, Leaf(list(field_names).index(name))
    at: Node = node
    for step in name.split("."):
        if not isinstance(at, Branch):
            raise KeyError(name)
        labels = [str(key) for key in at.keys] or [str(i) for i in range(len(at.children))]
        if step not in labels:
            raise KeyError(name)
        at = at.children[labels.index(step)]
    return _DEEPER, at


def leaves(node: Node) -> list[int]:
    """Return the numbers of the leaves, in the order of a sample."""
    if isinstance(node, Leaf):
        return [node.number]
    return [number for child in node.children for number in leaves(child)]


def renumber(node: Node, numbers: Sequence[int]) -> Node:
    """Return ``node`` with its leaves numbered by their position in ``numbers``."""
    if isinstance(node, Leaf):
        return Leaf(list(numbers).index(node.number))
    return Branch(node.kind, tuple([renumber(c, numbers) for c in node.children]), node.keys, node.type_name)


# --- JSON -------------------------------------------------------------------------------------------------------------


def node_to_json(node: Node) -> Any:
    """Return the structure as JSON values. Keys of dicts keep their types, as JSON's own objects would not."""
    if isinstance(node, Leaf):
        return node.number
    data: dict[str, Any] = {"kind": node.kind, "items": [node_to_json(child) for child in node.children]}
    if node.kind in ("dict", "namedtuple"):
        data["keys"] = list(node.keys)
    if node.kind == "namedtuple":
        data["type"] = node.type_name
    return data


def node_from_json(data: Any) -> Node:
    """Reverse ``node_to_json``; KeyError, TypeError or ValueError if ``data`` is nothing of the kind."""
    if isinstance(data, int):
        return Leaf(data)
    kind = str(data["kind"])
    if kind not in ("tuple", "list", "dict", "namedtuple"):
        raise ValueError(f"unknown structure {kind!r}")
    children = tuple([node_from_json(each) for each in data["items"]])
    keys = tuple(data["keys"]) if kind in ("dict", "namedtuple") else ()
    if keys and len(keys) != len(children):
        raise ValueError("keys and items differ in number")
    return Branch(kind, children, keys, str(data.get("type", "")))
