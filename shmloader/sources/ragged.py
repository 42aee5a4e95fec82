"""Many rows of different lengths in two arrays, so that nothing is one Python object per sample.

values   a a a b c c c c        rows, one after another
ends           3 4       8      where each row ends
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class Ragged:
    """Rows of ``values``, which share its memory: row i has ``lengths[i]`` of them."""

    def __init__(self, values: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> None:
        self.values = values
        self.ends = np.cumsum(lengths, dtype=np.int64)
        if (int(self.ends[-1]) if len(self.ends) else 0) != len(values):
            raise ValueError(f"lengths add up to {int(self.ends[-1:].sum())}, but there are {len(values)} values")

    def __len__(self) -> int:
        return len(self.ends)

    def span(self, row: int) -> slice:
        """Return where row ``row`` lies in ``values``."""
        return slice(int(self.ends[row - 1]) if row else 0, int(self.ends[row]))

    def __getitem__(self, row: int) -> npt.NDArray[Any]:
        return self.values[self.span(row)]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Values in each row."""
        return np.diff(self.ends, prepend=0)

    def take(self, rows: npt.NDArray[np.int64]) -> Ragged:
        """Return these rows, in this order; a copy."""
        lengths = self.lengths[rows]
        starts = (self.ends - self.lengths)[rows]
        # Within each row count up from its start.
        skips = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
        return Ragged(self.values[skips + np.arange(len(skips))], lengths)
