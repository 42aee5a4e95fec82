"""Slot to batch: build the user's batch as views of a lent slot. Never copies.

``compile_layout`` turns a layout into one closure, which is kept as long as batches of this layout come; each batch
then costs one view per tensor. Every view has a storage of its own that begins at its bytes and holds
a reference to ``base``, the array that is the lease: slices, ``.numpy()``, ``detach()`` and single rows keep the slot
lent, and ``torch.save`` of one field writes that field alone.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .layout import (
    NUMPY_DTYPES,
    ArrayLeaf,
    MappingNode,
    Node,
    PickledNode,
    SequenceNode,
    SplitLeaf,
    TensorLeaf,
    ValueNode,
    ValuesNode,
)

Base = npt.NDArray[np.uint8]
Build = Callable[[Base], Any]

MANY = 16
"""From so many equal tensors in a row on, they are cut from one view instead of being built one by one."""


class _Unpickler(pickle.Unpickler):
    """Puts views where the worker lifted tensors and arrays out; one leaf gives one object, however often it is
    named."""

    def __init__(self, payload: bytes, views: list[Any]) -> None:
        super().__init__(io.BytesIO(payload))
        self._views = views

    def persistent_load(self, pid: Any) -> Any:
        return self._views[pid]


def _tensor(leaf: TensorLeaf) -> Build:
    dtype, shape, stride, offset, extent, requires_grad = leaf
    frombuffer = torch.frombuffer
    if extent == 0:

        def build_empty(base: Base) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, requires_grad=requires_grad)

        return build_empty
    numpy_dtype = NUMPY_DTYPES.get(dtype)
    if stride is None and not requires_grad and numpy_dtype is not None:
        # The same view as below, made by way of NumPy in less than half the time.
        array, from_numpy = np.ndarray, torch.from_numpy

        def build_from_numpy(base: Base) -> torch.Tensor:
            return from_numpy(array(shape, numpy_dtype, base, offset))

        return build_from_numpy
    if stride is not None or requires_grad:

        def build_strided(base: Base) -> torch.Tensor:
            flat = frombuffer(base, dtype=dtype, count=extent, offset=offset)
            view = flat.view(shape) if stride is None else flat.as_strided(shape, stride)
            return view.requires_grad_(requires_grad)

        return build_strided
    if len(shape) == 1:

        def build_flat(base: Base) -> torch.Tensor:
            return frombuffer(base, dtype=dtype, count=extent, offset=offset)

        return build_flat

    def build(base: Base) -> torch.Tensor:
        return frombuffer(base, dtype=dtype, count=extent, offset=offset).view(shape)

    return build


def _array(leaf: ArrayLeaf) -> Build:
    dtype, shape, fortran, offset = leaf

    def build(base: Base) -> npt.NDArray[Any]:
        return np.ndarray(shape, dtype, base, offset, order="F" if fortran else "C")

    return build


def _split(leaf: SplitLeaf) -> Build:
    as_list, dtype, trailing, lengths, offset = leaf
    total = sum(lengths)
    row = 1
    for size in trailing:
        row *= size
    sizes = list(lengths)

    def build(base: Base) -> Any:
        if total * row == 0:
            whole = torch.empty((total, *trailing), dtype=dtype)
        else:
            whole = torch.frombuffer(base, dtype=dtype, count=total * row, offset=offset)
            if trailing:
                whole = whole.view(total, *trailing)
        parts = torch.split_with_sizes(whole, sizes)
        return list(parts) if as_list else tuple(parts)

    return build


def _equal_run(leaves: tuple[Node, ...]) -> int | None:
    """Return the step in elements if all leaves are equal dense tensors at equal distances, else None."""
    first, second = leaves[0], leaves[1]
    if not isinstance(first, TensorLeaf) or not isinstance(second, TensorLeaf):
        return None
    step = second.offset - first.offset
    if first.stride is not None or first.requires_grad or first.extent == 0 or step % first.dtype.itemsize or step <= 0:
        return None
    for place, leaf in enumerate(leaves):
        if leaf != first._replace(offset=first.offset + place * step):
            return None
    return step // first.dtype.itemsize


def _run(leaves: tuple[Node, ...], step: int) -> Build:
    """Build many small equal tensors with one C++ call; they share a storage that covers exactly this run."""
    first = leaves[0]
    assert isinstance(first, TensorLeaf)
    count, dtype, offset = len(leaves), first.dtype, first.offset
    inner = torch.empty(first.shape, device="meta").stride()
    shape, stride = (count, *first.shape), (step, *inner)
    extent = (count - 1) * step + first.extent

    def build(base: Base) -> Any:
        return torch.frombuffer(base, dtype=dtype, count=extent, offset=offset).as_strided(shape, stride).unbind(0)

    return build


def _children(nodes: tuple[Node, ...]) -> Callable[[Base], list[Any]]:
    """Return one builder for a row of nodes, which cuts runs of equal tensors from one view."""
    groups: list[tuple[bool, Build]] = []
    place = 0
    while place < len(nodes):
        stop = place + 1
        first = nodes[place]
        if isinstance(first, TensorLeaf):
            while stop < len(nodes) and nodes[stop][:3] == first[:3] and isinstance(nodes[stop], TensorLeaf):
                stop += 1
        step = _equal_run(nodes[place:stop]) if stop - place >= MANY else None
        if step is not None:
            groups.append((True, _run(nodes[place:stop], step)))
            place = stop
        else:
            groups.append((False, compile_layout(nodes[place])))
            place += 1
    if not any(many for many, _ in groups):
        builds = [build for _, build in groups]
        return lambda base: [build(base) for build in builds]

    def build_groups(base: Base) -> list[Any]:
        values: list[Any] = []
        for many, build in groups:
            if many:
                values.extend(build(base))
            else:
                values.append(build(base))
        return values

    return build_groups


def _pickled(node: PickledNode) -> Build:
    builds = [compile_layout(leaf) for leaf in node.leaves]
    payload = node.payload

    def build(base: Base) -> Any:
        return _Unpickler(payload, [make(base) for make in builds]).load()

    return build


def holds_custom(node: Node) -> bool:
    """Whether a layout has objects of custom types in it, which are rebuilt from a pickle."""
    if isinstance(node, SequenceNode | MappingNode):
        return any(holds_custom(child) for child in node.children)
    return isinstance(node, PickledNode)


def compile_layout(node: Node) -> Build:
    """Return a function that builds the batch described by ``node`` as views of a lent slot.

    Its argument is the uint8 array of the lease, of which offset 0 is the slot's first byte. Containers are new objects
    at each call; tensors and arrays never copy and keep the array alive.
    """
    if isinstance(node, TensorLeaf):
        return _tensor(node)
    if isinstance(node, ArrayLeaf):
        return _array(node)
    if isinstance(node, SplitLeaf):
        return _split(node)
    if isinstance(node, SequenceNode):
        children = _children(node.children)
        return children if node.as_list else lambda base: tuple(children(base))
    if isinstance(node, MappingNode):
        values, keys = _children(node.children), node.keys
        return lambda base: dict(zip(keys, values(base), strict=True))
    if isinstance(node, ValueNode):
        value = node.value
        return lambda base: value
    if isinstance(node, ValuesNode):
        kept, as_list = node.values, node.as_list
        return lambda base: list(kept) if as_list else kept
    return _pickled(node)
