"""Runs real loaders with several numbers of workers and slots, one after the other, and picks the knee.

First workers are varied with two batches each, then the batches per worker for the number of workers that was best.
The knee is the arrangement with the least memory among those that reach nearly the best throughput. Each loader is a
fresh one with a cap of its own; its first batches (start of the processes, first touch of the slots) are not timed.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from tqdm import tqdm

from shmloader import CopiedOutWarning, DataLoader
from shmloader.budget import slots_wanted
from shmloader.cgroups import read_text
from shmloader.errors import ResourceError, human_bytes
from shmloader.plan import MemoryPlan, plan_with
from shmloader.probe import private_bytes

NEARLY = 0.95  # of the best throughput: what is above differs by less than the noise of a short run
_MOST_WORKERS_PER_CPU = 2
_PREFETCHES = (1, 2, 4, 8)
_LOOKS = 3  # at the workers' private memory
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Row:
    """One loader that ran. Sizes in bytes."""

    num_workers: int
    prefetch_factor: int
    slots: int
    arena_bytes: int
    """The cap that the loader was given."""
    samples_per_s: float
    cpus: float
    """CPUs that the main process and the workers kept busy, on average."""
    waited: float
    """Share of the time that the main process waited for a batch."""
    shared_bytes: int
    """The most shared memory that was committed."""
    private_bytes: int
    """What the workers had to themselves, all together."""

    @property
    def memory_bytes(self) -> int:
        return self.shared_bytes + self.private_bytes


@dataclass(frozen=True, slots=True)
class Measurement:
    """All rows, the one that was picked, and why."""

    rows: tuple[Row, ...]
    best: Row
    """The fastest."""
    chosen: Row
    """The knee."""
    plan: MemoryPlan
    """The plan for the knee."""
    why: str

    def call(self) -> str:
        """Return the DataLoader(...) line for the knee."""
        return self.plan.call()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {
            "rows": [asdict(row) for row in self.rows],
            "best": asdict(self.best),
            "chosen": asdict(self.chosen),
            "why": self.why,
            "call": self.call(),
        }

    def table(self) -> list[str]:
        """Return the rows as lines of text."""
        lines = ["workers  prefetch  slots       arena     samples/s   CPUs  waiting     private"]
        for row in self.rows:
            mark = "  <- chosen" if row is self.chosen else ""
            lines.append(
                f"{row.num_workers:7}  {row.prefetch_factor:8}  {row.slots:5}  {human_bytes(row.shared_bytes):>10}  "
                f"{row.samples_per_s:12,.0f}  {row.cpus:5.2f}  {row.waited:6.0%}  {human_bytes(row.private_bytes):>10}"
                f"{mark}"
            )
        return lines


def measure(
    dataset: Any,
    plan: MemoryPlan,
    collate_fn: Callable[[list[Any]], Any] | None,
    *,
    seconds: float = 2.0,
    fixed_workers: int | None = None,
    progress: bool | None = None,
) -> Measurement:
    """Run the sweep and return it. ``seconds`` are timed for each loader; arrangements that do not fit are left out.

    ``fixed_workers``: vary only the batches per worker. ``progress``: a bar on stderr; None: only on a terminal.
    """
    counts = [fixed_workers] if fixed_workers is not None else worker_counts(plan)
    rows: list[Row] = []
    disable = None if progress is None else not progress  # None: silent unless stderr is a terminal
    bar = tqdm(total=len(counts) + len(_PREFETCHES) - 1, unit=" loaders", leave=False, disable=disable)
    with bar:
        for workers in counts:
            rows += _try(dataset, plan, collate_fn, workers, 2 if workers else 1, seconds)
            bar.update()
        if not rows:
            raise ResourceError(f"no loader could be run within {human_bytes(plan.limit.nbytes_free)}")
        workers = knee(rows).num_workers
        for prefetch in _PREFETCHES if workers else ():
            if prefetch != 2:
                rows += _try(dataset, plan, collate_fn, workers, prefetch, seconds)
                bar.update()
    best, chosen = max(rows, key=lambda row: row.samples_per_s), knee(rows)
    final = plan_with(plan, num_workers=chosen.num_workers, prefetch_factor=chosen.prefetch_factor)
    return Measurement(tuple(rows), best, chosen, final, _why(best, chosen))


def worker_counts(plan: MemoryPlan) -> list[int]:
    """Return the numbers of workers to try: none, one, then in steps of about half, up to twice the CPUs of a rank."""
    most = max(1, _MOST_WORKERS_PER_CPU * plan.host.cpus.usable // plan.local_ranks)
    counts, step = [0, 1], 2
    while step < most:
        counts.append(step)
        step += max(1, step // 2)
    return [*counts, most] if most > 1 else counts


def knee(rows: list[Row]) -> Row:
    """Return the row with the least memory among those with at least NEARLY the best throughput."""
    enough = NEARLY * max(row.samples_per_s for row in rows)
    return min((row for row in rows if row.samples_per_s >= enough), key=lambda row: row.memory_bytes)


def _why(best: Row, chosen: Row) -> str:
    text = (
        f"{chosen.num_workers} workers with {chosen.prefetch_factor} batches each reach {chosen.samples_per_s:,.0f} "
        f"samples/s with {human_bytes(chosen.memory_bytes)}"
    )
    if best is chosen:
        return f"{text}: the fastest, and nothing smaller comes within {1 - NEARLY:.0%} of it."
    return (
        f"{text}, {chosen.samples_per_s / best.samples_per_s:.0%} of the best ({best.num_workers} workers with "
        f"{best.prefetch_factor} batches each, {human_bytes(best.memory_bytes)}): the least memory within "
        f"{1 - NEARLY:.0%} of it."
    )


def _try(
    dataset: Any,
    plan: MemoryPlan,
    collate_fn: Callable[[list[Any]], Any] | None,
    workers: int,
    prefetch: int,
    seconds: float,
) -> list[Row]:
    """Run one loader; an empty list if its plan does not fit."""
    arranged = plan_with(plan, num_workers=workers, prefetch_factor=prefetch)
    if not arranged.fits or arranged.slots < slots_wanted(workers, prefetch):
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CopiedOutWarning)
        # torch warns of more workers than CPUs; finding out whether they help is what is being done here.
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=plan.batch.batch_size,
            shuffle=True,
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            persistent_workers=bool(workers),
            collate_fn=collate_fn,
            drop_last=plan.data.samples >= plan.batch.batch_size,  # every batch counts the same
            arena_bytes=arranged.arena_bytes,
        )
        with loader:
            return [_timed(loader, arranged, prefetch, slots_wanted(workers, prefetch) + 1, seconds)]


def _timed(loader: DataLoader[Any], plan: MemoryPlan, prefetch: int, warm: int, seconds: float) -> Row:
    batches = _endless(loader)
    for _ in range(warm):
        next(batches)
    before = loader.stats()
    pids = before.worker_pids
    cpu_s, start = _cpu_s(pids), time.perf_counter()
    done = 0
    while time.perf_counter() - start < seconds:
        next(batches)
        done += 1
    taken = time.perf_counter() - start
    cpu_s = _cpu_s(pids) - cpu_s
    after = loader.stats()
    private = 0
    for _ in range(_LOOKS):  # not timed: a look costs milliseconds per worker
        next(batches)
        private = max(private, sum(private_bytes(pid) for pid in pids))
    arena = after.arena
    return Row(
        num_workers=plan.num_workers,
        prefetch_factor=prefetch,
        slots=arena.slots if arena else 0,
        arena_bytes=plan.arena_bytes,
        samples_per_s=done * min(plan.batch.batch_size, plan.data.samples) / taken,
        cpus=cpu_s / taken,
        waited=min(1.0, (after.waited_s - before.waited_s) / taken),
        shared_bytes=arena.nbytes if arena else 0,
        private_bytes=private,
    )


def _endless(loader: DataLoader[Any]) -> Iterator[None]:
    """Deliver and drop batches, epoch after epoch."""
    while True:
        for _ in loader:
            yield


def _cpu_s(pids: tuple[int, ...]) -> float:
    """Return the CPU seconds that this process and the workers have used so far."""
    total = time.process_time()
    for pid in pids:
        words = (read_text(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
        if len(words) > 12:
            total += (int(words[11]) + int(words[12])) / _TICK
    return total
