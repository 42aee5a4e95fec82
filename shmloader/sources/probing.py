"""A look at a few samples before packing: what they have in common, how large they are, how long they take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import DataError, PackError, SourceError, human_bytes
from ..packfile.outline import Outline
from .base import Source
from .conversion import Conversion
from .journal import free_bytes
from .reading import Finding, Reading, problem_of
from .settings import PackSettings

_LOOKS = 12
_ROOM = 1.02
"""A file over its payload, where samples are not tiny."""
_BELIEVED = 8
"""So many samples must have been measured before a full disk is foretold."""


@dataclass(frozen=True)
class Probe:
    """What a few samples of one part showed."""

    raw: Outline
    """As the source gives them."""
    stored: Outline
    """As they are stored."""
    conversion: Conversion
    sample_bytes: float
    """Mean, as stored."""
    sample_s: float
    """Mean, to read one in this process."""
    looks: int
    """Samples that were measured."""


def probe(
    source: Source,
    order: npt.NDArray[np.int64],
    settings: PackSettings,
    *,
    bad: Callable[[Finding], None],
    first: int = 0,
) -> Probe:
    """Read the first good sample of an order, and a few more from all over it.

    ``bad`` is called with what is wrong with each sample before the first good one, and may raise. ``first``: where
    packing is to begin. Raises SourceError if there is no good sample at all, and MisuseError if the settings do not
    fit the fields.
    """
    raw, conversion, stored = _first(source, order, settings, bad)
    reading = Reading(source, order, raw, stored, conversion, stop_at_errors=False)
    spread = np.linspace(first, len(order) - 1, _LOOKS) if first < len(order) else np.empty(0)
    places = np.unique(spread.astype(np.int64)).tolist()
    sizes: list[int] = []
    begun = time.perf_counter()
    for place in places:
        values, _ = reading.sample(place)
        if values is not None:
            sizes.append(sum([value.array.nbytes for value in values]))
    took = time.perf_counter() - begun
    known = sum(each.row_bytes for each in stored.fields)
    mean = sum(sizes) / len(sizes) if sizes else float(known)
    return Probe(raw, stored, conversion, mean, took / max(1, len(places)), len(sizes))


def _first(
    source: Source, order: npt.NDArray[np.int64], settings: PackSettings, bad: Callable[[Finding], None]
) -> tuple[Outline, Conversion, Outline]:
    for position, index in enumerate(order.tolist()):
        try:
            sample = source[index]
            raw = Outline.of(sample, index, source.field_names, source.encodings)
            values = raw.values(index, sample)
            conversion = Conversion.of(raw, settings)
            made = conversion.apply(raw, index, values, source.name_of(index))
            return raw, conversion, conversion.outline(raw, made)
        except (DataError, OSError) as error:
            bad(Finding(position, *problem_of(error, index, source)))
    where = str(source.metadata.get("source", source.kind))
    raise SourceError(where, f"none of its {len(order)} samples can be packed")


def check_room(path: str, samples: int, sample_bytes: float, looks: int) -> None:
    """Raise PackError if ``samples`` of this mean size clearly have no room where ``path`` is to be."""
    need, free = int(samples * sample_bytes * _ROOM), free_bytes(path)
    if looks >= min(samples, _BELIEVED) and need > free:
        raise PackError(
            path,
            f"there is too little room: {samples:,} samples will take about {human_bytes(need)}, {human_bytes(free)} "
            "are free there: free some space, or pack less (--limit)",
        )
