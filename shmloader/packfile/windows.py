"""Windows: rows of one array that overlap, so that what they share need not be stored twice. Pure.

flat     0 1 2 3 4 5 6 7 8 9 10 11 12 13 14
window   ├─────────┤                             length 6, stride 4
                 ├──────────┤
                           ├─────────────┤       14 is left over
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Windowing:
    """How the rows of a field overlap."""

    stride: int
    """Elements of the first axis from the start of one row to that of the next, in the pack: at most a row's."""
    dtype: str
    """torch's name of the dtype that samples have; the rows are stored with that of the flat array."""

    def __str__(self) -> str:
        return f"windows that begin every {self.stride}, read as {self.dtype}"


class Windows:
    """The windows of ``flat``, (n, ...): ``length`` of its elements each, one every ``stride``. A view, never a copy.

    A column for ``PackWriter.add_columns``. ``dtype_given``: torch's name of the dtype that samples are to have. What
    does not fill a window at the end is in none. Slices are windows too; an index gives one window, a view of ``flat``.
    """

    def __init__(self, flat: npt.NDArray[Any], length: int, stride: int, dtype_given: str) -> None:
        if length < 1 or stride < 1:
            raise ValueError(f"windows of {length}, one every {stride}: both must be at least 1")
        self.flat, self.length, self.stride, self.dtype_given = flat, length, stride, dtype_given

    def __len__(self) -> int:
        return max(0, (len(self.flat) - self.length) // self.stride + 1)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the flat array."""
        return self.flat.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Windows, and the shape of each."""
        return (len(self), self.length, *self.flat.shape[1:])

    @property
    def windowing(self) -> Windowing:
        """How they are stored: windows with gaps between them are stored end to end."""
        return Windowing(min(self.stride, self.length), self.dtype_given)

    @property
    def row_bytes(self) -> int:
        """Bytes that each window adds to what is stored."""
        first = self.flat[:1]
        return self.windowing.stride * first.dtype.itemsize * int(np.prod(first.shape[1:], dtype=np.int64))

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise ValueError("windows are sliced without a step")
            end = (stop - 1) * self.stride + self.length if stop > start else start * self.stride
            return Windows(self.flat[start * self.stride : end], self.length, self.stride, self.dtype_given)
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} is out of range for {len(self)}")
        return self.flat[index * self.stride : index * self.stride + self.length]

    def rows(self) -> npt.NDArray[Any]:
        """Return all windows as one read-only array (n, length, ...) whose rows share memory."""
        step = self.flat.strides[0]
        return np.lib.stride_tricks.as_strided(
            self.flat, self.shape, (step * self.stride, *self.flat.strides), writeable=False
        )
