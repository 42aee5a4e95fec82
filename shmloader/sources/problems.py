"""What is wrong with a sample, as data: found while packing, counted, listed, and never dropped in silence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with one sample of a source."""

    index: int
    """Position of the sample in the source."""

    where: str
    """What a user would look up: the file, and the line, row or object in it."""

    kind: str
    """One word that groups equal problems in a report, such as ``"box-outside"`` or ``"unreadable-image"``."""

    what: str
    """The finding with its numbers, such as ``"box 3 (10, 5, 260, 80) reaches beyond the image of 240 x 200"``."""

    severity: Severity = "error"
    """``"error"``: the sample cannot be trained on; packing stops or skips it, as the user says. ``"warning"``: the
    sample is packed as it is, and the finding is counted and listed."""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"
