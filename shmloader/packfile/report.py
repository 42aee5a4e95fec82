"""PackReport: what became of a packing run."""

from __future__ import annotations

from dataclasses import dataclass

from .schema import Field


@dataclass(frozen=True)
class PackReport:
    """What became of a packing run."""

    path: str
    samples: int
    payload_bytes: int
    """Bytes of the values alone."""
    file_bytes: int
    seconds: float
    fields: tuple[Field, ...]

    @property
    def ratio(self) -> float:
        """File bytes per payload byte; 1.0 for a pack without payload."""
        return self.file_bytes / self.payload_bytes if self.payload_bytes else 1.0

    @property
    def advice(self) -> str | None:
        """What to do about a file much larger than its payload, or None."""
        if self.ratio <= 1.3 or self.file_bytes < 1 << 20:
            return None
        return (
            "the file is much larger than its values: each sample holds only few bytes per ragged field, which cost 4 "
            "bytes of offset each; pad them to one shape, or join fields"
        )
