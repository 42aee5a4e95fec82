"""Datasets that are columns: those whose batches can be gathered field by field, without asking for samples.

PackedDataset without transform   ──▶  the pack's readers
TensorDataset                     ──▶  its tensors
Subset of one of them             ──▶  the same, through a map of indices
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Subset, TensorDataset

from .collate import is_plain
from .packfile import PackedDataset
from .packfile.reader import RaggedReader

Indices = npt.NDArray[np.int64]


class FixedColumn(Protocol):
    """A field whose rows all have one shape."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one row."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of the batch."""

    def bind(self, out: torch.Tensor) -> Callable[[Indices], None]:
        """Return a function that copies the rows of ``len(out)`` indices into ``out``. Raises IndexError when
        called."""


class TensorColumn:
    """A tensor of a TensorDataset."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.shape = tuple(tensor.shape[1:])
        self.torch_dtype = tensor.dtype

    def bind(self, out: torch.Tensor) -> Callable[[Indices], None]:
        """See FixedColumn."""
        tensor, length = self._tensor, len(self._tensor)

        def gather(indices: Indices) -> None:
            if len(indices) and int(indices.min()) < 0:
                indices = np.where(indices < 0, indices + length, indices)
            torch.index_select(tensor, 0, torch.from_numpy(indices), out=out)

        return gather


@dataclass(frozen=True)
class Columns:
    """The fields of a dataset in the order in which they lie in a sample."""

    dataset: Any
    """The dataset without its Subsets."""
    fields: tuple[FixedColumn | RaggedReader, ...]
    mapping: Indices | None
    """From the user's indices to rows; None: they are the same."""
    before: Callable[[Indices], None] | None = None
    """To be called with the rows of a batch before they are read."""

    @property
    def is_fixed(self) -> bool:
        """Whether no field is ragged."""
        return not any(isinstance(field, RaggedReader) for field in self.fields)

    def rows(self, indices: Indices) -> Indices:
        """Return the rows of the user's indices."""
        return indices if self.mapping is None else self.mapping[indices]


def _unwrap(dataset: Any) -> tuple[Any, Indices | None] | None:
    """Take the Subsets off a dataset and combine their indices; None if they are not plain integers."""
    mapping: Indices | None = None
    while type(dataset) is Subset:
        chosen = np.asarray(dataset.indices)
        if chosen.ndim != 1 or not np.issubdtype(chosen.dtype, np.integer):
            return None
        chosen = chosen.astype(np.int64)
        mapping = chosen if mapping is None else chosen[mapping]
        dataset = dataset.dataset
    return dataset, mapping


def columns_of(dataset: Any) -> Columns | None:
    """Return the columns of a dataset, or None if it must be asked sample by sample. Opens a pack in this process."""
    found = _unwrap(dataset)
    if found is None:
        return None
    inner, mapping = found
    if type(inner) is PackedDataset:
        if inner.transform is not None or any(field.field.stores_bytes for field in inner.gather.fields):
            return None
        return Columns(inner, inner.gather.fields, mapping, inner.before)
    if type(inner) is TensorDataset and inner.tensors:
        if not all(is_plain(t) and not t.requires_grad and not t.is_conj() and not t.is_neg() for t in inner.tensors):
            return None
        return Columns(inner, tuple([TensorColumn(tensor) for tensor in inner.tensors]), mapping)
    return None
