"""What soak.py and kill_runs.py check against: a dataset whose every number is known, and a loader in plain Python.

The oracle is a loop: worker w makes batches w, w + n, w + 2n, ... one after the other, with random generators that are
seeded as torch seeds its workers. It knows no process, no slot and no death, so whatever a loader with workers that are
killed delivers must be equal to it, random numbers included.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from torch.utils.data._utils.worker import _generate_state

WIDTH = 64
SETTLE_S = 5.0
"""Seconds that what has been ended may take to disappear from the system's lists."""


class Known(Dataset[Any]):
    """Sample i: (WIDTH numbers i, i, three random numbers). ``bad`` ones raise, ``slow`` ones sleep ``nap_s``."""

    def __init__(
        self, length: int, bad: frozenset[int] = frozenset(), slow: frozenset[int] = frozenset(), nap_s: float = 0.0
    ) -> None:
        self.length, self.bad, self.slow, self.nap_s = length, bad, slow, nap_s

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        noise = torch.tensor([random.random(), np.random.random(), torch.rand(()).item()])
        if index in self.bad:
            raise ValueError(f"sample {index} is bad")
        if index in self.slow:
            time.sleep(self.nap_s)
        return torch.full((WIDTH,), index), index, noise


@dataclass(frozen=True)
class Repeat:
    """A collate function whose batches differ in size: growth, larger slots, giants in pieces."""

    most: int

    def factor(self, indices: list[int]) -> int:
        """How often the rows of a batch stand side by side."""
        return 1 + indices[0] * 7 % self.most

    def __call__(self, samples: list[Any]) -> Any:
        numbers, labels, noise = torch.utils.data.default_collate(samples)
        return numbers.repeat(1, self.factor(labels.tolist())), labels, noise


@dataclass(frozen=True)
class Expected:
    """One batch as it must arrive."""

    labels: list[int]
    noise: list[list[float]] | None
    """None: not known, because the batch is made in the main process or by whoever has time."""


@contextlib.contextmanager
def _own_states() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


class Oracle:
    """Makes batches in plain Python. One object lives as long as one set of workers."""

    def __init__(self, dataset: Known, policy: str, num_workers: int, base_seed: int, ordered: bool) -> None:
        self._dataset = dataset
        self._policy = policy
        self.exact = num_workers > 0 and ordered
        """Whether the random numbers are known."""
        self._states: list[Any] = []
        with _own_states():
            for worker in range(max(1, num_workers)):
                random.seed(base_seed + worker)
                np.random.seed(_generate_state(base_seed, worker))
                torch.manual_seed(base_seed + worker)
                self._states.append(self._now())

    @staticmethod
    def _now() -> Any:
        return random.getstate(), np.random.get_state(), torch.get_rng_state()

    def epoch(self, batches: list[list[int]]) -> list[Expected | None]:
        """Return what becomes of these index lists: a batch; None where the loader raises for a bad sample. Batches
        without a sample are left out."""
        found: list[Expected | None] = []
        with _own_states():
            for k, indices in enumerate(batches):
                worker = k % len(self._states)
                random.setstate(self._states[worker][0])
                np.random.set_state(self._states[worker][1])
                torch.set_rng_state(self._states[worker][2])
                made = self._make(indices)
                self._states[worker] = self._now()
                if made is None or made.labels:
                    found.append(made)
        return found

    def _make(self, indices: list[int]) -> Expected | None:
        got: dict[int, Any] = {}
        for place, index in enumerate(indices):
            try:
                got[place] = self._ask(index)
            except ValueError:
                if self._policy == "raise":
                    return None
        if self._policy == "replace":
            good = sorted(got)
            for place in sorted(set(range(len(indices))) - set(good)):
                if not good:
                    return None
                other = min(good, key=lambda each, place=place: (each < place, each))  # type: ignore[misc]
                got[place] = self._ask(indices[other])
        picked = [got[place] for place in sorted(got)]
        noise = [sample[1] for sample in picked] if self.exact else None
        return Expected([sample[0] for sample in picked], noise)

    def _ask(self, index: int) -> tuple[int, list[float]]:
        numbers = [random.random(), np.random.random(), torch.rand(()).item()]
        if index in self._dataset.bad:
            raise ValueError
        return index, torch.tensor(numbers).tolist()


def check(batch: Any, expected: Expected, repeat: Repeat) -> None:
    """AssertionError unless a batch is this one, to the last number."""
    numbers, labels, noise = batch
    assert labels.tolist() == expected.labels, f"labels {labels.tolist()}, expected {expected.labels}"
    factor = repeat.factor(expected.labels)
    assert numbers.shape == (len(expected.labels), WIDTH * factor), f"shape {tuple(numbers.shape)}"
    assert bool((numbers == labels[:, None]).all()), f"numbers of {expected.labels} are wrong"
    assert expected.noise is None or noise.tolist() == expected.noise, f"random numbers of {expected.labels} are wrong"


@dataclass(frozen=True)
class Held:
    """What this process holds at one moment."""

    children: int
    descriptors: int
    threads: int
    names: int
    """Of ours in /dev/shm."""
    mapped: int
    """Bytes of shared memory."""
    peak_rss: int

    @classmethod
    def now(cls) -> Held:
        """Count."""
        maps = Path("/proc/self/maps").read_text().splitlines()
        shared = [line.split() for line in maps if "/dev/shm/" in line or "/memfd:" in line]
        ends = [[int(end, 16) for end in words[0].split("-")] for words in shared]
        return cls(
            children=sum(len(path.read_text().split()) for path in Path("/proc/self/task").glob("*/children")),
            descriptors=len(os.listdir("/proc/self/fd")),
            threads=len(os.listdir("/proc/self/task")),
            names=sum("shmloader" in name for name in os.listdir("/dev/shm")),
            mapped=sum(last - first for first, last in ends),
            peak_rss=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )

    def settled(self) -> Held:
        """Count, and while it is more than ``self``, count again for SETTLE_S: the kernel lists a thread for a moment
        after it was joined, and numpy's BLAS ends its own with every fork."""
        deadline = time.monotonic() + SETTLE_S
        while self.leaks(now := Held.now()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return now

    def leaks(self, now: Held) -> list[str]:
        """Return what is more now than then; peak RSS is for the reader to judge."""
        names = ("children", "descriptors", "threads", "names", "mapped")
        pairs = [(name, getattr(self, name), getattr(now, name)) for name in names]
        return [f"{name}: {before} before, {after} now" for name, before, after in pairs if after > before]
