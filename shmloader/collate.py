"""Samples to a slot's bytes, in place: torch's default collate, whose results are born in the slot.

    samples ──default collate──▶ torch.stack(..., out=view of the slot)      no copy after it

``SlotWriter`` hands out views of one slot, front to back. What does not fit is made on the heap, and counted when the
batch is described, so that after one attempt the size is known that fits.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data._utils.collate import collate as torch_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from .layout import NUMPY_DTYPES, TensorLeaf, align

Memory = npt.NDArray[np.uint8]
CollateMap = dict[Any, Callable[..., Any]]


class SlotWriter:
    """Hands out views of ``memory[origin : origin + nbytes]`` one after the other, beginning at ``start``.

    Tensors of :meth:`empty` never copy and keep ``memory`` alive. ``cursor`` counts on where the slot is too small.
    ``address`` is where ``memory`` begins.
    """

    __slots__ = ("_address", "born", "cursor", "memory", "nbytes", "origin", "overflowed")

    def __init__(self, memory: Memory, address: int, origin: int, nbytes: int, start: int = 0) -> None:
        self.memory = memory
        self.origin = origin
        self.nbytes = nbytes
        self.cursor = start
        self.born: dict[int, tuple[torch.Tensor, TensorLeaf]] = {}
        """By id: the tensors handed out and what describes them. What is written there needs no further copy."""
        self.overflowed = False
        """Whether anything was asked for that the slot has no room for."""
        self._address = address + origin

    def reserve(self, nbytes: int) -> int:
        """Take ``nbytes`` and return their offset in the slot, whether or not the slot is that large."""
        offset = align(self.cursor)
        self.cursor = offset + nbytes
        return offset

    def empty(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Return an uninitialised contiguous tensor in the slot, or None if it has no room (or no bytes at all)."""
        count = math.prod(shape)
        if count == 0:
            return None
        offset = align(self.cursor)
        end = offset + count * dtype.itemsize
        if end > self.nbytes:  # it will be made on the heap, and described, and counted, there
            self.overflowed = True
            return None
        self.cursor = end
        numpy_dtype = NUMPY_DTYPES.get(dtype)
        if numpy_dtype is not None:  # the quicker way, and the result is no view of another tensor
            made = torch.from_numpy(np.ndarray(shape, numpy_dtype, self.memory, self.origin + offset))
        else:
            made = torch.frombuffer(self.memory, dtype=dtype, count=count, offset=self.origin + offset).view(shape)
        self.born[id(made)] = made, TensorLeaf(dtype, shape, None, offset, count, False)
        return made

    def offset_of(self, pointer: int) -> int | None:
        """Return the offset of an address in the slot, or None if it lies elsewhere."""
        offset = pointer - self._address
        return offset if 0 <= offset < self.nbytes else None


# --- the default collate, in place ------------------------------------------------------------------------------------


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is dense CPU memory of a plain dtype, which is what a slot can hold."""
    return (
        type(tensor) is torch.Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
    )


_dtype_of = operator.attrgetter("dtype")
_traits_of = operator.attrgetter("dtype", "is_cpu", "layout", "requires_grad", "is_quantized", "is_nested")


def _one_dtype(batch: list[torch.Tensor]) -> bool:
    try:
        return len(set(map(_dtype_of, batch))) == 1
    except AttributeError:  # not tensors all of them: torch.stack says so
        return False


def all_alike(tensors: Any) -> bool:
    """Whether all are plain tensors (see ``is_plain``) of one dtype, without gradients. No Python per tensor."""
    if set(map(type, tensors)) != {torch.Tensor}:
        return False
    first = tensors[0]
    return is_plain(first) and not first.requires_grad and len(set(map(_traits_of, tensors))) == 1


def in_place_collate_map(writer_of: Callable[[], SlotWriter | None]) -> CollateMap:
    """Return torch's table of collate functions with those for tensors and numbers writing into the current slot.

    ``writer_of`` returns the writer of the batch at hand, or None outside of a batch. All rules (which types, which
    containers, which errors) stay torch's; functions that a user registered in ``default_collate_fn_map`` stay his.
    Tensors of unequal dtypes become the dtype that holds them all, as with torch's num_workers=0; its workers would
    cut them to the first's.
    """
    stock = dict(default_collate_fn_map)
    stack_stock = stock[torch.Tensor]

    def collate_tensors(batch: list[torch.Tensor], *, collate_fn_map: CollateMap | None = None) -> Any:
        first, writer = batch[0], writer_of()
        if not is_plain(first) or first.requires_grad:
            return stack_stock(batch, collate_fn_map=collate_fn_map)
        # Never torch's own way in a worker: it would make a file in /dev/shm for each tensor, where there may be none.
        if writer is not None and _one_dtype(batch):
            out = writer.empty(first.dtype, (len(batch), *first.shape))
            if out is not None:
                try:
                    return torch.stack(batch, 0, out=out)
                except RuntimeError:
                    pass  # unequal shapes, or a gradient further down: the plain call says so in torch's own words
        return torch.stack(batch, 0)

    def moved(stock_fn: Callable[..., Any]) -> Callable[..., Any]:
        def collate_numbers(batch: Any, *, collate_fn_map: CollateMap | None = None) -> Any:
            made, writer = stock_fn(batch, collate_fn_map=collate_fn_map), writer_of()
            if writer is None or not isinstance(made, torch.Tensor):
                return made
            out = writer.empty(made.dtype, tuple(made.shape))
            return made if out is None else out.copy_(made)

        return collate_numbers

    table: CollateMap = {}
    for kind, stock_fn in stock.items():
        if kind is torch.Tensor:
            table[kind] = collate_tensors
        elif kind in (int, float) or (isinstance(kind, tuple) and np.number in kind):
            table[kind] = moved(stock_fn)
        else:
            table[kind] = stock_fn
    return table


def collate_in_place(samples: list[Any], table: CollateMap) -> Any:
    """Do what ``torch.utils.data.default_collate`` does, with the functions of ``table``."""
    return torch_collate(samples, collate_fn_map=table)
