"""From a source to a pack: by columns where the data lies in columns, else sample by sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..errors import SampleMismatch
from ..packfile import PackReport, PackWriter, pack
from .base import Array, Source, StrPath

_BLOCK_BYTES = 16 << 20  # read and handed over at a time: what bounds memory

Progress = Callable[[int, int | None, int], None]
"""Called with samples done, samples in all, bytes written."""


def pack_source(
    source: Source, path: StrPath, *, overwrite: bool = False, progress: Progress | None = None
) -> PackReport:
    """Write all samples of ``source`` to the pack ``path``, with its names, classes and encodings.

    Raises what reading a sample raises, and PackError for the target; then nothing is left and the target is as it was.
    A sample that does not fit the ones before it is named by where it came from.
    """
    columns = source.columns()
    if columns is not None and len(source):
        return _pack_columns(source, columns, path, overwrite=overwrite, progress=progress)
    try:
        return pack(
            source,
            path,
            overwrite=overwrite,
            field_names=source.field_names,
            metadata=source.metadata,
            encodings=source.encodings,
            progress=progress,
        )
    except SampleMismatch as odd:
        if odd.source:
            raise
        raise SampleMismatch(odd.index, odd.field, odd.expected, odd.found, source.name_of(odd.index)) from odd


def _pack_columns(
    source: Source, columns: Mapping[str, Array] | Array, path: StrPath, *, overwrite: bool, progress: Progress | None
) -> PackReport:
    arrays = list(columns.values()) if isinstance(columns, Mapping) else [columns]
    row_bytes = sum(array.dtype.itemsize * int(np.prod(array.shape[1:], dtype=np.int64)) for array in arrays)
    step = max(1, _BLOCK_BYTES // max(1, row_bytes))
    with PackWriter(
        path,
        overwrite=overwrite,
        field_names=source.field_names,
        metadata=source.metadata,
        encodings=source.encodings,
    ) as writer:
        for start in range(0, len(source), step):
            rows = slice(start, start + step)
            block: Any = (
                {name: _native(array[rows]) for name, array in columns.items()}
                if isinstance(columns, Mapping)
                else _native(columns[rows])
            )
            writer.add_columns(block)
            if progress is not None:
                progress(writer.samples, len(source), writer.payload_bytes)
        return writer.seal()


def _native(rows: Array) -> Array:
    """Return rows in this machine's byte order, contiguous: read now, once."""
    return np.ascontiguousarray(rows, dtype=rows.dtype.newbyteorder("="))
