"""Which samples come, in which batches and in which order: samplers, datasets, seeds."""

from __future__ import annotations

import pytest

from . import cases_order, cases_seeds
from .compare import Case, compare


@pytest.mark.parametrize(("case", "workers"), cases_order.CASES.parameters())
def test_the_same_samples_come_in_the_same_order(case: Case, workers: int) -> None:
    """E3: samplers, batch samplers, map-style and iterable datasets give torch's batches in torch's order."""
    compare(case, workers)


@pytest.mark.parametrize(("case", "workers"), cases_seeds.CASES.parameters())
def test_the_same_numbers_are_drawn(case: Case, workers: int) -> None:
    """F1, C14: with the same seed, datasets and collate functions draw the same numbers as under torch's loader."""
    compare(case, workers)
