"""Facts about this host: what this process may use, and which file or call says so. Changes nothing, decides nothing.

Every root is a parameter, so that a test, or a look at another container's files, needs no special host. Facts that
cannot be read are absent (None, an empty tuple, UNLIMITED), never an error.

The loader asks :func:`shared_memory_limit` alone: one ``statvfs`` and a few small files, well under a millisecond.
:func:`read_limits` gathers all facts, for people.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass

from .cgroups import (
    UNLIMITED,
    Groups,
    Limit,
    Quota,
    cpu_quota,
    find_groups,
    memory_limits,
    read_number,
    read_table,
    read_text,
)
from .placement import parse_list

__all__ = [
    "UNLIMITED",
    "Cpus",
    "HostLimits",
    "HugePages",
    "Limit",
    "Quota",
    "Ranks",
    "find_ranks",
    "mount_limit",
    "read_limits",
    "shared_memory_limit",
]

SHM_ROOT, PROC_ROOT, CGROUP_ROOT, SYS_ROOT = "/dev/shm", "/proc", "/sys/fs/cgroup", "/sys"

RANK_VARIABLES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
"""Where launchers (torchrun, Open MPI, MPICH) say how many processes of the job run on this host."""


@dataclass(frozen=True, slots=True)
class Cpus:
    """CPUs that this process may use, which in containers and batch jobs is not what the host has."""

    usable: int
    """The number to plan with: the affinity, or the quota rounded down (at least 1) where that is less."""
    affinity: int
    """CPUs in the process's affinity mask (``sched_getaffinity``: taskset, cpusets)."""
    quota: Quota | None
    """CPU time that the control groups grant; None: no quota."""

    @property
    def source(self) -> str:
        """What decides ``usable``."""
        return self.quota.source if self.quota and self.usable < self.affinity else "sched_getaffinity"


@dataclass(frozen=True, slots=True)
class Ranks:
    """Processes of this training job on this host. Each one has a loader, and an arena, of its own."""

    count: int
    source: str
    """The environment variable, ``'argument'``, or ``'default'``."""


@dataclass(frozen=True, slots=True)
class HugePages:
    """Huge-page settings that matter for shared memory."""

    shmem: str
    """The chosen word of ``transparent_hugepage/shmem_enabled`` (``'never'``, ``'advise'``...); empty if unknown."""
    anonymous: str
    """The chosen word of ``transparent_hugepage/enabled``; empty if unknown."""
    nbytes: int
    """Size of one huge page in bytes; 0 if the host has none."""
    reserved_free: int
    """Free pages of the reserved pool (hugetlbfs), in pages."""
    source: str
    """The directory of the settings."""


@dataclass(frozen=True, slots=True)
class HostLimits:
    """What this process may use, each with its source. Sizes in bytes."""

    shm: Limit | None
    """The shared-memory mount, or None if it cannot be used: ``shm_problem`` says why."""
    shm_problem: str
    """Why ``shm`` is None; else empty."""
    memory: tuple[Limit, ...]
    """All limits on memory: control groups from ours upwards, then the host's available memory (always there)."""
    memlock: Limit
    """What may be locked with ``mlock``. CUDA pinning does not count against it; we never call ``mlock``."""
    cpus: Cpus
    local_ranks: Ranks
    numa_nodes: tuple[int, ...]
    """Numbers of the NUMA nodes that are online; empty if unknown."""
    huge_pages: HugePages

    def binding(self, *, mount: bool = True) -> Limit:
        """Return the limit that says no first to shared memory: the one with the fewest free bytes.

        ``mount=False`` leaves the shared-memory mount out, as for memory from ``memfd_create``.
        """
        return _smallest((self.shm,) if mount else (), self.memory)


def _smallest(*groups: tuple[Limit | None, ...]) -> Limit:
    return min((limit for group in groups for limit in group if limit is not None), key=lambda limit: limit.nbytes_free)


def mount_limit(shm_root: str = SHM_ROOT) -> tuple[Limit | None, str]:
    """Return what the file system at ``shm_root`` has free, and an empty string; or None, and why it cannot be used."""
    try:
        status = os.statvfs(shm_root)
    except OSError as error:
        return None, f"{shm_root}: {os.strerror(error.errno or 0)}"
    if status.f_flag & os.ST_RDONLY:
        return None, f"{shm_root} is mounted read-only"
    if not os.access(shm_root, os.W_OK | os.X_OK):
        return None, f"{shm_root} is not writable for this user"
    if status.f_files and not status.f_favail:
        return None, f"{shm_root} has no free inodes"
    if not status.f_blocks:  # a tmpfs mounted with size=0 takes all memory there is
        return Limit("shared-memory mount", UNLIMITED, UNLIMITED, shm_root), ""
    free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    return Limit("shared-memory mount", free, total, shm_root), ""


