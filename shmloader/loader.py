"""The front: arguments, ``__iter__``, ``with``, statistics. All the rest is torch's own class, or lower floors."""

from __future__ import annotations

import inspect
import operator
import os
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.utils.data
from torch.utils.data import Dataset, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from .arena import Arena
from .arena_stats import ArenaStats
from .arenas import AUTO, Arenas
from .badsamples import POLICIES, RAISE, BadSample
from .budget import parse_bytes, slots_wanted
from .delivery import Counters
from .interrupts import raise_kept
from .passes import InProcessPass
from .pinning import Copying, Stream, choose_copying, parse_device
from .robustness import RESTART, WARN_STUCK_S, check_choice, refuse_iterable
from .watch import wanted
from .worker_pass import WorkerPass

T_co = TypeVar("T_co", covariant=True)

_HAS_IN_ORDER = "in_order" in inspect.signature(torch.utils.data.DataLoader.__init__).parameters


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """What a loader has done and holds at one moment."""

    arena: ArenaStats | None
    """Of the newest pass; None before the first."""
    worker_pids: tuple[int, ...]
    """Process ids of the workers that are alive, of all passes."""
    batches: int
    """Batches delivered, over all passes."""
    waited_s: float
    """Seconds that the main process slept because no batch was ready."""
    copied_out: int
    """Batches delivered as copies because the user kept too many."""
    copied_bytes: int
    """Bytes that were not born in a slot and so were copied into it once, by a worker."""
    payload_bytes: int
    """Bytes of all batches delivered, alignment and indices included."""
    worker_restarts: int
    """Workers that were started in place of dead ones."""
    bad_count: int
    """Samples that were left out or replaced."""
    bad_samples: tuple[BadSample, ...]
    """The first 1,000 of them, in the order of their batches."""


