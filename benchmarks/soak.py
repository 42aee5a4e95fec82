"""Minutes of random workloads with random kills, every batch checked: does anything hang, lie, or stay behind?

    python benchmarks/soak.py --minutes 30 --seed 1

Each round draws a loader (workers, batch size, prefetching, persistence, order, arena, start method, policies) and a
dataset with bad samples, and then a life for it: epochs that are finished, left in the middle or dropped, batches that
are kept and compared again later, workers that are killed with SIGKILL from a timer at any moment, start-up and
tear-down included. Every batch is compared with an oracle that is a plain loop (soak_oracle.py), random numbers of
transforms included. Meanwhile it is measured how long closing takes, in some rounds with all workers asleep in a
sample; at the end, how long programs take to exit. What the process holds is counted after warming up and at the end.

A round that takes two minutes is a hang: all stacks, and exit code 1. What this does not show: GPUs, other start
methods than fork in most rounds, more memory than a few MiB a round.

Exit code 0: nothing wrong; 1: a wrong batch, a hang or a leak. The seed of each round is printed when it fails.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import os
import random
import signal
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from typing import Any

import torch

from shmloader import AllSamplesBad, BadSampleWarning, CopiedOutWarning, DataLoader, WorkerDied
from soak_exits import HANG_S, exits
from soak_oracle import Expected, Held, Known, Oracle, Repeat, check

NAP_S = 1000.0


class Wrong(Exception):
    """What arrived is not what was to arrive."""


@dataclass
class Tally:
    """What happened in all rounds."""

    counts: Counter[str] = field(default_factory=Counter)
    close_s: list[float] = field(default_factory=list)
    asleep_s: list[float] = field(default_factory=list)
    """Closing while all workers are asleep in a sample."""


class Killer:
    """Kills a random worker of the current iterator at random moments, from a timer signal."""

    def __init__(self, rng: random.Random, mean_s: float, tally: Tally) -> None:
        self._rng, self._mean_s, self._tally = rng, mean_s, tally
        self.processes: list[Any] = []

    def __enter__(self) -> Killer:
        if self._mean_s:
            signal.signal(signal.SIGALRM, self._strike)
            self._arm()
        return self

    def __exit__(self, *exc: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._mean_s = 0.0

    def _arm(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, max(0.01, self._rng.expovariate(1 / self._mean_s)))

    def _strike(self, *_: object) -> None:
        if not self._mean_s:
            return
        alive = [process for process in list(self.processes) if process._popen and process._popen.returncode is None]
        if alive:
            try:
                os.kill(self._rng.choice(alive).pid, signal.SIGKILL)
                self._tally.counts["kills"] += 1
            except ProcessLookupError:
                pass
        self._arm()


class Round:
    """One loader and its life. ``run`` raises AssertionError for whatever is wrong."""

    def __init__(self, seed: str, tally: Tally) -> None:
        self.rng = rng = random.Random(seed)
        self.tally = tally
        self.workers = rng.choice((0, 1, 2, 2, 3))
        self.batch_size = rng.choice((1, 3, 8, 20))
        self.policy = rng.choice(("raise", "skip", "replace"))
        length = rng.choice((30, 150, 400))
        bad = frozenset(rng.sample(range(length), rng.choice((0, 0, 1, 10))))
        self.dataset = Known(length, bad)
        self.restart = bool(self.workers) and rng.random() < 0.7
        self.kill_mean_s = rng.choice((0.0, 0.3, 1.0)) if self.workers else 0.0
        self.persistent = bool(self.workers) and rng.random() < 0.5
        self.ordered = rng.random() < 0.8
        self.repeat = Repeat(rng.choice((1, 3, 11)))
        self.order = [rng.sample(range(length), length) for _ in range(3)]
        self.kept: list[tuple[Any, Expected]] = []
        self.keep = rng.choice((0.0, 0.1, 0.9))
        self.generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
        self.base_seeds = torch.Generator().manual_seed(self.generator.initial_seed())
        self.epoch_order: list[int] = []

    def loader(self) -> DataLoader[Any]:
        """Make the loader that was drawn."""
        rng = self.rng
        arguments: dict[str, Any] = {"num_workers": self.workers, "on_bad_sample": self.policy}
        if self.workers:
            arguments["prefetch_factor"] = rng.choice((1, 2, 4))
            arguments["persistent_workers"] = self.persistent
            arguments["on_worker_death"] = "restart" if self.restart else "raise"
            arguments["multiprocessing_context"] = "forkserver" if rng.random() < 0.02 else "fork"
        if rng.random() < 0.3:
            arguments["arena_bytes"] = (self.workers + 3) * max(65536, self.batch_size * 64 * 8 * self.repeat.most * 2)
        return DataLoader(
            self.dataset,
            batch_size=self.batch_size,
            sampler=self.epoch_order,
            collate_fn=self.repeat,
            in_order=self.ordered,
            generator=self.generator,
            **arguments,
        )

    def oracle(self) -> Oracle:
        """Draw the base seed that the loader draws at the same moment."""
        base_seed = int(torch.empty((), dtype=torch.int64).random_(generator=self.base_seeds).item())
        return Oracle(self.dataset, self.policy, self.workers, base_seed, self.ordered)

    def run(self) -> None:
        """Live through up to three epochs, and end somehow."""
        self.epoch_order[:] = self.order[0]
        loader = self.loader()
        oracle: Oracle | None = None
        with Killer(self.rng, self.kill_mean_s, self.tally) as killer:
            for order in self.order[: self.rng.randint(1, 3)]:
                self.epoch_order[:] = order
                if oracle is None or not self.persistent:
                    oracle = self.oracle()
                if not self._epoch(loader, oracle, killer):
                    oracle = None
                self._look_at_kept()
            killer.processes = []
        self.tally.counts["restarts"] += loader.stats().worker_restarts
        self.tally.counts["copied out"] += loader.stats().copied_out
        self._end(loader)
        self._look_at_kept()

    def _epoch(self, loader: DataLoader[Any], oracle: Oracle, killer: Killer) -> bool:
        """One epoch, or a part of it. Return whether the workers' random numbers are still known afterwards."""
        size, order, counts = self.batch_size, list(self.epoch_order), self.tally.counts
        expected = oracle.epoch([order[at : at + size] for at in range(0, len(order), size)])
        leave_at = self.rng.randrange(len(expected) + 1) if expected and self.rng.random() < 0.3 else None
        left = list(expected)
        try:
            iterator = iter(loader)
            killer.processes = iterator._workers  # type: ignore[attr-defined]
            while leave_at is None or len(expected) - len(left) < leave_at:
                try:
                    batch = next(iterator)
                except StopIteration:
                    break
                except (ValueError, AllSamplesBad) as error:
                    self._refused(error, left)
                    continue
                self._take(batch, left)
        except WorkerDied as death:
            # Told at once, or after too many kills at one place; the loader can begin again.
            if not self.kill_mean_s or (self.restart and death.deaths < 3):
                raise
            counts["deaths told" if not self.restart else "restarts given up"] += 1
            return False
        if leave_at is not None:
            counts["epochs left"] += 1
            oracle.exact = False  # how far the workers had come is not known
            return True
        if left:
            raise Wrong(f"{len(left)} batches are missing")
        counts["epochs"] += 1
        return True

    def _refused(self, error: Exception, left: list[Expected | None]) -> None:
        """An exception in place of a batch: there must be a bad sample in it."""
        if " bad" not in str(error) or None not in left or (self.ordered and left[0] is not None):
            raise error
        left.remove(None)
        self.tally.counts["bad samples raised"] += 1

    def _take(self, batch: Any, left: list[Expected | None]) -> None:
        """Compare a batch, and perhaps keep it."""
        assert left, "a batch too many"
        if self.ordered:
            wanted = left.pop(0)
        else:
            labels = batch[1].tolist()
            wanted = next((each for each in left if each is not None and each.labels == labels), None)
            assert wanted is not None, f"nobody asked for {labels}"
            left.remove(wanted)
        assert wanted is not None, "a batch in place of an exception"
        check(batch, wanted, self.repeat)
        self.tally.counts["batches"] += 1
        if self.rng.random() < self.keep:
            self.kept.append((batch, wanted))
        if len(self.kept) > 60 or (self.kept and self.rng.random() < 0.02):
            del self.kept[self.rng.randrange(len(self.kept))]

    def _look_at_kept(self) -> None:
        for batch, wanted in self.kept:
            check(batch, wanted, self.repeat)
        self.tally.counts["kept batches compared again"] += len(self.kept)

    def _end(self, loader: DataLoader[Any]) -> None:
        """Close, or drop and collect, perhaps in the middle of an epoch."""
        if self.rng.random() < 0.5:
            self.epoch_order[:] = self.order[0]
            with contextlib.suppress(StopIteration, ValueError, RuntimeError):
                iterator = iter(loader)
                next(iterator)
        started = time.monotonic()
        if self.rng.random() < 0.7:
            loader.close()
        del loader
        gc.collect()
        self.tally.close_s.append(time.monotonic() - started)