def _available_memory(meminfo: dict[str, int], source: str) -> Limit:
    """Return the host's available memory: MemAvailable, or what the C library calls free where that is missing."""
    if "MemAvailable" in meminfo:
        free, total = (meminfo.get(name, 0) << 10 for name in ("MemAvailable", "MemTotal"))
        return Limit("host's available memory", free, total or free, f"{source}: MemAvailable")
    page = os.sysconf("SC_PAGE_SIZE")
    free, total = (os.sysconf(name) * page for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"))
    return Limit("host's free memory", free, total, "sysconf(SC_AVPHYS_PAGES)")


def shared_memory_limit(
    shm_root: str | None = SHM_ROOT, *, proc_root: str = PROC_ROOT, cgroup_root: str = CGROUP_ROOT
) -> Limit:
    """Return the limit that says no first to shared memory in ``shm_root``: mount, control groups, or host memory.

    ``shm_root`` is the mount, another directory, or None for memory without a mount (``memfd_create``). A mount that
    cannot be used counts as one with 0 bytes free, with the reason in ``source``.
    """
    mount: Limit | None = None
    if shm_root is not None:
        mount, problem = mount_limit(shm_root)
        if mount is None:
            return Limit("shared-memory mount", 0, 0, problem)
    meminfo = f"{proc_root}/meminfo"
    return _smallest(
        (mount,),
        memory_limits(find_groups(proc_root, cgroup_root)),
        (_available_memory(read_table(meminfo), meminfo),),
    )


def _memlock() -> Limit:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    bytes_of = [UNLIMITED if value == resource.RLIM_INFINITY else value for value in (soft, hard)]
    return Limit("locked-memory limit", bytes_of[0], bytes_of[1], "getrlimit(RLIMIT_MEMLOCK)")


def _cpus(groups: Groups) -> Cpus:
    affinity, quota = len(os.sched_getaffinity(0)), cpu_quota(groups)
    usable = affinity if quota is None else min(affinity, int(quota.cpus))
    return Cpus(max(1, usable), affinity, quota)


def find_ranks(explicit: int | None = None, environ: Mapping[str, str] | None = None) -> Ranks:
    """Return how many processes of this training job run on this host: ``explicit``, or what the launcher has set.

    ``environ`` defaults to this process's. Raises ValueError if ``explicit`` is below 1.
    """
    environ = os.environ if environ is None else environ
    if explicit is not None:
        if explicit < 1:
            raise ValueError(f"local_ranks must be at least 1, not {explicit}")
        return Ranks(explicit, "argument")
    for variable in RANK_VARIABLES:
        value = environ.get(variable, "").strip()
        if value.isdecimal() and int(value) > 0:
            return Ranks(int(value), variable)
    return Ranks(1, "default")


def _numa_nodes(sys_root: str) -> tuple[int, ...]:
    return tuple(parse_list(read_text(f"{sys_root}/devices/system/node/online") or ""))


def _huge_pages(sys_root: str, meminfo: dict[str, int]) -> HugePages:
    source = f"{sys_root}/kernel/mm/transparent_hugepage"

    def chosen(name: str) -> str:
        _, _, rest = (read_text(f"{source}/{name}") or "").partition("[")
        return rest.partition("]")[0]

    nbytes = read_number(f"{source}/hpage_pmd_size") or meminfo.get("Hugepagesize", 0) << 10
    return HugePages(chosen("shmem_enabled"), chosen("enabled"), nbytes, meminfo.get("HugePages_Free", 0), source)


def read_limits(
    *,
    shm_root: str = SHM_ROOT,
    proc_root: str = PROC_ROOT,
    cgroup_root: str = CGROUP_ROOT,
    sys_root: str = SYS_ROOT,
    environ: Mapping[str, str] | None = None,
    local_ranks: int | None = None,
) -> HostLimits:
    """Return all facts. ``environ`` defaults to this process's; ``local_ranks`` overrides what the launcher says.

    Raises ValueError if ``local_ranks`` is below 1.
    """
    meminfo_path = f"{proc_root}/meminfo"
    meminfo = read_table(meminfo_path)
    groups = find_groups(proc_root, cgroup_root)
    shm, problem = mount_limit(shm_root)
    return HostLimits(
        shm=shm,
        shm_problem=problem,
        memory=(*memory_limits(groups), _available_memory(meminfo, meminfo_path)),
        memlock=_memlock(),
        cpus=_cpus(groups),
        local_ranks=find_ranks(local_ranks, environ),
        numa_nodes=_numa_nodes(sys_root),
        huge_pages=_huge_pages(sys_root, meminfo),
    )
