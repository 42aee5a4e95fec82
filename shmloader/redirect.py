"""A user's collate_fn, whose results are born in the slot: inside it, torch.stack and friends write there.

    collate_fn(samples) ──torch.stack(images)──▶ Redirect ──▶ torch.stack(images, out=view of the slot)

Only results that end up in the batch are worth it; an intermediate one would only take room. So the first batch
redirects every call that it can, looks which results arrived, and from then on redirects the calls of those numbers
alone (the third call, the fifth). A collate_fn that calls differently each time costs a copy, nothing else; it is
looked at again now and then.

A result that collate_fn keeps for itself, in a cache say, must not be overwritten by a later batch. The worker
notices that (see worker.py) and then neither reuses that slot nor redirects again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .collate import SlotWriter, all_alike, is_plain

_FILLS: dict[Any, float | None] = {
    torch.empty: None,
    torch.zeros: 0,
    torch.ones: 1,
    torch.Tensor.new_empty: None,
    torch.Tensor.new_zeros: 0,
    torch.Tensor.new_ones: 1,
}
"""Functions that make a tensor of one value (None: of no particular one)."""
_SMALLEST = 4096
"""Bytes; below this a redirected call costs more than the copy that it saves."""


class Redirect(TorchFunctionMode):
    """While active, makes torch functions of one batch write into ``writer``'s slot where that changes nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self._writer: SlotWriter | None = None
        self._wanted: set[int] | None = None  # numbers of the calls worth redirecting; None: not known yet
        self._call = 0
        self._made: list[tuple[int, torch.Tensor]] = []
        self._batches = 0
        self._look_again = 1

    def begin(self, writer: SlotWriter) -> bool:
        """Prepare for one batch. Returns False if no call of this collate_fn is worth it: then do not enter."""
        self._writer = writer
        self._call = 0
        self._made.clear()
        self._batches += 1
        return self._wanted is None or bool(self._wanted)

    def end(self, arrived: Callable[[torch.Tensor], bool], copied_bytes: int) -> None:
        """Learn from a finished batch which calls are worth it: those whose result ``arrived`` in it."""
        if self._wanted is None:
            self._wanted = {call for call, tensor in self._made if arrived(tensor)}
        elif copied_bytes > _SMALLEST and self._batches >= self._look_again:
            self._look_again = 2 * self._batches
            self._wanted = None
        self.forget()

    def forget(self) -> None:
        """Let go of the batch at hand, finished or failed."""
        self._made.clear()
        self._writer = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.resize_ and any(args[0] is made for _, made in self._made):
            args[0].set_(args[0].clone())  # the slot cannot grow under it: let it live on the heap
        redirect = _REDIRECTS.get(func)
        if redirect is not None and self._writer is not None:
            self._call += 1
            if self._wanted is None or self._call in self._wanted:
                made = redirect(self._writer, func, args, kwargs)
                if made is not None:
                    self._made.append((self._call, made))
                    return made
        return func(*args, **kwargs)


def _join(writer: SlotWriter, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """torch.stack and torch.cat."""
    if len(args) > 2 or not kwargs.keys() <= {"tensors", "dim"}:
        return None
    tensors: Any = args[0] if args else kwargs.get("tensors")
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if not isinstance(dim, int) or isinstance(dim, bool) or not isinstance(tensors, list | tuple):
        return None
    if not tensors or not all_alike(tensors):
        return None
    first = tensors[0]
    shape = list(first.shape)
    axes = len(shape) + (func is torch.stack)
    if not -axes <= dim < axes:
        return None
    dim %= axes
    if func is torch.stack:
        if any(tensor.shape != first.shape for tensor in tensors):
            return None
        shape.insert(dim, len(tensors))
    else:
        rest = (*shape[:dim], *shape[dim + 1 :])
        if any(tensor.dim() != axes or (*tensor.shape[:dim], *tensor.shape[dim + 1 :]) != rest for tensor in tensors):
            return None
        shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    if torch.Size(shape).numel() * first.element_size() < _SMALLEST:
        return None
    out = writer.empty(first.dtype, tuple(shape))
    return None if out is None else func(tensors, dim, out=out)


def _fill(writer: SlotWriter, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """torch.zeros, ones, empty and their ``new_`` forms. What they would make is asked of the meta device."""
    if kwargs.get("device") not in (None, "cpu", torch.device("cpu")):
        return None
    if not kwargs.keys() <= {"size", "dtype", "device"}:
        return None
    if torch.get_default_device().type != "cpu":
        return None
    if args and isinstance(args[0], torch.Tensor) and not is_plain(args[0]):
        return None
    like = func(*args, **{**kwargs, "device": "meta"})
    if like.numel() * like.element_size() < _SMALLEST:
        return None
    out = writer.empty(like.dtype, tuple(like.shape))
    value = _FILLS[func]
    return out if out is None or value is None else out.fill_(value)


_REDIRECTS: dict[Any, Callable[..., torch.Tensor | None]] = {
    torch.stack: _join,
    torch.cat: _join,
    torch.concat: _join,
    torch.concatenate: _join,
    **dict.fromkeys(_FILLS, _fill),
}
