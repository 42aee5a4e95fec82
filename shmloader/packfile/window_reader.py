"""Reader of a field of windows: rows that overlap in the file, gathered as if each were stored whole.

file    ── chunk 0: 0 1 2 3 4 5 6 7 8 9 ... ── chunk 1: ...      each chunk ends with its last window whole
batch   ONE index_select over the overlapping rows (rows.py), then, if they are wanted so, one conversion
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..errors import PackDamaged
from .mapping import OpenPack
from .reader import FieldReader
from .rows import Indices, Rows
from .schema import TORCH_DTYPES
from .windows import Windows


class WindowReader(FieldReader):
    """Windows of one shape, stored as ``field.stored`` and given as ``field.dtype``."""

    def __init__(self, pack: OpenPack, raw: Any, number: int) -> None:
        super().__init__(pack, raw, number)
        assert self.field.stride is not None
        assert self.field.stored is not None
        self._stride, self._stored = self.field.stride, TORCH_DTYPES[self.field.stored]
        self._item_bytes = self._numpy.itemsize * math.prod(self.shape[1:])
        window = self.shape[0] * self._item_bytes
        row = self._stride * self._item_bytes
        rows = pack.fields[number].table[:, 2]
        if not np.array_equal(self._value_bytes, rows * row + (window - row)):
            raise PackDamaged(pack.path, f"field {self.name!r}: its chunks are not as long as their windows")
        self._rows = Rows(pack, raw, self._chunks, self._places, row, window)

    def get(self, index: int) -> torch.Tensor:
        """Return a new tensor (shape, dtype)."""
        place = self._rows.place(index)
        self._announce(place, self.shape[0] * self._item_bytes)
        tensor = torch.from_numpy(np.ndarray(self.shape, self._numpy, self._pack.bytes, place).copy())
        return self._as_stored(tensor).to(self.torch_dtype)

    def _as_stored(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.dtype == self._stored else tensor.view(self._stored)

    def gather(self, indices: Indices, out: torch.Tensor) -> None:
        """Copy the windows ``indices`` into ``out``, as ``FixedReader.gather`` does with rows; raises the same."""
        self.bind(out)(indices)

    def get_many(self, indices: Indices) -> list[Any]:
        """As ``get`` for many samples: rows of one new tensor. One gather."""
        out = torch.empty((len(indices), *self.shape), dtype=self.torch_dtype)
        self.gather(indices, out)
        return list(out.unbind(0))

    def bind(self, out: torch.Tensor) -> Callable[[Indices], None]:
        """Return ``gather`` for this ``out``, as ``FixedReader.bind`` does. Where windows are converted, it also keeps
        memory for as many as they are stored."""
        count = len(out)
        self._check_out(out, (count, *self.shape))
        same = self.torch_dtype == self._stored
        target = out if same else torch.empty(out.shape, dtype=self._stored)
        gather, check = self._rows.bind(target, count), self._chunks.check

        def bound(indices: Indices) -> None:
            if len(indices) != count:
                raise ValueError(f"field {self.name!r}: bound to {count} rows, but got {len(indices)} indices")
            check(indices)
            gather(indices)
            if not same:
                out.copy_(target)

        return bound

    def column(self) -> npt.NDArray[Any]:
        """Return all windows, (count, *shape), as they are stored, without conversion: a read-only view of one new
        array, which holds what they share once."""
        rest = self.shape[1:]
        flat = np.empty(((self.count - 1) * self._stride + self.shape[0] if self.count else 0, *rest), self._numpy)
        at = 0
        for place, nbytes in zip(self._places.tolist(), self._value_bytes.tolist(), strict=True):
            self._pack.will_need(place, nbytes)
            part = np.ndarray((nbytes // self._item_bytes, *rest), self._numpy, self._pack.bytes, place)
            flat[at : at + len(part)] = part
            at += len(part) - (self.shape[0] - self._stride)
        return Windows(flat, self.shape[0], self._stride, self.dtype).rows()
