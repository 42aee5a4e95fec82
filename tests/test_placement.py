"""Huge pages and NUMA nodes: asked for only where the host says so, told in the statistics, harmless elsewhere."""

import json
import os
import pickle

import pytest
import torch
from torch.utils.data import TensorDataset

from realhost import in_mounts
from shmloader import DataLoader
from shmloader.placement import Placement, huge_pages_word, node_cpus, parse_list, place, run_on
from shmloader.segment import Segment
from support import MIB, script_command

MOUNTS = """\
tmpfs /dev/shm tmpfs rw,nosuid,size=64k,huge=advise 0 0
tmpfs /mnt/with\\040space tmpfs rw,huge=always 0 0
/dev/sda / ext4 rw 0 0
tmpfs /mnt/plain tmpfs rw 0 0
"""


def host(folder, shmem, mounts=MOUNTS):
    """Write a made-up /proc and /sys."""
    settings = folder / "sys/kernel/mm/transparent_hugepage"
    settings.mkdir(parents=True)
    (settings / "shmem_enabled").write_text(f"always within_size advise {shmem} deny force\n")
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/mounts").write_text(mounts)
    node = folder / "sys/devices/system/node/node1"
    node.mkdir(parents=True)
    (node / "cpulist").write_text("0-1,900\n")
    return {"proc_root": str(folder / "proc"), "sys_root": str(folder / "sys")}


@pytest.mark.parametrize(
    ("directory", "shmem", "word"),
    [
        (None, "[never]", "never"),
        (None, "[advise]", "advise"),
        ("/dev/shm", "[never]", "advise"),
        ("/dev/shm/below", "[never]", "advise"),
        ("/dev/shmoo", "[never]", "never"),
        ("/mnt/with space", "[never]", "always"),
        ("/mnt/plain", "[never]", "never"),
        ("/home", "[never]", "never"),
        ("/dev/shm", "[deny]", "deny"),
        ("/home", "[force]", "force"),
    ],
)
def test_who_decides_on_huge_pages(tmp_path, directory, shmem, word):
    """The mount for its files, shmem_enabled for memfd; its words deny and force for both."""
    assert huge_pages_word(directory, **host(tmp_path, shmem)) == word
    assert Placement(word).wants_huge is (word not in ("never", "deny"))


def test_a_mount_on_top_hides_the_one_below(tmp_path):
    """Two lines for one place: the later one counts."""
    on_top = MOUNTS + "tmpfs /dev/shm tmpfs rw 0 0\n"
    assert huge_pages_word("/dev/shm", **host(tmp_path, "[never]", on_top)) == "never"


def test_a_host_that_tells_nothing_says_never(tmp_path):
    """No such files: 4 KiB pages."""
    assert huge_pages_word(None, proc_root=str(tmp_path), sys_root=str(tmp_path)) == "never"


def test_a_node_has_the_cpus_that_this_process_may_use(tmp_path):
    """CPUs of the node's list outside of our affinity do not count; a node that is not there has none."""
    root = host(tmp_path, "[never]")["sys_root"]
    assert node_cpus(1, sys_root=root) == {0, 1} & os.sched_getaffinity(0)
    assert node_cpus(7, sys_root=root) == frozenset()
    assert parse_list("0-1,4, 6-6,x,") == [0, 1, 4, 6]


