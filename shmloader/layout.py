"""What lies where in a slot: the plain description that a worker writes and the main process reads.

    slot ┌───────────┬──────────────┬──────────────┬── ─ ─ ──┬────────────────┬─────────┐
         │  ticket   │  leaf        │  leaf        │         │  layout        │ (spare) │
         │  indices  │  (64-aligned)│  (64-aligned)│         │  pickled nodes │         │
         └───────────┴──────────────┴──────────────┴── ─ ─ ──┴────────────────┴─────────┘
    offset 0         all offsets below count from the slot's first byte

A *node* describes one value of a batch; together they form a tree of the batch's own shape. Tensors and arrays are
leaves that point into the slot; all else is carried by value. Nodes are tuples: they compare, hash and pickle at C
speed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

NUMPY_DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    getattr(torch, name): np.dtype(name)
    for name in (
        *("float16", "float32", "float64", "complex64", "complex128"),
        *("int8", "int16", "int32", "int64", "uint8", "bool"),
    )
}
"""The dtypes that torch and NumPy name alike."""

ALIGN = 64  # bytes: one cache line, and enough for every torch dtype


def align(offset: int, unit: int = ALIGN) -> int:
    """Return the first multiple of ``unit`` that is not below ``offset``."""
    return -(-offset // unit) * unit


class TensorLeaf(NamedTuple):
    """A dense CPU tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    """In elements; None if contiguous."""
    offset: int
    extent: int
    """Elements from the first to the last one, inclusive."""
    requires_grad: bool


class ArrayLeaf(NamedTuple):
    """A NumPy array without Python objects in it."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    offset: int


class SplitLeaf(NamedTuple):
    """A list or tuple of tensors that share dtype and trailing shape, end to end in the slot: boxes of 64 images,
    say."""

    as_list: bool
    dtype: torch.dtype
    trailing: tuple[int, ...]
    lengths: tuple[int, ...]
    """Of each tensor, along its first axis."""
    offset: int


class SequenceNode(NamedTuple):
    """An exact list or tuple."""

    as_list: bool
    children: tuple[Any, ...]


class MappingNode(NamedTuple):
    """An exact dict with string keys."""

    keys: tuple[str, ...]
    children: tuple[Any, ...]


class ValueNode(NamedTuple):
    """An immutable value, carried by value: None, a number, a string, bytes."""

    value: Any


class ValuesNode(NamedTuple):
    """A list or tuple of immutable values: the file names of a batch, say."""

    as_list: bool
    values: tuple[Any, ...]


class PickledNode(NamedTuple):
    """Anything else, pickled; the tensors and arrays inside were lifted out and are leaves."""

    payload: bytes
    leaves: tuple[TensorLeaf | ArrayLeaf, ...]


Node = TensorLeaf | ArrayLeaf | SplitLeaf | SequenceNode | MappingNode | ValueNode | ValuesNode | PickledNode
