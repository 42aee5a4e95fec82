"""Committed pieces of a segment: taken from its range, counted against the cap, and never more than the host has left.

    cap (the user's number) ──▶ host (control groups, memory) ──▶ a free range ──▶ segment.commit (the mount's word)

What says no says so here, before a page is touched or with nothing kept; the caller's books need no undoing.
"""

from __future__ import annotations

from .cap import Cap
from .errors import SharedMemoryFull
from .extents import Extents
from .host_room import HostRoom
from .segment import PAGE, Segment, round_up


class Pieces:
    """Takes and gives back pieces of ``segment``. Sizes and offsets in bytes. Not safe for threads: its arena is."""

    def __init__(self, segment: Segment, cap: Cap) -> None:
        self._segment = segment
        self._cap = cap
        self._host = HostRoom()
        self._extents = Extents(segment.nbytes // PAGE)

    def room(self, nbytes: int) -> int:
        """Return the bytes that cap, host and mount leave; the host is looked at anew if ``nbytes`` ask for it."""
        rooms = (self._cap.room(), self._segment.room(), self._host.room(nbytes))
        return min(room for room in rooms if room is not None)

    def take(self, nbytes: int) -> int:
        """Commit a piece of ``nbytes`` (whole pages); return its offset. Its bytes read as zero. Raises
        SharedMemoryFull."""
        room, host = self._cap.room(), self._host.room(nbytes)
        if room is not None and nbytes > room:
            raise SharedMemoryFull(nbytes, max(room, 0), f"arena_bytes={self._cap.limit}")
        if nbytes > host:
            raise SharedMemoryFull(nbytes, host, self._host.where)
        place = self._extents.take(nbytes // PAGE)
        if place is None:
            raise SharedMemoryFull(nbytes, self._extents.free * PAGE, "the reserved address range")
        try:
            self._segment.commit(place * PAGE, nbytes)
        except BaseException:
            self._extents.give(place, nbytes // PAGE)
            raise
        self._trim(place * PAGE, nbytes)
        self._host.add(nbytes)
        self._cap.add(nbytes)
        return place * PAGE

    def give(self, offset: int, nbytes: int) -> None:
        """Give a piece back, and its pages to the system."""
        if not self._segment.closed:
            self._segment.decommit(offset, nbytes)
            self._trim(offset, nbytes)
        self._extents.give(offset // PAGE, nbytes // PAGE)
        self._host.add(-nbytes)
        self._cap.add(-nbytes)

    def take_uncounted(self, nbytes: int) -> int:
        """``take``, rounded up to whole pages, for a piece that the cap does not count."""
        nbytes = round_up(nbytes)
        self._cap.add(-nbytes)
        try:
            return self.take(nbytes)
        except BaseException:
            self._cap.add(nbytes)
            raise

    def give_uncounted(self, offset: int, nbytes: int) -> None:
        """Give back what ``take_uncounted`` returned."""
        nbytes = round_up(nbytes)
        self.give(offset, nbytes)
        self._cap.add(nbytes)

    def _trim(self, offset: int, nbytes: int) -> None:
        """Give back what huge pages reach over a piece, as far as nobody has it: the cap counts pieces, not pages."""
        if self._segment.placement.wants_huge:
            start, stop = self._extents.reach(offset // PAGE, nbytes // PAGE)
            self._segment.trim(offset, nbytes, start * PAGE, stop * PAGE)
