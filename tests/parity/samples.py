"""Datasets, samplers and sample types of the parity cases: all at module level, so that spawn can pickle them."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info


class Fixed(Dataset[Any]):
    """Yields the items of a list as they are."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = list(items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]


class Rows(Dataset[Any]):
    """Sample i is (float row of i, i as int): the plainest supervised dataset."""

    def __init__(self, n: int, width: int = 3) -> None:
        self.n, self.width = n, width

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not 0 <= index < self.n:
            raise IndexError(index)
        return torch.full((self.width,), float(index)), index


class TypeOfIndex(Rows):
    """Yields the exact type in which an index arrives, and its value."""

    def __getitem__(self, index: Any) -> Any:
        return type(index).__name__, str(index)


class Batched(Rows):
    """Offers ``__getitems__`` and marks each sample with the length of the list that it was asked for."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(torch.tensor([index, len(indices)]), type(indices).__name__) for index in indices]


class ByKey(Dataset[Any]):
    """A map from strings (and tuples) to numbers."""

    def __init__(self) -> None:
        self.values: dict[Any, int] = {name: len(name) for name in ("a", "bb", "ccc", "dddd", "eeeee")}
        self.values |= {("x", 1): 101, ("y", 2): 102}

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, key: Any) -> int:
        return self.values[key]


class Growing(Rows):
    """Its length is what its user says at the time."""

    def grow(self, by: int) -> None:
        self.n += by


class Stream(IterableDataset[Any]):
    """Yields 0..n-1; workers share it by turns. Declares ``declared`` as length, if given."""

    def __init__(self, n: int, declared: int | None = None, shard: bool = True) -> None:
        self.n, self.declared, self.shard = n, declared, shard

    def __repr__(self) -> str:
        return f"Stream({self.n}, {self.declared})"

    def __len__(self) -> int:
        if self.declared is None:
            raise TypeError("this stream has no length")
        return self.declared

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None and self.shard else (0, 1)
        yield from range(first, self.n, step)


class Unsized(IterableDataset[Any]):
    """Has no ``__len__`` at all; each worker yields its own list."""

    def __init__(self, *lists: Sequence[Any]) -> None:
        self.lists = lists

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for each in self.lists if info is None else self.lists[info.id :: info.num_workers]:
            yield from each


class WhoAmI(Dataset[Any]):
    """Yields what a worker knows about itself."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        if info is None:
            return index, "main"
        return index, info.id, info.num_workers, info.seed, type(info.dataset).__name__, info.dataset is self


class Draws(Dataset[Any]):
    """Yields draws of all three global generators, and torch's initial seed."""

    def __init__(self, n: int = 8) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return index, torch.initial_seed(), torch.rand(2), random.random(), np.random.rand(2), torch.randperm(3)


class DrawingStream(IterableDataset[Any]):
    """An iterable that draws from all three global generators."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for index in range(3):
            yield -1 if info is None else info.id, index, torch.initial_seed(), random.random(), np.random.rand()


class Counting(Rows):
    """Counts its own calls."""

    calls = 0

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        return index, self.calls


def widen(worker: int) -> None:
    """worker_init_fn: change the worker's copy of ``Rows``."""
    info = get_worker_info()
    assert info is not None
    assert info.id == worker
    assert isinstance(info.dataset, Rows)
    info.dataset.width = 5 + worker


def cut(worker: int) -> None:
    """worker_init_fn: leave one share of a ``Stream`` to each worker."""
    info = get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, Stream)
    info.dataset.shard = True


class Flaky(Rows):
    """Raises ``errors[i]`` for sample i: a class and its arguments."""

    def __init__(self, n: int, errors: dict[int, tuple[type[BaseException], tuple[Any, ...]]]) -> None:
        super().__init__(n)
        self.errors = errors

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index in self.errors:
            kind, arguments = self.errors[index]
            raise kind(*arguments)
        return super().__getitem__(index)


class FlakyStream(Stream):
    """Raises in the middle of the stream."""

    def __iter__(self) -> Iterator[Any]:
        for index in super().__iter__():
            if index == 5:
                raise ValueError("the stream broke at 5")
            yield index


class Backwards(Sampler[int]):
    """A user's sampler: from the end to the start."""

    def __init__(self, source: Sequence[Any] | Dataset[Any]) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self) - 1, -1, -1))


class BrokenSampler(Backwards):
    """Raises after some indices."""

    def __iter__(self) -> Iterator[int]:
        yield from (0, 1, 2)
        raise OSError("the sampler's file is gone")


class OneShot:
    """A sampler that is a generator: empty in the second epoch."""

    def __init__(self, n: int) -> None:
        self.indices = iter(range(n))

    def __iter__(self) -> Iterator[int]:
        return self.indices


# --- types of samples and batches -------------------------------------------------------------------------------------


class Point(NamedTuple):
    """A plain namedtuple."""

    x: Any
    y: Any


@dataclass
class Record:
    """A plain dataclass."""

    image: Any
    label: Any
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Frozen:
    """A frozen dataclass with slots."""

    a: Any
    b: Any


class MyDict(dict[str, Any]):
    """A dict subclass."""


class MyList(list[Any]):
    """A list subclass."""


class MyTuple(tuple[Any, ...]):
    """A tuple subclass, no namedtuple."""


class Tagged(dict[str, Any]):
    """A dict subclass with an attribute."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tag = "set"


class Opaque:
    """An object that no loader knows: holds a tensor and more."""

    def __init__(self, number: int) -> None:
        self.number, self.tensor, self.words = number, torch.arange(number), ["w"] * number


class Pinnable:
    """A custom batch with torch's protocol for pinning."""

    def __init__(self, samples: list[Any]) -> None:
        self.images = torch.stack([sample[0] for sample in samples])
        self.labels = torch.tensor([sample[1] for sample in samples])
        self.pinned = False

    def pin_memory(self) -> Pinnable:
        self.pinned = True
        return self


class MyTensor(torch.Tensor):
    """A tensor subclass."""


class TwoArguments(Exception):
    """Its constructor needs two arguments, so one text cannot rebuild it."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code, self.reason = code, reason


class HoldsLambda(Exception):
    """Cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.action = lambda: text


class Custom(ValueError):
    """A plain exception class of the user."""


def plain_mapping(index: int) -> dict[str, Any]:
    """A sample as people write them: nested, mixed."""
    return {
        "image": torch.full((2, 3), index, dtype=torch.uint8),
        "boxes": np.full((2, 4), index, dtype=np.float32),
        "meta": {"name": f"file{index}.jpg", "size": (index, index + 1), "ok": index % 2 == 0},
        "weights": [float(index), index],
        "raw": bytes([index]),
        "point": Point(torch.tensor(index), OrderedDict(z=np.int16(index))),
    }


def counts(index: int) -> defaultdict[str, int]:
    """A defaultdict sample."""
    return defaultdict(int, a=index, b=index * 2)
