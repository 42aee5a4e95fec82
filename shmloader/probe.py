"""What a batch and a worker really take: a few batches made by real loaders with one worker.

    each batch of indices ──▶ a DataLoader of its own ──▶ slot size from stats()
    all of them in turn   ──▶ one DataLoader          ──▶ private memory of its worker from /proc/PID

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
"""How often all batches are made in turn for the private memory. The very first pays for imports and caches."""


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
    needs = tuple([_slot_bytes(dataset, indices, collate_fn) for indices in batches])
    return Probe(needs, _private_peak(dataset, [*batches] * _TIMES, collate_fn))


def _loader(
    dataset: Any, batches: Sequence[list[int]], collate_fn: Callable[[list[Any]], Any] | None
) -> DataLoader[Any]:
    return DataLoader(
        dataset, batch_sampler=batches, num_workers=1, prefetch_factor=1, collate_fn=collate_fn, timeout=DEADLINE_S
    )


def _slot_bytes(dataset: Any, indices: list[int], collate_fn: Callable[[list[Any]], Any] | None) -> int:
    """Return the slot that one batch needs: a loader that has made nothing else chooses its slots for it."""
    with _loader(dataset, [indices], collate_fn) as loader:
        for _ in loader:
            arena = loader.stats().arena
            if arena is not None:
                return arena.slot_bytes
    raise AssertionError("a loader over one batch of indices gave no batch")


def _private_peak(dataset: Any, batches: Sequence[list[int]], collate_fn: Callable[[list[Any]], Any] | None) -> int:
    """Return the most private memory of a worker that makes ``batches``, once it has made the first of them."""
    peak = 0
    with _loader(dataset, batches, collate_fn) as loader:
        for number, _ in enumerate(loader):
            for pid in loader.stats().worker_pids:
                if number == 0:
                    _forget_peak(pid)
                else:
                    peak = max(peak, _peak_private_bytes(pid))
    return peak
