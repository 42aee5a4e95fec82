"""What the main process keeps of a ticket, and how a batch's indices are written into its slot.

int64 array, list of plain ints  ──▶  8 bytes an index          what samplers nearly always yield
anything else                    ──▶  pickle                    arrives as the sampler gave it: tuples, strings,
arrays
iterable dataset                 ──▶  a count                   there are no indices
"""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data.dataloader import _sharding_worker_init_fn

from .badsamples import Avoid
from .errors import ShmLoaderError
from .mailbox import COUNT, INT64, PICKLED, SINGLE
from .slot import Slot

_NOTHING = memoryview(b"")


class Task:
    """A ticket that was handed out and not answered for good."""

    # Rare, so they stand on the class: a ticket that goes the normal way sets none of them.
    need = 0
    """Bytes that its worker has asked for."""
    refused: ShmLoaderError | None = None
    """Why they cannot be had; its worker answers VOID then."""
    heap: npt.NDArray[np.uint8] | None = None
    """Where the pieces of a batch are put together that no slot can hold now; ``filled`` bytes are there."""
    filled = 0

    def __init__(self, worker: int, slot: Slot, indices: Any) -> None:
        self.worker = worker
        self.slot: Slot | None = slot
        """The slot it holds; None once it holds none."""
        self.indices = indices

    def begin_again(self) -> None:
        """Forget what a worker that has died had done for it."""
        self.need = self.filled = 0
        self.heap = None

    def take_piece(self, piece: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Copy the next piece to the heap, and return the heap."""
        if self.heap is None:
            self.heap = np.empty(self.need, np.uint8)
        self.heap[self.filled : self.filled + len(piece)] = piece
        self.filled += len(piece)
        return self.heap

    def shown_indices(self) -> tuple[object, ...]:
        """Return the indices for a message."""
        indices = self.indices.indices if isinstance(self.indices, Avoid) else self.indices
        if isinstance(indices, np.ndarray):
            return tuple(indices.tolist())
        return tuple(indices) if isinstance(indices, list | tuple) else (indices,)


def oldest_indices(tasks: dict[int, Task], worker: int) -> tuple[object, ...]:
    """Return the indices that a worker is at: those of its oldest ticket."""
    mine = [batch for batch, task in tasks.items() if task.worker == worker]
    return tasks[min(mine)].shown_indices() if mine else ()


def _as_int64(indices: Any) -> array[int] | None:
    """Return plain ints as int64, or None if there is anything else among them, which must arrive as it is."""
    if type(indices) is not list or not indices or set(map(type, indices)) != {int}:
        return None
    try:
        return array("q", indices)
    except OverflowError:
        return None


def encode_indices(indices: Any, *, iterable: bool, batched: bool) -> tuple[int, int, memoryview]:
    """Return the index kind and count of a ticket, and the bytes that go to the beginning of its slot."""
    if iterable:
        return (COUNT, len(indices), _NOTHING) if batched else (SINGLE, 1, _NOTHING)
    if batched:
        if type(indices) is np.ndarray and indices.dtype == np.int64 and indices.ndim == 1 and len(indices):
            return INT64, len(indices), indices.data.cast("B")
        numbers = _as_int64(indices)
        if numbers is not None:
            return INT64, len(numbers), memoryview(numbers).cast("B")
    pickled = pickle.dumps(indices, pickle.HIGHEST_PROTOCOL)
    return PICKLED, len(pickled), memoryview(pickled)


class ShardingInit:
    """worker_init_fn of data pipes: shards them among workers and ranks, then calls the user's."""

    def __init__(self, user_fn: Callable[[int], None] | None, world_size: int, rank: int) -> None:
        self._args = (user_fn, world_size, rank)

    def __call__(self, worker: int) -> None:
        _sharding_worker_init_fn(*self._args, worker)
