"""What became of a packing run, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..packfile import PackReport
from .summary import FieldSummary, LabelSummary


@dataclass(frozen=True)
class PartRun:
    """What became of one pack of a run."""

    report: PackReport
    fields: tuple[FieldSummary, ...]
    labels: LabelSummary | None
    image_sizes: Mapping[tuple[int, int], int]
    """(height, width) of encoded images to how many; (0, 0) stands for the rest, where there are very many sizes."""
    odd: tuple[str, ...]
    """Samples whose shape is unlike nearly all others', one sentence a field and shape."""


@dataclass(frozen=True)
class PackRun:
    """What became of a packing run."""

    parts: tuple[PartRun, ...]
    resumed: int
    """Samples that an earlier run had packed."""
    skipped: int
    """Samples that are in no pack because something was wrong with them."""
    problems: Mapping[tuple[str, str], int]
    """(severity, kind) to how many findings."""
    examples: Mapping[str, list[str]]
    """Kind to the first few."""
    report_file: str | None
    workers: int
    seconds: float
