"""What all exceptions have in common."""

from __future__ import annotations

from typing import ClassVar


def human_bytes(nbytes: int) -> str:
    """Return ``nbytes`` in the largest binary unit that keeps one digit before the point: ``'64.0 MiB'``."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{int(value)} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def shown(indices: tuple[object, ...]) -> str:
    """Return the first indices of a batch as a message shows them."""
    return ", ".join(map(repr, indices[:16])) + (", ..." if len(indices) > 16 else "")


class ShmLoaderError(Exception):
    """Base of all exceptions of this library."""

    hint: ClassVar[str] = ""

    def _sentence(self) -> str:
        return super().__str__()

    def __str__(self) -> str:
        sentence = self._sentence()
        return f"{sentence}; {self.hint}" if self.hint else sentence
