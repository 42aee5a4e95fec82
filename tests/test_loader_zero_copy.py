"""Zero copy, proved by writing: a byte poked into the arena is seen through the batch, for every field."""

import ctypes
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, default_collate

from shmloader import DataLoader
from support import child_pids, context, no_leaks, start_methods


class Point(NamedTuple):
    """A sample's inner tuple."""

    x: torch.Tensor
    y: float


class ManyFields(Dataset):
    """Samples of every kind of field that the default collate turns into a tensor."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return {
            "image": torch.full((3, 4, 5), index, dtype=torch.uint8),
            "array": np.full((7,), index, np.float64),
            "half": torch.full((2,), index, dtype=torch.bfloat16),
            "label": index,
            "weight": float(index),
            "scalar": np.int16(index),
            "flag": torch.tensor(index % 2 == 0),
            "nested": [Point(torch.tensor([index]), index / 2), (torch.full((2, 2), index),)],
        }


class Numpy(ManyFields):
    """Collated by hand into arrays."""

    def __getitem__(self, index):
        return np.full((50,), index, np.int32)


def stack_arrays(samples):
    """A user's collate function that returns an array and a tensor."""
    return {"array": np.stack(samples), "tensor": torch.stack([torch.from_numpy(sample) for sample in samples])}


def leaves(batch):
    """All tensors and arrays of a batch with their paths."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        return [("", batch)]
    items = batch.items() if isinstance(batch, dict) else enumerate(batch)
    return [(f"{key}.{path}", leaf) for key, child in items for path, leaf in leaves(child)]


def raw(leaf):
    """The bytes of a leaf, as the leaf itself shows them."""
    array = leaf.view(torch.uint8).numpy() if isinstance(leaf, torch.Tensor) else leaf.view(np.uint8)
    return array.reshape(-1)


def assert_born_in_the_arena(batch, arena):
    """Every leaf lies inside the arena; every byte poked at its address is seen through the leaf, and no other is."""
    found = leaves(batch)
    for path, leaf in found:
        address = leaf.data_ptr() if isinstance(leaf, torch.Tensor) else leaf.__array_interface__["data"][0]
        nbytes = leaf.nbytes
        assert arena.address <= address, path
        assert address + nbytes <= arena.address + arena.reserved, path
        poke = (ctypes.c_uint8 * nbytes).from_address(address)
        others = [raw(other).copy() for name, other in found if name != path]
        for place in (0, nbytes // 2, nbytes - 1):
            poke[place] ^= 1
            assert raw(leaf)[place] == poke[place], path
            poke[place] ^= 1
        poke[0] ^= 1
        assert all(np.array_equal(a, raw(b)) for a, b in zip(others, [o for n, o in found if n != path], strict=True))
        poke[0] ^= 1


def expected_batch(dataset, indices):
    """What torch would deliver."""
    return default_collate([dataset[index] for index in indices])


def assert_equal(batch, expected):
    """Same paths, dtypes, values."""
    ours, theirs = leaves(batch), leaves(expected)
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    for (path, a), (_, b) in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype, path
        assert np.array_equal(raw(a), raw(b)), path


def check_default_collate(num_workers, chosen=None):
    """Go through an epoch and prove every field of every batch."""
    dataset = ManyFields()
    with DataLoader(dataset, 4, num_workers=num_workers, multiprocessing_context=chosen) as loader:
        for number, batch in enumerate(loader):
            assert_equal(batch, expected_batch(dataset, range(4 * number, 4 * number + 4)))
            assert_born_in_the_arena(batch, loader.stats().arena)
        assert loader.stats().copied_out == 0


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_field_of_the_default_collate_is_a_view_of_the_arena(num_workers):
    """Nested, of eight dtypes, with and without workers: written through the arena, read through the batch."""
    with no_leaks():
        check_default_collate(num_workers)


@pytest.mark.slow
@start_methods
def test_every_field_is_a_view_of_the_arena_whatever_the_start_method(start_method):
    """Two workers by fork, fork server and spawn."""
    chosen = context(start_method)
    with no_leaks():
        check_default_collate(2, chosen)


def test_what_a_users_collate_returns_is_a_view_of_the_arena_too():
    """Arrays and tensors that a worker's collate_fn returns cross without a pickle of their bytes."""

    def check():
        with DataLoader(Numpy(), 4, num_workers=2, collate_fn=stack_arrays) as loader:
            for number, batch in enumerate(loader):
                expected = np.repeat(np.arange(4 * number, 4 * number + 4, dtype=np.int32)[:, None], 50, 1)
                assert np.array_equal(batch["array"], expected)
                assert np.array_equal(batch["tensor"].numpy(), expected)
                assert_born_in_the_arena(batch, loader.stats().arena)

    with no_leaks():
        check()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_two_batches_in_hand_never_share_a_byte(num_workers):
    """Writing all over one batch leaves the other as it was."""
    with DataLoader(ManyFields(), 4, num_workers=num_workers) as loader:
        iterator = iter(loader)
        first, second = next(iterator), next(iterator)
        kept = [raw(leaf).copy() for _, leaf in leaves(second)]
        for _, leaf in leaves(first):
            raw(leaf)[:] = 255
        assert all(np.array_equal(a, raw(b)) for a, (_, b) in zip(kept, leaves(second), strict=True))
        del first, second, iterator, leaf


def test_a_batch_outlives_iterator_loader_and_workers():
    """With nothing else left, the kept view still shows its bytes, and letting go of it frees the memory."""
    with no_leaks():
        loader = DataLoader(ManyFields(), 4, num_workers=2)
        row = next(iter(loader))["image"][3, 1:].numpy()
        loader.close()
        del loader
        assert (row == 3).all()
        del row


def test_workers_pids_are_real_and_gone_after_the_epoch():
    """``stats().worker_pids`` names live children during the pass and nobody after it."""
    with DataLoader(ManyFields(), 4, num_workers=2) as loader:
        iterator = iter(loader)
        next(iterator)
        pids = loader.stats().worker_pids
        assert len(pids) == 2
        assert set(pids) <= child_pids()
        for _ in iterator:
            pass
        assert loader.stats().worker_pids == ()
        assert not set(pids) & child_pids()
