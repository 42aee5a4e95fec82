"""Which samples, in which batches: the order of one epoch, exactly as torch's samplers give it, without Python lists.

For torch's own ``BatchSampler`` over a ``SequentialSampler`` or ``RandomSampler`` the batches are slices of one int64
array (8 bytes a sample); the draws from the generators are the same, at the same moments, so the same seed gives the
same batches. All other samplers are iterated as they are, and may yield whatever they like.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

Indices = npt.NDArray[np.int64]

_RUN = 1 << 20
"""Samples of a sequential order that are made at a time: 8 MiB of indices."""


def index_batches(index_sampler: Iterable[Any]) -> Iterator[Any]:
    """Return an iterator over what ``iter(index_sampler)`` yields; batches of plain indices come as int64 arrays."""
    if type(index_sampler) is BatchSampler:
        sampler = index_sampler.sampler
        if type(sampler) is SequentialSampler:
            return _batches(_sequential(len(sampler)), index_sampler.batch_size, index_sampler.drop_last)
        if type(sampler) is RandomSampler and not sampler.replacement:
            return _batches(_permutations(sampler), index_sampler.batch_size, index_sampler.drop_last)
    return iter(index_sampler)


def _sequential(length: int) -> Iterator[Indices]:
    for start in range(0, length, _RUN):
        yield np.arange(start, min(start + _RUN, length), dtype=np.int64)


def _permutations(sampler: RandomSampler) -> Iterator[Indices]:
    """Yield the runs of ``RandomSampler.__iter__``, with its draws: a seed if it has no generator, then
    permutations."""
    length = len(sampler.data_source)
    if sampler.generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    else:
        generator = sampler.generator
    for _ in range(sampler.num_samples // length):
        yield torch.randperm(length, generator=generator).numpy()
    yield torch.randperm(length, generator=generator).numpy()[: sampler.num_samples % length]


def _batches(runs: Iterator[Indices], batch_size: int, drop_last: bool) -> Iterator[Indices]:
    """Cut runs into batches; a batch may span two runs."""
    rest = np.empty(0, np.int64)
    for run in runs:
        start = batch_size - len(rest) if len(rest) else 0
        if start:
            rest = np.concatenate((rest, run[:start]))
            if len(rest) < batch_size:
                continue
            yield rest
        stop = start + (len(run) - start) // batch_size * batch_size
        for place in range(start, stop, batch_size):
            yield run[place : place + batch_size]
        rest = run[max(stop, start) :]
    if len(rest) and not drop_last:
        yield rest
