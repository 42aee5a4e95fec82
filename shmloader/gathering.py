"""Batches without Python per sample: one gather a field, straight into the slot.

    indices (int64, from the ticket) ──▶ column.gather(indices, out=view of the slot) ──▶ layout known in advance

This works where nothing stands between the columns and the batch: a pack without transform or a TensorDataset, and
torch's default collate, or, for ragged fields, :class:`~shmloader.collates.ListCollate`. ``Gatherer.of`` says whether
it does; all other loaders take the general way (fetch.py), which gives the same batches.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data.dataloader import _DatasetKind

from .collate import Memory, SlotWriter
from .collates import ListCollate
from .columns import Columns, FixedColumn, columns_of
from .describe import BatchDescription
from .errors import PackDamaged
from .fetch import Recipe
from .layout import MappingNode, Node, PickledNode, SequenceNode, SplitLeaf, TensorLeaf, align
from .packfile.joined import bind_joined, joinable
from .packfile.reader import FixedReader, RaggedReader, Spans

Indices = npt.NDArray[np.int64]
_VIEWS = 512
"""Views kept for slots that come again; slots of changing size would collect them for ever."""


class GatherPlan(NamedTuple):
    """Where the fields of one batch go."""

    rows: Indices
    leaves: tuple[TensorLeaf | SplitLeaf, ...]
    """One a field."""
    root: Node
    """The batch's layout."""
    end: int
    """First byte behind the last field."""
    key: tuple[int, int] | None
    """Equal for batches of equal layout; None if lengths vary from batch to batch."""
    spans: tuple[Spans | None, ...] = ()
    """Where the rows of each ragged field lie."""


class _Template:
    """The structure of a batch, with holes where the fields go."""

    def __init__(self, root: Node, fields: tuple[FixedColumn | RaggedReader, ...]) -> None:
        self._root = root
        self._ragged = [isinstance(field, RaggedReader) for field in fields]

    def fill(self, leaves: tuple[TensorLeaf | SplitLeaf, ...]) -> Node:
        """Return the layout with one leaf a field. Raises TypeError if the structure does not have that many places."""
        left = list(leaves)
        node = self._fill(self._root, left)
        if left:
            raise TypeError("the batch has fewer places than the sample has fields")
        return node

    def _fill(self, node: Node, left: list[TensorLeaf | SplitLeaf]) -> Node:
        ragged = bool(left) and self._ragged[len(self._ragged) - len(left)]
        if ragged and isinstance(node, SequenceNode) and len(node.children) == 1:
            return left.pop(0)
        if isinstance(node, TensorLeaf) and left and not ragged:
            return left.pop(0)
        if isinstance(node, SequenceNode | MappingNode):
            return node._replace(children=tuple([self._fill(child, left) for child in node.children]))
        if isinstance(node, PickledNode) and len(node.leaves) <= len(left):
            taken = [left.pop(0) for _ in node.leaves]
            if all(isinstance(leaf, TensorLeaf) for leaf in taken):
                return node._replace(leaves=tuple(taken))  # type: ignore[arg-type]
        raise TypeError(f"no place for a field in a {type(node).__name__}")


