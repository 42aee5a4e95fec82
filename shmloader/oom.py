"""How often the kernel has killed for want of memory: this process's control groups, and the host.

    cgroup v2   memory.events        oom_kill N     of a group and all below it, on every level up to the mount
    cgroup v1   memory.oom_control   oom_kill N     the same (Linux >= 4.13)
    host        /proc/vmstat         oom_kill N     the whole machine (Linux >= 4.13)

Counters only: that a certain process was killed for want of memory is told by the kernel's log alone, which most
processes may not read. Read at the start of a pool, and when a worker has died.
"""

from __future__ import annotations

from .cgroups import find_groups, read_table
from .errors import OomKills
from .limits import CGROUP_ROOT, PROC_ROOT


def read_oom_kills(proc_root: str = PROC_ROOT, cgroup_root: str = CGROUP_ROOT) -> dict[str, int]:
    """Return the counters that can be read, by what they are: ``{'/proc/vmstat oom_kill': 3}``. A few small files."""
    groups = find_groups(proc_root, cgroup_root)
    files = [
        *[str(directory / "memory.events") for directory in groups.unified],
        *[str(directory / "memory.oom_control") for directory in groups.memory],
        f"{proc_root}/vmstat",
    ]
    counts = {f"{file} oom_kill": read_table(file).get("oom_kill") for file in files}
    return {source: count for source, count in counts.items() if count is not None}


def oom_kills_since(before: dict[str, int]) -> tuple[OomKills, ...]:
    """Return what the counters of ``before`` were and are."""
    after = read_oom_kills()
    return tuple([OomKills(source, count, after.get(source, count)) for source, count in before.items()])
