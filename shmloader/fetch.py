"""Indices to a batch: how a worker (or the main process, with num_workers=0) asks the dataset and collates.

    Recipe ──▶ Fetcher.fetch(indices, writer) ──▶ batch whose tensors were born in the slot where possible

Which rows a dataset gives, how an iterable one ends and what ``drop_last`` means there stay torch's business: its own fetchers are
used. Here is only what torch's cannot do: say which index failed, and hand the slot to the collate function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import default_collate
from torch.utils.data.dataloader import _DatasetKind

from .collate import SlotWriter, collate_in_place, in_place_collate_map


@dataclass(frozen=True)
class Recipe:
    """What a batch is made from."""

    dataset_kind: int
    """torch's ``_DatasetKind``: map-style or iterable."""
    dataset: Any
    auto_collation: bool
    """Whether indices come in batches."""
    collate_fn: Callable[[Any], Any]
    drop_last: bool

    @property
    def default_collation(self) -> bool:
        """Whether samples are collated by torch's default_collate, which is done in place."""
        return self.collate_fn is default_collate


class Fetcher:
    """Fetches batches of one recipe, one at a time. ``failed_index`` tells where the last ``fetch`` raised, if known."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._writer: SlotWriter | None = None
        self._table = in_place_collate_map(self._current_writer)
        self._collate = self._in_place if recipe.default_collation else recipe.collate_fn
        dataset = recipe.dataset
        self._by_item = (
            recipe.dataset_kind == _DatasetKind.Map
            and recipe.auto_collation
            and not getattr(dataset, "__getitems__", None)
        )
        self._stock = _DatasetKind.create_fetcher(
            recipe.dataset_kind, dataset, recipe.auto_collation, self._collate, recipe.drop_last
        )
        self.failed_index: Any = None

    def _current_writer(self) -> SlotWriter:
        assert self._writer is not None
        return self._writer

    def _in_place(self, samples: list[Any]) -> Any:
        return collate_in_place(samples, self._table)

    def fetch(self, indices: Any, writer: SlotWriter) -> Any:
        """Return the batch of ``indices``. Tensors that the default collate makes lie in ``writer``'s slot if they fit.

        Raises what dataset and collate function raise; StopIteration when an iterable dataset has ended.
        """
        self._writer = writer
        self.failed_index = None
        try:
            if not self._by_item:
                return self._stock.fetch(indices)
            samples = []
            dataset = self._recipe.dataset
            try:
                for index in indices:
                    samples.append(dataset[index])  # noqa: PERF401 - the length tells which index raised
            except Exception:
                self.failed_index = indices[len(samples)]
                raise
            return self._collate(samples)
        finally:
            self._writer = None
