"""Facts about the host, read from made-up roots of every kind: versions 1 and 2, nested, cut off, garbage."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmloader.cgroups import cpu_quota, find_groups, memory_limits, read_number, read_table
from shmloader.limits import UNLIMITED, HostLimits, Limit, mount_limit, read_limits, shared_memory_limit

MIB = 1 << 20
GIB = 1 << 30


class Host:
    """A made-up host under ``tmp_path``: proc, cgroup and sys roots, and a directory that stands for /dev/shm."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroup, self.sys, self.shm = (root / name for name in ("proc", "cgroup", "sys", "shm"))
        for directory in (self.proc / "self", self.cgroup, self.sys, self.shm):
            directory.mkdir(parents=True)

    def write(self, root: Path, files: dict[str, str | int]) -> None:
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")

    def groups(self, lines: str, files: dict[str, str | int]) -> None:
        self.write(self.proc, {"self/cgroup": lines})
        self.write(self.cgroup, files)

    def memory(self) -> tuple[Limit, ...]:
        return memory_limits(find_groups(str(self.proc), str(self.cgroup)))

    def read(self, environ: dict[str, str] | None = None, local_ranks: int | None = None) -> HostLimits:
        return read_limits(
            shm_root=str(self.shm),
            proc_root=str(self.proc),
            cgroup_root=str(self.cgroup),
            sys_root=str(self.sys),
            environ=environ or {},
            local_ranks=local_ranks,
        )


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_a_version_2_limit_counts_minus_what_is_used(host: Host) -> None:
    """Free is memory.max - memory.current, and the source is the file (A3)."""
    host.groups("0::/pod", {"cgroup.controllers": "memory", "pod/memory.max": GIB, "pod/memory.current": 300 * MIB})
    (limit,) = host.memory()
    assert limit.nbytes_free == GIB - 300 * MIB
    assert limit.nbytes_total == GIB
    assert limit.source == str(host.cgroup / "pod/memory.max")
    assert "v2" in limit.name


def test_every_group_on_the_way_up_counts(host: Host) -> None:
    """A parent that is nearly full decides, even if our own group has no limit at all."""
    files: dict[str, str | int] = {
        "cgroup.controllers": "memory",
        "a/memory.max": 2 * GIB,
        "a/memory.current": 2 * GIB - 50 * MIB,
        "a/b/memory.max": GIB,
        "a/b/memory.current": 10 * MIB,
        "a/b/c/memory.max": "max",
        "a/b/c/memory.current": 5 * MIB,
    }
    host.groups("0::/a/b/c", files)
    assert [limit.nbytes_free for limit in host.memory()] == [GIB - 10 * MIB, 50 * MIB]
    assert host.read().binding().source == str(host.cgroup / "a/memory.max")


def test_page_cache_that_the_kernel_can_drop_is_free(host: Host) -> None:
    """Clean file pages are counted as free, dirty ones, shared memory and anonymous ones are not."""
    stat = f"anon {MIB}\nfile {900 * MIB}\nshmem {100 * MIB}\nactive_file {500 * MIB}\ninactive_file {300 * MIB}\n"
    stat += f"file_dirty {20 * MIB}\nfile_writeback {5 * MIB}"
    files: dict[str, str | int] = {"memory.max": GIB, "memory.current": 1000 * MIB, "memory.stat": stat}
    host.groups("0::/g", {f"g/{name}": text for name, text in files.items()})
    (limit,) = host.memory()
    assert limit.nbytes_free == GIB - 1000 * MIB + (500 + 300 - 20 - 5) * MIB


def test_memory_high_is_a_limit_too(host: Host) -> None:
    """The smaller of memory.max and memory.high is taken, and named."""
    host.groups("0::/g", {"g/memory.max": GIB, "g/memory.high": 500 * MIB, "g/memory.current": 0})
    (limit,) = host.memory()
    assert limit.nbytes_total == 500 * MIB
    assert limit.source.endswith("g/memory.high")


