"""A reader for each field of an open pack."""

from __future__ import annotations

from typing import TypeAlias

from .mapping import OpenPack
from .reader import FixedReader, RaggedReader
from .window_reader import WindowReader

Reader: TypeAlias = FixedReader | RaggedReader | WindowReader


def open_fields(pack: OpenPack) -> tuple[Reader, ...]:
    """Return a reader for each field of the pack."""
    raw = pack.raw()
    kinds = [
        RaggedReader if field.ragged else FixedReader if field.stride is None else WindowReader
        for field in pack.manifest.fields
    ]
    return tuple([kind(pack, raw, number) for number, kind in enumerate(kinds)])
