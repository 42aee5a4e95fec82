"""Samples that cannot be had: what is told of them, and how word of them travels.

    dataset[index] raised ──▶ BadSample ──with the batch──▶ Flaws(layout, bad) ──▶ BadSamples of the loader ──▶ stats()
    its worker died on it, again and again ──▶ Avoid(indices, why) ──ticket──▶ the next worker does not ask for it

What is done about one (``on_bad_sample``) depends on its batch alone, so it is the same for any number of workers:

    raise     the exception reaches the user, as in torch
    skip      the batch is shorter by it; a batch of bad samples only does not come at all
    replace   another sample of its batch stands in: the next one behind it, in a circle, that is good, asked for anew.
              So no sampler's choice is left, and the batch keeps its size. Without a good one there is an exception
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from .errors import BadSampleWarning

RAISE, SKIP, REPLACE = "raise", "skip", "replace"
POLICIES = (RAISE, SKIP, REPLACE)

_LISTED = 1000
"""Bad samples that are kept in full; more are only counted."""
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class BadSample:
    """One sample that could not be had."""

    index: Any
    """As the sampler gave it."""
    error: str
    """Class and message of what its dataset raised, or how it killed its worker."""
    replaced_by: Any = None
    """Index of the sample that stood in; None: it was left out."""

    @classmethod
    def of(cls, index: Any, error: BaseException) -> BadSample:
        """Describe what ``dataset[index]`` raised."""
        return cls(index, f"{type(error).__name__}: {error}")


class Flaws(NamedTuple):
    """A batch's layout, and the bad samples that are not in the batch. Sent in place of the layout alone."""

    root: Any
    bad: tuple[BadSample, ...]


class Avoid(NamedTuple):
    """Indices for a ticket some of which must not be asked for: position in the batch -> why."""

    indices: Any
    why: dict[int, str]


class BadSamples:
    """All bad samples that a loader has met. The first 1,000 are kept, the rest is counted."""

    def __init__(self) -> None:
        self.count = 0
        self.listed: list[BadSample] = []

    def add(self, bad: Iterable[BadSample]) -> None:
        """Count and keep some."""
        for sample in bad:
            self.count += 1
            if len(self.listed) < _LISTED:
                self.listed.append(sample)

    def warn(self, since: int) -> None:
        """Say at the end of a pass what was found after the first ``since`` ones: a BadSampleWarning, if anything."""
        new = self.count - since
        if new:
            shown = self.listed[since : since + _SHOWN]
            names = ", ".join(f"{bad.index!r} ({bad.error})" for bad in shown) + (", ..." if new > len(shown) else "")
            warnings.warn(
                f"{new} bad samples were left out or replaced in this pass: {names}; "
                "loader.stats().bad_samples lists them",
                BadSampleWarning,
                stacklevel=4,
            )
