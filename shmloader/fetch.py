"""Indices to a batch: how a worker (or the main process, with num_workers=0) asks the dataset and collates.

    Recipe ──▶ Fetcher.fetch(indices, writer) ──▶ batch whose tensors were born in the slot where possible

Which rows a dataset gives, how an iterable one ends and what ``drop_last`` means there stay torch's business: its own
fetchers are used. Here is only what torch's cannot do: say which index failed, and hand the slot to the collate
function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import default_collate
from torch.utils.data.dataloader import _DatasetKind

from .badsamples import RAISE, SKIP, Avoid, BadSample
from .collate import SlotWriter, collate_in_place, in_place_collate_map
from .errors import AllSamplesBad
from .redirect import Redirect
from .unequal import explain_unequal


class NothingLeft(Exception):
    """All samples of a batch are bad and left out: there is no batch. ``Fetcher.bad`` tells them."""


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
    on_bad_sample: str = RAISE
    """What becomes of samples that cannot be had: see badsamples.py."""

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
        self.bad: list[BadSample] = []
        """The samples that were left out of the last batch, or replaced."""
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
            if self._recipe.on_bad_sample != RAISE:
                return self._fetch_good(indices)
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

    # --- with bad samples left out or replaced

    def _fetch_good(self, indices: Any) -> Any:
        """As ``fetch`` of a map-style dataset, by the policy for bad samples. Raises NothingLeft, AllSamplesBad."""
        dataset, self.bad = self._recipe.dataset, []
        indices, why = indices if isinstance(indices, Avoid) else (indices, {})
        if not self._recipe.auto_collation:
            return self._collate(self._good_ones([indices], why)[0])
        if not self._by_item and not why:
            try:
                samples = dataset.__getitems__(indices)
            except MemoryError:
                raise
            except Exception:  # noqa: BLE001 - the user's code; asked one by one, the bad ones tell themselves
                samples = None
            if samples is not None:
                return self._collate(samples)
        samples = self._good_ones(indices, why)
        self._indices = None if self.bad else indices  # positions are not those of the indices any more
        return self._collate(samples)

    def _good_ones(self, indices: Any, why: dict[int, str]) -> list[Any]:
        dataset = self._recipe.dataset
        samples: dict[int, Any] = {}
        bad: dict[int, BadSample] = {}
        for position, index in enumerate(indices):
            if position in why:
                bad[position] = BadSample(index, why[position])
                continue
            try:
                samples[position] = dataset[index]
            except MemoryError:  # the host's fault, not the sample's
                self.failed_index = index
                raise
            except Exception as error:  # noqa: BLE001 - the user's code, told by stats()
                bad[position] = BadSample.of(index, error)
        if bad and self._recipe.on_bad_sample == SKIP:
            self.bad = list(bad.values())
            if not samples:
                raise NothingLeft
        elif bad:
            good = sorted(samples)
            for position in bad:
                self._replace(indices, position, good, samples, bad)
            self.bad = list(bad.values())
            if not samples:
                raise AllSamplesBad(tuple(indices), self.bad[0].error)
        return [samples[position] for position in sorted(samples)]

    def _replace(
        self, indices: Any, position: int, good: list[int], samples: dict[int, Any], bad: dict[int, BadSample]
    ) -> None:
        """Put the next good sample behind ``position`` in its place, asked for anew."""
        for other in [p for p in good if p > position] + [p for p in good if p < position]:
            try:
                samples[position] = self._recipe.dataset[indices[other]]
            except MemoryError:
                raise
            except Exception:  # noqa: BLE001 - good a moment ago, and not now: the next one
                continue
            bad[position] = dataclasses.replace(bad[position], replaced_by=indices[other])
            return
        if good:
            raise AllSamplesBad(tuple(indices), bad[position].error)
