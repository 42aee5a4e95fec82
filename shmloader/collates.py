"""Ready collate functions for samples of unequal size: a list of views, padded with lengths, or jagged.

    boxes of 3 samples    list                     padded                        jagged
    [a a]                 [ (2,4) (1,4) (3,4) ]    (3, 3, 4) and lengths (3,)    one nested tensor (3, j, 4):
    [b]                                            a a .                         values a a b c c c, offsets 0 2 3 6
    [c c c]                                        b . .
                                                   c c c

Each is an object to pass as ``collate_fn``. ``fields`` names the parts of a sample that vary: places in a tuple or
list, keys of a dict (``ListCollate("boxes", "labels")``, ``ListCollate(1, 2)``; ``("target", "boxes")`` for a nested
one). All other parts go through torch's default collate. Without names, whatever differs in shape within the batch at
hand is taken to vary; name the fields, and the type of a batch does not depend on chance. In a worker all results are
born in the slot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

Path = tuple[int | str, ...]


class VaryingCollate(ABC):
    """What the three have in common: walk the sample, leave the rest to the default collate."""

    def __init__(self, *fields: int | str | Path) -> None:
        self.fields = frozenset(field if isinstance(field, tuple) else (field,) for field in fields)

    def __call__(self, samples: list[Any]) -> Any:
        """Return the batch of ``samples``, built as a sample is (a tuple becomes a list, as in torch)."""
        return self._collate(samples, ())

    def _collate(self, values: list[Any], path: Path) -> Any:
        first = values[0]
        if self._varies(values, path):
            return self.join([torch.as_tensor(value) for value in values])
        if not self._has_varying_parts(values, path):
            return default_collate(values)
        if isinstance(first, Mapping):
            parts = {key: self._collate([value[key] for value in values], (*path, key)) for key in first}
            return parts if type(first) is dict else type(first)(parts)  # type: ignore[call-arg]
        columns = zip(*values, strict=True)
        collated = [self._collate(list(column), (*path, place)) for place, column in enumerate(columns)]
        return type(first)(*collated) if getattr(first, "_fields", None) else collated

    def _varies(self, values: list[Any], path: Path) -> bool:
        if self.fields:
            return path in self.fields
        first = values[0]
        if not isinstance(first, torch.Tensor | np.ndarray):
            return False
        return any(value.shape != first.shape for value in values[1:])

    def _has_varying_parts(self, values: list[Any], path: Path) -> bool:
        first = values[0]
        if not isinstance(first, Mapping | tuple | list) or not len(first):
            return False
        if not self.fields:
            return True
        return any(field[: len(path)] == path for field in self.fields)

    @abstractmethod
    def join(self, tensors: list[torch.Tensor]) -> Any:
        """Return what stands for the tensors of one varying field in the batch."""


class ListCollate(VaryingCollate):
    """Varying fields become a list with one tensor a sample: the classic collate of object detection."""

    def join(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors themselves; the loader lays them end to end in the slot and hands out views."""
        return tensors


class PaddedCollate(VaryingCollate):
    """Varying fields become ``(padded, lengths)``: (n, longest, ...) filled up with ``value``, and int64 (n,).

    Only the first axis may vary. Raises torch's error if others do.
    """

    def __init__(self, *fields: int | str | Path, value: float = 0) -> None:
        super().__init__(*fields)
        self.value = value

    def join(self, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (padded, lengths)."""
        lengths = [len(tensor) for tensor in tensors]
        padded = tensors[0].new_empty((len(tensors), max(lengths), *tensors[0].shape[1:]))
        if min(lengths) < max(lengths):
            padded.fill_(self.value)
        for row, tensor in zip(padded, tensors, strict=True):
            row[: len(tensor)] = tensor
        return padded, torch.tensor(lengths)


class JaggedCollate(VaryingCollate):
    """Varying fields become one nested tensor of jagged layout, (n, j, ...): values end to end, and offsets. No
    padding.

    Only the first axis may vary. ``batch.values()`` and ``batch.offsets()`` are its parts, views of the slot.
    """

    def join(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return the nested tensor."""
        lengths = torch.tensor([0, *(len(tensor) for tensor in tensors)])
        return torch.nested.nested_tensor_from_jagged(torch.cat(tensors), lengths.cumsum(0))


collate_list = ListCollate()
collate_padded = PaddedCollate()
collate_jagged = JaggedCollate()
