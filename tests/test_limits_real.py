"""The same facts from a real kernel: small, read-only and unlimited mounts, and a real control group. Needs root."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

MIB = 1 << 20
REPORT = """
import json, sys
from shmloader.limits import read_limits, shared_memory_limit
limits = read_limits(shm_root=sys.argv[1])
shm = limits.shm and [limits.shm.nbytes_free, limits.shm.nbytes_total, limits.shm.unlimited]
asked = shared_memory_limit(sys.argv[1])
print(json.dumps([shm, limits.shm_problem, asked.name, asked.nbytes_free, asked.source]))
"""


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def report_in_mount(options: str, root: Path) -> list[object]:
    """Return what REPORT prints in a mount namespace of its own that has a tmpfs with ``options`` at ``root``."""
    if os.geteuid() != 0 or run(["unshare", "-m", "true"]).returncode:
        pytest.skip("mounting needs root and a mount namespace")
    script = 'mount -t tmpfs -o "$1" none "$2" && exec "$3" -c "$4" "$2"'
    done = run(["unshare", "-m", "sh", "-c", script, "sh", options, str(root), sys.executable, REPORT])
    assert done.returncode == 0, done.stderr
    answer: list[object] = json.loads(done.stdout)
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


def own_memory_group() -> tuple[Path, str] | None:
    """Return the directory of our memory group and the name of the file that limits a group below it."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "memory":
            return Path("/sys/fs/cgroup/memory") / group.lstrip("/"), "memory.limit_in_bytes"
        if not controllers and "memory" in _words(Path("/sys/fs/cgroup/cgroup.subtree_control")):
            return Path("/sys/fs/cgroup"), "memory.max"
    return None


def _words(path: Path) -> list[str]:
    return path.read_text().split() if path.is_file() else []


@pytest.fixture
def limited_group() -> Iterator[tuple[Path, str]]:
    """A real control group of 400 MiB, taken away afterwards."""
    found = own_memory_group()
    if os.geteuid() != 0 or found is None:
        pytest.skip("needs root and a memory controller that can be handed down")
    parent, file = found
    group = parent / f"shmloader-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / file).write_text(str(400 * MIB))
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"control groups cannot be made here: {error}")
    try:
        yield group, file
    finally:
        group.rmdir()


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


def test_a_real_group_binds_shared_memory_counts_and_page_cache_does_not(
    limited_group: tuple[Path, str], tmp_path: Path
) -> None:
    """In a real group of 400 MiB, 100 MiB of shared memory are gone from the free bytes, 60 MiB of clean cache not."""
    group, file = limited_group
    done = run([sys.executable, "-c", IN_GROUP, str(group), str(tmp_path / "cached")])
    assert done.returncode == 0, done.stderr
    source, total, before, after, cached = json.loads(done.stdout)
    assert source == str(group / file)
    assert total == 400 * MIB
    assert 300 * MIB < before <= 400 * MIB
    assert abs(before - after - 100 * MIB) < 8 * MIB
    assert abs(after - cached) < 8 * MIB
