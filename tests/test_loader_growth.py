"""Batches of unequal size under one cap: right, within it, and refused with numbers when they cannot be (E2, G1)."""

import random
import warnings

import pytest
import torch
from torch.utils.data import Dataset

from shmloader import ArenaTooSmall, BatchTooLarge, CopiedOutWarning, DataLoader
from support import MIB, no_leaks, shmem_bytes, small_tmpfs

KIB = 1 << 10


@pytest.fixture(autouse=True)
def copies_are_expected(recwarn):
    """Under a tight cap some batches are copies; whether they are right is the question here."""
    warnings.simplefilter("ignore", CopiedOutWarning)


class Ragged(Dataset):
    """Sample ``index`` has ``sizes[index]`` bytes, which all tell the index."""

    def __init__(self, sizes):
        self.sizes = sizes

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, index):
        return torch.full((self.sizes[index],), index % 251, dtype=torch.uint8), str(index)


def check_epoch(sizes, keep=False, **arguments):
    """Every batch right, in order, the cap held after each; returns the statistics. Batch size is 1."""
    loader = DataLoader(Ragged(sizes), 1, **arguments)
    kept, limit = [], loader.arena_bytes
    for index, (data, (name,)) in enumerate(loader):
        assert name == str(index)
        assert data.shape == (1, sizes[index])
        assert (data == index % 251).all()
        if keep:
            kept.append(data[:, ::8])
        if limit:
            assert loader.stats().arena.nbytes <= limit + 64 * KIB
    assert index + 1 == len(sizes)
    for index, data in enumerate(kept):
        assert (data == index % 251).all()
    loader.close()
    return loader.stats()


def mixed(seed, count=60, largest=600 * KIB):
    """Sizes up and down, with steps of many magnitudes."""
    rng = random.Random(seed)
    return [int(2 ** rng.uniform(4, largest.bit_length() - 1)) for _ in range(count)]


WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


@WORKERS
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("arena_bytes", [4 * MIB, None])
def test_a_giant_in_the_middle_is_right_and_so_is_the_rest(num_workers, keep, arena_bytes):
    """Small ones, one of 80 % of the cap, small ones: nothing truncated, nothing refused, nothing stuck (E2)."""
    sizes = [100 * KIB] * 15 + [3200 * KIB] + [100 * KIB] * 15
    with no_leaks(threads=torch.get_num_threads()):
        check_epoch(sizes, keep, num_workers=num_workers, arena_bytes=arena_bytes)


@WORKERS
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_sizes_up_and_down_are_right_under_a_tight_cap(num_workers, keep, seed):
    """Sixty random sizes over four magnitudes, kept or not."""
    check_epoch(mixed(seed), keep, num_workers=num_workers, arena_bytes=3 * MIB)


@WORKERS
@pytest.mark.parametrize("keep", [False, True])
def test_batches_that_grow_all_the_time_are_right(num_workers, keep):
    """Each a page larger than the last: every one asks for a larger slot."""
    check_epoch([4096 * (k + 1) for k in range(60)], keep, num_workers=num_workers, arena_bytes=MIB)


@pytest.mark.slow
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_giants_everywhere_never_stick(num_workers, in_order):
    """Every third batch is a giant and several are under way at once."""
    sizes = [(2 * MIB if k % 3 == 2 else 50 * KIB) for k in range(40)]
    loader = DataLoader(Ragged(sizes), 1, num_workers=num_workers, arena_bytes=4 * MIB, in_order=in_order)
    seen = set()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        for data, (name,) in loader:
            assert data.shape[1] == sizes[int(name)]
            assert (data == int(name)).all()
            seen.add(name)
    assert len(seen) == 40
    loader.close()


def test_a_batch_above_the_cap_is_refused_with_numbers_and_the_epoch_goes_on():
    """BatchTooLarge tells need and limit; every other batch is delivered (E2)."""
    sizes = [50 * KIB] * 10 + [5 * MIB] + [50 * KIB] * 10
    loader = DataLoader(Ragged(sizes), 1, num_workers=2, arena_bytes=2 * MIB)
    iterator, seen = iter(loader), []
    for number in range(21):
        if number == 10:
            with pytest.raises(BatchTooLarge) as caught:
                next(iterator)
            assert 5 * MIB <= caught.value.need <= 5 * MIB + 16 * KIB
            assert caught.value.limit == 2 * MIB
            assert str(caught.value.need) in str(caught.value)
        else:
            data, (name,) = next(iterator)
            assert (data == int(name)).all()
            seen.append(int(name))
    with pytest.raises(StopIteration):
        next(iterator)
    assert seen == [*range(10), *range(11, 21)]
    loader.close()


@WORKERS
def test_an_arena_below_the_minimum_says_the_minimum(num_workers):
    """ArenaTooSmall names the fewest bytes, and with these it runs (G1)."""
    sizes = [300 * KIB] * 12
    loader = DataLoader(Ragged(sizes), 1, num_workers=num_workers, arena_bytes=500 * KIB)
    with pytest.raises(ArenaTooSmall) as caught:
        sum(1 for _ in loader)
    loader.close()
    minimum = caught.value.minimum
    assert str(minimum) in str(caught.value)
    assert 500 * KIB < minimum <= (num_workers + 2) * 310 * KIB
    check_epoch(sizes, num_workers=num_workers, arena_bytes=minimum)


@WORKERS
def test_a_slot_is_not_much_larger_than_its_batch(num_workers):
    """The first batch does not fit anywhere and is counted once, not twice: slots waste less than an eighth."""
    loader = DataLoader(Ragged([256 * KIB] * 20), 1, num_workers=num_workers)
    for _batch in loader:
        pass
    assert 256 * KIB <= loader.stats().arena.slot_bytes <= 256 * KIB * 9 // 8 + 4096
    loader.close()


@pytest.mark.alone
@pytest.mark.parametrize("prefetch_factor", [1, 8])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_shared_memory_never_exceeds_the_arena(num_workers, prefetch_factor):
    """Measured on the machine: Shmem grows by no more than arena_bytes, whatever prefetch and kept batches (G1)."""
    before = shmem_bytes()
    loader = DataLoader(
        Ragged([MIB] * 60), 1, num_workers=num_workers, prefetch_factor=prefetch_factor, arena_bytes=12 * MIB
    )
    kept, peak = [], 0
    for data, _ in loader:
        kept.append(data[0, ::4096])
        peak = max(peak, shmem_bytes() - before)
    assert peak <= 12 * MIB + 4 * MIB  # other tests' processes share the machine
    assert all((data == k).all() for k, data in enumerate(kept))
    loader.close()


def fill_up(path):
    """Write until the mount is full, in small steps, so that nothing is left."""
    with path.open("wb") as file:
        while True:
            file.write(bytes(16 * KIB))
            file.flush()


def test_a_mount_that_fills_up_during_an_epoch_is_survived(tmp_path):
    """Someone else takes the space that growth had counted on: batches are copies then, right, and never SIGBUS."""
    with small_tmpfs(tmp_path / "shm", "8m") as mount:
        loader = DataLoader(Ragged([300 * KIB] * 40), 1, num_workers=2, arena_backing=str(mount))
        kept = []
        for index, (data, _) in enumerate(loader):
            kept.append(data)
            if index == 1:
                with pytest.raises(OSError, match="No space"):
                    fill_up(mount / "taken")
        assert len(kept) == 40
        assert all((data == k).all() for k, data in enumerate(kept))
        loader.close()
        kept.clear()
        del data
