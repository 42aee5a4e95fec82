"""One slot: its states and moves. Pure; whose memory it is and who may move it is the arena's business.

              grant           publish          lend
      FREE ──────────▶ GRANTED ──────▶ READY ──────────▶ LENT
       ▲ ◀── reclaim ───┘                │                 │
       ├───────────── reclaim ───────────┘                 │
       ├───────────── give_back (its last view is gone) ───┤
       └── passed ── DRAINING ◀──────── drain ─────────────┘  (no view, but a copy engine may still read it)
      FREE ── retire ──▶ RETIRED (its pages went back to the system)
      GRANTED, READY ── quarantine ──▶ QUARANTINED ── release ──▶ FREE (once the worker that still looks at it has
      ended)

Every move is in MOVES; nothing outside this file writes a state.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import SlotMisuse

# A slot's states are plain strings: they are compared and hashed at C speed, several times a batch.
FREE, GRANTED, READY, LENT, RETIRED = "free", "granted", "ready", "lent", "retired"
QUARANTINED, DRAINING = "quarantined", "draining"

MOVES: dict[tuple[str, str], str] = {
    (FREE, "grant"): GRANTED,
    (GRANTED, "publish"): READY,
    (GRANTED, "reclaim"): FREE,
    (READY, "lend"): LENT,
    (READY, "reclaim"): FREE,
    (LENT, "give_back"): FREE,
    (LENT, "drain"): DRAINING,
    (DRAINING, "passed"): FREE,
    (FREE, "retire"): RETIRED,
    (GRANTED, "quarantine"): QUARANTINED,
    (READY, "quarantine"): QUARANTINED,
    (QUARANTINED, "release"): FREE,
}


class Slot:
    """A piece of the arena that one batch occupies: ``nbytes`` committed bytes at ``offset``."""

    __slots__ = (
        "__weakref__",
        "fence",
        "generation",
        "index",
        "lease",
        "lent_on",
        "mapped",
        "nbytes",
        "offset",
        "on_last_view_gone",
        "state",
        "taken_at",
    )

    def __init__(self, index: int, offset: int, nbytes: int, returned: Callable[[Slot], None]) -> None:
        self.index = index
        self.offset = offset
        self.nbytes = nbytes
        self.state = FREE
        self.mapped = False
        """Whether the owner of the arena has mapped its pages, so that reading it costs no faults."""
        self.lease: weakref.ref[npt.NDArray[np.uint8]] | None = None
        self.on_last_view_gone: Callable[[object], None] = lambda _: returned(self)
        self.fence: Sequence[Any] | None = None
        """Events behind all that may read it beside its views; None: not recorded yet."""
        self.lent_on: Any = None
        """The stream that was current when it was handed out."""
        self.generation = 0
        """How often it was handed out; counted in debug mode."""
        self.taken_at = ""
        """Where its batch was taken; noted in debug mode."""

    def move(self, event: str) -> None:
        """Make a move of MOVES, or raise SlotMisuse with the moves that are legal here."""
        try:
            self.state = MOVES[self.state, event]
        except KeyError:
            legal = tuple(e for s, e in MOVES if s == self.state)
            raise SlotMisuse(self.index, self.state, event, legal, self.taken_at) from None

    def __repr__(self) -> str:
        return f"Slot({self.index}, {self.state}, offset={self.offset}, nbytes={self.nbytes})"
