"""Kept batches stay right, whatever is kept of them and however small the arena (B2)."""

import gc
import itertools
import threading
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

from shmloader import CopiedOutWarning, DataLoader
from support import MIB, no_leaks

ROW = 16 << 10
BATCH = 8


class Rows(Dataset):
    """Samples of 16 KiB whose bytes all tell their index, and a label."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.full((8, ROW // 8), index % 251, dtype=torch.uint8), index


def arrays(samples):
    """A collate_fn that returns NumPy arrays."""
    return np.stack([sample.numpy() for sample, _ in samples]), np.array([label for _, label in samples])


FOUR_ARENAS = Rows(4 * MIB // ROW)  # 256 samples, 32 batches of 128 KiB, beside an arena of 1 MiB


@pytest.fixture(autouse=True)
def copies_are_expected(recwarn):
    """The warning about copies has its own test."""
    warnings.simplefilter("ignore", CopiedOutWarning)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("arena_bytes", [MIB, None])
def test_a_small_slice_of_every_batch_stays_right_to_the_end(num_workers, arena_bytes):
    """Keep ``batch[0][3, ::2].numpy()`` of a dataset four arenas large: no value ever changes, within the cap."""
    with no_leaks(threads=torch.get_num_threads()):  # torch's own, for copies of this size
        loader = DataLoader(FOUR_ARENAS, BATCH, num_workers=num_workers, arena_bytes=arena_bytes)
        kept = []
        for batch in loader:
            kept.append(batch[0][3, ::2].numpy())
            for number, row in enumerate(kept):
                assert (row == (BATCH * number + 3) % 251).all(), f"batch {number} after {len(kept)}"
            if arena_bytes:
                assert loader.stats().arena.nbytes <= arena_bytes + 64 * 1024
        stats = loader.stats()
        assert len(kept) == 32
        if arena_bytes:
            assert 0 < stats.copied_out < 32
        else:  # the cap is the host's: there is room for all
            assert stats.copied_out == 0
        loader.close()
        for number, row in enumerate(kept):
            assert (row == (BATCH * number + 3) % 251).all()
        del kept, batch, row


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("arena_bytes", [MIB, None])
def test_a_list_of_a_loader_equals_torchs(num_workers, arena_bytes):
    """``list(loader)`` is right, never stuck, never wrong, shuffled as torch shuffles."""
    theirs = list(TorchLoader(FOUR_ARENAS, BATCH, shuffle=True, generator=torch.Generator().manual_seed(3)))
    loader = DataLoader(
        FOUR_ARENAS,
        BATCH,
        shuffle=True,
        generator=torch.Generator().manual_seed(3),
        num_workers=num_workers,
        arena_bytes=arena_bytes,
    )
    ours = list(loader)
    assert len(ours) == len(theirs) == 32
    for (image, label), (their_image, their_label) in zip(ours, theirs, strict=True):
        assert torch.equal(label, their_label)
        assert torch.equal(image, their_image)
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("keep", ["array", "slice", "reshape", "tensor"])
def test_kept_numpy_arrays_stay_right(num_workers, keep):
    """What a collate_fn made as arrays keeps its slot as tensors do, whole or cut."""
    chosen = {
        "array": lambda array: array,
        "slice": lambda array: array[:, 2, ::3],
        "reshape": lambda array: array.reshape(BATCH, -1)[:, 5:9],
        "tensor": lambda array: torch.from_numpy(array)[:, 0],
    }[keep]
    loader = DataLoader(FOUR_ARENAS, BATCH, num_workers=num_workers, arena_bytes=MIB, collate_fn=arrays)
    kept = [chosen(batch[0]) for batch in loader]
    for number, part in enumerate(kept):
        for row in range(BATCH):
            assert (np.asarray(part)[row] == (BATCH * number + row) % 251).all(), f"batch {number}"
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_copies_are_warned_about_once_in_a_pass_with_the_remedy(num_workers):
    """One CopiedOutWarning that names arena_bytes=; the count is in the statistics."""
    loader = DataLoader(FOUR_ARENAS, BATCH, num_workers=num_workers, arena_bytes=MIB)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kept = list(loader)
    copied = [warning for warning in caught if warning.category is CopiedOutWarning]
    assert len(copied) == 1
    assert "arena_bytes=" in str(copied[0].message)
    assert loader.stats().copied_out >= len(kept) - 1 * MIB // (BATCH * ROW)
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_nothing_is_copied_while_the_user_keeps_one_batch(num_workers):
    """The usual loop, which replaces the last batch by the next, runs without a copy."""
    loader = DataLoader(FOUR_ARENAS, BATCH, num_workers=num_workers)
    for _batch in loader:
        pass
    assert loader.stats().copied_out == 0
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_kept_from_one_epoch_survive_the_next_ones(num_workers):
    """No slot is recycled at an epoch boundary (the bug of section 9: 68 % of items silently wrong)."""
    loader = DataLoader(FOUR_ARENAS, BATCH, num_workers=num_workers, arena_bytes=2 * MIB)
    kept = []
    for epoch in range(4):
        for number, batch in enumerate(itertools.islice(loader, 6)):
            if number % 2 == epoch % 2:
                kept.append((number, batch[0][:, 1, ::64]))
        for number, part in kept:
            assert part[:, 0].tolist() == [(BATCH * number + row) % 251 for row in range(BATCH)]
            assert (part == part[:, :1]).all()
    loader.close()
    for number, part in kept:
        assert part[:, -1].tolist() == [(BATCH * number + row) % 251 for row in range(BATCH)]


def test_dropping_kept_batches_makes_their_slots_lendable_again():
    """Copies stop when the user lets go."""
    loader = DataLoader(FOUR_ARENAS, BATCH, num_workers=2, arena_bytes=MIB)
    iterator = iter(loader)
    kept = [next(iterator) for _ in range(16)]
    copied = loader.stats().copied_out
    assert copied > 0
    kept.clear()
    gc.collect()
    for _batch in iterator:
        pass
    assert loader.stats().copied_out == copied
    loader.close()


def test_leases_may_be_dropped_in_another_thread():
    """A consumer thread that gets batches through a queue and drops them there loses no slot."""
    with no_leaks():
        loader = DataLoader(FOUR_ARENAS, BATCH, num_workers=2, arena_bytes=2 * MIB)
        box, seen, wake = [], [], threading.Semaphore(0)

        def consume():
            while wake.acquire(timeout=60) and (batch := box.pop(0)) is not None:
                seen.append(batch[1].tolist())

        thread = threading.Thread(target=consume)
        thread.start()
        for batch in loader:
            box.append(batch)
            wake.release()
            del batch
        box.append(None)
        wake.release()
        thread.join(60)
        assert seen == [list(range(BATCH * k, BATCH * k + BATCH)) for k in range(32)]
        assert loader.stats().arena.lent == 0
        loader.close()
        del loader


@pytest.mark.parametrize("num_workers", [0, 2])
def test_two_threads_iterate_one_loader_each_with_its_own_iterator(num_workers):
    """Both see the whole epoch, and neither the other's bytes."""
    loader = DataLoader(FOUR_ARENAS, BATCH, num_workers=num_workers)
    wrong, counts = [], []

    def consume():
        count = 0
        for image, label in loader:
            count += 1
            if not (image[:, 0, 0].long() == label % 251).all() or not (image == image[:, :1, :1]).all():
                wrong.append(label)
        counts.append(count)

    threads = [threading.Thread(target=consume) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert counts == [32, 32]
    assert wrong == []
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_two_iterators_side_by_side_are_independent_under_one_cap(num_workers):
    """``zip(loader, loader)``: both right, and together within the cap."""
    loader = DataLoader(FOUR_ARENAS, BATCH, num_workers=num_workers, arena_bytes=2 * MIB)
    for number, (first, second) in enumerate(zip(loader, loader, strict=True)):
        assert first[1].tolist() == second[1].tolist() == list(range(BATCH * number, BATCH * number + BATCH))
        assert first[0].data_ptr() != second[0].data_ptr()
        assert torch.equal(first[0], second[0])
    assert number == 31
    loader.close()


SPARSE = {
    "coo": lambda dense: dense.to_sparse(),
    "csr": lambda dense: dense.to_sparse_csr(),
    "csc": lambda dense: dense.to_sparse_csc(),
    "bsr": lambda dense: dense.to_sparse_bsr((2, 2)),
    "bsc": lambda dense: dense.to_sparse_bsc((2, 2)),
}


@pytest.mark.parametrize("layout", SPARSE)
def test_slots_of_sparse_tensors_come_back(layout):
    """A sparse batch is a view of its slot, and when it is dropped nothing keeps the slot, torch included."""
    dense = [torch.eye(4) * (index + 1) for index in range(40)]
    samples = [SPARSE[layout](tensor) for tensor in dense]
    loader = DataLoader(samples, 1, num_workers=1, collate_fn=list)
    for (batch,), expected in zip(loader, dense, strict=True):
        assert batch.layout is samples[0].layout
        assert torch.equal(batch.to_dense(), expected)
    del batch
    stats = loader.stats()
    assert (stats.arena.lent, stats.arena.peak_lent, stats.copied_out) == (0, 2, 0)
    loader.close()
