"""Which parts of a reserved range are taken: first fit, neighbours merge again. Pure arithmetic, knows no memory."""

from __future__ import annotations

import bisect


class Extents:
    """Hands out non-overlapping ``(offset, nbytes)`` pieces of ``[0, nbytes)``. All numbers are the caller's unit."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._free: list[tuple[int, int]] = [(0, nbytes)] if nbytes else []  # sorted by offset, never touching

    def take(self, nbytes: int) -> int | None:
        """Return the offset of a free piece of ``nbytes``, which is taken from now on, or None if there is none."""
        for place, (offset, length) in enumerate(self._free):
            if length >= nbytes:
                if length == nbytes:
                    del self._free[place]
                else:
                    self._free[place] = (offset + nbytes, length - nbytes)
                return offset
        return None

    def reach(self, offset: int, nbytes: int) -> tuple[int, int]:
        """Return where a taken piece begins and ends if the free pieces that touch it are counted in."""
        place = bisect.bisect_left(self._free, (offset, 0))
        before = self._free[place - 1] if place else None
        after = self._free[place] if place < len(self._free) else None
        start = before[0] if before and sum(before) == offset else offset
        stop = sum(after) if after and after[0] == offset + nbytes else offset + nbytes
        return start, stop

    def give(self, offset: int, nbytes: int) -> None:
        """Give back a piece that ``take`` returned."""
        place = bisect.bisect_left(self._free, (offset, 0))
        before = self._free[place - 1] if place else None
        after = self._free[place] if place < len(self._free) else None
        if (before and before[0] + before[1] > offset) or (after and offset + nbytes > after[0]):
            raise ValueError(f"piece [{offset}, {offset + nbytes}) is not taken")
        if after and offset + nbytes == after[0]:
            nbytes += after[1]
            del self._free[place]
        if before and before[0] + before[1] == offset:
            offset, nbytes = before[0], before[1] + nbytes
            place -= 1
            del self._free[place]
        self._free.insert(place, (offset, nbytes))

    @property
    def free(self) -> int:
        """The sum of all free pieces."""
        return sum(length for _, length in self._free)
