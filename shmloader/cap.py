"""The one number: bytes of shared memory that all arenas of a loader may commit together. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sized


class Cap:
    """The one number: bytes that all arenas of a loader may commit together. ``limit`` None: only the host limits."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.used = 0
        self.peak = 0
        self._orphans: list[tuple[Sized, int, int]] = []

    def room(self) -> int | None:
        """Bytes that may still be committed; None if the host alone decides."""
        for orphan in [o for o in self._orphans if len(o[0]) >= o[1]]:
            self._orphans.remove(orphan)
            self.used -= orphan[2]
        return None if self.limit is None else self.limit - self.used

    def adopt(self, returned: Sized, lent: int, nbytes: int) -> None:
        """Go on counting the ``nbytes`` of a closed arena until its ``lent`` slots have all come back.

        Its pages belong to one mapping, which lives as long as the last of their views.
        """
        if lent:
            self._orphans.append((returned, lent, nbytes))
        else:
            self.add(-nbytes)

    def add(self, nbytes: int) -> None:
        """Count ``nbytes`` more (negative: fewer) committed bytes."""
        self.used += nbytes
        self.peak = max(self.peak, self.used)
