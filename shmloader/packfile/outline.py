"""What the first sample says about all of them: structure, and for each field its name, kind, dtype and first shape.

    first sample ──Outline.of──▶ Outline ──values(sample)──▶ one Value a field, or the error that names sample and field

Plain data: it goes to the workers that take samples apart, and into the journal of a pack that is being written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..errors import SampleMismatch, UnsupportedField
from .compressed import Inner, deflate
from .naming import name_fields
from .schema import ZLIB, storage_dtype
from .structure import Node, StructureDiffers, UnusableKey, flatten, infer, node_from_json, node_to_json
from .values import Unstorable, Value, describe, value_of
from .windows import Windowing


@dataclass(frozen=True)
class FieldOutline:
    """One field as the first sample has it."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    """Of the first row. That of str and bytes is their length."""
    encoding: str | None
    windowing: Windowing | None = None
    """Of windows: how the rows overlap."""
    inner: Inner | None = None
    """Of a compressed field: what its rows hold. The other attributes are those of the bytes that are stored."""

    @property
    def row_bytes(self) -> int:
        """Bytes of the first row; of windows, of what they have before the next one begins."""
        shape = self.shape if self.windowing is None else (self.windowing.stride, *self.shape[1:])
        return math.prod(shape) * self.item_bytes

    @property
    def item_bytes(self) -> int:
        """Bytes of one number, or 1 for str and bytes."""
        return 1 if self.kind in ("str", "bytes") else storage_dtype(self.dtype).itemsize

    def fits(self, value: Value) -> bool:
        """Say whether ``value`` can be a row of this field; shapes may differ, their number of axes may not."""
        return value.kind == self.kind and value.dtype == self.dtype and value.array.ndim == len(self.shape)

    def describe(self) -> str:
        """Say in a few words what a row looks like."""
        return describe(self.kind, self.dtype, self.shape)


@dataclass(frozen=True)
class Outline:
    """What all samples have in common."""

    structure: Node
    fields: tuple[FieldOutline, ...]

    @classmethod
    def of(
        cls, sample: Any, index: int, field_names: Sequence[str] | None, encodings: Mapping[str, str] | None = None
    ) -> Outline:
        """Learn from the first sample, which is number ``index`` in messages.

        Raises UnsupportedField, SampleMismatch for an encoded field that holds no bytes, MisuseError for wrong names,
        and ValueError for encodings of fields that are not there.
        """
        try:
            structure, paths = infer(sample)
        except UnusableKey as fault:
            raise UnsupportedField(index, ".".join(fault.path) or "sample", fault.found) from None
        names = name_fields(paths, structure, None if field_names is None else tuple(field_names))
        leaves: list[Any] = []
        flatten(sample, structure, leaves)
        fields = []
        for name, leaf in zip(names, leaves, strict=True):
            try:
                value = value_of(leaf)
            except Unstorable as fault:
                raise UnsupportedField(index, name, fault.found) from None
            encoding = (encodings or {}).get(name)
            if encoding == ZLIB:
                try:
                    inner, stored = Inner.of(value), deflate(value)
                except Unstorable as fault:
                    raise UnsupportedField(index, name, fault.found) from None
                fields.append(FieldOutline(name, stored.kind, stored.dtype, stored.array.shape, ZLIB, None, inner))
                continue
            if encoding is not None and value.kind != "bytes":
                raise SampleMismatch(index, name, f"bytes, to be kept as {encoding}", value.describe())
            fields.append(FieldOutline(name, value.kind, value.dtype, value.array.shape, encoding))
        unknown = set(encodings or {}) - set(names)
        if unknown:
            raise ValueError(f"encodings name the fields {sorted(unknown)}, but the samples have {names}")
        return cls(structure, tuple(fields))

    def windowed(self, values: Sequence[Value]) -> Outline:
        """Return the outline of columns, some of which may be windows: one value a field."""
        fields = [replace(each, windowing=value.windowing) for each, value in zip(self.fields, values, strict=True)]
        return Outline(self.structure, tuple(fields))

    def leaves(self, index: int, sample: Any) -> list[Any]:
        """Return what ``sample`` holds, one object a field. Raises SampleMismatch if it is built differently."""
        found: list[Any] = []
        try:
            flatten(sample, self.structure, found)
        except StructureDiffers as differs:
            name = ".".join(differs.path) or "sample"
            raise SampleMismatch(index, name, differs.expected, differs.found) from None
        return found

    def values(self, index: int, sample: Any) -> list[Value]:
        """Return what is to be stored of ``sample``, one value a field. Raises SampleMismatch, UnsupportedField."""
        values: list[Value] = []
        for field, leaf in zip(self.fields, self.leaves(index, sample), strict=True):
            try:
                value = value_of(leaf)
            except Unstorable as fault:
                raise UnsupportedField(index, field.name, fault.found) from None
            if not field.fits(value):
                raise SampleMismatch(index, field.name, field.describe(), value.describe())
            values.append(value)
        return values

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        fields = [
            [
                *(each.name, each.kind, each.dtype, list(each.shape), each.encoding),
                None if each.windowing is None else asdict(each.windowing),
                each.inner,
            ]
            for each in self.fields
        ]
        return {"structure": node_to_json(self.structure), "fields": fields}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Outline:
        """Reverse ``to_json``."""
        fields = [
            FieldOutline(
                name,
                kind,
                dtype,
                tuple(shape),
                encoding,
                None if windowing is None else Windowing(**windowing),
                None if inner is None else Inner(*inner),
            )
            for name, kind, dtype, shape, encoding, windowing, inner in data["fields"]
        ]
        return cls(node_from_json(data["structure"]), tuple(fields))
