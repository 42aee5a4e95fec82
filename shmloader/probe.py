"""What a batch and a worker really take: each batch made a few times by a real loader with one worker.

    batches of indices ──▶ DataLoader(num_workers=1) ──▶ slot size from stats(), private memory from /proc/PID

Measured is the thing itself, so whatever the loader learns to do better is in the numbers. Private memory is what
nobody shares: pages that a forked worker has not written yet, the pack's pages and the arena are counted elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .cgroups import read_table
from .loader import DataLoader

DEADLINE_S = 300.0
"""Seconds that one batch may take."""
_TIMES = 3
"""How often each batch is made. The first time pays for imports, caches and the search for the slot's size."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What was measured. Sizes in bytes."""

    batch_bytes: tuple[int, ...]
    """Of a slot, for each batch of indices that was asked for; in whole pages."""
    private_bytes: int
    """The most that a worker had to itself, without shared memory and file pages."""


def private_bytes(pid: int | str = "self") -> int:
    """Return the memory that a process shares with no other: written pages of private mappings. In bytes.

    0 if the kernel does not tell, or the process is gone. Takes some milliseconds.
    """
    total = dirty = 0
    try:
        with open(f"/proc/{pid}/smaps", encoding="ascii", errors="replace") as lines:
            for line in lines:
                # Of one mapping, Private_Dirty comes before Anonymous. Pages of shared memory are dirty, not anonymous.
                if line.startswith("Private_Dirty:"):
                    dirty = int(line.split()[1])
                elif line.startswith("Anonymous:"):
                    total += min(dirty, int(line.split()[1]))
    except OSError:
        return 0
    return total << 10


def _forget_peak(pid: int) -> None:
    """Let the kernel's peak of resident memory begin anew; where it cannot, the peak is the one since the fork."""
    try:
        with open(f"/proc/{pid}/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        return


def _peak_private_bytes(pid: int) -> int:
    """Return the most private memory since ``_forget_peak``: what is there now, and what has been freed since the peak.

    File pages and shared memory only grow here, so the fall from the peak is private memory.
    """
    status = read_table(f"/proc/{pid}/status")
    fallen = status.get("VmHWM", 0) - status.get("VmRSS", 0)
    return private_bytes(pid) + (max(0, fallen) << 10)


def probe_batches(dataset: Any, batches: Sequence[list[int]], collate_fn: Callable[[list[Any]], Any] | None) -> Probe:
    """Make ``batches`` of a map-style dataset and return what they took. ``collate_fn`` None: torch's default.

    Raises what the dataset or ``collate_fn`` raises, and what a loader raises: WorkerDied, WorkerTimeout after five
    minutes for one batch, SharedMemoryFull. Leaves nothing behind.
    """
    needs, peaks = zip(*[_probe(dataset, indices, collate_fn) for indices in batches], strict=True)
    return Probe(needs, max(peaks))


def _probe(dataset: Any, indices: list[int], collate_fn: Callable[[list[Any]], Any] | None) -> tuple[int, int]:
    """Return the slot that one batch needs, and the most private memory of the worker that makes it."""
    need = peak = 0
    with DataLoader[Any](
        dataset,
        batch_sampler=[indices] * _TIMES,
        num_workers=1,
        prefetch_factor=1,
        collate_fn=collate_fn,
        timeout=DEADLINE_S,
    ) as loader:
        for _ in loader:
            stats = loader.stats()
            if not need and stats.arena is not None:
                need = stats.arena.slot_bytes
                for pid in stats.worker_pids:
                    _forget_peak(pid)
            else:
                peak = max(peak, *map(_peak_private_bytes, stats.worker_pids))
    return need, peak
