"""Shared memory grows by no more than the cap, whatever workers, prefetch, kept batches, iterators and loaders (G1).

What is counted is the blocks that the kernel has given to the segment's own file: what this process maps, and nothing
that anybody else on the machine does. Shmem of /proc/meminfo is the same number where nobody else moves it.
"""

from __future__ import annotations

import gc
import os
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

from shmloader import CopiedOutWarning, DataLoader, NoSlotLeft
from support import MIB, no_leaks, run_script

KIB = 1 << 10


@pytest.fixture(autouse=True)
def copies_are_expected():
    """Under a tight cap some batches are copies; torch warns of more workers than CPUs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CopiedOutWarning)
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        yield


class Rows(Dataset):
    """Sample i has ``nbytes(i)`` bytes, which all tell i."""

    def __init__(self, samples=64, nbytes=lambda index: 256 * KIB):
        self.samples, self.nbytes = samples, nbytes

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return torch.full((self.nbytes(index),), index % 251, dtype=torch.uint8)


def arena_files() -> dict[int, int]:
    """By inode: the bytes that the kernel has given to each arena of this process, found by their descriptors."""
    files = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
            if "shmloader-" in target or target.startswith("/memfd:shmloader"):
                status = os.fstat(int(fd))
                files[status.st_ino] = status.st_blocks * 512
        except OSError:  # the descriptor of the listing itself
            continue
    return files


@pytest.fixture(autouse=True)
def arenas_before():
    """Arenas that earlier tests have left to the garbage, or to a copy that never ends, are not counted."""
    BEFORE.clear()
    BEFORE.update(arena_files())


BEFORE: dict[int, int] = {}


def arena_blocks() -> int:
    """Bytes that the kernel has given to all arenas that the test at hand has made."""
    return sum(nbytes for inode, nbytes in arena_files().items() if inode not in BEFORE)


def peak_of(*loaders, keep=0, control=64 * KIB):
    """Iterate loaders in turn, keep the last ``keep`` batches of each; check every byte; return the most that was
    there. A batch that is kept is looked at again at the end."""
    peak, kept = 0, []
    iterators = [iter(loader) for loader in loaders]
    for number in range(max(len(loader) for loader in loaders)):
        for place, iterator in enumerate(iterators):
            batch = next(iterator, None)
            if batch is not None:
                assert (batch == number % 251).all()
                kept.append((place, number, batch[0, :: 4 * KIB]))
            del batch
            kept = kept[-keep * len(loaders) :] if keep else []
            peak = max(peak, arena_blocks())
    assert all((data == number % 251).all() for _, number, data in kept)
    return peak


CONTROL = 64 * KIB  # rings of the workers and small first slots: less than a page per slot


@pytest.mark.parametrize(
    ("num_workers", "prefetch_factor", "keep"),
    [(1, 1, 0), (1, 16, 60), (2, 4, 3), pytest.param(8, 16, 60, marks=pytest.mark.slow)]
    + [pytest.param(w, p, k, marks=pytest.mark.slow) for w in (3, 5, 8) for p in (1, 2, 8) for k in (0, 60)],
)
def test_the_cap_holds_over_workers_prefetch_and_kept_batches(num_workers, prefetch_factor, keep):
    """Never more than cap and 1 %, checked after every batch on the segment's own blocks; every batch is right."""
    cap = 10 * MIB
    loader = DataLoader(
        Rows(), 1, num_workers=num_workers, prefetch_factor=prefetch_factor, arena_bytes=cap, in_order=True
    )
    peak = peak_of(loader, keep=keep)
    assert 256 * KIB < peak <= cap + max(cap // 100, CONTROL)
    loader.close()
    gc.collect()
    assert arena_blocks() == 0


@pytest.mark.parametrize("num_workers", [0, 2])
def test_two_iterators_of_one_loader_share_its_cap(num_workers):
    """Side by side, with kept batches: both epochs are right, together they stay under the one number."""
    cap = 6 * MIB
    loader = DataLoader(Rows(32), 1, num_workers=num_workers, arena_bytes=cap)
    with no_leaks(threads=torch.get_num_threads()):
        peak, kept = 0, []
        for number, (left, right) in enumerate(zip(loader, loader, strict=True)):
            assert (left == number).all()
            assert (right == number).all()
            kept = [*kept[-6:], left, right]
            peak = max(peak, arena_blocks())
        assert peak <= cap + 2 * CONTROL
        del left, right
        kept.clear()
        loader.close()


def test_several_loaders_have_their_own_caps():
    """Training, validation and test beside each other: each number holds, so their sum does."""
    loaders = [DataLoader(Rows(24), 1, num_workers=1, arena_bytes=size * MIB) for size in (2, 3, 4)]
    assert peak_of(*loaders, keep=8) <= 9 * MIB + 3 * CONTROL
    for loader in loaders:
        loader.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_epochs_that_are_dropped_again_and_again_do_not_add_up(num_workers):
    """Thirty iterators, each left after two batches that stay in use for a while: the cap counts what they hold."""
    cap = 4 * MIB
    loader = DataLoader(Rows(16), 1, num_workers=num_workers, arena_bytes=cap)
    kept, peak = [], 0
    for _ in range(30 if num_workers == 0 else 8):
        iterator = iter(loader)
        for number in range(2):
            batch = next(iterator)
            assert (batch == number).all()
            kept = [*kept[-5:], (number, batch)]
        del iterator, batch
        peak = max(peak, arena_blocks())
        assert all((batch == number).all() for number, batch in kept)
    assert peak <= cap + 4 * CONTROL
    kept.clear()
    loader.close()


@pytest.mark.parametrize("num_workers", [1, 2])
def test_ragged_giants_under_a_cap_that_just_holds_them(num_workers):
    """Every fourth sample is as large as the cap allows beside the small ones: right, and never over."""
    cap = 4 * MIB
    data = Rows(40, lambda index: 3 * MIB if index % 4 == 3 else (20 + index) * KIB)
    loader = DataLoader(data, 1, num_workers=num_workers, arena_bytes=cap)
    assert peak_of(loader, keep=2) <= cap + CONTROL
    loader.close()


KEPT_IN_WORKER = []


def hoarding(samples):
    """A collate function that keeps every batch it makes, in the worker."""
    batch = torch.stack(samples)
    KEPT_IN_WORKER.append(batch)
    return batch


@pytest.mark.parametrize("num_workers", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_when_user_and_workers_keep_every_slot_the_reason_is_told_and_the_epoch_can_go_on(num_workers):
    """At the minimum of slots, with batches kept and a collate_fn that keeps its tensors: NoSlotLeft with the numbers,
    no hang; once the batches are dropped, the rest of the epoch comes, right."""
    cap = (num_workers + 1) * 260 * KIB
    loader = DataLoader(Rows(24), 1, num_workers=num_workers, collate_fn=hoarding, arena_bytes=cap)
    iterator, kept = iter(loader), []
    with pytest.raises(NoSlotLeft) as caught:
        kept.extend(iterator)
    assert caught.value.lent + caught.value.kept == caught.value.slots
    assert caught.value.kept > 0
    assert all((batch == number).all() for number, batch in enumerate(kept))
    first = len(kept)
    kept.clear()
    for number, batch in enumerate(iterator, first):
        assert (batch == number).all()
    assert number == 23
    loader.close()


MEMINFO = """
import sys, torch, warnings
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from torch.utils.data import TensorDataset
from shmloader import CopiedOutWarning, DataLoader, NoSlotLeft
from support import shmem_bytes
from test_memory_cap import arena_blocks

warnings.simplefilter("ignore", CopiedOutWarning)
rows = torch.arange(128, dtype=torch.uint8).repeat_interleave(1 << 20).view(128, -1)
before = shmem_bytes()
loader = DataLoader(TensorDataset(rows), 1, num_workers=2, prefetch_factor=8, arena_bytes=64 << 20)
kept, pairs = [], []
for (batch,) in loader:
    kept.append(batch[0, ::4096])
    pairs.append((shmem_bytes() - before, arena_blocks()))
assert all((row == index).all() for index, row in enumerate(kept))
print(min(abs(shmem - blocks) for shmem, blocks in pairs), max(shmem for shmem, _ in pairs))
"""


@pytest.mark.alone
def test_shmem_of_the_machine_tells_the_same():
    """/proc/meminfo agrees with the segment's blocks, to a megabyte at the calmest of 128 moments: others share the
    machine. Its peak stays within what the cap allows and what they do."""
    nearest, _peak = map(int, run_script(MEMINFO, args=[str(Path(__file__).parent)]).silent().stdout.split())
    assert nearest <= MIB
