"""How the benchmarks measure: fair turns, checked data, and numbers that can be traced.

How a number comes about:

1. One fresh process per (workload, number of workers), so that no row inherits another's memory or threads.
2. Inside it the contenders take turns: A B C A B C ..., so that a slow minute of the machine hits all of them.
   Each turn builds a new loader and ends it. Medians over the rounds are shown; the JSON keeps every round.
3. Steady state is measured, nothing else: worker start-up, the first use of every slot and the batches that piled up
   meanwhile are used up before the clock starts, and it stops while batches are still being made:

       start │ checked │ settle │  t i m e d  │ checked tail
       ──────┴─────────┴────────┴─────────────┴─────────────
4. Every row's data is checked: a whole pass, every byte, before the first round; then a part of the samples before
   and after each timed stretch. Order is checked too: all contenders must deliver the indices that torch's
   RandomSampler draws from the same seed. While the clock runs, batches are taken and dropped, not looked at.

CPU time is the scheduler's own count in nanoseconds (``/proc/PID/task/*/schedstat``). Peak shared memory is the growth
of ``Shmem`` in /proc/meminfo, which counts the whole machine, named or not: run nothing else beside it. torch uses one
thread in every process; workers are forked. A busy machine shows as main-process CPU far below the time of a batch in
the memcpy row: repeat such a run.
"""

from __future__ import annotations

import os
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.utils.data
from torch.utils.data import RandomSampler

import shmloader

PREFETCH = 2  # batches per worker: torch's default, for all
TARGET_S = 0.4  # how long one timed stretch should take
Batches = list[torch.Tensor]
"""The indices of each batch."""


class Workload(ABC):
    """One kind of data: how it is made, read and collated, and what a batch of it must hold."""

    name: str
    batch_size: int
    samples: int
    collate_fn: Callable[[list[Any]], Any] | None = None

    @abstractmethod
    def write(self, folder: Path, samples: int) -> None:
        """Write the data into files of ``folder``."""

    @abstractmethod
    def load(self, folder: Path) -> Any:
        """Return a map-style dataset over the data, all in this process's memory."""

    @abstractmethod
    def flat(self, batch: Any) -> list[torch.Tensor]:
        """Return the tensors of a batch in a fixed order."""

    @abstractmethod
    def expected(self, dataset: Any, indices: torch.Tensor) -> list[torch.Tensor]:
        """Return what ``flat`` must give for the samples ``indices``, made from the loaded data without any loader."""

    @abstractmethod
    def limit(self, folder: Path, batches: Batches) -> Iterator[Any]:
        """Yield what ``flat`` understands, in the cheapest way there is.

        That is: rows of page-cached files, gathered into one reused buffer by one thread. Everything
        but the gather is prepared before the first batch is yielded.
        """

    def check(self, dataset: Any, batch: Any, indices: torch.Tensor, step: int) -> None:
        """AssertionError if a tensor is missing or differs in type, shape or in any row of every ``step``-th sample."""
        found, expected = self.flat(batch), self.expected(dataset, indices)
        assert len(found) == len(expected), f"{self.name}: {len(found)} tensors instead of {len(expected)}"
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert (one.dtype, one.shape) == (other.dtype, other.shape), f"{self.name}: tensor {place} differs in kind"
            assert torch.equal(one[::step], other[::step]), f"{self.name}: tensor {place} holds wrong data"


