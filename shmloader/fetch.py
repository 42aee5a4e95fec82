"""Indices to a batch: how a worker (or the main process, with num_workers=0) asks the dataset and collates.

    Recipe ──▶ Fetcher.fetch(indices, writer) ──▶ batch whose tensors were born in the slot where possible

Which rows a dataset gives, how an iterable one ends and what ``drop_last`` means there stay torch's business: its own
fetchers are used. Here is only what torch's cannot do: say which index failed, and hand the slot to the collate
function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import default_collate
from torch.utils.data.dataloader import _DatasetKind

from .collate import SlotWriter, collate_in_place, in_place_collate_map
from .redirect import Redirect
from .unequal import explain_unequal


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
    """Fetches batches of one recipe, one at a time. ``failed_index`` tells where the last ``fetch`` raised, if known.

    ``redirecting``: also let a user's collate_fn, and default_collate where the user's code calls it, write into the
    slot.
    """

    def __init__(self, recipe: Recipe, *, redirecting: bool) -> None:
        self._recipe = recipe
        self._writer: SlotWriter | None = None
        self.table = in_place_collate_map(self._current_writer)
        self._redirect = Redirect() if redirecting and not recipe.default_collation else None
        self._collate = self._in_place if recipe.default_collation else self._users
        self._indices: Any = None
        self._collating = False
        self._everywhere = redirecting
        dataset = recipe.dataset
        self._by_item = (
            recipe.dataset_kind == _DatasetKind.Map
            and recipe.auto_collation
            and not getattr(dataset, "__getitems__", None)
        )
        self.failed_index: Any = None
        self.renew()

    def renew(self) -> None:
        """Begin a new epoch: an iterable dataset is iterated anew."""
        recipe = self._recipe
        self._stock = _DatasetKind.create_fetcher(
            recipe.dataset_kind, recipe.dataset, recipe.auto_collation, self._collate, recipe.drop_last
        )

    def _current_writer(self) -> SlotWriter | None:
        return self._writer if self._collating or self._everywhere else None

    def _in_place(self, samples: list[Any]) -> Any:
        self._collating = True
        try:
            return collate_in_place(samples, self.table)
        except RuntimeError as error:
            known = isinstance(self._indices, list) and len(self._indices) == len(samples)
            better = explain_unequal(error, samples, self._indices if known else None)
            if better is None:
                raise
            raise better from None
        finally:
            self._collating = False

    def _users(self, samples: Any) -> Any:
        redirect, writer = self._redirect, self._writer
        if redirect is None or writer is None or not redirect.begin(writer):
            return self._recipe.collate_fn(samples)
        with redirect:
            return self._recipe.collate_fn(samples)

    def learn(self, arrived: Callable[[Any], bool], copied_bytes: int) -> None:
        """Tell what became of the last batch: which tensors made in the slot ``arrived`` in it, and how much was
        copied."""
        if self._redirect is not None:
            self._redirect.end(arrived, copied_bytes)

    def forget(self) -> None:
        """Let go of the batch at hand: nothing in here refers to its slot afterwards."""
        if self._redirect is not None:
            self._redirect.forget()

    def stop_redirecting(self) -> None:
        """Let dataset and collate_fn make their tensors on the heap from now on: they keep some of them."""
        self._redirect = None
        self._everywhere = False

    def fetch(self, indices: Any, writer: SlotWriter) -> Any:
        """Return the batch of ``indices``. Tensors that the default collate makes lie in ``writer``'s slot if they fit.

        Raises what dataset and collate function raise; StopIteration when an iterable dataset has ended.
        """
        self._writer = writer
        self._indices = indices
        self.failed_index = None
        try:
            if not self._by_item:
                return self._stock.fetch(indices)
            samples = []
            dataset = self._recipe.dataset
            try:
                for index in indices:
                    samples.append(dataset[index])  # its length tells which index raised
            except Exception:
                self.failed_index = indices[len(samples)]
                raise
            return self._collate(samples)
        finally:
            self._writer = self._indices = None