def test_work_runs_on_the_cpus_and_the_caller_stays_free():
    """A thread of its own is bound; the caller's affinity is what it was, also after an error."""
    before, seen = os.sched_getaffinity(0), []
    one = frozenset([min(before)])
    run_on(one, lambda: seen.append(os.sched_getaffinity(0)))
    assert seen == [one]
    with pytest.raises(ZeroDivisionError):
        run_on(one, lambda: seen.append(1 // 0))
    assert os.sched_getaffinity(0) == before
    run_on(frozenset([4095]), lambda: seen.append(None))  # no such CPU: it runs all the same
    assert seen[-1] is None


def test_a_node_that_is_not_there_is_a_warning_and_nothing_else():
    """One sentence with the nodes that there are; the loader works, and tells that no node was used."""
    with pytest.warns(UserWarning, match="arena_numa_node=77"):
        assert place(None, 77, huge=False) == Placement()
    with pytest.raises(ValueError, match="arena_numa_node"):
        DataLoader(TensorDataset(torch.zeros(2)), arena_numa_node=-1)


@pytest.mark.skipif(not node_cpus(0), reason="this host does not tell the CPUs of NUMA node 0")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_commits_on_the_node_that_is_wanted(num_workers):
    """Right values, the node in the statistics, kept by a copy of the loader."""
    loader = DataLoader(TensorDataset(torch.arange(40)), 4, num_workers=num_workers, arena_numa_node=0)
    assert torch.equal(torch.cat([batch.clone() for (batch,) in loader]), torch.arange(40))
    assert loader.stats().arena.numa_node == 0
    assert pickle.loads(pickle.dumps(loader)).arena_numa_node == loader.arena_numa_node == 0
    loader.close()


def test_a_small_arena_does_not_ask_for_huge_pages():
    """Its slots would hold few or none; 4 KiB pages are no worse then."""
    with DataLoader(TensorDataset(torch.arange(8)), 4, arena_bytes=MIB) as loader:
        next(iter(loader))
        assert loader.stats().arena.huge_pages == "never"


HUGE = """
import json, os, sys, torch
from pathlib import Path
from shmloader import DataLoader
from torch.utils.data import Dataset

MIB = 1 << 20

class Ragged(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return torch.full(((1 + 3 * (index % 7)) * MIB // 2 + 4096 * index,), index, dtype=torch.uint8)

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    huge, excess = 0, 0
    loader = DataLoader(Ragged(), 1, num_workers=2, arena_bytes="256MiB", arena_backing=str(folder))
    for index, batch in enumerate(loader):
        assert (batch == index).all() and batch.shape[1] == (1 + 3 * (index % 7)) * MIB // 2 + 4096 * index
        status = os.statvfs(folder)
        excess = max(excess, (status.f_blocks - status.f_bfree) * status.f_frsize - loader.stats().arena.nbytes)
        for line in Path("/proc/self/smaps" if index % 7 == 6 else "/dev/null").read_text().splitlines():
            if line.startswith("ShmemPmdMapped:"):
                huge = max(huge, int(line.split()[1]) << 10)
    word = loader.stats().arena.huge_pages
    del batch
    loader.close()
    status = os.statvfs(folder)
    print(json.dumps([word, huge, excess, (status.f_blocks - status.f_bfree) * status.f_frsize]))
"""


@pytest.mark.parametrize(
    "word", ["advise", pytest.param("always", marks=pytest.mark.slow), pytest.param("never", marks=pytest.mark.slow)]
)
def test_huge_pages_of_a_real_mount_are_used_and_stay_under_the_cap(tmp_path, word):
    """On tmpfs mounts with huge=: ragged batches are right, mapped in huge pages, and cost what is counted and the
    control pages, no half huge page more; afterwards the mount is empty (G1)."""
    folder = tmp_path / "shm"
    folder.mkdir()
    mount = f"mount -t tmpfs -o size=1g,huge={word} none {folder}"
    done = in_mounts(mount, script_command(HUGE, [str(folder)])).check()
    told, huge, excess, left = json.loads(done.stdout)
    assert told == word
    assert (huge >= 2 * MIB) is (word != "never")
    assert excess <= 64 * 1024
    assert left == 0


def test_a_segment_remembers_its_placement():
    """What was asked for is told, in the process that made it."""
    made = Segment.create(MIB, "memfd", Placement("advise", 0, node_cpus(0)))
    made.commit(0, MIB)
    assert made.placement.huge_pages == "advise"
    assert not made.view(0, MIB).any()
    made.close()
