"""A finished batch: describe it, then copy into its slot what does not lie there yet.

    batch ──walk──▶ nodes (layout.py)     leaves that were born in the slot are only noted
                  ▶ pending copies        all others are copied once
Tensors and arrays are never pickled, whatever object they sit in: they are lifted out of it.
"""

from __future__ import annotations

import io
import operator
import pickle
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .collate import Memory, SlotWriter, all_alike, is_plain
from .errors import DeviceTensor
from .layout import (
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
from .sparse import reduce_sparse

_NOTHING = np.empty(0, np.uint8)
_is_contiguous = operator.methodcaller("is_contiguous")
_IMMUTABLE = frozenset((type(None), bool, int, float, complex, str, bytes))
_DEEPEST = 32
"""Containers nested deeper than this, or in themselves, are left to pickle."""
_SPLIT = 4
"""So many tensors of one dtype and trailing shape in a list are laid end to end and cut apart again by the receiver."""


def _dense_strides(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether elements fill one block without gap or overlap, in whatever order of axes (channels last, transposed)."""
    expected = 1
    for size, step in sorted(
        ((size, step) for size, step in zip(shape, stride, strict=True) if size != 1), key=lambda pair: pair[1]
    ):
        if step != expected:
            return False
        expected *= size
    return True


class _Lifter(pickle.Pickler):
    """Pickles a value and lifts the tensors and arrays inside out of it."""

    def __init__(self, file: io.BytesIO, description: BatchDescription) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._description = description
        self.leaves: list[TensorLeaf | ArrayLeaf] = []
        self._known: dict[int, int] = {}
        self._alive: list[Any] = []  # ids are only unique among living objects

    def persistent_id(self, obj: Any) -> int | None:
        kind = type(obj)
        if kind is not torch.Tensor and kind is not np.ndarray:
            return None
        known = self._known.get(id(obj))
        if known is not None:
            return known
        leaf = self._description.tensor(obj) if kind is torch.Tensor else self._description.array(obj)
        if leaf is None:
            return None
        self._known[id(obj)] = len(self.leaves)
        self._alive.append(obj)
        self.leaves.append(leaf)
        return len(self.leaves) - 1

    def reducer_override(self, obj: Any) -> Any:
        reduced = reduce_sparse(obj) if type(obj) is torch.Tensor else None
        return NotImplemented if reduced is None else reduced


class BatchDescription:
    """The description of one finished batch (``root``) and the copies that it still needs.

    ``end`` is the end of the payload, inside the slot or not. If it fits, ``copy_pending`` does the copies. If not,
    what was born in the slot (``born_until``) is saved, and ``move_to`` goes on in another slot.
    """

    def __init__(self, batch: Any, writer: SlotWriter) -> None:
        self.writer = writer
        self._start = writer.cursor
        self._pending: list[tuple[int, torch.Tensor | list[torch.Tensor] | npt.NDArray[Any], Node]] = []
        self._known: dict[int, TensorLeaf] = {}
        self._alive: list[Any] = []
        self._arrived: set[int] = set()
        self.copied_bytes = 0
        """Bytes that were not born in the slot."""
        self.has_values = False
        """Whether the description carries values of the batch: then equal descriptions need not be the same."""
        self.root = self._node(batch, 0)
        self.end = writer.cursor

    # describe

    def _node(self, value: Any, depth: int) -> Node:
        kind = type(value)
        if kind is torch.Tensor:
            born = self.writer.born.get(id(value))
            if born is not None and self._is_as_born(value, born[1]):
                self._arrived.add(id(value))
                return born[1]
            leaf = self.tensor(value)
            if leaf is not None:
                return leaf
        elif kind is np.ndarray:
            array = self.array(value)
            if array is not None:
                return array
        elif kind in _IMMUTABLE:
            self.has_values = True
            return ValueNode(value)
        elif (kind is list or kind is tuple) and depth < _DEEPEST:
            if value and _IMMUTABLE.issuperset(map(type, value)):
                self.has_values = True
                return ValuesNode(kind is list, tuple(value))
            split = self._split(value, kind is list) if len(value) >= _SPLIT else None
            return split or SequenceNode(kind is list, tuple([self._node(item, depth + 1) for item in value]))
        elif kind is dict and depth < _DEEPEST and {str}.issuperset(map(type, value)):
            return MappingNode(tuple(value), tuple([self._node(item, depth + 1) for item in value.values()]))
        return self._pickled(value)

    def _is_as_born(self, tensor: torch.Tensor, leaf: TensorLeaf) -> bool:
        """Whether a tensor is still what the slot handed out: in-place methods may have given it another shape or
        memory."""
        return (
            tensor.shape == leaf.shape
            and tensor.dtype is leaf.dtype
            and tensor.is_contiguous()
            and not tensor.requires_grad
            and self.writer.offset_of(tensor.data_ptr()) == leaf.offset
        )

    def tensor(self, tensor: torch.Tensor) -> TensorLeaf | None:
        """Describe a dense CPU tensor; None for other kinds, which are pickled (their parts are lifted out)."""
        known = self._known.get(id(tensor))
        if known is not None:
            return known
        if not is_plain(tensor):
            if tensor.device.type not in ("cpu", "meta"):
                raise DeviceTensor(str(tensor.device), str(tuple(tensor.shape)))
            return None
        if tensor.requires_grad and not tensor.is_leaf:
            raise RuntimeError(
                "Cowardly refusing to serialize non-leaf tensor which requires_grad, since autograd does not support "
                "crossing process boundaries.  If you just want to transfer the data, call detach() on the tensor in "
                "the dataset or in collate_fn"
            )
        shape = tuple(tensor.shape)
        stride = None if tensor.is_contiguous() else tensor.stride()
        if tensor.is_conj() or tensor.is_neg():
            tensor, stride = tensor.resolve_conj().resolve_neg(), None
            tensor = tensor.contiguous()
        count = tensor.numel()
        if count == 0:
            leaf = TensorLeaf(tensor.dtype, shape, stride, 0, 0, tensor.requires_grad)
        else:
            extent = count if stride is None else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
            offset = self.writer.offset_of(tensor.data_ptr())
            if offset is None or offset + extent * tensor.element_size() > self._start:
                if stride is not None:
                    tensor, stride, extent = self._compact(tensor, shape, stride)
                offset = self.writer.reserve(extent * tensor.element_size())
                leaf = TensorLeaf(tensor.dtype, shape, stride, offset, extent, tensor.requires_grad)
                self._pending.append((offset, tensor, leaf))
                self.copied_bytes += extent * tensor.element_size()
            else:
                leaf = TensorLeaf(tensor.dtype, shape, stride, offset, extent, tensor.requires_grad)
                self._arrived.update(self._makers(tensor))
        self._known[id(tensor)] = leaf
        self._alive.append(tensor)
        return leaf

    def _makers(self, tensor: torch.Tensor) -> list[int]:
        """Return the ids of the tensors born in the slot whose memory this one is a view of."""
        pointer = tensor.data_ptr()
        return [
            name
            for name, (made, leaf) in self.writer.born.items()
            if made.data_ptr() <= pointer < made.data_ptr() + leaf.extent * leaf.dtype.itemsize
        ]

    @staticmethod
    def _compact(
        tensor: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> tuple[torch.Tensor, tuple[int, ...] | None, int]:
        """Return what to copy, the strides it gets and its extent: order of axes and expanded axes are kept."""
        kept = tuple(1 if step == 0 else size for size, step in zip(shape, stride, strict=True))
        if not _dense_strides(kept, stride):
            return tensor, None, tensor.numel()
        for axis, (size, small) in enumerate(zip(shape, kept, strict=True)):
            if size != small:
                tensor = tensor.narrow(axis, 0, 1)
        return tensor, stride, tensor.numel()

    def array(self, array: npt.NDArray[Any]) -> ArrayLeaf | None:
        """Describe an array; None if it holds Python objects."""
        if array.dtype.hasobject:
            return None
        fortran = array.flags.f_contiguous and not array.flags.c_contiguous
        if array.nbytes == 0:
            return ArrayLeaf(array.dtype, array.shape, fortran, 0)
        leaf = ArrayLeaf(array.dtype, array.shape, fortran, self.writer.reserve(array.nbytes))
        self._pending.append((leaf.offset, array, leaf))
        self.copied_bytes += array.nbytes
        return leaf

    def _split(self, values: Any, as_list: bool) -> SplitLeaf | None:
        first = values[0]
        if type(first) is not torch.Tensor or not first.dim() or not all_alike(values):
            return None
        dtype, trailing = first.dtype, first.shape[1:]
        shapes = [tensor.shape for tensor in values]
        if any(shape[1:] != trailing or not shape for shape in shapes) or not all(map(_is_contiguous, values)):
            return None
        if self.writer.offset_of(first.data_ptr()) is not None:  # rows of a tensor that lies in the slot already
            return None
        lengths = tuple([shape[0] for shape in shapes])
        nbytes = sum(lengths) * trailing.numel() * dtype.itemsize
        offset = self.writer.reserve(nbytes) if nbytes else 0
        leaf = SplitLeaf(as_list, dtype, tuple(trailing), lengths, offset)
        if nbytes:
            self._pending.append((offset, list(values), leaf))
            self.copied_bytes += nbytes
        return leaf

    def _pickled(self, value: Any) -> PickledNode:
        file = io.BytesIO()
        lifter = _Lifter(file, self)
        lifter.dump(value)
        self._alive.extend(lifter._alive)
        return PickledNode(file.getvalue(), tuple(lifter.leaves))

    # copy

    def copy_pending(self) -> None:
        """Copy every leaf that was not born in the slot to its place."""
        memory, origin = self.writer.memory, self.writer.origin
        for offset, source, leaf in self._pending:
            if isinstance(source, np.ndarray):
                assert isinstance(leaf, ArrayLeaf)
                place = np.ndarray(
                    source.shape, source.dtype, memory, origin + offset, order="F" if leaf.fortran else "C"
                )
                place[...] = source
            elif isinstance(source, list):
                assert isinstance(leaf, SplitLeaf)
                rows = sum(leaf.lengths)
                flat = torch.frombuffer(
                    memory, dtype=leaf.dtype, count=rows * torch.Size(leaf.trailing).numel(), offset=origin + offset
                )
                torch.cat(source, out=flat.view(rows, *leaf.trailing))
            else:
                assert isinstance(leaf, TensorLeaf)
                flat = torch.frombuffer(memory, dtype=leaf.dtype, count=leaf.extent, offset=origin + offset)
                view = flat.view(source.shape) if leaf.stride is None else flat.as_strided(source.shape, leaf.stride)
                view.copy_(source.detach())

    def arrived(self, tensor: torch.Tensor) -> bool:
        """Whether this very tensor is part of the batch and was born in the slot."""
        return id(tensor) in self._arrived

    def leave(self) -> None:
        """Let go of the batch itself and of the slot. What is left are the copies that are pending; see ``move_to``."""
        self._known.clear()
        self._alive = [source for _, source, _ in self._pending]
        self._arrived.clear()
        self.writer = SlotWriter(_NOTHING, 0, 0, 0, self.end)

    def move_to(self, writer: SlotWriter, saved: Memory | None = None) -> None:
        """Go on in a slot: the same one, or a larger one that gets what ``saved_from`` took from the first."""
        if saved is not None:
            writer.memory[writer.origin : writer.origin + len(saved)] = saved
        writer.cursor = self.end
        self.writer = writer

    def born_until(self) -> int:
        """Return the offset behind the last byte that was born in the slot."""
        return self._start
