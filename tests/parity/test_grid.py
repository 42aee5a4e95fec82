"""E3: every combination of n, batch size, workers, drop_last and shuffle gives torch's batches, and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from .compare import OURS, TORCH, Loader, freeze, reseed

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Squares(Dataset[Any]):
    """Sample i is (i, i squared as a float tensor)."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.tensor([float(index * index)])


def epoch(kind: Loader, n: int, batch_size: int, workers: int, *, drop: bool, shuffle: bool) -> Any:
    """Return the length and all frozen batches of one epoch, or the error of the constructor."""
    reseed()
    try:
        loader = kind(Squares(n), batch_size, shuffle, num_workers=workers, drop_last=drop)
    except ValueError as error:
        return str(error)
    return len(loader), [freeze(batch) for batch in loader], torch.initial_seed(), torch.get_rng_state().tolist()


def check(ns: Iterable[int], sizes: Iterable[int], workers: int, theirs: int, *, drop: bool, shuffle: bool) -> None:
    """Compare ours at ``workers`` with torch's at ``theirs`` workers: torch's order does not depend on their number."""
    for n, size in itertools.product(ns, sizes):
        expected = epoch(TORCH, n, size, theirs, drop=drop, shuffle=shuffle)
        found = epoch(OURS, n, size, workers, drop=drop, shuffle=shuffle)
        assert found == expected, f"n={n} batch_size={size} num_workers={workers} drop_last={drop} shuffle={shuffle}"
        if not isinstance(found, str):
            assert found[0] == len(found[1]), f"len() lies for n={n} batch_size={size}"


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop", [False, True])
def test_the_whole_grid_without_workers(drop: bool, shuffle: bool) -> None:
    """E3: n 0..50, batch sizes 1..9 and 60, in the main process."""
    check(range(51), (*range(1, 10), 60), 0, 0, drop=drop, shuffle=shuffle)


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize(("drop", "shuffle"), [(False, True), (True, False)])
def test_a_covering_part_of_the_grid_with_workers(workers: int, drop: bool, shuffle: bool) -> None:
    """E3: borders around multiples of the batch size and of the number of workers, torch with as many workers."""
    check((0, 1, 4, 7), (1, 4), workers, workers, drop=drop, shuffle=shuffle)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop", [False, True])
def test_the_grid_with_workers(workers: int, drop: bool, shuffle: bool) -> None:
    """E3: n 0..50 with 1, 2 and 4 workers: each n with two of the batch sizes 1..9, by turns."""
    for n in range(51):
        sizes = (1 + n % 9, 1 + (n * 2 + 4) % 9)
        check((n,), sizes, workers, 0, drop=drop, shuffle=shuffle)
