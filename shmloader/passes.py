"""One pass over a loader: what all iterators share, and the iterator without workers.

``Pass`` stands where torch's ``_BaseDataLoaderIter`` stands and draws the same random numbers from the same
generators at the same moments: first the sampler is iterated, then the base seed is drawn. ``InProcessPass`` reads
and collates in the main process, into slots of the same arena that workers would use.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch._C._autograd import _profiler_enabled
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _DatasetKind,
    _get_distributed_settings,
    _share_dist_seed,
)
from torch.utils.data.graph_settings import apply_random_seed, apply_sharding

from .arena import Arena
from .badsamples import RAISE
from .batch import Build, compile_layout
from .collate import Memory, SlotWriter
from .delivery import Counters, Delivery
from .describe import BatchDescription
from .device import Feed
from .errors import IteratorClosed
from .fetch import Fetcher, NothingLeft, Recipe
from .gathering import Gatherer
from .interrupts import raise_kept
from .order import index_batches
from .pinning import Copying, pinned_copy
from .slot import Slot

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

_NOTHING = np.empty(0, np.uint8)


class Pass(_BaseDataLoaderIter):
    """An iterator over one epoch. Does not call torch's constructor: that one warns about pinning once per epoch."""

    _delivery: Delivery

    def __init__(self, loader: Any, arena: Arena, counters: Counters, copying: Copying, ahead: int) -> None:
        self._dataset = loader.dataset
        self._pg = None
        self._shared_seed: int | None = None
        self._reseed_data_pipes(loader)
        self._dataset_kind = loader._dataset_kind
        self._IterableDataset_len_called: Any = loader._IterableDataset_len_called
        self._auto_collation = loader._auto_collation
        self._drop_last = loader.drop_last
        self._index_sampler = loader._index_sampler
        self._num_workers = loader.num_workers
        self._world_size, self._rank = _get_distributed_settings()
        self._copying = copying
        self._pin_memory = copying.pin or copying.copy_for is not None
        self._pin_memory_device = loader.pin_memory_device or None
        self._pin_by_copy = copying.copy_for
        self._timeout = loader.timeout
        self._collate_fn = loader.collate_fn
        self._sampler_iter: Iterator[Any] = index_batches(self._index_sampler)
        self._base_seed: Any = torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item()
        self._persistent_workers = loader.persistent_workers
        self._num_yielded = 0
        self._finished = False
        self._profile_name = f"enumerate(DataLoader)#{self.__class__.__name__}.__next__"
        self._arena = arena
        self._counters = counters
        self._on_bad_sample: str = loader.on_bad_sample
        self._bad_before = counters.bad.count
        self._feed = Feed(copying, ahead) if copying.to_device else None
        self._one_at_a_time = threading.RLock()  # several threads may take batches from one iterator

    def _reseed_data_pipes(self, loader: DataLoader[Any]) -> None:
        """Give an IterDataPipe the random seed that all ranks and workers share, as torch's loader does."""
        if not isinstance(self._dataset, IterDataPipe):
            return
        if self._pg is None and torch.distributed.is_available() and torch.distributed.is_initialized():
            self._pg = torch.distributed.new_group(backend="gloo")
        self._shared_seed = int(_share_dist_seed(loader.generator, self._pg))
        rng = torch.Generator()
        rng.manual_seed(self._shared_seed)
        self._dataset = apply_random_seed(self._dataset, rng)

    def _recipe(self) -> Recipe:
        return Recipe(
            dataset_kind=self._dataset_kind,
            dataset=self._dataset,
            auto_collation=self._auto_collation,
            collate_fn=self._collate_fn,
            drop_last=self._drop_last,
            on_bad_sample=self._on_bad_sample,
        )

    def _next_data(self) -> Any:
        raise AssertionError("every pass has its own")

    def _take(self) -> Any:
        """Return the next batch as it was ordered: on the host, pinned or not, or on the device."""
        if self._feed is not None:
            return self._feed.next(self._pull, self._ready)
        batch = self._next_data()
        return batch if self._pin_by_copy is None else pinned_copy(batch, self._pin_by_copy)

    def _pull(self) -> tuple[Any, Slot | None]:
        """Return the next host batch and its slot, for the feed."""
        batch = self._next_data()
        if self._pin_by_copy is not None:
            batch = pinned_copy(batch, self._pin_by_copy)
        return batch, self._delivery.lent_slot

    def drop_ahead(self) -> None:
        """Drop the device batches that were fetched ahead."""
        if self._feed is not None:
            self._feed.clear()

    def _ready(self) -> bool:
        """Whether ``_next_data`` would return at once."""
        return False

    def worker_pids(self) -> list[int]:
        """Return the process ids of the workers that live."""
        return []

    def __next__(self) -> Any:
        raise_kept()
        if self._copying.refused is not None:
            self._copying.tell()
        if _profiler_enabled():
            with torch.autograd.profiler.record_function(self._profile_name), self._one_at_a_time:
                data = self._take()
        else:
            with self._one_at_a_time:
                data = self._take()
        self._num_yielded += 1
        if (
            self._IterableDataset_len_called is not None
            and self._dataset_kind == _DatasetKind.Iterable
            and self._num_yielded > self._IterableDataset_len_called
        ):
            self._warn_about_length()
        return data

    def _warn_about_length(self) -> None:
        text = (
            f"Length of IterableDataset {self._dataset} was reported to be {self._IterableDataset_len_called}"
            f"(when accessing len(dataloader)), but {self._num_yielded} samples have been fetched. "
        )
        if self._num_workers > 0:
            text += (
                "For multiprocessing data-loading, this could be caused by not properly configuring the "
                "IterableDataset replica at each worker. Please see "
                "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for examples."
            )
        warnings.warn(text, stacklevel=3)

    def __getstate__(self) -> Any:
        # The class of torch's own refusal, whose text torch forgets to format.
        raise NotImplementedError(f"{self.__class__.__name__} cannot be pickled")


