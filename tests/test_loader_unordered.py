"""``in_order=False``, slow samples, stuck samples, slow starts: who waits for whom, how long (C7, C9, C10)."""

import multiprocessing
import multiprocessing.resource_tracker as resource_tracker
import os
import pickle
import threading
import time
import warnings

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from shmloader import DataLoader, WorkerTimeout
from support import context, no_leaks


@pytest.fixture(autouse=True)
def more_workers_than_cpus(recwarn):
    """Sleeping workers need no CPU of their own."""
    warnings.filterwarnings("ignore", message="This DataLoader will create")


class Gated(Dataset):
    """Sample 0 waits until a gate is opened; the others are quick."""

    def __init__(self, gate):
        self.gate = gate

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 0 and not self.gate.wait(60):
            raise TimeoutError("the gate was never opened")
        return index


class Stuck(Dataset):
    """Index 5 never comes."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 5:
            self.wait_for_the_disk()
        return index

    def wait_for_the_disk(self):
        """What a stack should show."""
        threading.Event().wait(1000)


class Uneven(IterableDataset):
    """Worker 0 yields 3, worker 1 yields 20, worker 2 nothing."""

    def __iter__(self):
        worker = torch.utils.data.get_worker_info().id
        return iter(range(100 * worker, 100 * worker + (3, 20, 0)[worker]))


class Large(Dataset):
    """A million samples without a list of them."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index


@pytest.mark.parametrize("arguments", [{}, {"prefetch_factor": 1}, {"arena_bytes": "32KiB"}])
def test_one_slow_sample_blocks_nobody_when_order_does_not_matter(arguments):
    """All other batches come while sample 0 is still waiting, also with workers + 1 slots (C9)."""
    gate = multiprocessing.get_context("fork").Event()
    loader = DataLoader(Gated(gate), 2, num_workers=4, in_order=False, timeout=60, **arguments)
    iterator, seen = iter(loader), []
    held = 0
    for batch in iterator:
        seen.append(batch.tolist())
        held = len(seen)
        if held == 20 - arguments.get("prefetch_factor", 2):
            gate.set()  # what is left may queue behind the slow sample
    assert held == 20
    assert sorted(x for batch in seen for x in batch) == list(range(40))
    assert seen.index([0, 1]) >= 20 - arguments.get("prefetch_factor", 2)
    loader.close()


def test_in_order_the_other_workers_go_on_into_free_slots():
    """While batch 0 is awaited, the others work ahead as far as prefetch allows; then all comes in order."""
    gate = multiprocessing.get_context("fork").Event()
    loader = DataLoader(Gated(gate), 2, num_workers=4, timeout=60)
    iterator = iter(loader)
    threading.Timer(0.2, gate.set).start()
    assert [batch.tolist() for batch in iterator] == [[k, k + 1] for k in range(0, 40, 2)]
    loader.close()


@pytest.mark.parametrize("arena_bytes", [None, "16KiB"])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_unordered_batches_are_the_same_batches(num_workers, shuffle, arena_bytes):
    """As a multiset, they are those of the ordered epoch with the same seed."""
    epochs = []
    for in_order in (True, False):
        loader = DataLoader(
            Large(101),
            4,
            shuffle=shuffle,
            generator=torch.Generator().manual_seed(9),
            num_workers=num_workers,
            in_order=in_order,
            arena_bytes=arena_bytes,
        )
        epochs.append([tuple(batch.tolist()) for batch in loader])
        loader.close()
    assert sorted(epochs[1]) == sorted(epochs[0])


@pytest.mark.parametrize("in_order", [True, False])
def test_streams_of_unequal_length_are_read_to_the_end_of_each(in_order):
    """A worker that has ended, or never had anything, holds nobody up."""
    loader = DataLoader(Uneven(), 2, num_workers=3, in_order=in_order)
    for _ in range(2):
        values = [x for batch in loader for x in batch.tolist()]
        assert sorted(values) == [0, 1, 2, *range(100, 120)]
        assert [x for x in values if x >= 100] == list(range(100, 120))
    loader.close()


@pytest.mark.parametrize("in_order", [True, False])
def test_a_timeout_names_the_index_the_worker_and_the_line(in_order):
    """Two seconds later: worker, pid, indices with 5 among them, and the function that it hangs in (C10)."""
    loader = DataLoader(Stuck(), 1, num_workers=2, timeout=1.0, in_order=in_order, prefetch_factor=1)
    iterator = iter(loader)
    pids = loader.stats().worker_pids
    with pytest.raises(WorkerTimeout) as caught:
        for _batch in iterator:
            pass
    error, text = caught.value, str(caught.value)
    assert 5 in error.indices
    assert error.pid in pids
    assert "timed out after 1 seconds" in text
    assert "wait_for_the_disk" in text
    assert pickle.loads(pickle.dumps(error)).args == error.args
    started = time.monotonic()
    loader.close()
    assert time.monotonic() - started < 2 + 1


def test_after_a_timeout_the_iterator_can_be_asked_again():
    """What was slow and not stuck is delivered in the end, and nothing is lost or doubled."""
    gate = multiprocessing.get_context("fork").Event()
    loader = DataLoader(Gated(gate), 2, num_workers=2, timeout=0.3)
    iterator = iter(loader)
    with pytest.raises(WorkerTimeout):
        next(iterator)
    gate.set()
    loader.timeout = 60
    values, late = [], 0
    while True:
        try:
            values += next(iterator).tolist()
        except StopIteration:
            break
        except WorkerTimeout:
            late += 1
            assert late < 100
    assert values == list(range(40))
    loader.close()


@pytest.mark.parametrize("num_workers", [1, 2])
def test_what_crosses_to_a_worker_does_not_grow_with_the_dataset(num_workers):
    """Ten million samples: the first batch comes without a list of indices, in a few MiB (C7)."""
    loader = DataLoader(Large(10_000_000), 1000, num_workers=num_workers)
    iterator = iter(loader)
    assert next(iterator).tolist() == list(range(1000))
    assert loader.stats().arena.nbytes < 2 << 20
    loader.close()


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_what_cannot_be_sent_to_a_worker_is_named_before_any_worker_is_left(start_method):
    """A lambda or a lock in the dataset: the message names the argument and attribute; nothing leaks."""
    chosen = context(start_method)
    resource_tracker.ensure_running()  # spawn's own helper, which stays

    def check():
        loader = DataLoader(
            Large(8), 2, num_workers=2, multiprocessing_context=chosen, collate_fn=lambda samples: samples
        )
        with pytest.raises((AttributeError, TypeError, pickle.PicklingError), match="collate_fn"):
            iter(loader)
        loader.close()

    with no_leaks():
        check()


def test_all_workers_take_part_and_each_knows_who_it_is():
    """Batch k comes from worker k mod n, in every epoch."""

    class Who(Large):
        def __getitem__(self, index):
            info = torch.utils.data.get_worker_info()
            return torch.tensor([info.id, info.num_workers, os.getpid()])

    loader = DataLoader(Who(24), 2, num_workers=3)
    for _ in range(2):
        batches = [batch.clone() for batch in loader]
        assert [batch[0, 0].item() for batch in batches] == [k % 3 for k in range(12)]
        assert {batch[0, 1].item() for batch in batches} == {3}
        assert len({batch[0, 2].item() for batch in batches}) == 3
    loader.close()
