"""A plan: what loading this data in batches of this size takes, and whether it fits. Starts nothing that stays.

dataset ──facts: lengths, a few batches──▶ bytes per batch, private bytes per worker ┐
host ──limits────────────────────────────▶ free bytes, CPUs, ranks                   ├─budget──▶ MemoryPlan
the user's one number ──ram──────────────────────────────────────────────────────────┘

total = ranks x (arena + workers x private)     and, on top, page cache: the kernel takes it back when others need it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from .budget import DEFAULT_PREFETCH, plan_arena, slots_minimum, slots_wanted
from .errors import SharedMemoryFull, human_bytes
from .facts import BatchFacts, DataFacts, data_facts, measure_batches
from .limits import HostLimits, Limit, read_limits

ASSUMED_PRIVATE = 32 << 20  # bytes per worker where nothing was measured: the interpreter and torch, after a fork


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Facts, and what a ``DataLoader`` made by ``call()`` will take. Sizes in bytes."""

    data: DataFacts
    batch: BatchFacts
    host: HostLimits
    num_workers: int
    prefetch_factor: int
    """Batches under way per worker; 1 without workers."""
    local_ranks: int
    slots: int
    slot_bytes: int
    arena_bytes: int
    """The number to give to each loader: its shared memory never exceeds it."""
    arena_used_bytes: int
    """What the arena takes when every slot is in use and no batch is larger than ``batch.batch_bytes``."""
    private_bytes: int
    """Of each worker: what it shares with nobody."""
    page_cache_bytes: int
    """What keeps the whole pack in memory; shared by all ranks, and given back when others need it."""
    total_bytes: int
    """All ranks: arenas in use and the workers' private memory."""
    backing: str
    """``'posix'`` if all arenas fit into the shared-memory mount, else ``'memfd'``."""
    limit: Limit
    """What the total was held against."""
    fits: bool
    missing_bytes: int
    """How much more memory the smallest arrangement needs; 0 if it fits."""
    advice: tuple[str, ...]
    """What to do, one sentence each."""

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain dicts, lists, strings and numbers, ready for JSON."""
        return {**asdict(self), "call": self.call()}

    def call(self, *, pin_memory: bool = False) -> str:
        """Return the line of Python that follows the plan."""
        workers = f"num_workers={self.num_workers}"
        if self.num_workers:
            workers += f", prefetch_factor={self.prefetch_factor}"
        pinned = ", pin_memory=True" if pin_memory else ""
        size = f'"{self.arena_bytes >> 20}MiB"' if self.arena_bytes % (1 << 20) == 0 else str(self.arena_bytes)
        return (
            f"DataLoader({self.data.expression}, batch_size={self.batch.batch_size}, shuffle=True, {workers}{pinned}, "
            f"arena_bytes={size})"
        )


def plan_memory(
    dataset: Any,
    *,
    batch_size: int,
    num_workers: int | None = None,
    prefetch_factor: int | None = None,
    ram: int | None = None,
    local_ranks: int | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    sample_bytes: int | None = None,
    limits: HostLimits | None = None,
) -> MemoryPlan:
    """Measure a few batches with a worker, and return the facts and the plan.

    ``dataset`` is map-style; of a pack, all lengths are looked at. ``ram`` (bytes) is what the loaders of all local
    ranks may take together; None: what the host has free. Workers and prefetch that are not given are chosen to fit.
    ``sample_bytes``: do not measure, each sample takes that. Raises ValueError for numbers below 1 or an empty dataset,
    and what the dataset raises. A plan that does not fit is a result (``fits``), not an error.
    """
    for name, value in (("batch_size", batch_size), ("ram", ram), ("sample_bytes", sample_bytes)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    if (num_workers is not None and num_workers < 0) or (prefetch_factor is not None and prefetch_factor < 1):
        raise ValueError(f"num_workers={num_workers} must be at least 0, prefetch_factor={prefetch_factor} at least 1")
    if len(dataset) == 0:
        raise ValueError("the dataset is empty: there is nothing to plan for")
    host = read_limits(local_ranks=local_ranks) if limits is None else limits
    ranks = host.local_ranks.count if local_ranks is None else local_ranks
    if sample_bytes is None:
        batch, private = measure_batches(dataset, batch_size, collate_fn)
    else:
        nbytes = batch_size * (sample_bytes + 8)  # an index per sample travels in the slot
        batch, private = BatchFacts(batch_size, sample_bytes, nbytes, nbytes, True, "given"), ASSUMED_PRIVATE
    limit = host.binding(mount=False)
    if ram is not None and ram <= limit.nbytes_free:
        limit = Limit("memory given to this job", ram, ram, "ram")

    arrangement = _choose(batch, host, private, num_workers, prefetch_factor, ranks, limit)
    return _finish(data_facts(dataset), batch, host, ranks, private, limit, arrangement, ram)


def plan_with(plan: MemoryPlan, *, num_workers: int, prefetch_factor: int) -> MemoryPlan:
    """Return the plan for the same facts with other workers and prefetch. Measures nothing."""
    arrangement = _choose(
        plan.batch, plan.host, plan.private_bytes, num_workers, prefetch_factor, plan.local_ranks, plan.limit
    )
    return _finish(
        plan.data, plan.batch, plan.host, plan.local_ranks, plan.private_bytes, plan.limit, arrangement, None
    )


# --- the plan ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Arrangement:
    """One choice of workers and slots for one rank."""

    workers: int
    prefetch: int
    wanted: int
    """Slots with which nobody would wait."""
    slots: int
    slot_bytes: int
    arena: int
    used: int
    missing: int
    """Bytes that are missing for the fewest slots; 0 if it fits."""


def _choose(
    batch: BatchFacts,
    host: HostLimits,
    private: int,
    workers: int | None,
    prefetch: int | None,
    ranks: int,
    limit: Limit,
) -> _Arrangement:
    """Arrange the workers that were asked for, or as many as there are CPUs; of those, as many as fit."""
    most = max(1, host.cpus.usable // ranks) if workers is None else workers
    fewest = 1 if workers is None else workers
    for count in range(most, fewest - 1, -1):
        arrangement = _arrange(batch, private, count, prefetch, limit.nbytes_free // ranks)
        if arrangement.missing == 0:
            break
    return arrangement


def _arrange(batch: BatchFacts, private: int, workers: int, prefetch: int | None, available: int) -> _Arrangement:
    """Fit slots into what one rank may have."""
    wanted, minimum = slots_wanted(workers, prefetch), slots_minimum(workers)
    # Set aside: one slot may have to hold the largest batch (or all, where that is not known for sure); the workers'
    # message rings; a page per slot, from before the first batch told the size; rounding to a readable number.
    unit = 1 << 20 if batch.batch_bytes * wanted >= 1 << 24 else 1 << 16
    giant = (batch.largest_bytes - batch.batch_bytes) * (1 if batch.certain else wanted)
    rings = (1 + 2 * workers * ((prefetch or DEFAULT_PREFETCH) + 4)) * 64 + 4096
    start = wanted * 4096
    aside = workers * private + giant + rings + start + unit
    try:
        plan = plan_arena(
            slot_bytes=batch.batch_bytes,
            slots=wanted,
            minimum_slots=minimum,
            arena_bytes=None,
            binding=Limit("memory of one rank", available, available, "plan"),
            headroom=aside,
        )
        slots, slot_bytes, missing = plan.slots, plan.slot_bytes, 0
    except SharedMemoryFull as full:
        slots, slot_bytes, missing = minimum, full.wanted // minimum, full.wanted + aside - available
    used = slots * slot_bytes + rings
    arena = -(-(used + giant + start) // unit) * unit
    if workers:
        prefetch = min(prefetch or DEFAULT_PREFETCH, max(1, (slots - 2) // workers))
    return _Arrangement(
        workers, prefetch if workers and prefetch else 1, wanted, slots, slot_bytes, arena, used, missing
    )


def _finish(
    data: DataFacts,
    batch: BatchFacts,
    host: HostLimits,
    ranks: int,
    private: int,
    limit: Limit,
    chosen: _Arrangement,
    ram: int | None,
) -> MemoryPlan:
    """Add up all ranks, choose the backing, and say what to do."""
    in_mount = host.shm is not None and ranks * chosen.arena <= host.shm.nbytes_free
    missing = ranks * chosen.missing
    total = ranks * (chosen.used + chosen.workers * private)
    plan = MemoryPlan(
        data=data,
        batch=batch,
        host=host,
        num_workers=chosen.workers,
        prefetch_factor=chosen.prefetch,
        local_ranks=ranks,
        slots=chosen.slots,
        slot_bytes=chosen.slot_bytes,
        arena_bytes=chosen.arena,
        arena_used_bytes=chosen.used,
        private_bytes=private,
        page_cache_bytes=data.file_bytes,
        total_bytes=total,
        backing="posix" if in_mount else "memfd",
        limit=limit,
        fits=missing == 0,
        missing_bytes=missing,
        advice=(),
    )
    advice = (*_memory_advice(plan, ram), *_slot_advice(plan, chosen.wanted), *_host_advice(plan))
    return MemoryPlan(**{**{name: getattr(plan, name) for name in plan.__slots__}, "advice": advice})


def _memory_advice(plan: MemoryPlan, ram: int | None) -> list[str]:
    advice = []
    if not plan.fits:
        least = plan.limit.nbytes_free + plan.missing_bytes
        fewer = "fewer workers, " if plan.num_workers > 1 else ""
        slots = plan.local_ranks * plan.slots * plan.slot_bytes  # the only part that a smaller batch makes smaller
        fitting = int(plan.batch.batch_size * (1 - plan.missing_bytes / slots)) if plan.missing_bytes < slots else 0
        smaller = f"a batch size of about {fitting}" if fitting else "another host"
        needs = "1 worker needs" if plan.num_workers == 1 else f"{plan.num_workers} workers need"
        advice.append(
            f"{needs} at least {plan.slots} slots of {human_bytes(plan.slot_bytes)}, with all "
            f"that belongs to it {human_bytes(least)} for {plan.local_ranks} rank(s): "
            f"{human_bytes(plan.missing_bytes)} more than {plan.limit.where} has. Try {fewer}{smaller}, or give more "
            "memory."
        )
    host = plan.host.binding(mount=False)
    if ram is not None and ram > host.nbytes_free:
        advice.append(
            f"You gave {human_bytes(ram)}, but {host.where} has only {human_bytes(host.nbytes_free)} free: the plan "
            "keeps to that."
        )
    left = host.nbytes_free - plan.total_bytes
    if plan.fits and plan.page_cache_bytes > left:
        advice.append(
            f"The pack ({human_bytes(plan.page_cache_bytes)}) is larger than the {human_bytes(max(0, left))} that are "
            "left for the page cache: part of each epoch is read from disk, so fast storage matters more than workers."
        )
    return advice


def _slot_advice(plan: MemoryPlan, wanted: int) -> list[str]:
    advice = []
    if plan.fits and plan.slots < wanted:
        advice.append(
            f"{plan.slots} slots instead of {wanted} fit into {plan.limit.where}: workers may wait for a free slot; "
            f"{human_bytes(plan.local_ranks * (wanted - plan.slots) * plan.slot_bytes)} more would end that."
        )
    if plan.batch.certain and plan.batch.largest_bytes > plan.batch.batch_bytes:
        advice.append(
            f"A shuffled epoch's batches take up to {human_bytes(plan.batch.batch_bytes)}, but the largest samples in "
            f"one batch would take {human_bytes(plan.batch.largest_bytes)}: the arena has room for one such slot at a "
            "time."
        )
    if not plan.batch.certain:
        advice.append(
            "The largest batch is not known, since only a few were made: if samples differ much, add what the largest "
            "may need to arena_bytes."
        )
    return advice


def _host_advice(plan: MemoryPlan) -> list[str]:
    advice = []
    host = plan.host
    if plan.backing == "memfd":
        size = -(-plan.local_ranks * plan.arena_bytes // (1 << 20))
        why = host.shm_problem or (
            f"{host.shm.source if host.shm else ''} has {human_bytes(host.shm.nbytes_free if host.shm else 0)} free"
        )
        advice.append(
            f"{why}, so the arena uses memory without a mount (memfd); docker's --shm-size={size}m, or a larger mount, "
            "would make it posix shared memory."
        )
    if plan.num_workers * plan.local_ranks > host.cpus.usable:
        advice.append(
            f"{plan.num_workers * plan.local_ranks} workers share {host.cpus.usable} CPUs ({host.cpus.source}): more "
            "workers than CPUs help only where they wait for storage."
        )
    return advice
