"""What a batch and a worker really take: a few batches made in a child process, exactly as a worker would make them.

    plan ──batches of indices──▶ child: fetch, collate, describe in shared memory ──▶ bytes per batch, private bytes

The child is started the way workers are (torch's current start method), works with one thread, and ends. Private memory
is what nobody shares: pages that a forked child has not written yet, the pack's pages and the arena count elsewhere.
"""

from __future__ import annotations

import gc
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.multiprocessing
from torch.utils.data.dataloader import _DatasetKind

from .cgroups import read_table
from .collate import SlotWriter
from .describe import BatchDescription
from .errors import WorkerDied
from .failure import WorkerFailure
from .fetch import Fetcher, Recipe
from .gathering import Gatherer
from .layout import align
from .segment import Segment, round_up

_FIRST_SLOT = 1 << 20  # bytes; a batch that needs more is made again in a slot that is large enough
_RESERVED = 1 << 40  # bytes of address space, which cost nothing
DEADLINE_S = 300.0


@dataclass(frozen=True, slots=True)
class Probe:
    """What was measured. Sizes in bytes."""

    batch_bytes: tuple[int, ...]
    """Of a slot, for each batch of indices that was asked for."""
    private_bytes: int
    """The most that the process had to itself, without shared memory and file pages."""
    fetch_s: tuple[float, ...]
    """Seconds for each batch, in a process with one thread."""


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


def _forget_peak() -> None:
    """Let the kernel's peak of resident memory begin anew; where it cannot, the peak is the one since the fork."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        return


def _peak_private_bytes() -> int:
    """Return the most private memory since ``_forget_peak``: what is there now, and what has been freed since the peak.

    File pages and shared memory only grow here, so the fall from the peak is private memory.
    """
    status = read_table("/proc/self/status")
    fallen = status.get("VmHWM", 0) - status.get("VmRSS", 0)
    return private_bytes() + (max(0, fallen) << 10)


class _Maker:
    """Makes batches in a slot of its own, as a worker does."""

    def __init__(self, recipe: Recipe) -> None:
        self._segment = Segment.create(_RESERVED, "memfd")
        self._slot_bytes = 0
        self._grow(_FIRST_SLOT)
        self._gatherer = Gatherer.of(recipe, self._segment.memory)
        self._fetcher = Fetcher(recipe, redirecting=False)

    def _grow(self, nbytes: int) -> None:
        nbytes = round_up(nbytes)
        if nbytes > self._slot_bytes:
            self._segment.commit(self._slot_bytes, nbytes - self._slot_bytes)
            self._slot_bytes = nbytes

    def make(self, indices: list[int]) -> int:
        """Make one batch and return the bytes of the slot that it needs."""
        start = align(8 * len(indices))
        if self._gatherer is not None:
            plan = self._gatherer.plan(np.asarray(indices, np.int64), start)
            self._grow(plan.end)
            self._gatherer.gather(plan, 0)
            return align(plan.end) + len(pickle.dumps(plan.root, pickle.HIGHEST_PROTOCOL))
        return self._fetch(indices, start)

    def _fetch(self, indices: list[int], start: int) -> int:
        while True:
            writer = SlotWriter(self._segment.memory, self._segment.address, 0, self._slot_bytes, start)
            description = BatchDescription(self._fetcher.fetch(indices, writer), writer)
            need = align(description.end) + len(pickle.dumps(description.root, pickle.HIGHEST_PROTOCOL))
            if need <= self._slot_bytes:
                description.copy_pending()
                return need
            self._grow(need + need // 8)


def _probe_main(answer: Any, recipe: Recipe, batches: Sequence[list[int]]) -> None:
    # As in a worker: without this, the garbage collector would sooner or later mark every object that a forked child
    # inherited, and so make their pages the child's own: tens of MiB, more in a large training process.
    gc.freeze()
    torch.set_num_threads(1)
    try:
        maker = _Maker(recipe)
        # The first batch pays for imports, caches and a slot that is too small, and is not what the others are like.
        maker.make(batches[0])
        _forget_peak()
        needs, times = [], []
        for indices in batches:
            start = time.perf_counter()
            needs.append(maker.make(indices))
            times.append(time.perf_counter() - start)
        answer.send(Probe(tuple(needs), _peak_private_bytes(), tuple(times)))
    except Exception as error:  # noqa: BLE001 - the dataset's code
        answer.send(WorkerFailure.of(error, "in the process that measures a batch").to_bytes())


def probe_batches(dataset: Any, batches: Sequence[list[int]], collate_fn: Callable[[list[Any]], Any]) -> Probe:
    """Make ``batches`` of a map-style dataset in a child process and return what they took.

    Raises what the dataset or ``collate_fn`` raises there, WorkerDied if the child ends without a word, TimeoutError
    after five minutes. Leaves nothing behind.
    """
    recipe = Recipe(_DatasetKind.Map, dataset, True, collate_fn, False)
    receive, send = torch.multiprocessing.Pipe(duplex=False)
    process = torch.multiprocessing.get_context().Process(target=_probe_main, args=(send, recipe, batches), daemon=True)
    process.start()
    send.close()
    try:
        if not receive.poll(DEADLINE_S):
            raise TimeoutError(f"{len(batches)} batches were not made within {DEADLINE_S:.0f} s: try a smaller batch")
        try:
            result: Probe | bytes = receive.recv()
        except EOFError:
            process.join()
            raise WorkerDied(0, process.pid or 0, process.exitcode, tuple(batches[0])) from None
    finally:
        receive.close()
        if process.is_alive():
            process.join(1.0)
        if process.is_alive():
            process.kill()
        process.join()
    if isinstance(result, bytes):
        WorkerFailure.from_bytes(result).reraise()
    assert isinstance(result, Probe)
    return result
