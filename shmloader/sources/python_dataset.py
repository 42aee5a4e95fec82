"""Any Python dataset as a source: what has ``len`` and ``[i]``, or can be iterated.

A map-style one is read in any order and in worker processes, like every source. One that can only be iterated has no
length and no index: ``pack_source`` takes its samples as they come, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset, TensorDataset

from ..errors import MisuseError
from .base import Options, Source, position
from .blocks import Columns


class PythonDataset(Source):
    """``dataset``, which ``name`` made (``module:function``). Its samples are as ``shmloader.pack`` takes them.

    Its ``classes``, if it has a list of str under this name (as torchvision's have), become those of the pack.
    Raises MisuseError unless it can be indexed and has a length, or can be iterated.
    """

    kind = "dataset"
    looked_for = "a Python dataset (with --dataset)"

    def __init__(self, dataset: Any, name: str) -> None:
        self.dataset, self.name = dataset, name
        cls = type(dataset)
        indexed = callable(getattr(cls, "__getitem__", None)) and callable(getattr(cls, "__len__", None))
        self.streams = isinstance(dataset, IterableDataset) or (not indexed and isinstance(dataset, Iterable))
        """Whether it can only be iterated: then it has no ``len`` and no ``[i]`` here either."""
        if not (indexed or self.streams) or isinstance(dataset, str | bytes | Mapping):
            raise MisuseError(
                f"{name} returned a {cls.__name__}: a dataset has a length and items by number, or can be iterated"
            )
        found = getattr(dataset, "classes", None)
        named = isinstance(found, list | tuple) and all(isinstance(each, str) for each in found)
        self._classes: list[str] | None = list(found) if named and found else None

    @classmethod
    def recognises(cls, path: str) -> bool:
        """Nothing: a path is no Python dataset."""
        return False

    @classmethod
    def open(cls, path: str, options: Options) -> PythonDataset:
        raise MisuseError(f"{path}: a Python dataset is named by the function that makes it: --dataset module:function")

    def __len__(self) -> int:
        if self.streams:
            raise TypeError(f"{self.name} gives a dataset that can only be iterated: it has no length")
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[position(index, len(self))]

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples in their order."""
        return iter(self.dataset) if self.streams else (self.dataset[index] for index in range(len(self)))

    def columns(self) -> Columns | None:
        """The tensors of a TensorDataset."""
        if type(self.dataset) is not TensorDataset or not self.dataset.tensors:
            return None
        if any(tensor.layout is not torch.strided for tensor in self.dataset.tensors):
            return None
        return tuple([tensor.detach().cpu() for tensor in self.dataset.tensors])

    def name_of(self, index: int) -> str:
        return f"sample {index} of {self.name}"

    def describe(self) -> str:
        return f"{'iterable' if self.streams else 'map-style'} dataset, a {type(self.dataset).__name__}"

    @property
    def metadata(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"kind": self.kind, "source": self.name}
        return facts if self._classes is None else {**facts, "classes": self._classes}