def test_a_version_1_limit_counts_with_its_own_file_names(host: Host) -> None:
    """limit_in_bytes, usage_in_bytes and the total_ lines of memory.stat, at every level."""
    stat = f"active_file 0\ntotal_active_file {10 * MIB}\ntotal_inactive_file {30 * MIB}\ntotal_dirty {MIB}"
    files: dict[str, str | int] = {
        "memory/memory.limit_in_bytes": 9223372036854771712,
        "memory/memory.usage_in_bytes": 3 * GIB,
        "memory/job/memory.limit_in_bytes": 400 * MIB,
        "memory/job/memory.usage_in_bytes": 200 * MIB,
        "memory/job/memory.stat": stat,
        "memory/job/me/memory.limit_in_bytes": 9223372036854771712,
        "memory/job/me/memory.usage_in_bytes": 1,
    }
    host.groups("4:memory:/job/me\n0::/", files)
    (limit,) = host.memory()
    assert limit.nbytes_free == (400 - 200 + 39) * MIB
    assert limit.source == str(host.cgroup / "memory/job/memory.limit_in_bytes")
    assert "v1" in limit.name


def test_version_1_without_hierarchy_ends_at_our_group(host: Host) -> None:
    """A parent that does not count its children cannot limit them."""
    files: dict[str, str | int] = {
        "memory/job/memory.limit_in_bytes": MIB,
        "memory/job/memory.usage_in_bytes": 0,
        "memory/job/memory.use_hierarchy": 0,
        "memory/job/me/memory.limit_in_bytes": GIB,
        "memory/job/me/memory.usage_in_bytes": 0,
    }
    host.groups("4:memory:/job/me", files)
    assert [limit.nbytes_total for limit in host.memory()] == [GIB]


def test_both_versions_side_by_side(host: Host) -> None:
    """Version 2 under unified/ and version 1 beside it are both looked at."""
    files: dict[str, str | int] = {
        "unified/cgroup.controllers": "",
        "unified/u/memory.max": 2 * GIB,
        "unified/u/memory.current": 0,
        "memory/m/memory.limit_in_bytes": GIB,
        "memory/m/memory.usage_in_bytes": 0,
    }
    host.groups("4:memory:/m\n1:name=systemd:/x\n0::/u", files)
    assert sorted(limit.nbytes_total for limit in host.memory()) == [GIB, 2 * GIB]


@pytest.mark.parametrize("group", ["/docker/0123abcd", "/../other", "/", "", "/kubepods/pod7/0123abcd"])
def test_a_container_that_sees_only_its_own_subtree(host: Host, group: str) -> None:
    """The path names the host's tree, but the container's group is mounted at the root: the root's files count."""
    host.groups(f"0::{group}", {"cgroup.controllers": "memory", "memory.max": GIB, "memory.current": MIB})
    assert [limit.nbytes_free for limit in host.memory()] == [GIB - MIB]


def test_a_partly_visible_path_is_followed_as_far_as_it_exists(host: Host) -> None:
    """The longest end of the path that exists is our group."""
    host.groups("0::/docker/0123/inner", {"inner/memory.max": GIB, "inner/memory.current": 0, "memory.max": "max"})
    assert [limit.source for limit in host.memory()] == [str(host.cgroup / "inner/memory.max")]


@pytest.mark.parametrize("text", ["max", "", "-1", "12 34 56", "1e9", "\xff\xfe", "0x10", "9" * 5000])
def test_garbage_is_no_limit(host: Host, text: str) -> None:
    """A file that does not hold one number sets no limit, and nothing is raised."""
    (host.proc / "self/cgroup").write_text("garbage\n:::\n0\n0::/g\nx:memory:/g")
    for name in ("g/memory.max", "memory/g/memory.limit_in_bytes", "g/cpu.max", "g/memory.current"):
        host.write(host.cgroup, {name: text})
    limits = host.read()
    assert [limit.source for limit in limits.memory if "cgroup" in limit.name] == []
    assert limits.cpus.quota is None


