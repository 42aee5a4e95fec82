"""What a finished pack looks like from outside: shapes, odd ones out, classes. Read from the pack itself, so it is the
same for a run that was interrupted, and for every kind of source.

Of fixed fields nothing is read; of others the offsets and shapes, 4 bytes a number; of labels all of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..packfile.compressed import inflated_bytes
from ..packfile.dataset import PackedDataset
from ..packfile.reader import RaggedReader
from ..packfile.schema import ZLIB

_SLICE = 1 << 20
_ODD_SHARE = 0.02
_ODD_SHAPES = 3
_NAMED = 5
_LOOKS = 200
_SHAPES = 1000
"""Different shapes that are counted one by one; of more only the commonest are worth a line."""


@dataclass(frozen=True)
class ShapeCount:
    """Samples of one shape."""

    shape: tuple[int, ...]
    count: int
    first_rows: tuple[int, ...]
    """The first few of them."""


@dataclass(frozen=True)
class FieldSummary:
    """The shapes of one field."""

    name: str
    text: str
    """Dtype and shape, as ``str(Field)``."""
    shapes: tuple[ShapeCount, ...]
    """Commonest first; of str and bytes: none."""
    different: int
    """Different shapes."""
    sizes: tuple[int, int, int] | None
    """Of what varies in length: the least, middle and greatest number of elements, or bytes; None if all are alike."""
    compressed: float | None = None
    """Of a compressed field: its bytes in the pack as a share of what they are when expanded, from some samples."""

    @property
    def odd(self) -> tuple[ShapeCount, ...]:
        """The shapes of few, where nearly all others have one: most often a mistake in the data."""
        if self.different < 2 or not self.shapes:
            return ()
        total = sum(each.count for each in self.shapes)
        rare = [each for each in self.shapes[1:] if each.count <= _ODD_SHARE * total]
        return tuple(rare[:_ODD_SHAPES]) if self.shapes[0].count >= (1 - _ODD_SHARE) * total else ()


@dataclass(frozen=True)
class LabelSummary:
    """The classes of one pack."""

    field: str
    counts: dict[str, int]
    """By class, or by number where there are no names: samples, or labels where a sample has many."""
    per_sample: bool
    """Whether a sample has one label."""

    @property
    def imbalance(self) -> float:
        """The largest class over the smallest that has samples; 1.0 if there is but one."""
        found = [count for count in self.counts.values() if count]
        return max(found) / min(found) if found else 1.0

    def sampler(self, name: str = "train") -> tuple[str, str] | None:
        """Return the two lines that draw all classes equally often, for a PackedDataset called ``name``.

        None where a sample has many labels: there, which samples to draw is no matter of counts.
        """
        if not self.per_sample:
            return None
        return (
            f"labels = {name}.column({self.field!r}); weights = 1 / numpy.bincount(labels).clip(1)[labels]",
            "sampler = torch.utils.data.WeightedRandomSampler(weights.tolist(), len(labels))",
        )


def summarise(path: str) -> tuple[tuple[FieldSummary, ...], LabelSummary | None]:
    """Return the summaries of the fields of a finished pack, and of its labels if it has classes or a label field."""
    packed = PackedDataset(path)
    fields = tuple(_field(reader) for reader in packed.gather.fields)
    return fields, label_summary(packed)


def _field(reader: Any) -> FieldSummary:
    field, count = reader.field, reader.count
    if not isinstance(reader, RaggedReader):
        whole = ShapeCount(field.shape, count, tuple(range(min(count, _NAMED))))
        return FieldSummary(field.name, str(field), (whole,) if field.kind == "array" else (), 1, None)
    counts: Counter[tuple[int, ...]] = Counter()
    firsts: dict[tuple[int, ...], list[int]] = {}
    lengths = np.empty(count, np.int64)
    for start in range(0, count, _SLICE):
        rows = np.arange(start, min(count, start + _SLICE), dtype=np.int64)
        lengths[start : start + len(rows)] = reader.lengths(rows)
        if not field.stores_bytes:
            _count(reader.shapes(rows), start, counts, firsts)
    sizes = None
    if count:
        least, middle, most = np.percentile(lengths, [0, 50, 100], method="lower").astype(int).tolist()
        sizes = (least, middle, most)
    shapes = tuple(
        ShapeCount(shape, number, tuple(firsts.get(shape, ()))) for shape, number in counts.most_common(_SHAPES)
    )
    return FieldSummary(field.name, str(field), shapes, len(counts), sizes, _compressed(reader))


def _compressed(reader: RaggedReader) -> float | None:
    """Return what share of their expanded size some rows from all over a compressed field take."""
    if reader.field.encoding != ZLIB or not reader.count:
        return None
    rows = [reader.raw_bytes(index) for index in np.linspace(0, reader.count - 1, _LOOKS).astype(int).tolist()]
    return sum(map(len, rows)) / max(1, sum([inflated_bytes(row, reader.field) for row in rows]))


def _count(
    shapes: npt.NDArray[np.int64],
    start: int,
    counts: Counter[tuple[int, ...]],
    firsts: dict[tuple[int, ...], list[int]],
) -> None:
    kinds, inverse, numbers = np.unique(shapes, axis=0, return_inverse=True, return_counts=True)
    inverse = inverse.reshape(-1)
    for number, (kind, found) in enumerate(zip(kinds.tolist(), numbers.tolist(), strict=True)):
        shape = tuple(kind)
        counts[shape] += found
        known = firsts.setdefault(shape, [])
        if len(firsts) > _SHAPES:
            del firsts[shape]
        elif len(known) < _NAMED:
            where = np.flatnonzero(inverse == number)[: _NAMED - len(known)]
            known += (where + start).tolist()


def label_summary(packed: PackedDataset) -> LabelSummary | None:
    """Return the classes of the field ``label``, one integer per sample, or ``labels``, any number of them.

    Where the metadata has a ``label_field``, that one stands for ``label``.
    """
    one = str(packed.manifest.metadata.get("label_field", "label"))
    for field in packed.fields:
        if field.dtype.startswith(("int", "uint")) and (field.name, len(field.shape)) in ((one, 0), ("labels", 1)):
            break
    else:
        return None
    column = packed.column(field.name)
    labels = np.asarray(column[0] if isinstance(column, tuple) else column).reshape(-1)
    per_sample, names = not field.shape, packed.classes
    if not len(labels):
        return None
    if names is not None and labels.min() >= 0 and labels.max() < len(names):
        counts = np.bincount(labels.astype(np.int64), minlength=len(names)).tolist()
        return LabelSummary(field.name, dict(zip(map(str, names), counts, strict=True)), per_sample)
    found, numbers = np.unique(labels, return_counts=True)
    if len(found) > _SHAPES:  # a target to be regressed, not a class
        return None
    return LabelSummary(field.name, dict(zip(map(str, found.tolist()), numbers.tolist(), strict=True)), per_sample)
