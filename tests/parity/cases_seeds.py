"""Random numbers: what a dataset draws in a worker, and what is left of the parent's states afterwards."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from .compare import Cases
from .samples import DrawingStream, Draws, Rows

CASES = Cases()


def seeded(seed: int = 11) -> torch.Generator:
    """Return a generator in a known state."""
    return torch.Generator().manual_seed(seed)


def drawing_collate(samples: list[Any]) -> Any:
    """Draw in collate_fn."""
    return len(samples), torch.rand(3), random.random(), np.random.rand(2), torch.randn(2, 2)


def dropping_collate(samples: list[Any]) -> Any:
    """Draw a mask over the batch, as an augmentation does."""
    rows = torch.stack([row for row, _ in samples])
    return rows * (torch.rand_like(rows) > 0.5), torch.randperm(len(samples)), torch.bernoulli(torch.full((4,), 0.5))


def reseeding_init(worker: int) -> None:
    """Give the worker seeds of one's own."""
    torch.manual_seed(100 + worker)
    random.seed(200 + worker)
    np.random.seed(300 + worker)


def seed_from_torch(worker: int) -> None:
    """Seed numpy from torch's initial seed: the recipe of torch's documentation."""
    np.random.seed(torch.initial_seed() % 2**32)
    random.seed(torch.initial_seed() % 2**32)


@CASES.case(epochs=3)
def global_seed() -> Any:
    """F1: torch, random and numpy draw as under torch from the global seed; other numbers in each epoch."""
    return Draws(), {"batch_size": 2}


@CASES.case(epochs=3)
def own_generator() -> Any:
    """F1: the base seed comes from generator=."""
    return Draws(), {"batch_size": 2, "generator": seeded()}


@CASES.case(epochs=2)
def shuffled_draws() -> Any:
    """F1: shuffle and the base seed are drawn from the generator in torch's order."""
    return Draws(), {"batch_size": 3, "shuffle": True, "generator": seeded()}


@CASES.case(epochs=2)
def shuffled_draws_globally() -> Any:
    """F1: shuffle and the base seed are drawn from the global generator in torch's order."""
    return Draws(), {"batch_size": 3, "shuffle": True}


@CASES.case(workers=(2,), epochs=3)
def persistent_draws() -> Any:
    """F1, C14: persistent workers go on drawing where they stopped, as torch's do."""
    return Draws(), {"batch_size": 2, "persistent_workers": True}


@CASES.case(workers=(1, 3))
def other_numbers_of_workers() -> Any:
    """F1: each worker has its own seed."""
    return Draws(9), {"batch_size": 1}


@CASES.case()
def draws_in_collate() -> Any:
    """F1: collate_fn draws from the worker's states."""
    return Rows(8), {"batch_size": 2, "collate_fn": drawing_collate}


@CASES.case()
def augmentation_in_collate() -> Any:
    """F1: random masks made in collate_fn."""
    return Rows(8), {"batch_size": 2, "collate_fn": dropping_collate, "shuffle": True}


@CASES.case(epochs=2)
def draws_in_a_stream() -> Any:
    """F1: an iterable dataset draws as under torch."""
    return DrawingStream(), {"batch_size": None}


@CASES.case(workers=(2,), epochs=2)
def init_fn_reseeds() -> Any:
    """F1: worker_init_fn may reseed everything."""
    return Draws(), {"batch_size": 2, "worker_init_fn": reseeding_init}


@CASES.case(workers=(2,), epochs=2)
def init_fn_from_torch_seed() -> Any:
    """F1: torch.initial_seed() in worker_init_fn is the worker's seed."""
    return Draws(), {"batch_size": 2, "worker_init_fn": seed_from_torch}


@CASES.case()
def unbatched_draws() -> Any:
    """F1: the same without batches."""
    return Draws(5), {"batch_size": None}


@CASES.case(workers=(2,), bag=True)
def in_any_order() -> Any:
    """C9, F1: in_order=False gives the same batches, whatever their order."""
    return Rows(8), {"batch_size": 2, "in_order": False, "shuffle": True}