class DataLoader(torch.utils.data.DataLoader[T_co]):
    """torch's DataLoader, whose workers write batches into a shared arena that the main process hands out as views.

    All arguments of ``torch.utils.data.DataLoader`` mean what they mean there, and the same seed gives the same
    batches. New are:

    ``arena_bytes``: the most shared memory that this loader may ever commit, in bytes or as text (``"2GiB"``), control
    pages aside (less than a page per slot). None: what ``num_workers``, ``prefetch_factor`` and the batch need.
    ``arena_backing``: ``"auto"`` (posix shared memory, or memfd where that is small or missing), ``"posix"``,
    ``"memfd"``, or a directory for the memory's file, which has no name there either.
    ``arena_numa_node``: commit the arena's memory on this NUMA node (the GPU's, say). None: where the kernel puts it.
    ``device``: where batches are delivered. ``None`` and ``"cpu"``: in host memory, as torch does. ``"cuda"``,
    ``"cuda:1"``, an int: on that device, copied by a stream of their own; DeviceUnavailable at once if it is not there.
    ``device_prefetch``: batches that are copied ahead of the one that is handed out, as far as they are ready.
    ``drain``: a slot waits, without a view, until the device has passed everything it was given so far, because
    ``non_blocking`` copies may still read it (see ``record_stream``). False: it is reused at once, which is right only
    if every copy of a batch has ended before its last tensor is dropped. Ignored with ``device``.
    ``debug``: look for misuse of batches' memory, at the price of a pass over each slot; None: as the environment
    variable SHMLOADER_DEBUG says.

    ``pin_memory=True`` with CUDA page-locks the arena where it lies, so that nothing is copied or pinned per batch; if
    the system refuses, one NotPinnedWarning says why. Without an accelerator one warning, as torch gives it.

    ``on_worker_death``: ``"raise"`` WorkerDied, or ``"restart"``: a new worker takes over, and the epoch's batches are
    those of an undisturbed run (revival.py says for which datasets, and what bounds it).
    ``on_bad_sample``: ``"raise"`` what the dataset raises; ``"skip"`` the sample, so that its batch is shorter, or does
    not come if none is left; ``"replace"`` it by the next good one of its batch. ``stats().bad_samples`` lists them.
    Both are for map-style datasets only, ValueError for others.
    ``warn_stuck_s``: after so many seconds of waiting for one batch, warn once a pass (WorkerStuckWarning) with the
    worker, its indices and its Python stack. None or 0: never.

    A batch's tensors are views of a slot that this batch owns until the last view of it is gone; keeping them is
    always right. Who keeps many gets copies from some number on (``stats().copied_out``). ``close()``, ``with``,
    garbage collection and the end of the program give everything back.
    """

    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[T_co]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        arena_bytes: int | str | None = None,
        arena_backing: str = AUTO,
        arena_numa_node: int | None = None,
        on_worker_death: str = RAISE,
        on_bad_sample: str = RAISE,
        warn_stuck_s: float | None = WARN_STUCK_S,
        device: str | int | torch.device | None = None,
        device_prefetch: int = 2,
        drain: bool = True,
        debug: bool | None = None,
    ) -> None:
        check_choice("on_worker_death", on_worker_death, (RAISE, RESTART))
        check_choice("on_bad_sample", on_bad_sample, POLICIES)
        if arena_numa_node is not None and operator.index(arena_numa_node) < 0:
            raise ValueError(f"arena_numa_node must be the number of a NUMA node or None, not {arena_numa_node}")
        if device_prefetch < 0:
            raise ValueError(f"device_prefetch must be the number of batches to copy ahead, not {device_prefetch}")
        self.device, self.device_prefetch, self.drain, self.debug = device, device_prefetch, drain, debug
        self._device, self._debug = parse_device(device), wanted(debug)
        self._streams: list[Stream] = []
        self._copying: Copying | None = None
        size = None if arena_bytes is None else parse_bytes(arena_bytes)
        self._arenas = Arenas(size, os.fspath(arena_backing), arena_numa_node)
        self._counters = Counters()
        self._passes: weakref.WeakSet[Any] = weakref.WeakSet()
        options: dict[str, Any] = {"in_order": in_order} if _HAS_IN_ORDER else {}
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            **options,
        )
        if not _HAS_IN_ORDER:
            self.in_order = in_order
        if self._dataset_kind == _DatasetKind.Iterable:
            refuse_iterable(on_worker_death=on_worker_death, on_bad_sample=on_bad_sample)
        self.on_worker_death = on_worker_death
        self.on_bad_sample = on_bad_sample
        self.warn_stuck_s = warn_stuck_s
        # Hidden by the properties of these names, but to be found in vars(): Lightning builds loaders anew from there.
        arenas = self._arenas
        self.__dict__.update(
            arena_bytes=arenas.arena_bytes, arena_backing=arenas.backing, arena_numa_node=arenas.numa_node
        )

    @property
    def arena_bytes(self) -> int | None:
        """The cap on committed shared memory in bytes, or None."""
        return self._arenas.arena_bytes

    @property
    def arena_backing(self) -> str:
        """Where the shared memory comes from, as it was asked for."""
        return self._arenas.backing

    @property
    def arena_numa_node(self) -> int | None:
        """The NUMA node that was asked for, or None. What was had is in ``stats().arena``."""
        return self._arenas.numa_node

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_passes"] = state["_copying"] = None
        state["_streams"] = []
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__dict__["_passes"] = weakref.WeakSet()

    def __iter__(self) -> _BaseDataLoaderIter:
        raise_kept()
        # A persistent iterator whose workers have ended (one died, or they were shut down) cannot begin another epoch.
        old = self._iterator
        if isinstance(old, WorkerPass) and old.ended:
            self._iterator = None
        return super().__iter__()

    def _get_iterator(self) -> _BaseDataLoaderIter:
        workers = self.num_workers
        copying = self._copying
        if copying is None or copying.pid != os.getpid():
            copying = self._copying = self._choose_copying()
        ahead = self.device_prefetch if copying.to_device else 0
        slots = slots_wanted(workers, self.prefetch_factor) + ahead
        arena = self._arenas.take(slots, workers, copying, self._debug)
        arenas = self._arenas

        def plan(arena: Arena, need: int) -> None:
            arenas.plan(arena, need, workers)

        try:
            if workers == 0:
                new_pass: Any = InProcessPass(self, arena, self._counters, plan, arenas.give, copying, ahead)
            else:
                self.check_worker_number_rationality()
                new_pass = WorkerPass(self, arena, self._counters, plan, arenas.give, copying, ahead)
        except BaseException:
            arenas.give(arena)
            raise
        self._passes.add(new_pass)
        return new_pass  # type: ignore[no-any-return]

    def _choose_copying(self) -> Copying:
        """Return how this process's accelerator reads the batches: the seam where tests put a recorder in."""
        return choose_copying(self._device, self.pin_memory, self.pin_memory_device, self.drain, self._streams)

    def record_stream(self, stream: Stream) -> None:
        """Name a stream on which batches are copied or read, as ``Tensor.record_stream`` does for one tensor.

        Needed only for a stream that is current neither when a batch is handed out nor when its last tensor is dropped,
        and that none of these waits for in between. Slots then wait for ``stream`` too, as long as this loader lives,
        so it must live as long. Does nothing without CUDA.
        """
        if stream not in self._streams:
            self._streams.append(stream)

    def stats(self) -> LoaderStats:
        """Return the numbers of this moment. Cheap: a few microseconds a slot."""
        arena = self._arenas.newest()
        pids = [pid for one_pass in list(self._passes) for pid in one_pass.worker_pids()]
        counters = self._counters
        return LoaderStats(
            arena=arena.stats() if arena is not None else None,
            worker_pids=tuple(pids),
            batches=counters.batches,
            waited_s=counters.waited_s,
            copied_out=counters.copied_out,
            copied_bytes=counters.copied_bytes,
            payload_bytes=counters.payload_bytes,
            worker_restarts=counters.restarts,
            bad_count=counters.bad.count,
            bad_samples=tuple(counters.bad.listed),
        )

    def close(self) -> None:
        """End all iterators and workers and give all shared memory back, except under batches that are still in use.

        Idempotent. A later ``iter(loader)`` begins anew.
        """
        for old_pass in list(self._passes):
            old_pass._shutdown_workers()
            old_pass.drop_ahead()
        self._iterator = None
        self._arenas.close()
        raise_kept()

    def __enter__(self) -> DataLoader[T_co]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
