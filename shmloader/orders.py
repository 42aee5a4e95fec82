"""All that a worker process needs to begin. Crosses to the child once, by fork or by pickle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .doorbell import Doorbell
from .fetch import Recipe
from .lifeline import LifeLine
from .segment import Segment
from .witness import WitnessEnd


@dataclass(frozen=True)
class WorkerOrders:
    """Who a worker is, what it reads, and where its rings and bells are."""

    worker: int
    """Number of this worker, from 0."""
    num_workers: int
    recipe: Recipe
    worker_init_fn: Callable[[int], None] | None
    base_seed: int
    shared_seed: int | None
    """Seed of data pipes, equal in all workers."""
    segment: Segment
    tickets_at: int
    """Offset of the ring of tickets in the segment."""
    replies_at: int
    """Offset of the ring of replies."""
    capacity: int
    """Messages that each ring holds."""
    ticket_bell: Doorbell
    reply_bell: Doorbell
    life_line: LifeLine
    witness: WitnessEnd
    epoch_at: int
    """Offset of the number of the current epoch: tickets of earlier ones are void."""
    position_at: int
    """Offset of an int64 that says at which sample of a batch the worker is, while it is ``probing``."""
    states_at: int | None
    """Offset of its random states (see randomstates.py), kept for a successor; None: it will have none."""
    redo: int
    """A successor: the label of the first ticket that it makes again; it goes on with the random states before that.
    0: it is the first of its kind, or has nothing to continue."""
    probing: bool
    """A successor whose first ticket was fatal: ask for the samples one by one first, and tell at which one it is."""
