"""pack(): any dataset into a pack."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from typing import Any

import torch
from torch.utils.data import IterableDataset, TensorDataset

from ..errors import UnsupportedField
from .report import PackReport
from .writer import CHUNK_BYTES, PackWriter

Progress = Callable[[int, int | None, int], None]
"""Called with (samples done, samples in all or None, bytes of values so far)."""

_PROGRESS_S = 0.1
_SLICE_ROWS = 1 << 12


def pack(
    dataset: Any,
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    field_names: Sequence[str] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    metadata: Mapping[str, Any] | None = None,
    encodings: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> PackReport:
    """Write every sample of ``dataset`` into a new pack at ``path``, and return what became of it.

    ``dataset``: map-style (``len`` and ``[i]``) or iterable; of arrays, tensors, numbers, bools, str, bytes, and
    tuples, lists, dicts and namedtuples of them, nested. All samples have the same structure and dtypes; shapes may
    vary. A ``TensorDataset`` is packed in slices, without Python for each sample.
    ``field_names``: names for the parts of a tuple, ``("image", "label")``; else their positions are their names.
    ``encodings``: ``{"image": "encoded-image"}`` says that these bytes are an image file, to be decoded when read.
    ``{"mask": "zlib"}`` compresses each row of that field, arrays, str or bytes: it is expanded when read.
    ``metadata``: JSON values to keep; ``{"classes": [...]}`` can be read as ``PackedDataset.classes``.
    ``progress``: called at most ten times a second, and at the end.

    ``path`` gets its name when all is written and synced; until then, and after any failure, it is as it was. Memory
    is bounded by a few times ``chunk_bytes``, whatever the size of the dataset. Raises PackExists, SampleMismatch
    (which names the sample, the field, and what was expected), UnsupportedField, and whatever the dataset raises.
    """
    total, steps = _walk(dataset, by_rows=not encodings)
    with PackWriter(
        path,
        overwrite=overwrite,
        field_names=field_names,
        chunk_bytes=chunk_bytes,
        metadata=metadata,
        encodings=encodings,
    ) as writer:
        due = time.monotonic() + _PROGRESS_S
        for step in steps:
            step(writer)
            if progress is not None and time.monotonic() >= due:
                progress(writer.samples, total, writer.payload_bytes)
                due = time.monotonic() + _PROGRESS_S
        report = writer.seal()
    if progress is not None:
        progress(report.samples, report.samples, report.payload_bytes)
    return report


Step = Callable[[PackWriter], None]


def _walk(dataset: Any, *, by_rows: bool) -> tuple[int | None, Iterator[Step]]:
    """Return (length or None, what to do with the writer, in order: most often to add one sample)."""
    if by_rows and type(dataset) is TensorDataset and dataset.tensors:
        return len(dataset), _slices(dataset.tensors)
    total, samples = _samples(dataset)
    return total, (partial(_add, sample) for sample in samples)


def _add(sample: Any, writer: PackWriter) -> None:
    writer.add(sample)


def _slices(tensors: tuple[torch.Tensor, ...]) -> Iterator[Step]:
    """Samples that are rows of tensors need no Python for each of them."""
    for at in range(0, len(tensors[0]), _SLICE_ROWS):
        columns = tuple([tensor[at : at + _SLICE_ROWS] for tensor in tensors])
        yield lambda writer, columns=columns: writer.add_columns(columns)  # type: ignore[misc]


def _samples(dataset: Any) -> tuple[int | None, Iterator[Any]]:
    """Return (length or None, the samples in order)."""
    if isinstance(dataset, (str, bytes, Mapping)):
        raise UnsupportedField(0, "dataset", f"a {type(dataset).__name__} as a dataset")
    if isinstance(dataset, IterableDataset) or (isinstance(dataset, Iterable) and not isinstance(dataset, Sized)):
        return None, iter(dataset)
    if isinstance(dataset, Sized) and callable(getattr(type(dataset), "__getitem__", None)):
        count = len(dataset)
        return count, (dataset[i] for i in range(count))  # type: ignore[index]
    if isinstance(dataset, Iterable):
        return None, iter(dataset)
    raise UnsupportedField(
        0, "dataset", f"a {type(dataset).__name__} as a dataset: it has neither len and [i] nor iter"
    )