def sleeping_round(tally: Tally, workers: int) -> None:
    """All workers are asleep in a sample when the loader is closed."""
    dataset = Known(400, slow=frozenset(range(workers, 400)), nap_s=NAP_S)
    loader = DataLoader(dataset, 1, num_workers=workers)
    iterator = iter(loader)
    for _ in range(workers):
        next(iterator)
    time.sleep(0.3)  # they fall asleep meanwhile
    started = time.monotonic()
    loader.close()
    tally.asleep_s.append(time.monotonic() - started)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 20))
    parser.add_argument("--round", type=int, help="repeat one round")
    chosen = parser.parse_args(arguments)
    warnings.simplefilter("error")
    for kind in (BadSampleWarning, CopiedOutWarning, DeprecationWarning):
        warnings.simplefilter("ignore", kind)
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    torch.set_num_threads(1)
    tally, wrong = Tally(), []
    ends = time.monotonic() + 60 * chosen.minutes
    print(f"seed {chosen.seed}, {chosen.minutes:g} minutes", flush=True)
    forkserver.ensure_running()  # Python's own, once a process: some rounds use them, and they stay
    resource_tracker.ensure_running()
    number, before = chosen.round or 0, Held.now()
    while True:
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        seed = f"{chosen.seed}/{number}"
        try:
            if number % 25 == 7:
                sleeping_round(tally, 1 + number % 4)
            else:
                Round(seed, tally).run()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
            wrong.append(f"round {number}: {type(error).__name__}: {error}")
            print(f"--seed {chosen.seed} --round {number}: {wrong[-1]}", flush=True)
        number += 1
        gc.collect()
        if number == 10:
            before = Held.now()
        if chosen.round is not None or (time.monotonic() > ends and number > 10):
            break
    faulthandler.dump_traceback_later(10 * HANG_S, exit=True)
    now = before.settled()
    leaks = before.leaks(now) if chosen.round is None else []
    counts = ", ".join(f"{count} {name}" for name, count in sorted(tally.counts.items()))
    print(f"{number} rounds: {counts}")
    if tally.close_s:
        most, middle = max(tally.close_s), statistics.median(tally.close_s)
        print(f"closing: {len(tally.close_s)} times, median {middle:.3f} s, longest {most:.2f} s")
    if tally.asleep_s:
        print(f"closing with all workers asleep: {len(tally.asleep_s)} times, longest {max(tally.asleep_s):.2f} s")
    for way, seconds, fault in exits() if chosen.round is None else []:
        print(f"exit by {way}{', 8 workers asleep' * ('torch' not in way)}: {seconds:.2f} s {fault}")
        wrong += [fault] * bool(fault)
    print(f"held after 10 rounds: {before}\nheld at the end:      {now}")
    print(f"{len(wrong)} wrong, leaks: {'; '.join(leaks) or 'none'}")
    return 1 if wrong or leaks else 0


if __name__ == "__main__":
    sys.exit(main())
