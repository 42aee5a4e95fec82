"""Indices to a batch in one process: torch's values, in the slot where possible, and the index that failed."""

import weakref

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, default_collate
from torch.utils.data.dataloader import _DatasetKind

from shmloader.collate import SlotWriter
from shmloader.fetch import Fetcher, Recipe

MAP, ITERABLE = _DatasetKind.Map, _DatasetKind.Iterable


class Squares(Dataset):
    """Raises at 13."""

    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index == 13:
            raise KeyError("unlucky")
        return torch.full((5,), index), index * index


class InBulk(Squares):
    """Answers for many at once."""

    def __getitems__(self, indices):
        return [(torch.full((5,), index), -index) for index in indices]


class Stream(IterableDataset):
    """Five numbers."""

    def __iter__(self):
        return iter(range(5))


def writer(nbytes=4096):
    """A slot writer over memory of its own."""
    memory = np.zeros(nbytes, np.uint8)
    return SlotWriter(memory, memory.__array_interface__["data"][0], 0, nbytes)


def fetcher(dataset, kind=MAP, auto=True, collate=default_collate, drop_last=False, redirecting=False):
    """A fetcher of this recipe."""
    return Fetcher(Recipe(kind, dataset, auto, collate, drop_last), redirecting=redirecting)


def test_the_default_collate_writes_into_the_slot():
    """Both fields are in the slot's memory, and their values are torch's."""
    slot = writer()
    image, square = fetcher(Squares()).fetch([3, 1, 2], slot)
    assert image[:, 0].tolist() == [3, 1, 2]
    assert square.tolist() == [9, 1, 4]
    assert slot.offset_of(image.data_ptr()) is not None
    assert slot.offset_of(square.data_ptr()) is not None
    assert not slot.overflowed


def test_what_does_not_fit_is_on_the_heap_and_right():
    """A slot too small for the first field still takes the second."""
    slot = writer(64)
    image, square = fetcher(Squares()).fetch([3, 1, 2, 4], slot)
    assert image[:, 4].tolist() == [3, 1, 2, 4]
    assert slot.offset_of(image.data_ptr()) is None
    assert slot.offset_of(square.data_ptr()) == 0
    assert slot.overflowed


def test_the_index_that_raised_is_known_and_the_next_fetch_forgets_it():
    """Of ten indices it was the fourth; the exception is the dataset's own."""
    made = fetcher(Squares())
    with pytest.raises(KeyError, match="unlucky"):
        made.fetch([10, 11, 12, 13, 14], writer())
    assert made.failed_index == 13
    made.fetch([1, 2], writer())
    assert made.failed_index is None


def test_a_collate_function_that_raises_blames_no_index():
    """All samples were there."""

    def collate(samples):
        raise ValueError("collate")

    made = fetcher(Squares(), collate=collate)
    with pytest.raises(ValueError, match="collate"):
        made.fetch([1, 2], writer())
    assert made.failed_index is None


def test_getitems_is_asked_where_it_exists():
    """Once, for the whole batch."""
    assert fetcher(InBulk()).fetch([2, 13], writer())[1].tolist() == [-2, -13]


def test_without_batches_one_sample_is_one_answer():
    """``batch_size=None``: the index itself, and the convert function in place of collation."""
    image, square = fetcher(Squares(), auto=False, collate=lambda sample: sample).fetch(4, writer())
    assert image.tolist() == [4] * 5
    assert square == 16


@pytest.mark.parametrize(("drop_last", "expected"), [(False, [[0, 1], [2, 3], [4]]), (True, [[0, 1], [2, 3]])])
def test_a_stream_ends_as_torch_ends_it(drop_last, expected):
    """The last, smaller batch comes or not, and then StopIteration, also when asked again after ``renew``."""
    made = fetcher(Stream(), kind=ITERABLE, drop_last=drop_last)
    for _ in range(2):
        for values in expected:
            assert made.fetch([None] * 2, writer()).tolist() == values
        with pytest.raises(StopIteration):
            made.fetch([None] * 2, writer())
        made.renew()


def test_unequal_samples_are_one_error_that_names_both_and_the_field():
    """The shapes, the indices, and what to use instead; still a RuntimeError as torch's (C11)."""

    class Ragged(Dataset):
        def __getitem__(self, index):
            return {"boxes": torch.zeros(index, 4), "label": index}

    with pytest.raises(RuntimeError) as caught:
        fetcher(Ragged()).fetch([3, 3, 7], writer())
    text = str(caught.value)
    assert "boxes" in text
    assert "(3, 4)" in text or "[3, 4]" in text
    assert "(7, 4)" in text or "[7, 4]" in text
    assert "collate_" in text


def test_a_fetch_leaves_no_reference_to_the_slot():
    """After ``forget`` nothing in the fetcher keeps the memory of a batch that was dropped."""
    memory = np.frombuffer(bytearray(65536), np.uint8)
    slot = SlotWriter(memory, memory.__array_interface__["data"][0], 0, 65536)
    made = fetcher(Squares(), redirecting=True, collate=lambda samples: torch.stack([a for a, _ in samples] * 200))
    batch = made.fetch([1, 2], slot)
    made.learn(lambda tensor: True, 0)
    made.forget()
    gone = weakref.ref(memory)
    del batch, slot, memory
    assert gone() is None


def test_a_fetcher_that_stopped_redirecting_makes_heap_tensors():
    """What the user's code keeps is then its own."""
    made = fetcher(Squares(), redirecting=True, collate=lambda samples: torch.stack([a for a, _ in samples] * 200))
    slot = writer(1 << 16)
    assert slot.offset_of(made.fetch([1, 2], slot).data_ptr()) is not None
    made.stop_redirecting()
    slot = writer(1 << 16)
    assert slot.offset_of(made.fetch([1, 2], slot).data_ptr()) is None
