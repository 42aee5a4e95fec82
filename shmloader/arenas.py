"""The arenas of one loader, under one cap: made when needed, kept between epochs, planned when the batch size is known.

    iter(loader) ──take──▶ idle arena of an earlier epoch, or a new one ──▶ pass ──give──▶ idle again

Batches that the user kept from an earlier epoch stay lent in the arena that is reused, so its slots are never rewritten
under them. Two passes at one time have two arenas, and the cap counts both.
"""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import replace
from typing import Any

from .arena import Arena
from .budget import ArenaPlan, plan_arena, slots_minimum
from .cap import Cap
from .errors import SharedMemoryFull, human_bytes
from .host_room import kept_back
from .limits import Limit, Ranks, find_ranks, mount_limit, shared_memory_limit
from .pinning import Copying
from .placement import place
from .segment import HUGE, PAGE, SHM_ROOT, Segment, round_up
from .watch import Watch

AUTO = "auto"
SMALL_MOUNT = 256 << 20
"""Bytes; below this a shared-memory mount is a container's default of 64 MB or the like, and memfd is used instead."""
_SPREAD = 4
"""Reserved addresses per byte of the cap: room for slots of changing size. Reserving costs nothing."""
_HUGE_FROM = 128 * HUGE
"""Bytes of cap from which huge pages are asked for: below it slots hold few or none, and splitting them costs."""
WORKER_BYTES = 32 << 20
"""Private memory of one worker before it has read anything: the interpreter and torch, after a fork."""
_SHARE = 0.5
"""Share of what the host has free that a loader without arena_bytes may take at most, kept batches included."""


def directory_of(backing: str) -> str | None:
    """Return the directory whose mount limits a backing; None for memory without a mount."""
    return {"posix": SHM_ROOT, "memfd": None}.get(backing, backing)


def choose_backing(requested: str, arena_bytes: int | None) -> tuple[str, Limit]:
    """Return the backing for a new segment and the limit that binds there.

    ``auto``: posix shared memory, unless its mount is missing, read-only or too small, then memfd. Raises
    SharedMemoryFull if ``arena_bytes`` is more than the host has free. Touches no page.
    """
    if requested == AUTO:
        mount, _ = mount_limit(SHM_ROOT)
        roomy = mount is not None and mount.nbytes_free >= (arena_bytes or SMALL_MOUNT)
        requested = "posix" if roomy else "memfd"
    binding = shared_memory_limit(directory_of(requested))
    if arena_bytes is not None and arena_bytes > binding.nbytes_free:
        raise SharedMemoryFull(arena_bytes, binding.nbytes_free, binding.where)
    return requested, binding


