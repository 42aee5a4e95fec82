"""What loaders leave behind: nothing, however often they are begun, left and dropped (C13, A4)."""

import gc

import pytest
import torch
from torch.utils.data import Dataset

from shmloader import DataLoader, IteratorClosed
from support import MIB, Counters, context, no_leaks, run_script, shmem_bytes


class Squares(Dataset):
    """Small samples."""

    def __init__(self, length=64):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.full((64,), index), index * index


def rounds(count, **arguments):
    """``next(iter(loader))`` so many times; counters from after the fifth, and the loader that is still alive."""
    loader = DataLoader(Squares(), 8, **arguments)
    before = None
    for number in range(count):
        image, square = next(iter(loader))
        first = 0 if loader.in_order else image[0, 0].item()
        assert image[:, 0].tolist() == list(range(first, first + 8)), number
        assert square.tolist() == [k * k for k in range(first, first + 8)]
        if number == 4:
            before = Counters.now(), shmem_bytes()
    assert before is not None
    return loader, *before


def assert_as_after_the_fifth(loader, before, shmem):
    """Processes, threads, descriptors, names and mappings as then; shared and resident memory within a few MiB."""
    before.assert_no_leak()
    now = Counters.now()
    assert shmem_bytes() - shmem < 8 * MIB
    assert now.rss - before.rss < 32 * MIB
    assert loader.stats().arena.nbytes < MIB


@pytest.mark.alone
@pytest.mark.parametrize(
    ("count", "arguments"),
    [
        (12, {"num_workers": 2}),
        (200, {"num_workers": 0}),
        (40, {"num_workers": 2, "persistent_workers": True}),
        pytest.param(25, {"num_workers": 2, "in_order": False}, marks=pytest.mark.slow),
    ],
)
def test_first_batches_leave_nothing_behind(count, arguments):
    """An iterator that was begun and dropped, again and again, costs no more than five did."""
    loader, *before = rounds(count, **arguments)
    assert_as_after_the_fifth(loader, *before)
    loader.close()


@pytest.mark.alone
@pytest.mark.slow
def test_five_hundred_first_batches_leave_nothing_behind():
    """500 rounds with two forked workers (C13)."""
    loader, *before = rounds(500, num_workers=2)
    assert_as_after_the_fifth(loader, *before)
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loaders_made_and_dropped_leave_nothing_behind(num_workers):
    """Loaders that are closed, left to garbage collection, never iterated, and iterated to the end."""

    def some():
        for how in range(12):
            loader = DataLoader(Squares(), 8, num_workers=num_workers, persistent_workers=how % 2 and num_workers > 0)
            if how % 3:
                iterator = iter(loader)
                next(iterator)
            if how % 4 == 3:
                sum(1 for _ in (iterator if how % 3 else loader))
            if how % 4 == 2:
                loader.close()

    some()
    with no_leaks():
        some()


def test_an_iterator_in_a_reference_cycle_is_torn_down_by_the_collector():
    """No ``del`` and no ``close`` reach it; the garbage collector does."""
    with no_leaks():
        loader = DataLoader(Squares(), 8, num_workers=2)
        cycle = [iter(loader)]
        cycle.append(cycle)
        next(cycle[0])
        del cycle, loader
        gc.collect()


def test_close_is_idempotent_and_a_closed_loader_begins_anew():
    """Twice closed, then iterated again, right."""
    with no_leaks():
        loader = DataLoader(Squares(), 8, num_workers=2)
        next(iter(loader))
        loader.close()
        loader.close()
        assert [square[0].item() for _, square in loader] == [(8 * k) ** 2 for k in range(8)]
        loader.close()


def test_an_iterator_of_a_closed_loader_says_so():
    """A clear error instead of a wait for workers that are gone."""
    loader = DataLoader(Squares(), 8, num_workers=2)
    iterator = iter(loader)
    next(iterator)
    loader.close()
    with pytest.raises(IteratorClosed):
        next(iterator)


MANY_FIELDS = """
    import os, resource, sys, torch
    from torch.utils.data import Dataset
    from shmloader import DataLoader

    class Wide(Dataset):
        def __len__(self):
            return 4 * int(sys.argv[1])

        def __getitem__(self, index):
            return {f"f{k}": torch.full((3,), index + k) for k in range(120)}

    workers = 2
    own = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64 + 4 * workers,) * 2)
    kept, at_ten = [], None
    loader = DataLoader(Wide(), 4, num_workers=workers)
    for number, batch in enumerate(loader):
        assert batch["f7"][:, 0].tolist() == [4 * number + k + 7 for k in range(4)]
        if number % 29 == 3:
            kept.append(batch)
        if number == 10:
            counts = [len(os.listdir(f"/proc/{pid}/fd")) for pid in (os.getpid(), *loader.stats().worker_pids)]
        if number == int(sys.argv[1]) - 3:
            last = [len(os.listdir(f"/proc/{pid}/fd")) for pid in (os.getpid(), *loader.stats().worker_pids)]
    assert counts == last, (counts, last)
    assert number + 1 == int(sys.argv[1])
    for place, batch in enumerate(kept):
        assert batch["f119"][0, 0] == 4 * (29 * place + 3) + 119
"""


@pytest.mark.parametrize("batches", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_descriptors_do_not_depend_on_batches_or_fields(batches):
    """120 fields, kept batches, 64 + 4 descriptors per worker in all: as many open at batch 10 as at the end (A4)."""
    run_script(MANY_FIELDS, args=[str(batches)]).silent()


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_pools_of_other_start_methods_leave_nothing_behind(start_method):
    """Eight rounds each by fork server and spawn."""
    chosen = context(start_method)

    def some(count):
        loader = DataLoader(Squares(), 8, num_workers=2, multiprocessing_context=chosen)
        for _ in range(count):
            next(iter(loader))
        loader.close()

    some(2)
    with no_leaks():
        some(6)
