"""Arithmetic of the one number: how many slots of which size, under which limit. Pure: reads no host, touches no page.

    arena_bytes not given:  the plan takes what it needs; if the host says no, fewer slots, down to the minimum, else an
                            error
    arena_bytes given:      that number is a promise in both directions: the arena never takes more, and the host must
                            have it

The host's word comes in as a :class:`~shmloader.limits.Limit` (the binding one), whose name goes into every message.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import SupportsIndex

from .errors import ArenaTooSmall, SharedMemoryFull, human_bytes
from .limits import Limit

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]*)\s*", re.IGNORECASE)
_UNITS = {"": 1, "b": 1, "byte": 1, "bytes": 1}
for _power, _letter in enumerate("kmgt", 1):
    # A bare letter is binary, as in docker's --shm-size=2g; with "B" it is decimal, with "iB" binary, as on paper.
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}

IN_HAND = 1  # slots: the batch that the user's loop body works on
HANDED_OVER = 1  # slots: the next batch, asked for while the loop's names still hold the last one
DEFAULT_PREFETCH = 2  # batches per worker, as in torch


def parse_bytes(size: SupportsIndex | str) -> int:
    """Return a size in bytes: an integer, or a string such as ``"2GiB"``, ``"512 MB"``, ``"1.5g"``.

    KiB, MiB, GiB, TiB are powers of 1024; KB, MB, GB, TB powers of 1000; a bare k, m, g, t is binary, as docker means
    it; upper and lower case are the same; a fraction of a byte is dropped. Raises TypeError for other types (a bool or
    float too), ValueError for other text and for sizes below one byte.
    """
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise ValueError(f"cannot read {size!r} as a size; write a number of bytes, or '2GiB', '512MB', '1.5g'")
        number = match[1]
        nbytes = int(Fraction(f"0{number}" if number.startswith(".") else number.rstrip(".")) * unit)
    elif isinstance(size, bool):
        raise TypeError("a size must be an int or a string such as '2GiB', not a bool")
    else:
        try:
            nbytes = operator.index(size)
        except TypeError:
            raise TypeError(f"a size must be an int or a string such as '2GiB', not {type(size).__name__}") from None
    if nbytes < 1:
        raise ValueError(f"a size must be at least one byte, not {size!r}")
    return nbytes


def slots_wanted(num_workers: int, prefetch_factor: int | None) -> int:
    """Return the slots with which nobody waits for memory: all batches in flight, one in use, one being handed over.

    Without workers one batch is in flight. ``prefetch_factor`` None means torch's default of 2.
    """
    if not num_workers:
        return 1 + IN_HAND + HANDED_OVER
    return num_workers * (prefetch_factor or DEFAULT_PREFETCH) + IN_HAND + HANDED_OVER


def slots_minimum(num_workers: int) -> int:
    """Return the fewest slots that keep every worker busy: one each (at least one), and the one in the user's hands."""
    return max(num_workers, 1) + IN_HAND


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """What an arena will take. ``slots * slot_bytes == nbytes <= limit``. Sizes in bytes."""

    slots: int
    slot_bytes: int
    """Of each slot; a multiple of the page."""
    nbytes: int
    """Of all slots: what is committed when every slot is in use."""
    limit: int
    """What the arena may never exceed, giants and growth included."""
    reason: str
    """Why these numbers, in one clause that names the limit that decided."""


def plan_arena(
    *,
    slot_bytes: int,
    slots: int,
    minimum_slots: int,
    arena_bytes: int | None,
    binding: Limit | None,
    page: int = 4096,
    headroom: int = 0,
) -> ArenaPlan:
    """Plan ``slots`` slots that hold ``slot_bytes`` each, under ``arena_bytes`` and the host's ``binding`` limit.

    ``headroom``: bytes under the binding limit that the arena must leave to others (the workers' own memory).
    ``binding`` None: the host is not asked. Raises ArenaTooSmall if ``arena_bytes`` cannot hold ``minimum_slots``, and
    SharedMemoryFull if the host cannot give ``arena_bytes``, or, without that number, not even ``minimum_slots``.
    """
    if slot_bytes < 1 or minimum_slots < 1 or page < 1 or headroom < 0:
        raise ValueError(
            f"slot_bytes={slot_bytes}, minimum_slots={minimum_slots} and page={page} must be at least 1, "
            f"headroom={headroom} at least 0"
        )
    slot_bytes = -(-slot_bytes // page) * page
    slots = max(slots, minimum_slots)
    minimum, wanted = minimum_slots * slot_bytes, slots * slot_bytes
    free = None if binding is None else max(0, binding.nbytes_free - headroom)

    if arena_bytes is not None:
        if arena_bytes < minimum:
            raise ArenaTooSmall(arena_bytes, minimum, minimum_slots, slot_bytes)
        if binding is not None and free is not None and arena_bytes > free:
            raise SharedMemoryFull(arena_bytes, free, binding.where)
        fit = min(slots, arena_bytes // slot_bytes)
        by = f"arena_bytes={arena_bytes} ({human_bytes(arena_bytes)}) allows no more"
        return _plan(fit, slots, slot_bytes, arena_bytes, by)

    if binding is None or free is None or wanted <= free:
        return _plan(slots, slots, slot_bytes, wanted, "")
    if minimum > free:
        raise SharedMemoryFull(minimum, free, binding.where)
    fit = free // slot_bytes
    left = f", and {human_bytes(headroom)} of that are left to the processes" if headroom else ""
    by = f"{binding.where} has {human_bytes(binding.nbytes_free)} free{left}"
    return _plan(fit, slots, slot_bytes, fit * slot_bytes, by)


def _plan(fit: int, wanted: int, slot_bytes: int, limit: int, by: str) -> ArenaPlan:
    if fit == wanted:
        reason = f"all {wanted} slots of {human_bytes(slot_bytes)} fit"
    else:
        reason = f"{fit} of {wanted} slots of {human_bytes(slot_bytes)}: {by}"
    return ArenaPlan(fit, slot_bytes, fit * slot_bytes, limit, reason)