@given(st.binary(max_size=300))
def test_any_bytes_in_any_file_are_survived(tmp_path_factory: pytest.TempPathFactory, blob: bytes) -> None:
    """Whatever stands in the files, facts come back and no exception."""
    path = tmp_path_factory.getbasetemp() / "blob"
    path.write_bytes(blob)
    number = read_number(path)
    assert number is None or number >= 0
    assert all(value >= 0 for value in read_table(path).values())


def test_usage_above_the_limit_leaves_nothing_free(host: Host) -> None:
    """A limit that was lowered below the current use gives 0, never a negative number."""
    host.groups("0::/g", {"g/memory.max": MIB, "g/memory.current": 5 * MIB})
    assert host.memory()[0].nbytes_free == 0


def test_a_host_without_any_file_still_has_a_binding_limit(host: Host) -> None:
    """Without /proc and cgroups the C library says what is free."""
    limits = host.read()
    assert [limit.source for limit in limits.memory] == ["sysconf(SC_AVPHYS_PAGES)"]
    assert limits.binding(mount=False) == limits.memory[0]


def test_available_memory_comes_from_meminfo(host: Host) -> None:
    """MemAvailable in KiB becomes bytes, MemTotal is the total."""
    host.write(host.proc, {"meminfo": "MemTotal:  2048 kB\nMemFree: 5 kB\nMemAvailable:   1024 kB"})
    limit = host.read().binding()
    assert (limit.nbytes_free, limit.nbytes_total) == (1024 << 10, 2048 << 10)
    assert limit.source == f"{host.proc}/meminfo: MemAvailable"


def test_the_binding_limit_is_the_smallest_and_mounts_can_be_left_out(host: Host) -> None:
    """binding() takes the fewest free bytes; memory from memfd is not bound to the mount."""
    host.write(host.proc, {"meminfo": "MemTotal: 999999999999 kB\nMemAvailable: 999999999999 kB"})
    limits = host.read()
    assert limits.binding() == limits.shm
    assert limits.binding(mount=False) == limits.memory[-1]


def test_shared_memory_limit_is_the_binding_limit(host: Host) -> None:
    """The loader's cheap question and the full list of facts agree on which limit wins (A3)."""
    host.write(host.proc, {"meminfo": "MemTotal: 99999999999 kB\nMemAvailable: 99999999999 kB"})
    host.groups("0::/pod", {"pod/memory.max": 8 * MIB, "pod/memory.current": 3 * MIB})
    limit = shared_memory_limit(str(host.shm), proc_root=str(host.proc), cgroup_root=str(host.cgroup))
    assert limit == host.read().binding()
    assert limit.nbytes_free == 5 * MIB
    assert limit.where == f"the cgroup v2 memory limit ({host.cgroup}/pod/memory.max)"


def test_a_missing_mount_has_nothing_free_and_says_why(host: Host) -> None:
    """No /dev/shm: the mount is None with a reason; asked directly, 0 bytes are free there."""
    limit, problem = mount_limit(str(host.shm / "none"))
    assert limit is None
    assert problem == f"{host.shm}/none: No such file or directory"
    assert shared_memory_limit(str(host.shm / "none")) == Limit("shared-memory mount", 0, 0, problem)


