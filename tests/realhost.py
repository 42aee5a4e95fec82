"""Real limits for tests: a mount namespace of its own, and a real control group. Both need root, and skip without.

done = in_mounts('mount -t tmpfs -o size=2m none /dev/shm', script_command(SOURCE))
with memory_group(400 * MIB) as group: ...          # a process joins by writing its pid to group.procs
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from support import Result, run_command, wait_until


def in_mounts(setup: str, command: Sequence[str], *, timeout: float = 60.0) -> Result:
    """Run ``command`` in a mount namespace that the shell line ``setup`` has prepared. The host sees nothing of it."""
    if os.geteuid() or not shutil.which("unshare") or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("mounting needs root and a mount namespace")
    script = f'{setup} || exit 77; exec "$@"'
    done = run_command(["unshare", "-m", "sh", "-c", script, "sh", *command], timeout=timeout)
    if done.returncode == 77:
        pytest.skip(f"this host cannot be made so: {done.stderr}")
    return done


WITHOUT_SHM = (
    "mount -t tmpfs none /dev/shm && mkdir /dev/shm/dev && cd / && "
    "cp -a /dev/null /dev/zero /dev/random /dev/urandom /dev/full /dev/fd /dev/shm/dev/ && "
    "mount --bind /dev/shm/dev /dev && test ! -e /dev/shm"
)
"""A ``setup`` for a /dev that has no shm."""


@dataclass(frozen=True)
class MemoryGroup:
    """A control group with a limit on memory."""

    folder: Path
    limit_file: str

    @property
    def procs(self) -> Path:
        return self.folder / "cgroup.procs"

    def peak(self) -> int | None:
        """The most memory that was in use, or None where the kernel does not say (version 2 before Linux 5.19)."""
        for name in ("memory.max_usage_in_bytes", "memory.peak"):
            if (self.folder / name).is_file():
                return int((self.folder / name).read_text())
        return None

    def kills(self) -> int:
        """How many processes the kernel has ended here for want of memory."""
        for name in ("memory.oom_control", "memory.events"):
            if (self.folder / name).is_file():
                table = dict(line.split() for line in (self.folder / name).read_text().splitlines())
                return int(table["oom_kill"])
        raise AssertionError(f"no count of kills in {self.folder}")


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


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[MemoryGroup]:
    """A real control group that allows ``limit`` bytes, taken away afterwards. Skips where none can be made."""
    found = own_memory_group()
    if os.geteuid() != 0 or found is None:
        pytest.skip("needs root and a memory controller that can be handed down")
    parent, file = found
    folder = parent / f"shmloader-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / file).write_text(str(limit))
    except OSError as error:
        if folder.is_dir():
            folder.rmdir()
        pytest.skip(f"control groups cannot be made here: {error}")
    try:
        yield MemoryGroup(folder, file)
    finally:
        wait_until("the group is empty", lambda: not (folder / "cgroup.procs").read_text())
        folder.rmdir()
