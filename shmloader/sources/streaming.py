"""Datasets that can only be iterated: packed as their samples come, in this process, once."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..errors import MisuseError
from ..packfile import pack
from .base import StrPath
from .python_dataset import PythonDataset
from .result import PackRun, PartRun
from .settings import PackSettings
from .summary import summarise


def pack_stream(
    source: PythonDataset,
    path: StrPath,
    *,
    settings: PackSettings,
    overwrite: bool,
    progress: Callable[[int, int | None, int], None] | None,
) -> PackRun:
    """Write the samples of ``source`` to the pack ``path``. Nothing is left of a run that fails.

    Raises MisuseError for settings that need a length or an order, PackError for the target, and what iterating raises.
    """
    if settings != PackSettings(chunk_bytes=settings.chunk_bytes):
        raise MisuseError(
            f"{source.name} can only be iterated: its samples are packed as they come, all of them, into one pack. "
            "Give the dataset a length and items by number to shuffle, split, limit or convert it"
        )
    begun = time.monotonic()
    report = pack(
        iter(source),
        path,
        overwrite=overwrite,
        field_names=source.field_names,
        chunk_bytes=settings.chunk_bytes,
        metadata=source.metadata,
        encodings=source.encodings,
        progress=progress,
    )
    fields, labels = summarise(report.path)
    return PackRun((PartRun(report, fields, labels, {}, ()),), 0, 0, {}, {}, None, 0, time.monotonic() - begun)