def test_memory_without_a_mount_has_only_the_memory_limits(host: Host) -> None:
    """shm_root=None leaves the mount out."""
    host.write(host.proc, {"meminfo": f"MemTotal: {1 << 50} kB\nMemAvailable: {1 << 50} kB"})
    limit = shared_memory_limit(None, proc_root=str(host.proc), cgroup_root=str(host.cgroup))
    assert limit.name == "host's available memory"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"g/cpu.max": "150000 100000"}, 1.5),
        ({"g/cpu.max": "max 100000"}, None),
        ({"g/cpu.max": "100 0"}, None),
        ({"g/cpu.max": "max 100000", "cpu.max": "50000 100000"}, 0.5),
        ({"cpu/c/cpu.cfs_quota_us": -1, "cpu/c/cpu.cfs_period_us": 100000}, None),
        ({"cpu/c/cpu.cfs_quota_us": 300000, "cpu/c/cpu.cfs_period_us": 100000}, 3.0),
        ({"cpu,cpuacct/c/cpu.cfs_quota_us": 300000, "cpu,cpuacct/c/cpu.cfs_period_us": 200000}, 1.5),
    ],
)
def test_cpu_quota_of_both_versions(host: Host, files: dict[str, str | int], quota: float | None) -> None:
    """cpu.max and cfs_quota_us, the smallest on the way up; max and -1 are no quota (C11)."""
    host.groups("3:cpu,cpuacct:/c\n0::/g", files)
    found = cpu_quota(find_groups(str(host.proc), str(host.cgroup)))
    assert (found.cpus if found else None) == quota


@pytest.mark.parametrize(("cpu_max", "most"), [("50000 100000", 1), ("150000 100000", 1), ("1000000 100000", 10)])
def test_usable_cpus_never_exceed_quota_or_affinity(host: Host, cpu_max: str, most: int) -> None:
    """The quota is rounded down, but one CPU is always usable (C11)."""
    host.groups("0::/g", {"g/cpu.max": cpu_max})
    cpus = host.read().cpus
    assert cpus.affinity == len(os.sched_getaffinity(0))
    assert cpus.usable == min(most, cpus.affinity)
    assert cpus.source == ("sched_getaffinity" if cpus.usable == cpus.affinity else cpus.quota.source)


def test_local_ranks_are_what_the_launcher_says(host: Host) -> None:
    """LOCAL_WORLD_SIZE, then MPI's names; an argument overrides; garbage and absence mean one."""
    assert host.read({"LOCAL_WORLD_SIZE": "8"}).local_ranks.count == 8
    assert host.read({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}).local_ranks.source == "OMPI_COMM_WORLD_LOCAL_SIZE"
    assert host.read({"LOCAL_WORLD_SIZE": "8"}, local_ranks=2).local_ranks == host.read(local_ranks=2).local_ranks
    for garbage in ("", "0", "-3", "many"):
        assert host.read({"LOCAL_WORLD_SIZE": garbage}).local_ranks.count == 1
    with pytest.raises(ValueError, match="at least 1"):
        host.read(local_ranks=0)


def test_numa_nodes_and_huge_pages(host: Host) -> None:
    """Lists such as 0-1,4 are unfolded; the chosen word of a setting is the one in brackets."""
    files: dict[str, str | int] = {
        "devices/system/node/online": "0-1,4",
        "kernel/mm/transparent_hugepage/shmem_enabled": "always within_size [advise] never deny force",
        "kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    }
    host.write(host.sys, files)
    host.write(host.proc, {"meminfo": "Hugepagesize:    2048 kB\nHugePages_Free:      7"})
    limits = host.read()
    assert limits.numa_nodes == (0, 1, 4)
    assert (limits.huge_pages.shmem, limits.huge_pages.anonymous) == ("advise", "madvise")
    assert (limits.huge_pages.nbytes, limits.huge_pages.reserved_free) == (2 * MIB, 7)


def test_unknown_numa_and_huge_pages_are_empty(host: Host) -> None:
    """A host that does not say has no nodes and no words, not an error."""
    host.write(host.sys, {"devices/system/node/online": "garbage-3,-"})
    limits = host.read()
    assert limits.numa_nodes == ()
    assert (limits.huge_pages.shmem, limits.huge_pages.nbytes) == ("", 0)


def test_the_real_host_answers_and_facts_pickle() -> None:
    """On this machine every fact has a source, and the result travels between processes."""
    limits = read_limits()
    assert limits.memory
    assert all(limit.source for limit in limits.memory)
    assert limits.binding().nbytes_free > 0
    assert limits.cpus.usable >= 1
    assert pickle.loads(pickle.dumps(limits)) == limits
    assert limits.memlock.nbytes_free <= UNLIMITED
