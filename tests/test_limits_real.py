"""The same facts from a real kernel: small, read-only and unlimited mounts, and a real control group. Needs root."""

from __future__ import annotations

import json
from pathlib import Path

from realhost import in_mounts, memory_group
from support import MIB, run_script, script_command

REPORT = """
import json, sys
from shmloader.limits import read_limits, shared_memory_limit
limits = read_limits(shm_root=sys.argv[1])
shm = limits.shm and [limits.shm.nbytes_free, limits.shm.nbytes_total, limits.shm.unlimited]
asked = shared_memory_limit(sys.argv[1])
print(json.dumps([shm, limits.shm_problem, asked.name, asked.nbytes_free, asked.source]))
"""


def report_in_mount(options: str, root: Path) -> list[object]:
    """Return what REPORT prints in a mount namespace of its own that has a tmpfs with ``options`` at ``root``."""
    done = in_mounts(f"mount -t tmpfs -o {options} none {root}", script_command(REPORT, [str(root)]))
    answer: list[object] = json.loads(done.check().stdout)
    return answer


def test_a_mount_of_2_mib_binds(tmp_path: Path) -> None:
    """The mount's own numbers are reported, and it is the limit that says no (A1)."""
    shm, problem, name, free, source = report_in_mount("size=2m", tmp_path)
    assert shm == [2 * MIB, 2 * MIB, False]
    assert problem == ""
    assert (name, free, source) == ("shared-memory mount", 2 * MIB, str(tmp_path))


def test_a_read_only_mount_cannot_be_used(tmp_path: Path) -> None:
    """Read-only: no mount, and the reason; nothing is free there."""
    shm, problem, _, free, source = report_in_mount("size=2m,ro", tmp_path)
    assert shm is None
    assert problem == source == f"{tmp_path} is mounted read-only"
    assert free == 0


def test_a_mount_without_free_inodes_cannot_be_used(tmp_path: Path) -> None:
    """All inodes taken (the root directory is one): a file cannot be made, however many bytes are free."""
    shm, problem, *_ = report_in_mount("size=2m,nr_inodes=1", tmp_path)
    assert shm is None
    assert problem == f"{tmp_path} has no free inodes"


def test_a_mount_without_a_size_is_bound_by_memory(tmp_path: Path) -> None:
    """size=0 means no limit: the memory decides."""
    shm, _, name, free, _ = report_in_mount("size=0", tmp_path)
    assert isinstance(shm, list)
    assert shm[2] is True
    assert name != "shared-memory mount"
    assert isinstance(free, int)
    assert 0 < free < 1 << 60


IN_GROUP = """
import json, sys, os, mmap
from pathlib import Path
from shmloader.limits import shared_memory_limit
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
before = shared_memory_limit(None)
fd = os.memfd_create("used")
os.posix_fallocate(fd, 0, 100 << 20)
after = shared_memory_limit(None)
with open(sys.argv[2], "wb") as file:
    file.write(bytes(60 << 20))
    os.fsync(file.fileno())
cached = shared_memory_limit(None)
print(json.dumps([before.source, before.nbytes_total, before.nbytes_free, after.nbytes_free, cached.nbytes_free]))
"""


def test_a_real_group_binds_shared_memory_counts_and_page_cache_does_not(tmp_path: Path) -> None:
    """In a real group of 400 MiB, 100 MiB of shared memory are gone from the free bytes, 60 MiB of clean cache not."""
    with memory_group(400 * MIB) as group:
        done = run_script(IN_GROUP, args=[str(group.folder), str(tmp_path / "cached")])
        source, total, before, after, cached = json.loads(done.check().stdout)
        assert source == str(group.folder / group.limit_file)
    assert total == 400 * MIB
    assert 300 * MIB < before <= 400 * MIB
    assert abs(before - after - 100 * MIB) < 8 * MIB
    assert abs(after - cached) < 8 * MIB
