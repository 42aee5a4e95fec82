"""What the control groups above this process leave it: bytes of memory, and CPUs. Both versions, the whole way up.

    /sys/fs/cgroup               no limit
      └─ kubepods.slice          memory.max  48 GiB, used 40 GiB, of which 6 GiB page cache  ->  14 GiB free
           └─ pod1234            memory.max  16 GiB, used  3 GiB, of which 1 GiB page cache  ->  14 GiB free
                └─ our process   memory.max  max                                             ->  no limit here

Rule 1: every level counts. A page is charged to the group that touches it first and to all groups above, shared memory
        too, so the smallest free number on the way up is the one that gets the process killed.
Rule 2: free = limit - (used - reclaimable page cache). Reclaimable is ``active_file + inactive_file - dirty -
        writeback`` of ``memory.stat``: the kernel drops these pages before it kills, and a job that reads a pack fills
        its group with them. Shared memory and tmpfs files are not in these two lists, so they count as used. Dirty
        pages can be freed too, but only at the speed of the disk, so they count as used. Swap is not memory here.
Rule 3: a fact that cannot be read (no file, no permission, garbage) is no limit, never an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

UNLIMITED = (1 << 63) - 1
"""Bytes: what ``Limit.nbytes_free`` holds where there is no limit."""
_V1_NO_LIMIT = 1 << 60  # bytes: version 1 writes "no limit" as the largest multiple of a page, which differs by kernel


@dataclass(frozen=True, slots=True)
class Limit:
    """One thing that can say no. Sizes in bytes."""

    name: str
    """What it is, in words: ``'shared-memory mount'``."""
    nbytes_free: int
    """What it still allows; UNLIMITED if it sets no limit."""
    nbytes_total: int
    """What it allows in all, of which some may be in use; UNLIMITED if it sets no limit."""
    source: str
    """The file, mount or call that the numbers come from."""

    @property
    def unlimited(self) -> bool:
        return self.nbytes_free >= UNLIMITED

    @property
    def where(self) -> str:
        """Name and source, as messages show them."""
        return f"the {self.name} ({self.source})"


@dataclass(frozen=True, slots=True)
class Quota:
    """CPU time that a control group grants, in CPUs (1.5 = one and a half)."""

    cpus: float
    source: str
    """The file that says so."""


def read_text(path: str | Path) -> str | None:
    """Return the stripped text of a small file, or None if it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read().decode("ascii", "replace").strip()
    except OSError:
        return None


def _number(text: str) -> int | None:
    # 19 digits hold every size that is a size; int() would refuse thousands of them with an exception.
    return int(text) if text.isdecimal() and len(text) <= 19 else None


def read_number(path: str | Path) -> int | None:
    """Return the one non-negative number in a file; None if it cannot be read or holds something else (``'max'``)."""
    return _number(read_text(path) or "")


def read_table(path: str | Path) -> dict[str, int]:
    """Return the lines ``name number`` (or ``name: number unit``) of a file as a dict. Other lines are left out."""
    table: dict[str, int] = {}
    for line in (read_text(path) or "").splitlines():
        words = line.split(None, 2)
        number = _number(words[1]) if len(words) > 1 else None
        if number is not None:
            table[words[0].rstrip(":")] = number
    return table


@dataclass(frozen=True, slots=True)
class Groups:
    """Where this process stands: for each hierarchy, the directories from its own group up to the mount."""

    unified: tuple[Path, ...]
    """Version 2."""
    memory: tuple[Path, ...]
    """Version 1, memory controller."""
    cpu: tuple[Path, ...]
    """Version 1, cpu controller."""


