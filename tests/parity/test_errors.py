"""Errors of the user's code: what is raised, when, with which text, and what comes after."""

from __future__ import annotations

import pytest

from . import cases_errors
from .compare import Case, compare


@pytest.mark.parametrize(("case", "workers"), cases_errors.CASES.parameters())
def test_errors_of_the_users_code_come_through(case: Case, workers: int) -> None:
    """C4, E1: one error per bad batch, of the original class, with its text and place; then the epoch goes on."""
    compare(case, workers)