class Gatherer:
    """Gathers batches of one dataset into slots of one memory. Keeps, per slot and batch length, what writes there."""

    def __init__(self, columns: Columns, template: _Template) -> None:
        self._columns = columns
        self._template = template
        self._memories: dict[int, Memory] = {}
        self._plans: dict[tuple[int, int], tuple[tuple[TensorLeaf | SplitLeaf, ...], Node, int]] = {}
        self._bound: dict[tuple[int, int, int, int], list[Callable[[Indices], None]]] = {}

    @classmethod
    def of(cls, recipe: Recipe) -> Gatherer | None:
        """Return a gatherer for this recipe in the current process, or None if it must be fetched sample by sample."""
        collate = recipe.collate_fn
        lists = isinstance(collate, ListCollate) and type(collate) is ListCollate and bool(collate.fields)
        if not (recipe.default_collation or lists) or not recipe.auto_collation:
            return None
        if recipe.dataset_kind != _DatasetKind.Map:
            return None
        columns = columns_of(recipe.dataset)
        if columns is None or not len(columns.dataset) or not (columns.is_fixed or lists):
            return None
        try:
            batch = collate([columns.dataset[0]])
            gatherer = cls(columns, _Template(_describe(batch), columns.fields))
            plan = gatherer.plan(np.zeros(1, np.int64), 0)
        except (TypeError, PackDamaged):  # damage is told with the samples that it concerns
            return None
        # The structure is right if it gives this very batch its places: same order, dtypes and shapes.
        return gatherer if _shapes(plan.root) == _shapes(_describe(batch)) else None

    def plan(self, indices: Indices, start: int) -> GatherPlan:
        """Return where the fields of a batch lie behind ``start``. Raises IndexError for rows that are not there, and
        PackDamaged."""
        count = len(indices)
        rows = self._columns.rows(indices)
        if self._columns.before is not None:
            self._columns.before(rows)
        if self._columns.is_fixed:
            known = self._plans.get((count, start))
            if known is None:
                known = self._plans[count, start] = self._lay(rows, start)
            leaves, root, end = known
            return GatherPlan(rows, leaves, root, end, (count, start))
        spans = tuple([f.spans(rows) if isinstance(f, RaggedReader) else None for f in self._columns.fields])
        leaves, root, end = self._lay(rows, start, spans)
        return GatherPlan(rows, leaves, root, end, None, spans)

    def _lay(
        self, rows: Indices, end: int, spans: tuple[Spans | None, ...] = ()
    ) -> tuple[tuple[TensorLeaf | SplitLeaf, ...], Node, int]:
        leaves: list[TensorLeaf | SplitLeaf] = []
        for number, field in enumerate(self._columns.fields):
            end = align(end)
            if isinstance(field, RaggedReader):
                if field.trailing is None:
                    raise TypeError(f"more than the first axis of field {field.name!r} varies")
                found = spans[number]
                assert found is not None
                lengths = found.lengths
                leaves.append(SplitLeaf(True, field.torch_dtype, field.trailing, tuple(lengths.tolist()), end))
                end += int(lengths.sum()) * math.prod(field.trailing) * field.torch_dtype.itemsize
            else:
                shape = (len(rows), *field.shape)
                leaves.append(TensorLeaf(field.torch_dtype, shape, None, end, math.prod(shape), False))
                end += math.prod(shape) * field.torch_dtype.itemsize
        return tuple(leaves), self._template.fill(tuple(leaves)), end

    def need(self, count: int) -> int | None:
        """Return the bytes that a batch of ``count`` samples takes in a slot, with its indices and its layout; None if
        lengths vary."""
        if not self._columns.is_fixed:
            return None
        plan = self.plan(np.zeros(count, np.int64), align(8 * count))
        return align(plan.end) + len(pickle.dumps(plan.root, pickle.HIGHEST_PROTOCOL))

    def gather(self, plan: GatherPlan, memory: Memory, origin: int) -> None:
        """Copy the fields of a planned batch into ``memory`` at ``origin``. One call a field, no Python per sample.

        Raises IndexError for rows that are not there.
        """
        if plan.key is not None:
            key = (*plan.key, id(memory), origin)
            bound = self._bound.get(key)
            if bound is None:
                if len(self._bound) >= _VIEWS:
                    self._bound.clear()
                    self._memories.clear()
                self._memories[id(memory)] = memory  # while views of it are kept, its id is its own
                bound = self._bound[key] = self._bind(plan, memory, origin)
            for write in bound:
                write(plan.rows)
            return
        for field, leaf, spans in zip(self._columns.fields, plan.leaves, plan.spans, strict=True):
            out = _view(leaf, memory, origin)
            if isinstance(field, RaggedReader):
                assert spans is not None
                field.gather_spans(spans, out)
            else:
                field.bind(out)(plan.rows)

    def _bind(self, plan: GatherPlan, memory: Memory, origin: int) -> list[Callable[[Indices], None]]:
        """Return what writes a batch without ragged fields: one function a field, or one for a run of equal fields."""
        fields, leaves = self._columns.fields, plan.leaves
        bound: list[Callable[[Indices], None]] = []
        first = 0
        while first < len(fields):
            stop = first + 1
            while stop < len(fields) and _adjoin(fields[stop - 1], leaves[stop - 1], fields[stop], leaves[stop]):
                stop += 1
            if stop - first > 1:
                start, end = leaves[first].offset, leaves[stop - 1].offset + _nbytes(leaves[stop - 1])
                out = torch.frombuffer(memory, dtype=torch.uint8, count=end - start, offset=origin + start)
                rows = [field.rows for field in fields[first:stop] if isinstance(field, FixedReader)]
                bound.append(bind_joined(rows, out, len(plan.rows)))
            else:
                bound.append(fields[first].bind(_view(leaves[first], memory, origin)))  # type: ignore[union-attr]
            first = stop
        return bound


def _nbytes(leaf: TensorLeaf | SplitLeaf) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize if isinstance(leaf, TensorLeaf) else 0


def _adjoin(one: Any, leaf: TensorLeaf | SplitLeaf, other: Any, next_leaf: TensorLeaf | SplitLeaf) -> bool:
    """Whether two fields can be gathered by one call, into places without a gap between them."""
    return (
        isinstance(one, FixedReader)
        and isinstance(other, FixedReader)
        and leaf.offset + _nbytes(leaf) == next_leaf.offset
        and joinable(one.rows, other.rows)
    )


def _view(leaf: TensorLeaf | SplitLeaf, memory: Memory, origin: int) -> torch.Tensor:
    shape = (sum(leaf.lengths), *leaf.trailing) if isinstance(leaf, SplitLeaf) else leaf.shape
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=leaf.dtype)
    return torch.frombuffer(memory, dtype=leaf.dtype, count=count, offset=origin + leaf.offset).view(shape)


def _describe(batch: Any) -> Node:
    return BatchDescription(batch, SlotWriter(np.empty(0, np.uint8), 0, 0, 0)).root


def _shapes(node: Node) -> list[Any]:
    """Return dtype and shape of all tensors of a layout in their order."""
    if isinstance(node, TensorLeaf):
        return [(node.dtype, node.shape)]
    if isinstance(node, SplitLeaf):
        return [(node.dtype, (length, *node.trailing)) for length in node.lengths]
    if isinstance(node, SequenceNode | MappingNode):
        return [shape for child in node.children for shape in _shapes(child)]
    if isinstance(node, PickledNode):
        return [shape for leaf in node.leaves for shape in _shapes(leaf)]
    return [node]


def batch_bytes(recipe: Recipe, batch_size: int | None) -> int | None:
    """Return what a full batch takes in a slot; None if that is known only when one has been made."""
    gatherer = Gatherer.of(recipe) if batch_size else None
    return gatherer.need(min(batch_size or 0, len(recipe.dataset))) if gatherer is not None else None
