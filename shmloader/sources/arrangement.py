"""Which samples go into which pack, in which order. Pure: counts and seeds in, arrays of indices out.

Random orders are made by sorting samples by a hash of their number (SplitMix64): the same seed gives the same order on
every machine and with every version of every library, which a run that resumes depends on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..errors import MisuseError
from .settings import PackSettings

Indices = npt.NDArray[np.int64]

_GOLDEN = 0x9E3779B97F4A7C15
_WORD = 2**64 - 1


def random_order(count: int, seed: int) -> Indices:
    """Return 0 to ``count`` - 1 in a random order. Any ``seed`` is good, negative ones too."""
    with np.errstate(over="ignore"):
        state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(_mix(seed & _WORD))
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return np.argsort(state, kind="stable").astype(np.int64)


def _mix(seed: int) -> int:
    """Return the seed with its bits spread, so that seeds 0 and 1 have nothing in common."""
    seed = (seed + _GOLDEN) & _WORD
    seed = (seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    seed = (seed ^ (seed >> 27)) * 0x94D049BB133111EB & _WORD
    return seed ^ (seed >> 31)


def shares_of(count: int, shares: Sequence[float]) -> list[int]:
    """Return how many of ``count`` each share gets: rounded, none lost if the shares are 1 together."""
    ends = [min(count, round(count * sum(shares[: i + 1]))) for i in range(len(shares))]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def arrange(count: int, settings: PackSettings, classes: npt.NDArray[np.int64] | None) -> list[Indices]:
    """Return the samples of each part (of the one pack, if there is no split) in the order in which they are packed.

    ``classes``: one number per sample; needed to stratify. Raises MisuseError if it is missing, or a part gets nothing.
    """
    chosen: Indices = (
        np.arange(count, dtype=np.int64) if settings.shuffle is None else random_order(count, settings.shuffle)
    )
    if settings.limit is not None:
        chosen = chosen[: settings.limit]
    if not settings.split:
        return [chosen]
    if not settings.stratify:
        groups = [np.arange(len(chosen))]
    elif classes is None:
        raise MisuseError("to stratify needs classes, which this data does not have")
    else:
        groups = [np.flatnonzero(classes[chosen] == each) for each in np.unique(classes[chosen])]
    part_of = np.full(len(chosen), -1)
    shares = [part.share for part in settings.split]
    for number, group in enumerate(groups):
        drawn = group[random_order(len(group), settings.split_seed + number)]
        ends = np.cumsum(shares_of(len(group), shares))
        for part, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            part_of[drawn[start:end]] = part
    parts = [chosen[part_of == part] for part in range(len(shares))]
    for each, indices in zip(settings.split, parts, strict=True):
        if count and not len(indices):
            raise MisuseError(f"part {each.name!r} of the split would be empty: {len(chosen)} samples are too few")
    return parts
