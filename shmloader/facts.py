"""Facts about data: what is stored, and what a batch of it takes. Reads lengths, makes a few batches with a worker.

A pack knows all its lengths, so the heaviest batches that there can be are looked up and made, whatever the collate
function does with them. Of other datasets some batches are made, and the largest speaks for all.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .packfile import PackedDataset
from .packfile.reader import RaggedReader
from .probe import Probe, probe_batches

_PROBED = 3  # batches
_SEED = 0x5EED  # which batches are measured is the same each time
_EPOCH = 1 << 16  # batches of a simulated epoch are enough to see how heavy they get


@dataclass(frozen=True, slots=True)
class DataFacts:
    """What is stored."""

    path: str | None
    """The pack's file, or None for another dataset."""
    samples: int
    file_bytes: int
    """Of the pack's file: the page cache that it would like. 0 if there is no pack."""
    expression: str = "dataset"
    """How Python makes it, if a path is enough for that; else a name that the user has for it."""


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """What one batch takes in a slot. Sizes in bytes."""

    batch_size: int
    sample_bytes: int
    """The batch's bytes, divided by its samples."""
    batch_bytes: int
    """The largest batch to be expected in one shuffled epoch."""
    largest_bytes: int
    """The largest batch that there can be: the largest samples, all in one batch."""
    certain: bool
    """Whether ``largest_bytes`` is a fact; else batches differed, and it is the largest one seen and an eighth more."""
    source: str
    """Where the sizes come from: ``'every batch is alike'``, ``'from the lengths of all samples'``, ``'as were n
    batches that were made'``, ``'the largest of n batches'`` or ``'given'``."""


def data_facts(dataset: Any) -> DataFacts:
    if not isinstance(dataset, PackedDataset):
        return DataFacts(None, len(dataset), 0)
    path = os.fspath(dataset.path)
    facts = DataFacts(path, len(dataset), os.stat(path).st_size)
    if dataset.transform is not None:  # a function has no expression
        return facts
    fields = "" if dataset.selected is None else f", fields={dataset.selected!r}"
    return replace(facts, expression=f"PackedDataset({path!r}{fields})")


def ragged_sizes(dataset: Any) -> npt.NDArray[np.int64] | None:
    """Return the bytes that the ragged fields of each sample have in a pack; None if stored lengths tell nothing.

    They tell nothing of other datasets, of encoded images, and once a transform stands between pack and batch.
    """
    if not isinstance(dataset, PackedDataset) or dataset.transform is not None:
        return None
    ragged = [reader for reader in dataset.gather.fields if isinstance(reader, RaggedReader)]
    if not ragged or any(reader.field.encoding for reader in ragged):
        return None
    everything = np.arange(len(dataset), dtype=np.int64)
    sizes = np.zeros(len(dataset), np.int64)
    for reader in ragged:
        step = math.prod(reader.field.trailing or ()) * reader.field.numpy_dtype.itemsize
        sizes += reader.lengths(everything) * step
    return sizes


def stackable(dataset: Any) -> bool:
    """Return False if torch's default collate may not stack the samples: arrays of unequal shape, images as files."""
    if not isinstance(dataset, PackedDataset) or dataset.transform is not None:
        return True
    return not any(field.encoding or (field.kind == "array" and field.ragged) for field in dataset.fields)


def measure_batches(
    dataset: Any, batch_size: int, collate_fn: Callable[[list[Any]], Any] | None
) -> tuple[BatchFacts, int]:
    """Measure batches: some of a shuffled epoch; of ragged packs the heaviest of that epoch and the heaviest of all."""
    samples = len(dataset)
    rows = min(batch_size, samples)
    order = np.random.default_rng(_SEED).permutation(samples)
    epoch = [order[start : start + rows] for start in range(0, samples - rows + 1, rows)][:_EPOCH]
    sizes = ragged_sizes(dataset)
    if sizes is None:
        chosen = epoch[:_PROBED]
    else:
        heaviest = max(epoch, key=lambda indices: int(sizes[indices].sum()))
        with_giant = max(epoch, key=lambda indices: int(sizes[indices].max()))  # what counts for padding
        chosen = [epoch[0], heaviest, with_giant, np.argsort(sizes, kind="stable")[-rows:]]
    probe: Probe = probe_batches(dataset, [indices.tolist() for indices in chosen], collate_fn)
    needs = probe.batch_bytes
    expected = largest = max(needs)
    certain = True
    if sizes is not None:
        expected, source = max(needs[:-1]), "from the lengths of all samples"
    elif isinstance(dataset, PackedDataset) and dataset.transform is None and dataset.gather.is_plain:
        source = "every batch is alike"
    elif min(needs) == max(needs):
        source, certain = f"as were {len(needs)} batches that were made", len(needs) == len(epoch)
    else:
        source, certain = f"the largest of {len(needs)} batches", False
        largest += largest // 8
    return BatchFacts(batch_size, expected // rows, expected, largest, certain, source), probe.private_bytes