def _way_up(root: Path, group: str) -> tuple[Path, ...]:
    """Return the existing directories from ``group`` under ``root`` up to ``root``.

    Inside a container ``group`` often names the path that the host sees, while the container's own subtree is mounted
    at ``root``. So the longest end of the path that exists is taken, down to the root alone.
    """
    if not root.is_dir():
        return ()
    parts = [part for part in group.split("/") if part not in ("", ".")]
    if ".." in parts:  # the process is outside of the subtree that its namespace shows
        parts = []
    for skip in range(len(parts)):
        if root.joinpath(*parts[skip:]).is_dir():
            parts = parts[skip:]
            break
    else:
        parts = []
    return tuple(root.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1))


def find_groups(proc_root: str, cgroup_root: str) -> Groups:
    """Read ``proc_root/self/cgroup`` and return the directories that count for this process."""
    root = Path(cgroup_root)
    unified: tuple[Path, ...] = ()
    found: dict[str, tuple[Path, ...]] = {}
    for line in (read_text(f"{proc_root}/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if number == "0" and not controllers:
            # Beside version 1 hierarchies, version 2 is mounted one level deeper.
            alone = (root / "cgroup.controllers").exists() or not (root / "unified").is_dir()
            unified = _way_up(root if alone else root / "unified", group)
            continue
        for controller in controllers.split(","):
            if controller in ("memory", "cpu"):
                found[controller] = _way_up(root / controller, group) or _way_up(root / controllers, group)
    return Groups(unified, found.get("memory", ()), found.get("cpu", ()))


def _reclaimable(stat: dict[str, int], prefix: str, dirty: str, writeback: str) -> int:
    clean = sum(stat.get(prefix + name, 0) for name in ("active_file", "inactive_file"))
    return max(0, clean - stat.get(prefix + dirty, 0) - stat.get(prefix + writeback, 0))


def _memory_v2(directories: tuple[Path, ...]) -> Iterator[Limit]:
    for directory in directories:
        # Above memory.high nothing is killed, but the whole group is slowed to a crawl: a limit as well.
        stated = [(read_number(directory / name), name) for name in ("memory.max", "memory.high")]
        limits = [(number, name) for number, name in stated if number is not None]
        used = read_number(directory / "memory.current") if limits else None
        if used is None:
            continue
        limit, name = min(limits)
        cache = _reclaimable(read_table(directory / "memory.stat"), "", "file_dirty", "file_writeback")
        free = max(0, limit - max(0, used - cache))
        yield Limit("cgroup v2 memory limit", free, limit, str(directory / name))


def _memory_v1(directories: tuple[Path, ...]) -> Iterator[Limit]:
    for directory in directories:
        source = directory / "memory.limit_in_bytes"
        limit = read_number(source)
        if limit is not None and limit < _V1_NO_LIMIT:
            used = read_number(directory / "memory.usage_in_bytes")
            if used is not None:
                cache = _reclaimable(read_table(directory / "memory.stat"), "total_", "dirty", "writeback")
                yield Limit("cgroup v1 memory limit", max(0, limit - max(0, used - cache)), limit, str(source))
        if read_number(directory.parent / "memory.use_hierarchy") == 0:
            return  # the groups above do not count what happens here


def memory_limits(groups: Groups) -> tuple[Limit, ...]:
    """Return the memory limit of every group that sets one, from the process's own group upwards."""
    return (*_memory_v2(groups.unified), *_memory_v1(groups.memory))


def cpu_quota(groups: Groups) -> Quota | None:
    """Return the smallest CPU quota on the way up, or None if there is none."""
    quotas: list[tuple[float, str]] = []
    for directory in groups.unified:
        words = (read_text(directory / "cpu.max") or "").partition(" ")
        share, period = _number(words[0]), _number(words[2])
        if share is not None and period:  # "max" is no number
            quotas.append((share / period, str(directory / "cpu.max")))
    for directory in groups.cpu:
        share, period = (read_number(directory / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        if share is not None and period:  # a quota of -1 means none, and is no number for read_number
            quotas.append((share / period, str(directory / "cpu.cfs_quota_us")))
    return Quota(*min(quotas)) if quotas else None
