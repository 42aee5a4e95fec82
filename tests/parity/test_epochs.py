"""Several epochs, several iterators, abandoned and kept ones: no batch is lost, stale or overwritten."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

from .compare import OURS, SELF, TORCH, Loader, freeze, random_states, reseed
from .samples import Rows, Stream

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    # who keeps many batches gets copies and one warning: that is ours, and right
    pytest.mark.filterwarnings("ignore:.*delivered as copies"),
]

fork = multiprocessing.get_context("fork")


def both(play: Callable[[Loader], Any]) -> None:
    """Play one scene on torch's class and on ours from the same seed; results and random states must be equal."""
    results = []
    for kind in (TORCH, OURS):
        reseed()
        results.append((play(kind), random_states()))
    assert results[1] == results[0]


def labels(batch: Any) -> list[int]:
    """Return the indices of the samples of a ``Rows`` batch, after a check of its rows."""
    rows, indices = batch
    assert rows[:, 0].tolist() == rows[:, -1].tolist() == [float(index) for index in indices]
    return [int(index) for index in indices]


@pytest.mark.parametrize("persistent", [False, True])
def test_epochs_are_shuffled_anew(persistent: bool) -> None:
    """C14: four epochs have four orders, those of torch, with persistent workers or without."""

    def play(kind: Loader) -> Any:
        loader = kind(Rows(20), 4, shuffle=True, num_workers=2, persistent_workers=persistent)
        epochs = [[labels(batch) for batch in loader] for _ in range(4)]
        assert len({repr(epoch) for epoch in epochs}) == 4
        return epochs

    both(play)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_abandoned_iterator_leaves_nothing_behind(workers: int) -> None:
    """No stale batch: after a few batches of an epoch the next epoch is whole, and shuffled as in torch."""

    def play(kind: Loader) -> Any:
        loader = kind(Rows(24), 2, shuffle=True, num_workers=workers)
        seen = []
        for take in (0, 1, 3, 11):
            iterator = iter(loader)
            seen.append([labels(next(iterator)) for _ in range(take)])
            del iterator
            seen.append([labels(batch) for batch in loader])
        return seen

    both(play)


def test_an_abandoned_persistent_iterator_leaves_nothing_behind() -> None:
    """No stale batch with persistent workers: a broken-off epoch is followed by whole ones."""

    def play(kind: Loader) -> Any:
        loader = kind(Rows(24), 2, shuffle=True, num_workers=2, persistent_workers=True)
        seen: list[Any] = []
        for take in (1, 4, 2):
            for place, batch in enumerate(loader):
                seen.append(labels(batch))
                if place == take:
                    break
            epoch = [labels(batch) for batch in loader]
            assert sorted(itertools.chain.from_iterable(epoch)) == list(range(24))
            seen.append(epoch)
        return seen

    both(play)


@pytest.mark.parametrize("workers", [0, 2])
def test_two_iterators_are_independent(workers: int) -> None:
    """Two iterators of one loader, read by turns, give what they give in torch."""

    def play(kind: Loader) -> Any:
        loader = kind(Rows(15), 2, shuffle=True, num_workers=workers)
        first, second = iter(loader), iter(loader)
        pairs = [(labels(a), labels(b)) for a, b in zip(first, second, strict=True)]
        third, fourth = iter(loader), iter(loader)
        rest = [labels(next(third)), *[labels(batch) for batch in fourth], *[labels(batch) for batch in third]]
        return pairs, rest

    both(play)


@pytest.mark.parametrize("workers", [0, 2])
def test_nested_loops_over_one_loader(workers: int) -> None:
    """A loop over the loader inside a loop over the same loader."""

    def play(kind: Loader) -> Any:
        loader = kind(Rows(6), 2, num_workers=workers)
        return [(labels(outer), [labels(inner) for inner in loader]) for outer in loader]

    both(play)


def test_a_new_persistent_iterator_is_whole() -> None:
    """With persistent workers, the newer iterator gives the whole epoch while the older one is still referred to."""
    loader = OURS(Rows(12), 2, num_workers=2, persistent_workers=True)
    older = iter(loader)
    next(older)
    newer = iter(loader)
    assert [index for batch in newer for index in labels(batch)] == list(range(12))
    del older


@pytest.mark.parametrize("workers", [0, 2])
def test_kept_batches_keep_their_values(workers: int) -> None:
    """list(loader) of 150 batches equals torch's to the last bit, looked at only when the epoch is over."""

    def play(kind: Loader) -> Any:
        return [freeze(batch) for batch in list(kind(Rows(450, width=64), 3, num_workers=workers))]

    both(play)


