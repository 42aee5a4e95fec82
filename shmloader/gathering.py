"""Batches of a pack without Python per sample: one gather a field, straight into the slot.

    indices (int64, from the ticket) ──▶ field.gather(indices, out=view of the slot) ──▶ layout known in advance

This works where nothing stands between the pack and the batch: a ``PackedDataset`` (or ``torch.utils.data.Subset`` of
one) without transform, whose selected fields are all of fixed shape, and torch's default collate. ``Gatherer.of``
says whether it does; all other datasets take the general way (fetch.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Subset, default_collate
from torch.utils.data.dataloader import _DatasetKind

from .collate import Memory, SlotWriter
from .describe import BatchDescription
from .fetch import Recipe
from .layout import MappingNode, Node, PickledNode, RowLayout, SequenceNode, TensorLeaf, row_layout
from .packfile import PackedDataset

Indices = npt.NDArray[np.int64]


def _unwrap(dataset: Any) -> tuple[PackedDataset, Indices | None] | None:
    """Return the pack behind a dataset and the map from its indices to the pack's (None: the same), or None."""
    mapping: Indices | None = None
    while type(dataset) is Subset:
        chosen = np.asarray(dataset.indices)
        if chosen.ndim != 1 or not np.issubdtype(chosen.dtype, np.integer):
            return None
        chosen = chosen.astype(np.int64)
        if mapping is None:
            mapping = chosen
        elif len(mapping) and (mapping.min() < -len(chosen) or mapping.max() >= len(chosen)):
            return None
        else:
            mapping = chosen[mapping]
        dataset = dataset.dataset
    return (dataset, mapping) if type(dataset) is PackedDataset else None


def _with_leaves(node: Node, leaves: list[TensorLeaf]) -> Node:
    """Return ``node`` with its tensor leaves replaced, in order, by those taken off the front of ``leaves``."""
    if isinstance(node, TensorLeaf):
        return leaves.pop(0)
    if isinstance(node, SequenceNode | MappingNode):
        return node._replace(children=tuple([_with_leaves(child, leaves) for child in node.children]))
    if isinstance(node, PickledNode):
        return node._replace(leaves=tuple([leaves.pop(0) for _ in node.leaves]))
    raise TypeError(f"a gathered batch has no {type(node).__name__}")


def _leaves(node: Node) -> list[TensorLeaf]:
    if isinstance(node, TensorLeaf):
        return [node]
    if isinstance(node, SequenceNode | MappingNode):
        return [leaf for child in node.children for leaf in _leaves(child)]
    if isinstance(node, PickledNode) and all(isinstance(leaf, TensorLeaf) for leaf in node.leaves):
        return list(node.leaves)  # type: ignore[arg-type]
    raise TypeError(f"a gathered batch has no {type(node).__name__}")


class Gatherer:
    """Gathers batches of one pack into slots of one memory. Keeps, per slot and batch length, the views that it
    writes to."""

    def __init__(self, dataset: PackedDataset, mapping: Indices | None, root: Node, memory: Memory) -> None:
        self._fields = dataset.gather.fields
        self._length = len(dataset)
        self._mapping = mapping
        self._root = root
        self._memory = memory
        self._shapes = [tuple(field.shape) for field in self._fields]
        self._dtypes = [leaf.dtype for leaf in _leaves(root)]
        self._row_bytes = tuple(
            [
                dtype.itemsize * int(np.prod(shape, dtype=np.int64))
                for dtype, shape in zip(self._dtypes, self._shapes, strict=True)
            ]
        )
        self._layouts: dict[tuple[int, int], tuple[RowLayout, Node]] = {}
        self._views: dict[tuple[int, int, int], list[torch.Tensor]] = {}

    @classmethod
    def of(cls, recipe: Recipe, memory: Memory) -> Gatherer | None:
        """Return a gatherer for this recipe in the current process, or None if it must be fetched sample by sample."""
        if not recipe.default_collation or not recipe.auto_collation or recipe.dataset_kind != _DatasetKind.Map:
            return None
        found = _unwrap(recipe.dataset)
        if found is None:
            return None
        dataset, mapping = found
        if dataset.transform is not None or len(dataset) == 0 or not dataset.gather.is_plain:
            return None
        root = cls._structure(dataset)
        return None if root is None else cls(dataset, mapping, root, memory)

    @staticmethod
    def _structure(dataset: PackedDataset) -> Node | None:
        """Return the nodes of a batch of one, if its leaves are the pack's fields in their order; else None."""
        fields = dataset.gather.fields
        scratch = np.empty(0, np.uint8)
        batch = default_collate([dataset[0]])
        try:
            root = BatchDescription(batch, SlotWriter(scratch, 0, 0, 0)).root
            leaves = _leaves(root)
        except TypeError:
            return None
        if [leaf.shape[1:] for leaf in leaves] != [tuple(field.shape) for field in fields]:
            return None
        if [leaf.dtype for leaf in leaves] != [field.torch_dtype for field in fields]:
            return None
        return root

    def row_bytes(self) -> int:
        """Return the bytes of one sample."""
        return sum(self._row_bytes)

    def layout(self, rows: int, start: int) -> tuple[RowLayout, Node]:
        """Return where the fields of ``rows`` samples lie behind ``start``, and the batch's nodes."""
        known = self._layouts.get((rows, start))
        if known is None:
            rows_at = row_layout(start, rows, self._row_bytes)
            leaves = [
                TensorLeaf(dtype, (rows, *shape), None, offset, rows * int(np.prod(shape, dtype=np.int64)), False)
                for dtype, shape, offset in zip(self._dtypes, self._shapes, rows_at.offsets, strict=True)
            ]
            known = rows_at, _with_leaves(self._root, leaves)
            self._layouts[rows, start] = known
        return known

    def gather(self, indices: Indices, rows_at: RowLayout, origin: int) -> None:
        """Copy the rows of ``indices`` from the pack into the slot at ``origin``. One call a field, no Python per
        sample.

        Raises IndexError for an index outside the dataset.
        """
        if self._mapping is not None:
            indices = self._mapping[indices]
        rows = len(indices)
        key = (origin, rows, rows_at.end)
        views = self._views.get(key)
        if views is None:
            if len(self._views) > 256:  # slots of changing size: do not collect views for ever
                self._views.clear()
            views = [
                self._view(dtype, (rows, *shape), origin + offset)
                for dtype, shape, offset in zip(self._dtypes, self._shapes, rows_at.offsets, strict=True)
            ]
            self._views[key] = views
        for field, view in zip(self._fields, views, strict=True):
            field.gather(indices, view)

    def _view(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> torch.Tensor:
        count = torch.Size(shape).numel()
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset).view(shape)
