"""Persistent workers: no stale batch, all slots back, the same dataset copy in every epoch."""

import itertools
import multiprocessing
import os
import random
import signal
import time
import warnings

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from shmloader import CopiedOutWarning, DataLoader, WorkerTimeout
from support import DEADLINE_S, no_leaks


@pytest.fixture(autouse=True)
def copies_are_expected(recwarn):
    """Kept batches may be copies."""
    warnings.simplefilter("ignore", CopiedOutWarning)


class Counting(Dataset):
    """Tells index, process, and how often this copy was asked."""

    def __init__(self):
        self.asked = 0

    def __len__(self):
        return 48

    def __getitem__(self, index):
        self.asked += 1
        return torch.tensor([index, os.getpid(), self.asked])


class Sleepy(Counting):
    """Index 20 takes for ever, and tells when it has begun."""

    def __init__(self):
        super().__init__()
        self.begun = multiprocessing.Event()

    def __getitem__(self, index):
        if index == 20:
            self.begun.set()
            time.sleep(1000)
        return super().__getitem__(index)


class SlowToBegin(IterableDataset):
    """Each epoch takes a while to begin."""

    def __iter__(self):
        if torch.utils.data.get_worker_info() is not None:
            time.sleep(0.3)
        return iter(range(24))


@pytest.mark.parametrize("in_order", [True, False])
def test_twenty_epochs_left_early_show_no_stale_batch(in_order):
    """Break after k batches, shuffle anew, iterate again: indices are those of this epoch, and slots all come back."""
    order = list(range(48))

    class Shuffled:
        def __iter__(self):
            return iter(order)

        def __len__(self):
            return 48

    loader = DataLoader(
        Counting(), 4, sampler=Shuffled(), num_workers=2, persistent_workers=True, in_order=in_order, prefetch_factor=3
    )
    rng = random.Random(11)
    for epoch in range(20):
        rng.shuffle(order)
        expected = [tuple(order[k : k + 4]) for k in range(0, 48, 4)]
        stop = rng.choice([0, 1, 2, 3, 7, 12])
        seen = [tuple(batch[:, 0].tolist()) for batch in itertools.islice(loader, stop)]
        if in_order:
            assert seen == expected[:stop], f"epoch {epoch}"
        assert set(seen) <= set(expected)
        assert len(set(seen)) == stop
        arena = loader.stats().arena
        assert arena.lent == 0
    assert sorted(tuple(batch[:, 0].tolist()) for batch in loader) == sorted(
        tuple(order[k : k + 4]) for k in range(0, 48, 4)
    )
    arena = loader.stats().arena
    assert arena.free == arena.slots
    loader.close()


def test_the_dataset_copy_of_a_worker_lives_as_long_as_the_worker():
    """Same two processes, and the count of questions goes on from epoch to epoch."""
    loader = DataLoader(Counting(), 4, num_workers=2, persistent_workers=True)
    asked, pids = [], set()
    for _ in range(3):
        batches = [batch.clone() for batch in loader]
        pids |= {pid for batch in batches for pid in batch[:, 1].tolist()}
        asked.append(max(batch[:, 2].max().item() for batch in batches))
    assert len(pids) == 2
    assert asked == [24, 48, 72]
    loader.close()


def test_a_batch_of_a_pass_that_was_left_stays_right_during_the_next():
    """Kept from an epoch that was broken off, while its slot's neighbours are written again and again."""
    loader = DataLoader(Counting(), 4, num_workers=2, persistent_workers=True)
    kept = []
    for _ in range(8):
        kept.append(next(iter(loader)))
        assert all(batch[:, 0].tolist() == [0, 1, 2, 3] for batch in kept)
    sum(1 for _ in loader)
    assert all(batch[:, 0].tolist() == [0, 1, 2, 3] for batch in kept)
    loader.close()


def test_an_interrupted_start_of_an_epoch_does_not_spoil_the_next():
    """An exception (Ctrl-C) while the workers are being told of the epoch: the next one is complete and right."""

    class Interrupted(Exception):
        pass

    def interrupt(*_):
        raise Interrupted

    loader = DataLoader(SlowToBegin(), 4, num_workers=2, persistent_workers=True)
    expected = sorted([*range(24), *range(24)])
    assert sorted(x for batch in loader for x in batch.tolist()) == expected
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        for delay_s in (0.05, 0.2):
            signal.setitimer(signal.ITIMER_REAL, delay_s)
            with pytest.raises(Interrupted):
                for _batch in loader:
                    pass
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert sorted(x for batch in loader for x in batch.tolist()) == expected
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        loader.close()


def test_a_worker_that_is_stuck_in_a_stale_batch_is_a_timeout_not_a_wait_for_ever():
    """``timeout`` also bounds the wait for workers that still do work of the epoch that was left (C10)."""
    dataset = Sleepy()
    loader = DataLoader(dataset, 4, num_workers=2, persistent_workers=True, timeout=1.0, prefetch_factor=4)
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    # Work that has not begun is void when the epoch ends; what has begun is finished first.
    assert dataset.begun.wait(DEADLINE_S)
    del iterator
    previous = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("no timeout after 20 s"))
    signal.alarm(20)
    try:
        with pytest.raises(WorkerTimeout, match="20"):
            next(iter(loader))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
        loader.close()


def test_closing_persistent_workers_leaves_nothing():
    """Mid-epoch, between epochs, twice."""

    def some(stop):
        loader = DataLoader(Counting(), 4, num_workers=2, persistent_workers=True)
        for _batch in itertools.islice(loader, stop):
            pass
        loader.close()

    with no_leaks():
        some(3)
        some(12)
        some(99)


class Growing(Dataset):
    """Sample ``index`` has 2 ** ``index`` KiB."""

    def __len__(self):
        return 11

    def __getitem__(self, index):
        return torch.full((1 << (10 + index),), index, dtype=torch.uint8)


def test_passes_left_while_workers_wait_for_larger_slots_lose_no_slot():
    """The order is drawn twice as large each time, so that NEED is unanswered when a pass is left; no slot stays out.

    The epoch that follows has all slots, ends as it should, and none is granted after it.
    """
    order = list(range(11))
    with DataLoader(Growing(), 1, sampler=order, num_workers=2, persistent_workers=True) as loader:
        for left_after in range(10):
            batches = iter(loader)
            for index in range(left_after):
                assert next(batches)[0, 0] == index
        assert [int(batch[0, -1]) for batch in loader] == order
        arena = loader.stats().arena
        assert arena.granted == 0
        assert arena.free + arena.lent + arena.quarantined == arena.slots
