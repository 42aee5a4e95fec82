"""What the host has left for one more slot: asked before memory is committed, since a control group kills instead of
saying no.

    a slot of n bytes ──▶ within the credit of the last look? ──yes──▶ go on
                              │no
                              └──▶ look at control groups and memory (a fraction of a millisecond), new credit

A mount says no by itself (ENOSPC) and is asked each time. A control group's limit, or the host's last memory, is
enforced by ending a process, so nothing is committed that a look would have forbidden. A look costs too much for every
slot of ragged data; so a part of what was free may be committed before the next look.
"""

from __future__ import annotations

from .limits import Limit, shared_memory_limit

_CREDIT = 8
"""One part in so many of what was free may be committed before the next look."""
_KEEP, _KEEP_PARTS = 64 << 20, 16
"""Bytes, or one part in so many of the limit if that is less, that are left to everything else that will want some."""


def kept_back(limit: Limit) -> int:
    """Return the bytes under ``limit`` that an arena leaves to others: the workers' own memory grows too."""
    return 0 if limit.unlimited else min(_KEEP, limit.nbytes_total // _KEEP_PARTS)


class HostRoom:
    """Bytes that may still be committed as far as control groups and memory are concerned. Knows no mount."""

    def __init__(self) -> None:
        self._free = 0
        self._credit = 0
        self.where = "the host's memory"
        """The limit that decided at the last look, with its source."""

    def room(self, nbytes: int) -> int:
        """Return the bytes that may be committed now; looks at the host if ``nbytes`` is more than the credit."""
        if nbytes > self._credit:
            limit = shared_memory_limit(None)
            self.where = limit.where
            self._free = max(0, limit.nbytes_free - kept_back(limit))
            self._credit = self._free // _CREDIT
        return self._free

    def add(self, nbytes: int) -> None:
        """Count ``nbytes`` more (negative: fewer) committed bytes."""
        self._free -= nbytes
        self._credit -= max(0, nbytes)
