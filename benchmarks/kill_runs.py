"""One worker, one SIGKILL, at any moment: two hundred times. None may hang, none may be wrong.

    python benchmarks/kill_runs.py --count 200 --seed 1

Each run starts a loader of two or three workers on a dataset of known numbers (soak_oracle.py) and kills one worker
after a random time, start-up included. With ``on_worker_death="restart"`` (every second run) all batches must be those
of the oracle, random numbers of transforms included; with ``"raise"`` the batches until WorkerDied must, and it must
come within a second of the kill unless the epoch ended first. A run of 60 seconds is a hang: all stacks, exit code 1.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Sequence

import torch

from shmloader import DataLoader, WorkerDied
from soak_oracle import Held, Known, Oracle, Repeat, check

HANG_S = 60
TOLD_S = 1.0


class Murder(threading.Thread):
    """Kills one process after a while. ``at`` is when it did."""

    def __init__(self, pid: int, delay_s: float) -> None:
        super().__init__()
        self._pid, self._delay_s = pid, delay_s
        self.at: float | None = None

    def run(self) -> None:
        time.sleep(self._delay_s)
        try:
            os.kill(self._pid, signal.SIGKILL)
            self.at = time.monotonic()
        except ProcessLookupError:
            pass


def one_run(seed: str, counts: Counter[str]) -> str:
    """Return what is wrong, or ''."""
    rng = random.Random(seed)
    workers, batch_size, restart = rng.choice((2, 3)), rng.choice((2, 5)), rng.random() < 0.5
    dataset = Known(200, slow=frozenset(range(0, 200, 7)), nap_s=0.01)
    repeat = Repeat(rng.choice((1, 5)))
    order = rng.sample(range(200), 200)
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    base_seed = int(
        torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(generator.initial_seed()))
    )
    expected = Oracle(dataset, "raise", workers, base_seed, True).epoch(
        [order[at : at + batch_size] for at in range(0, 200, batch_size)]
    )
    loader = DataLoader(
        dataset,
        batch_size,
        sampler=order,
        collate_fn=repeat,
        num_workers=workers,
        generator=generator,
        on_worker_death="restart" if restart else "raise",
    )
    iterator = iter(loader)
    murder = Murder(rng.choice(loader.stats().worker_pids), rng.random() * 0.6)
    murder.start()
    number = 0
    try:
        for batch in iterator:
            wanted = expected[number]
            if wanted is None:
                return "a batch too many"
            check(batch, wanted, repeat)
            number += 1
        counts["whole epochs"] += 1
        if number != len(expected):
            return f"{len(expected) - number} batches are missing"
    except WorkerDied as death:
        told = time.monotonic()
        counts["deaths told"] += 1
        murder.join()
        if restart or murder.at is None:
            return f"told, but {death}"
        if told - murder.at > TOLD_S:
            counts["told late"] += 1
            return f"told after {told - murder.at:.2f} s"
    finally:
        murder.join()
        counts["restarts"] += loader.stats().worker_restarts
        loader.close()
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 20))
    parser.add_argument("--only", type=int, help="repeat one run")
    chosen = parser.parse_args(arguments)
    warnings.simplefilter("error")
    for message in ("This DataLoader will create", "This process"):
        warnings.filterwarnings("ignore", message=message)
    warnings.filterwarnings("ignore", message=".*slots hold batches")
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    wrong, before = 0, Held.now()
    print(f"seed {chosen.seed}", flush=True)
    for number in range(chosen.count) if chosen.only is None else [chosen.only]:
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        fault = one_run(f"{chosen.seed}/{number}", counts)
        if fault:
            wrong += 1
            print(f"--seed {chosen.seed} --only {number}: {fault}", flush=True)
        gc.collect()
        if number == 5:
            before = Held.now()
    faulthandler.cancel_dump_traceback_later()
    leaks = before.leaks(before.settled()) if chosen.only is None else []
    found = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    print(f"{found}; {wrong} wrong, leaks: {'; '.join(leaks) or 'none'}")
    return 1 if wrong or leaks else 0


if __name__ == "__main__":
    sys.exit(main())
