"""What samples look like when they come out as batches: default collate, identity, a user's own collate."""

from __future__ import annotations

import pytest

from . import cases_batches, cases_carried, cases_collate
from .compare import Case, compare


@pytest.mark.parametrize(("case", "workers"), cases_batches.CASES.parameters())
def test_default_collate_gives_what_torch_gives(case: Case, workers: int) -> None:
    """B7, A4, E1: types, dtypes, values and order of batches, and errors for samples that do not fit together."""
    compare(case, workers)


@pytest.mark.parametrize(("case", "workers"), cases_carried.CASES.parameters())
def test_a_batch_of_any_type_is_carried_through(case: Case, workers: int) -> None:
    """B7: without default collate the loader changes no type, no dtype and no value."""
    compare(case, workers)


@pytest.mark.parametrize(("case", "workers"), cases_collate.CASES.parameters())
def test_what_collate_fn_returns_is_delivered(case: Case, workers: int) -> None:
    """B7, E1: a user's collate_fn is called with the samples of the batch, and its result comes out unchanged."""
    compare(case, workers)
