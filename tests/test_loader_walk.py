"""A walk over what a user and the world can do to a loader, workers killed at every turn, beside a plain loop (A7)."""

from __future__ import annotations

import os
import signal
import warnings
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shmloader import CopiedOutWarning, DataLoader
from soak_oracle import Expected, Known, Oracle, Repeat, check

SIZE, LENGTH = 3, 45


class Walk(RuleBasedStateMachine):
    """A persistent loader with two workers; the model is what is left of the epoch, and what is kept."""

    def __init__(self) -> None:
        super().__init__()
        warnings.simplefilter("ignore", CopiedOutWarning)
        self.kept: list[tuple[Any, Expected]] = []
        self.iterator: Any = None
        self.left: list[Expected | None] = []

    @initialize(
        seed=st.integers(0, 1 << 20),
        prefetch_factor=st.sampled_from([1, 3]),
        most=st.sampled_from([1, 7]),
        small=st.booleans(),
    )
    def make(self, seed: int, prefetch_factor: int, most: int, small: bool) -> None:
        """Draw a loader: batches of one size or of many, an arena with room or without."""
        self.repeat = Repeat(most)
        self.order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(seed)).tolist()
        self.loader = DataLoader(
            Known(LENGTH),
            SIZE,
            sampler=self.order,
            num_workers=2,
            collate_fn=self.repeat,
            prefetch_factor=prefetch_factor,
            persistent_workers=True,
            generator=torch.Generator().manual_seed(seed),
            arena_bytes=65536 if small else None,
            on_worker_death="restart",
        )
        base_seed = torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(seed)).item()
        self.oracle = Oracle(Known(LENGTH), "raise", 2, int(base_seed), ordered=True)
        self.kills = 0

    @rule()
    def begin(self) -> None:
        """A new epoch, whatever became of the last one."""
        if self.left:
            self.oracle.exact = False  # how far the workers had come is not known
        self.left = self.oracle.epoch([self.order[at : at + SIZE] for at in range(0, LENGTH, SIZE)])
        self.iterator = iter(self.loader)

    @precondition(lambda self: self.iterator is not None)
    @rule(count=st.integers(1, 6), keep=st.booleans())
    def take(self, count: int, keep: bool) -> None:
        """The next batches are the oracle's, to the last random number."""
        for _ in range(count):
            batch = next(self.iterator, None)
            if batch is None:
                assert not self.left, f"{len(self.left)} batches are missing"
                self.iterator = None
                return
            wanted = self.left.pop(0)
            assert wanted is not None
            check(batch, wanted, self.repeat)
            if keep:
                self.kept.append((batch, wanted))

    @precondition(lambda self: self.iterator is not None)
    @rule(which=st.integers(0, 1))
    def kill(self, which: int) -> None:
        """One worker, wherever it is: idle, in a sample, about to reply."""
        pids = self.loader.stats().worker_pids
        if len(pids) == 2:  # the other one may have been killed a moment ago
            os.kill(pids[which], signal.SIGKILL)
            self.kills += 1

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """Let go of a batch."""
        del self.kept[data.draw(st.integers(0, len(self.kept) - 1))]

    @invariant()
    def kept_batches_are_what_they_were(self) -> None:
        """No slot was written while somebody looked at it, by the living or the dead."""
        for batch, wanted in self.kept:
            check(batch, wanted, self.repeat)

    def teardown(self) -> None:
        """Kept batches outlive the loader; every restart had a death."""
        if hasattr(self, "loader"):
            restarts = self.loader.stats().worker_restarts
            self.loader.close()
            self.kept_batches_are_what_they_were()
            assert restarts <= self.kills


TestWalk = Walk.TestCase
TestWalk.settings = settings(
    max_examples=8, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)


class LongWalk(Walk):
    """The same, thousands of steps."""


TestLongWalk = pytest.mark.slow(LongWalk.TestCase)
TestLongWalk.settings = settings(
    max_examples=50, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
