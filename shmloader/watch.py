"""Debug mode: what a slot's memory is used for when nobody may use it. Costs a pass over each slot; off by default.

    handed out ─▶ place noted, generation counted ─▶ views built (checked) ─▶ last view gone ─▶ poisoned ─▶ granted (the
    poison must be whole)

A tensor made from a raw pointer, or an array that lost its base, reads poison instead of the next batch; whoever writes
through one is found when the slot is granted again, and told where that batch was taken.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import StaleSlot
from .slot import LENT, Slot

POISON = 0xDB
"""As an integer and as a float it is a number that no batch holds by accident."""
_FRAMES = 4
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def wanted(argument: bool | None) -> bool:
    """Return whether debug mode is on: the argument, or, if it is None, ``SHMLOADER_DEBUG`` in the environment."""
    return os.environ.get("SHMLOADER_DEBUG", "0") not in ("", "0") if argument is None else argument


class Watch:
    """Looks after the slots in ``memory``, the bytes of a whole segment."""

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        self._memory = memory
        self._poisoned: set[int] = set()

    def _bytes(self, slot: Slot) -> npt.NDArray[np.uint8]:
        return self._memory[slot.offset : slot.offset + slot.nbytes]

    def freed(self, slot: Slot) -> None:
        """A slot is FREE again: whoever still looks at it shall see poison."""
        self._bytes(slot)[:] = POISON
        self._poisoned.add(slot.index)

    def retired(self, slot: Slot) -> None:
        """A slot's pages go."""
        self._poisoned.discard(slot.index)

    def granted(self, slot: Slot, free: list[Slot]) -> None:
        """A slot that was taken from ``free`` is about to be written anew.

        Raises StaleSlot if somebody wrote into it meanwhile; then it is poisoned again, and back on the list.
        """
        if slot.index not in self._poisoned:
            return
        wrong = np.flatnonzero(self._bytes(slot) != POISON)
        if len(wrong):
            self.freed(slot)
            free.append(slot)
            what = f"was written at {len(wrong)} of its bytes, first at byte {wrong[0]}, after its last view was gone"
            raise StaleSlot(slot.index, slot.generation, what, slot.taken_at)
        self._poisoned.discard(slot.index)

    def lent(self, slot: Slot) -> None:
        """A slot is handed out: note where."""
        slot.generation += 1
        slot.taken_at = place()

    def checked(self, slot: Slot, build: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return ``build`` with a check, before and after, that the slot is still lent to this very batch."""
        generation = slot.generation

        def check(base: Any) -> None:
            lease = slot.lease() if slot.lease is not None else None
            if slot.state != LENT or slot.generation != generation or lease is not base:
                what = f"is {slot.state} in use {slot.generation} while views of it are built"
                raise StaleSlot(slot.index, generation, what, slot.taken_at)

        def checking(base: Any) -> Any:
            check(base)
            batch = build(base)
            check(base)
            return batch

        return checking


def place() -> str:
    """Return the innermost frames outside this package and torch's loader, as in a traceback."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(_HERE) or frame.f_code.co_filename.endswith("/utils/data/dataloader.py")
    ):
        frame = frame.f_back
    return "".join(traceback.format_stack(frame, _FRAMES)).rstrip()
