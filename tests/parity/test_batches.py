"""Default collate and identity: what samples look like when they come out as batches."""

from __future__ import annotations

import pytest

from . import cases_batches
from .compare import Case, compare


@pytest.mark.parametrize(("case", "workers"), cases_batches.CASES.parameters())
def test_default_collate_gives_what_torch_gives(case: Case, workers: int) -> None:
    """B7, A4, E1: types, dtypes, values and order of batches, and errors for samples that do not fit together."""
    compare(case, workers)
