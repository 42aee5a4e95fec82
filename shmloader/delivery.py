"""A finished slot becomes the user's batch: lent if the slot can be spared, copied if not.

Two ways lead there:

    READY ──lend──▶ views of the slot                 the normal way: no byte is copied
    READY ──copy──▶ views of a heap copy, slot FREE   when the user keeps so many batches that workers would run dry
"""

from __future__ import annotations

import pickle
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from .arena import Arena
from .badsamples import BadSamples, Flaws
from .batch import Build, compile_layout, holds_custom
from .errors import CopiedOutWarning, human_bytes
from .pinning import pinned_copy
from .slot import Slot


@dataclass
class Counters:
    """What a loader has done so far. One object per loader, shared by its iterators."""

    batches: int = 0
    """Batches delivered."""
    waited_s: float = 0.0
    """Seconds that the main process slept because no batch was ready."""
    copied_out: int = 0
    """Batches that were delivered as copies because the user kept too many."""
    copied_bytes: int = 0
    """Bytes that workers copied into slots because they were not born there."""
    payload_bytes: int = 0
    """Bytes of all batches' slots in use."""
    restarts: int = 0
    """Workers that were started in place of dead ones."""
    bad: BadSamples = field(default_factory=BadSamples)
    """Samples that were left out or replaced."""


class Delivery:
    """Turns published slots of one arena into batches.

    ``pin_types``: ``pin_memory()`` of custom types is called, as torch does; all other batches are as they lie.
    """

    def __init__(self, arena: Arena, counters: Counters, pin_types: bool = False) -> None:
        self._arena = arena
        self._watch = arena.watch
        self._pin_types = pin_types
        self._counters = counters
        self._builds: dict[tuple[int, int], Build] = {}
        self._warned = False
        self.lent_slot: Slot | None = None
        """The slot of the batch that was delivered last; None if it was a copy."""

    def known_build(self, worker: int, number: int) -> Build:
        """Return the builder of a layout that ``worker`` has sent before under this number."""
        return self._builds[worker, number]

    def build_of(self, worker: int, number: int, layout: npt.NDArray[Any]) -> Build:
        """Return the builder of a layout from its pickle, and keep it under the worker's ``number``, if not -1."""
        root = pickle.loads(layout.data)
        if type(root) is Flaws:
            self._counters.bad.add(root.bad)
            root = root.root
        build = compile_layout(root)
        if self._pin_types and holds_custom(root):
            build = _pinning(build)
        if number >= 0:
            self._builds[worker, number] = build
        return build

    def forget_builds(self) -> None:
        """A new epoch begins, in which workers send every layout anew."""
        self._builds.clear()

    def can_spare(self) -> bool:
        """Whether one more slot can be lent and enough remain for the workers."""
        return self._arena.can_spare()

    def deliver(self, slot: Slot, build: Build, used: int) -> Any:
        """Return the batch of a GRANTED slot that its worker has filled up to ``used``. Lends or copies; see above."""
        counters = self._counters
        counters.batches += 1
        counters.payload_bytes += used
        base = self._arena.lend_if_spare(slot, used)
        self.lent_slot = slot
        if base is None:
            self.lent_slot = None
            base = self._arena.segment.memory[slot.offset : slot.offset + used].copy()
            self._arena.reclaim(slot)
            self.count_copy()
        elif self._watch is not None:
            build = self._watch.checked(slot, build)
        return build(base)

    def deliver_copy(self, build: Build, base: npt.NDArray[Any]) -> Any:
        """Return a batch whose bytes are on the heap already."""
        self.lent_slot = None
        self._counters.batches += 1
        self._counters.payload_bytes += len(base)
        return build(base)

    def count_copy(self) -> None:
        """Count a batch that is a copy because the user holds the slots; warn at the first one of this pass."""
        stats = self._arena.stats()
        self._count_copy(
            f"{stats.lent + stats.draining} of {stats.slots} slots hold batches that are still in use"
            f"{f' ({stats.draining} of them by copies to a device)' if stats.draining else ''}, so further batches are "
            "delivered as copies, which are right but slower; drop old batches, or raise arena_bytes= "
            f"({self._limit()}) to keep more of them in shared memory"
        )

    def count_giant(self, nbytes: int) -> None:
        """Count a batch that came in pieces, because no slot of its size could be had; warn as above."""
        self._count_copy(
            f"a batch of {human_bytes(nbytes)} is larger than any slot that can be had while other batches hold "
            "the rest of the arena, so it is delivered as a copy, which is right but slower; raise arena_bytes= "
            f"({self._limit()}), or lower the batch size, prefetch_factor or num_workers"
        )

    def _limit(self) -> str:
        limit = self._arena.cap.limit
        return "now the host's memory" if limit is None else f"now {human_bytes(limit)}"

    def _count_copy(self, why: str) -> None:
        self._counters.copied_out += 1
        if not self._warned:
            self._warned = True
            warnings.warn(why, CopiedOutWarning, stacklevel=2)


def _pinning(build: Build) -> Build:
    """Return ``build`` followed by what torch's pinning does: a no-op for tensors that are page-locked already."""
    return lambda base: pinned_copy(build(base), "cuda")