def random_bytes(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return bytes that no file system can compress, the same every time."""
    return np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)


def mapped(path: Path) -> torch.Tensor:
    """Return an ``.npy`` file as a tensor over its mapping, every page read once. Copy-on-write, but nobody writes."""
    tensor = torch.from_numpy(np.load(path, mmap_mode="c"))
    tensor.sum()
    return tensor


# --- one round --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Round:
    """One timed stretch of one contender."""

    batches: int
    wall_s: float
    main_cpu_s: float
    """CPU time of the main process, all its threads."""
    tree_cpu_s: float
    """CPU time of the main process and of its workers."""
    nbytes: int
    """Payload of the batches."""
    shmem: int
    """Bytes by which the machine's shared memory grew at most, over the whole turn."""


@dataclass
class Row:
    """All rounds of one contender."""

    workload: str
    workers: int
    contender: str
    rounds: list[Round] = field(default_factory=list)

    @property
    def us_per_batch(self) -> float:
        return statistics.median(turn.wall_s / turn.batches for turn in self.rounds) * 1e6

    @property
    def main_us_per_batch(self) -> float:
        return statistics.median(turn.main_cpu_s / turn.batches for turn in self.rounds) * 1e6

    @property
    def gb_per_s(self) -> float:
        return statistics.median(turn.nbytes / turn.wall_s for turn in self.rounds) / 1e9

    @property
    def cpu_s_per_gb(self) -> float:
        return sum(turn.tree_cpu_s for turn in self.rounds) / sum(turn.nbytes for turn in self.rounds) * 1e9

    @property
    def shmem(self) -> int:
        return max(turn.shmem for turn in self.rounds)


def shmem_now() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no Shmem line")


def cpu_ns(pids: Iterable[int]) -> int:
    """Nanoseconds on a CPU of all threads of these processes, so far."""
    files = (task / "schedstat" for pid in pids for task in Path(f"/proc/{pid}/task").iterdir())
    return sum(int(file.read_text().split()[0]) for file in files)


class Contender:
    """One way to get batches. ``open`` returns a new loader over ``batches``; ``close`` ends what ``open`` returned."""

    def __init__(self, name: str, dataset: Any, make: Callable[[RandomSampler, Batches], Iterable[Any]]) -> None:
        self.name, self.dataset, self.open = name, dataset, make

    @staticmethod
    def close(loader: Any) -> None:
        if isinstance(loader, shmloader.DataLoader):
            loader.close()


def draw(workload: Workload, plain: Any, contender: Contender, count: int, seed: int) -> tuple[RandomSampler, Batches]:
    """Return a sampler for ``count`` batches, and the indices that it will draw."""
    total = count * workload.batch_size
    sampler, order = (
        RandomSampler(dataset, num_samples=total, generator=torch.Generator().manual_seed(seed))
        for dataset in (contender.dataset, plain)
    )
    return sampler, list(torch.tensor(list(order)).split(workload.batch_size))


def take_turn(
    workload: Workload, plain: Any, contender: Contender, workers: int, timed: int, seed: int, step: int
) -> Round:
    """Open, check, settle, time, check, close. ``step`` thins the checks out: 1 looks at every sample."""
    checked = PREFETCH * workers + 4  # more than any loader here has slots: each is used once before the clock starts
    settle = 2 * PREFETCH * workers + 2
    tail = PREFETCH * workers + 1
    sampler, batches = draw(workload, plain, contender, checked + settle + timed + tail, seed)
    before = peak = shmem_now()
    loader = contender.open(sampler, batches)
    source, place = iter(loader), 0

    def look(number: int) -> None:
        nonlocal place, peak
        for _ in range(number):
            workload.check(plain, next(source), batches[place], step)
            place += 1
            peak = max(peak, shmem_now())

    look(checked)
    for _ in range(settle):
        batch = next(source)
    pids = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
    tree, main, start = cpu_ns(pids), time.process_time(), time.perf_counter()
    for _ in range(timed):
        batch = next(source)
    wall, main, tree = time.perf_counter() - start, time.process_time() - main, cpu_ns(pids) - tree
    place += settle + timed
    workload.check(plain, batch, batches[place - 1], step)
    nbytes = sum(tensor.nbytes for tensor in workload.flat(batch))
    del batch
    look(tail)
    assert next(source, None) is None, f"{contender.name} delivers more than {len(batches)} batches"
    contender.close(loader)
    return Round(timed, wall, main, tree / 1e9, nbytes * timed, peak - before)


CONTENDERS = ("memcpy", "alone/plain", "torch/plain", "ours/plain", "torch/pack", "ours/pack")


# --- one process: all contenders of one workload and one number of workers --------------------------------------------


def contenders_of(workload: Workload, folder: Path, workers: int, wanted: Sequence[str]) -> list[Contender]:
    """Return the contenders in the order of their turns."""
    plain = workload.load(folder)
    packed = shmloader.PackedDataset(str(folder / "pack.lmdb")) if any("pack" in name for name in wanted) else None

    def loader(kind: Any, dataset: Any) -> Callable[[RandomSampler, Batches], Iterable[Any]]:
        options: dict[str, Any] = {"batch_size": workload.batch_size, "collate_fn": workload.collate_fn}
        if workers:
            options |= {"num_workers": workers, "prefetch_factor": PREFETCH, "multiprocessing_context": "fork"}
        return lambda sampler, batches: kind(dataset, sampler=sampler, **options)

    torch_loader = torch.utils.data.DataLoader
    collate = workload.collate_fn or torch.utils.data.default_collate

    def alone(sampler: RandomSampler, batches: Batches) -> Iterator[Any]:
        return (collate([plain[index] for index in indices.tolist()]) for indices in batches)

    found = {
        "alone/plain": Contender("alone/plain", plain, alone),
        "memcpy": Contender("memcpy", plain, lambda sampler, batches: workload.limit(folder, batches)),
        "torch/plain": Contender("torch/plain", plain, loader(torch_loader, plain)),
        "ours/plain": Contender("ours/plain", plain, loader(shmloader.DataLoader, plain)),
        "torch/pack": Contender("torch/pack", packed, loader(torch_loader, packed)),
        "ours/pack": Contender("ours/pack", packed, loader(shmloader.DataLoader, packed)),
    }
    return [found[name] for name in wanted]


def measure(workload: Workload, folder: Path, workers: int, wanted: Sequence[str], rounds: int) -> list[Row]:
    """Check all contenders, find how many batches fill a timed stretch, then let them take turns."""
    torch.set_num_threads(1)
    turns: list[tuple[Row, Contender, int]] = []
    plain = workload.load(folder)
    for contender in contenders_of(workload, folder, workers, wanted):
        whole = -(-len(plain) // workload.batch_size)  # batches: every sample is looked at once, at least
        trial = take_turn(workload, plain, contender, workers, 8, seed=0, step=1)
        check_whole_pass(workload, plain, contender, whole)
        timed = int(min(max(TARGET_S / (trial.wall_s / trial.batches), 8), 3000))
        turns.append((Row(workload.name, workers, contender.name), contender, timed))
    for number in range(rounds):
        for row, contender, timed in turns:
            row.rounds.append(take_turn(workload, plain, contender, workers, timed, seed=number + 1, step=16))
    return [row for row, _, _ in turns]


def check_whole_pass(workload: Workload, plain: Any, contender: Contender, count: int) -> None:
    """Every byte of ``count`` batches."""
    sampler, batches = draw(workload, plain, contender, count, seed=0)
    loader = contender.open(sampler, batches)
    for batch, indices in zip(loader, batches, strict=True):
        workload.check(plain, batch, indices, 1)
    contender.close(loader)
