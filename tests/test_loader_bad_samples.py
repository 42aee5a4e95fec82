"""Samples that cannot be had: raised, left out or replaced, the same for any number of workers (E7)."""

import collections
import itertools
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset

from shmloader import AllSamplesBad, BadSampleWarning, DataLoader, PackedDataset, pack

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
BAD = (13, 14, 77)


class Flawed(Dataset):
    """Sample i is (a tensor full of i, i); some cannot be had."""

    def __init__(self, bad=BAD, length=100):
        self.bad = frozenset(bad)
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index in self.bad:
            raise OSError(f"cannot read {index}")
        return torch.full((50,), index), index


class InBulk(Flawed):
    """The same, asked for a batch at a time."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def labels(loader):
    """The labels of all batches, each checked against its image."""
    found = []
    for image, label in loader:
        assert image.shape == (len(label), 50)
        assert (image == label[:, None]).all()
        found.append(label.tolist())
    return found


def run(policy, num_workers, dataset=None, **arguments):
    """What an epoch gives, what is counted, and the warnings."""
    dataset = Flawed() if dataset is None else dataset
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = DataLoader(
            dataset, arguments.pop("batch_size", 10), num_workers=num_workers, on_bad_sample=policy, **arguments
        )
        found = labels(loader)
        stats = loader.stats()
        loader.close()
    assert stats.arena.granted == stats.arena.ready == 0
    told = [str(each.message) for each in caught if each.category is BadSampleWarning]
    return found, stats, told


PLAIN = [list(range(start, start + 10)) for start in range(0, 100, 10)]


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_skipped_samples_are_missing_counted_and_listed(num_workers):
    """E7: shorter batches without the bad ones; stats() lists index and error in order; one warning at the end."""
    found, stats, told = run("skip", num_workers)
    assert found == [[i for i in batch if i not in BAD] for batch in PLAIN]
    assert [bad.index for bad in stats.bad_samples] == list(BAD)
    assert stats.bad_count == 3
    assert stats.bad_samples[0].error == "OSError: cannot read 13"
    assert {bad.replaced_by for bad in stats.bad_samples} == {None}
    assert len(told) == 1
    assert "3 bad samples" in told[0]
    assert "13 (OSError: cannot read 13)" in told[0]


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_replaced_samples_are_the_next_good_ones_of_their_batch(num_workers):
    """E7: batches keep their size; what stands in was drawn by the sampler for this very batch."""
    found, stats, told = run("replace", num_workers)
    assert found == [[{13: 15, 14: 15, 77: 78}.get(i, i) for i in batch] for batch in PLAIN]
    assert [(bad.index, bad.replaced_by) for bad in stats.bad_samples] == [(13, 15), (14, 15), (77, 78)]
    assert len(told) == 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_raised_samples_reach_the_user_as_ever(num_workers):
    """E7: the default is torch's: the exception with the index; the next batch comes."""
    loader = DataLoader(Flawed(), 10, num_workers=num_workers)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(OSError, match="cannot read 13"):
        next(iterator)
    assert next(iterator)[1].tolist() == PLAIN[2]
    assert loader.stats().bad_count == 0
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 3])
def test_a_batch_of_bad_ones_only_does_not_come_or_is_named(num_workers):
    """E7: skip: no empty batch; replace: an error with the indices, and the epoch can go on."""
    bad = tuple(range(20, 30))
    found, stats, _ = run("skip", num_workers, Flawed(bad))
    assert found == PLAIN[:2] + PLAIN[3:]
    assert [sample.index for sample in stats.bad_samples] == list(bad)

    loader = DataLoader(Flawed(bad), 10, num_workers=num_workers, on_bad_sample="replace")
    iterator = iter(loader)
    assert [next(iterator)[1].tolist() for _ in range(2)] == PLAIN[:2]
    with pytest.raises(AllSamplesBad, match="cannot read 20"):
        next(iterator)
    assert [label.tolist() for _, label in iterator] == PLAIN[3:]
    loader.close()


@pytest.mark.parametrize("policy", ["skip", "replace"])
@pytest.mark.parametrize("kind", [Flawed, InBulk])
def test_shuffled_epochs_are_equal_for_any_number_of_workers(policy, kind):
    """E7: nothing depends on who makes a batch, or on how samples are asked for."""
    results = []
    for num_workers in (0, 1, 3):
        torch.manual_seed(5)
        found, stats, _ = run(policy, num_workers, kind(range(0, 100, 9)), shuffle=True, batch_size=7)
        results.append((found, stats.bad_samples))
    assert results[0] == results[1] == results[2]
    assert len(results[0][1]) == 12


def test_single_samples_are_left_out_too():
    """batch_size=None: a sample is its own batch, and cannot be replaced."""
    for num_workers in (0, 2):
        loader = DataLoader(Flawed(), None, num_workers=num_workers, on_bad_sample="skip")
        with pytest.warns(BadSampleWarning):
            found = [label for _, label in loader]
        assert found == [i for i in range(100) if i not in BAD]
        loader.close()
        loader = DataLoader(Flawed((0,)), None, num_workers=num_workers, on_bad_sample="replace")
        with pytest.raises(AllSamplesBad):
            next(iter(loader))
        loader.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_whole_batches_that_cannot_be_gathered_are_asked_for_one_by_one(tmp_path, num_workers):
    """A pack's batches are gathered without Python; an index that is not there is a bad sample like any other."""
    report = pack([(np.full(50, i), i) for i in range(100)], tmp_path / "p.lmdb")
    chosen = [*range(10), 500, *range(11, 20)]
    subset = Subset(PackedDataset(report.path), chosen)
    found, stats, _ = run("skip", num_workers, subset)
    assert list(itertools.chain(*found)) == [i for i in chosen if i != 500]
    assert stats.bad_count == 1
    assert "500" in stats.bad_samples[0].error


def test_a_sample_that_fails_now_and_then_cannot_make_an_endless_loop():
    """Replacing asks each good sample of the batch once at most."""

    class Tired(Flawed):
        def __init__(self):
            super().__init__(())
            self.asked = collections.Counter()

        def __getitem__(self, index):
            self.asked[index] += 1
            if index == 0 or self.asked[index] > 1:
                raise OSError("tired")
            return torch.zeros(50), 0

    dataset = Tired()
    loader = DataLoader(dataset, 10, on_bad_sample="replace")
    with pytest.raises(AllSamplesBad):
        next(iter(loader))
    assert max(dataset.asked.values()) <= 2
    loader.close()


def test_no_memory_is_no_bad_sample():
    """MemoryError is the host's fault: skipping would hide it."""

    class Huge(Flawed):
        def __getitem__(self, index):
            raise MemoryError("no room")

    for num_workers in (0, 1):
        loader = DataLoader(Huge(), 10, num_workers=num_workers, on_bad_sample="skip")
        with pytest.raises(MemoryError):
            next(iter(loader))
        loader.close()


class Stream(IterableDataset):
    """Three numbers."""

    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize("choice", [{"on_bad_sample": "skip"}, {"on_worker_death": "restart"}])
def test_streams_and_unknown_choices_are_refused_at_once(choice):
    """What cannot be done exactly is not begun; a misspelt word neither."""
    with pytest.raises(ValueError, match="needs a map-style dataset"):
        DataLoader(Stream(), 2, **choice)
    with pytest.raises(ValueError, match="must be 'raise' or"):
        DataLoader(Flawed(), 2, **dict.fromkeys(choice, "jump"))
