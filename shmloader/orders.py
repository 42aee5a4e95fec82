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
    inherited_fds: tuple[int, ...]
    """Write ends of life lines that a forked worker inherited and must not hold."""