def share_of(limit: Limit, ranks: Ranks) -> Limit:
    """Return what one of the job's processes on this host may have of a limit: each has an arena of its own."""
    if ranks.count == 1 or limit.unlimited:
        return limit
    name = f"{limit.name}, shared by {ranks.count} local ranks as {ranks.source} says"
    return Limit(name, limit.nbytes_free // ranks.count, limit.nbytes_total // ranks.count, limit.source)


class Arenas:
    """Makes, keeps and closes the arenas of one loader. Safe to use from several threads.

    A copy of the loader in another process, or by ``copy`` or ``pickle``, begins without any.
    """

    def __init__(self, arena_bytes: int | None, backing: str, numa_node: int | None = None) -> None:
        self.arena_bytes = arena_bytes
        self.backing = backing
        self.numa_node = numa_node
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._cap = Cap(None if self.arena_bytes is None else round_up(self.arena_bytes))
        self._idle: list[Arena] = []
        self._newest: weakref.ref[Arena] | None = None
        self._lock = threading.Lock()
        self._close_idle = weakref.finalize(self, _close_all, self._idle)

    def __reduce__(self) -> tuple[Any, ...]:
        return Arenas, (self.arena_bytes, self.backing, self.numa_node)

    def take(self, slots: int, num_workers: int, copying: Copying | None = None, debug: bool = False) -> Arena:
        """Return an arena for one pass: an idle one, or a new one. Raises SharedMemoryFull or OSError.

        ``copying``: what may read its slots beside the user. ``debug``: misuse of slots is looked for.
        """
        if self._pid != os.getpid():  # a forked child: the arenas of its parent are not its own
            self._close_idle.detach()
            self._begin()
        with self._lock:
            arena = self._idle.pop() if self._idle else self._make()
            if not arena.slot_bytes:
                arena.slots_wanted = slots
                arena.keep_back = min(num_workers, max(1, slots // 2))
            if copying is not None:
                arena.serve(copying)
            if debug and arena.watch is None:
                arena.watch = Watch(arena.segment.memory)
            self._newest = weakref.ref(arena)
            return arena

    def give(self, arena: Arena) -> None:
        """Take an arena back whose pass has ended."""
        if arena.segment.owner_pid == os.getpid():
            self._idle.append(arena)

    def _make(self) -> Arena:
        room = self._cap.room() if self.arena_bytes is not None else None
        backing, binding = choose_backing(self.backing, room)
        if self._cap.limit is None:
            free = share_of(binding, find_ranks()).nbytes_free
            self._cap.limit = max(round_up(int(free * _SHARE)), PAGE)
        reserve = round_up(_SPREAD * max(self._cap.limit, 64 << 20))
        try:
            segment = self._create(reserve, backing)
        except OSError:
            if backing == "posix" and self.backing == AUTO:
                backing = "memfd"
            segment = self._smaller(reserve, backing)
        return Arena(segment, self._cap, 0)

    def _create(self, reserve: int, backing: str) -> Segment:
        huge = (self._cap.limit or 0) >= _HUGE_FROM
        return Segment.create(reserve, backing, place(directory_of(backing), self.numa_node, huge=huge))

    def _smaller(self, reserve: int, backing: str) -> Segment:
        """Reserve what a limit on address space (``ulimit -v``) or file size leaves."""
        while True:
            try:
                return self._create(reserve, backing)
            except OSError:
                if reserve <= 64 << 20:
                    raise
                reserve = round_up(reserve // 2)

    def plan(self, arena: Arena, need: int, num_workers: int) -> None:
        """Set the slot size of ``arena`` for batches of ``need`` bytes, and how many slots there will be.

        The first batch decides both. A larger batch later raises the size for all if as many slots still fit; if not,
        it is a giant, which gets a slot of its own. Raises ArenaTooSmall or SharedMemoryFull.
        """
        need = round_up(need)
        if not arena.slot_bytes:
            minimum = slots_minimum(num_workers)
            plan = self._plan_default(arena, need, num_workers) if self.arena_bytes is None else None
            plan = plan or plan_arena(
                slot_bytes=need,
                slots=arena.slots_wanted,
                minimum_slots=minimum,
                arena_bytes=self.arena_bytes,
                binding=None,
                page=PAGE,
            )
            arena.plan(plan.slot_bytes, plan.slots)
        elif need > arena.slot_bytes:
            limit = self._cap.limit or need
            for size in (round_up(need + need // 8), need):
                if size * arena.slots_wanted <= limit:
                    arena.slot_bytes = size
                    return

    def _plan_default(self, arena: Arena, need: int, workers: int) -> ArenaPlan:
        """Plan without ``arena_bytes``: what is wanted, or as many slots as half of what is free holds, or the fewest
        that do in what the workers leave of all of it."""
        minimum = slots_minimum(workers)
        binding = share_of(shared_memory_limit(directory_of(arena.segment.backing)), find_ranks())
        half = max(0, min(binding.nbytes_free - kept_back(binding), self._cap.room() or 0))
        wanted = arena.slots_wanted
        if minimum * need > half:
            keep = kept_back(binding) + workers * WORKER_BYTES
            name = f"{binding.name}, less {human_bytes(keep)} for the processes' own memory"
            half, wanted = binding.nbytes_free - keep, minimum
            binding = replace(binding, name=name)
        plan = plan_arena(
            slot_bytes=need,
            slots=wanted,
            minimum_slots=minimum,
            arena_bytes=None,
            binding=replace(binding, nbytes_free=max(0, half)),
            page=PAGE,
        )
        if self._cap.limit is not None:
            self._cap.limit = max(self._cap.limit, self._cap.used + plan.nbytes)
        return plan

    def newest(self) -> Arena | None:
        """Return the arena of the newest pass, if it still exists."""
        return self._newest() if self._newest is not None else None

    def close(self) -> None:
        """Close all idle arenas. Lent batches stay valid."""
        with self._lock:
            _close_all(self._idle)


def _close_all(arenas: list[Arena]) -> None:
    while arenas:
        arenas.pop().close()