class InProcessPass(Pass):
    """The iterator with ``num_workers=0``: reads when asked, in the main process, into a slot."""

    def __init__(
        self,
        loader: Any,
        arena: Arena,
        counters: Counters,
        plan: Callable[[Arena, int], None],
        done: Callable[[Arena], None],
        copying: Copying,
        ahead: int,
    ) -> None:
        super().__init__(loader, arena, counters, copying, ahead)
        if copying.call_types:  # of batches that are not born in a slot too
            self._pin_by_copy = copying.copy_for or "cuda"
        if self._timeout != 0:
            raise AssertionError("a loader without workers requires timeout == 0")
        if isinstance(self._dataset, IterDataPipe | MapDataPipe):
            apply_sharding(self._dataset, self._world_size, self._rank)
        recipe = self._recipe()
        self._plan = plan
        self._in_place = recipe.default_collation
        self._fetcher = Fetcher(recipe, redirecting=False)
        self._gatherer = Gatherer.of(recipe)
        self._delivery = Delivery(arena, counters)
        self._builds: dict[tuple[int, int], Build] = {}
        self._workers: list[Any] = []
        self._close = weakref.finalize(self, done, arena)

    def _next_data(self) -> Any:
        if not self._close.alive:
            if self._finished:
                raise StopIteration
            raise IteratorClosed("it was closed")
        while True:
            try:
                return self._make_batch()
            except NothingLeft:
                self._counters.bad.add(self._fetcher.bad)
            except StopIteration:
                self._finished = True
                self._close()
                self._counters.bad.warn(self._bad_before)
                raise

    def _make_batch(self) -> Any:
        indices = next(self._sampler_iter)
        if self._gatherer is not None and type(indices) is np.ndarray:
            try:
                return self._gather(self._gatherer, indices)
            except Exception:
                if self._on_bad_sample == RAISE:
                    raise
                # asked for one by one, the bad ones tell themselves
        if type(indices) is np.ndarray:
            indices = indices.tolist()
        return self._fetch(indices)

    def _lease(self, need: int) -> tuple[Slot, Memory] | None:
        """Lend a slot of ``need`` bytes to the batch that is about to be made; None if the user holds all others."""
        arena = self._arena
        if need > arena.slot_bytes:
            self._plan(arena, need)
        if not self._delivery.can_spare():
            return None
        slot = arena.grant(need)
        if slot is None:
            return None
        arena.publish(slot)
        self._delivery.lent_slot = slot
        return slot, arena.lend(slot, 0, slot.nbytes)

    def _gather(self, gatherer: Gatherer, indices: Any) -> Any:
        """Gather straight into a slot."""
        plan = gatherer.plan(indices, 0)
        lease = self._lease(plan.end)
        if lease is None:
            return self._on_heap(indices.tolist())
        slot, base = lease
        gatherer.gather(plan, self._arena.segment.memory, slot.offset)
        build = self._builds.get(plan.key) if plan.key is not None else None
        if build is None:
            build = compile_layout(plan.root)
            if plan.key is not None:
                self._builds[plan.key] = build
        if self._arena.watch is not None:
            build = self._arena.watch.checked(slot, build)
        return self._count(build(base), plan.end)

    def _fetch(self, indices: Any) -> Any:
        """Fetch and collate; what the default collate makes is born in the slot, and the batch is returned as it is."""
        lease = self._lease(self._arena.slot_bytes)
        if lease is None:
            return self._on_heap(indices)
        slot, base = lease
        writer = SlotWriter(base, self._arena.segment.address + slot.offset, 0, len(base))
        batch = self._fetch_from(indices, writer)
        if writer.overflowed:
            batch = self._move(batch, writer)
        return self._count(batch, writer.cursor)

    def _move(self, batch: Any, writer: SlotWriter) -> Any:
        """Move a batch that did not fit into a slot that is large enough, if there is one and if that can be done."""
        try:
            description = BatchDescription(batch, writer)
        except Exception:  # noqa: BLE001 - pickling runs user code; a batch that cannot be described stays as it is
            return batch
        saved = writer.memory[: description.born_until()].copy()
        lease = self._lease(description.end)
        if lease is None:
            return batch
        slot, base = lease
        writer = SlotWriter(base, self._arena.segment.address + slot.offset, 0, len(base))
        description.move_to(writer, saved)
        description.copy_pending()
        return compile_layout(description.root)(base)

    def _on_heap(self, indices: Any) -> Any:
        """Make a batch without a slot."""
        self._delivery.lent_slot = None
        self._delivery.count_copy()
        return self._count(self._fetch_from(indices, SlotWriter(_NOTHING, 0, 0, 0)), 0)

    def _fetch_from(self, indices: Any, writer: SlotWriter) -> Any:
        batch = self._fetcher.fetch(indices, writer)
        if self._fetcher.bad:
            self._counters.bad.add(self._fetcher.bad)
        return batch

    def _count(self, batch: Any, used: int) -> Any:
        if used and not self._arena.slot_bytes:
            self._plan(self._arena, used)
        self._counters.batches += 1
        self._counters.payload_bytes += used
        return batch

    def _shutdown_workers(self) -> None:
        """End this pass: there are no workers, but its arena is free for the next one. Idempotent."""
        self._close()