@pytest.mark.parametrize("workers", [0, 2])
def test_kept_views_keep_their_values(workers: int) -> None:
    """A numpy view of every other number of one row, kept of each batch over two epochs, stays right to the end."""
    loader = OURS(Rows(400, width=33), 5, num_workers=workers)
    views = [batch[0][3, ::2].numpy() for _ in range(2) for batch in loader]
    assert len(views) == 160
    for place, view in enumerate(views):
        assert view.tolist() == [float(place % 80 * 5 + 3)] * 17


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_may_be_written_to(workers: int) -> None:
    """A user may change a batch in place; no later batch and no other epoch sees it."""

    def play(kind: Loader) -> Any:
        loader = kind(Rows(40), 4, num_workers=workers)
        sums = []
        for _ in range(2):
            for rows, indices in loader:
                labels((rows, indices))
                rows.mul_(-7).add_(1)
                indices.zero_()
                sums.append(rows.sum().item())
        return sums

    both(play)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_tensor_dataset_is_not_written_to(workers: int) -> None:
    """Writing to a batch of batch_size 1 or more does not reach the dataset's own tensors."""
    data = torch.utils.data.TensorDataset(torch.arange(12.0).reshape(6, 2))
    for size in (1, 4):
        for (rows,) in OURS(data, size, num_workers=workers):
            rows.fill_(-1)
    assert data.tensors[0].tolist() == np.arange(12.0).reshape(6, 2).tolist()


def test_a_batch_outlives_its_loader() -> None:
    """A batch stays readable after iterator, loader and workers are gone."""
    for workers in (0, 2):
        loader = OURS(Rows(8), 4, num_workers=workers)
        iterator = iter(loader)
        kept = next(iterator)
        del iterator, loader
        assert labels(kept) == [0, 1, 2, 3]


class Waits(Rows):
    """Sample 0 is not ready before the main process has seen another one."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.seen = fork.Event()

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 0:
            assert self.seen.wait(60), "nobody saw another sample within 60 seconds"
        return super().__getitem__(index)


@pytest.mark.parametrize("persistent", [False, True])
def test_any_order_does_not_wait_for_a_slow_sample(persistent: bool) -> None:
    """C9: in_order=False delivers what is ready while sample 0 is still being read; each sample once per epoch."""
    for kind in (TORCH, OURS):
        data = Waits(12)
        loader = kind(
            data, 1, num_workers=2, in_order=False, persistent_workers=persistent, multiprocessing_context=fork
        )
        for _ in range(2):
            data.seen.clear()
            seen = []
            for batch in loader:
                seen += labels(batch)
                data.seen.set()
            assert seen[0] != 0
            assert sorted(seen) == list(range(12))


@pytest.mark.parametrize("in_order", [False, True])
def test_a_stream_in_any_order_loses_nothing(in_order: bool) -> None:
    """C9, E3: an iterable dataset with in_order=False: each item once."""
    for kind in (TORCH, OURS):
        loader = kind(Stream(41), 3, num_workers=3, in_order=in_order)
        assert sorted(int(item) for batch in loader for item in batch) == list(range(41))


class Tallied(Rows):
    """Counts in shared memory how many samples all workers have read."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.read = fork.Value("i", 0)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with self.read.get_lock():
            self.read.value += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_workers_read_ahead_by_the_prefetch_factor_at_most(prefetch: int, in_order: bool) -> None:
    """C9: never more than workers x prefetch_factor batches beyond those delivered."""
    for kind in (TORCH, OURS):
        data = Tallied(60)
        loader = kind(data, 2, num_workers=2, prefetch_factor=prefetch, in_order=in_order, multiprocessing_context=fork)
        for taken, _ in enumerate(loader, start=1):
            assert data.read.value <= 2 * (taken + 2 * prefetch)
        assert data.read.value == 60


def test_a_loader_works_in_a_thread() -> None:
    """Iterating in a thread that is not the main one gives the same batches."""

    def play(kind: Loader) -> Any:
        found: list[Any] = []
        loader = kind(Rows(10), 3, shuffle=True, num_workers=2)
        thread = threading.Thread(target=lambda: found.extend(labels(batch) for batch in loader))
        thread.start()
        thread.join(60)
        assert len(found) == 4
        return found

    both(play)


def test_two_loaders_work_side_by_side() -> None:
    """Two loaders with workers, read by turns (training and validation), do not mix."""

    def play(kind: Loader) -> Any:
        train, valid = kind(Rows(12), 2, num_workers=2), kind(Stream(9), 3, num_workers=1)
        return [(labels(a), b.tolist()) for a, b in zip(train, valid, strict=False)]

    both(play)


class InWorkerOnly(Rows):
    """Says whether get_worker_info() is set."""

    def __getitem__(self, index: int) -> Any:
        return get_worker_info() is not None


def test_worker_info_is_none_in_the_main_process() -> None:
    """get_worker_info() is None in main before, during and after iteration with workers, and with none."""
    assert get_worker_info() is None
    for workers in (0, 2):
        for batch in OURS(InWorkerOnly(4), 2, num_workers=workers):
            assert batch.tolist() == [workers > 0] * 2
            assert get_worker_info() is None
    assert get_worker_info() is None


@pytest.mark.skipif(SELF, reason="torch's loader has no statistics")
def test_statistics_count_the_batches() -> None:
    """loader.stats() tells how many batches were delivered, over all epochs."""
    loader = OURS(Rows(9), 2, num_workers=2)
    for _ in range(2):
        for _batch in loader:
            pass
    assert loader.stats().batches == 10
