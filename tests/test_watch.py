"""Debug mode: free slots hold poison, views are checked, misuse names the place where the batch was taken."""

import gc

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from shmloader import DataLoader, SlotMisuse, StaleSlot
from shmloader.arena import Arena
from shmloader.cap import Cap
from shmloader.segment import PAGE, Segment
from shmloader.watch import POISON, Watch, wanted


class Numbered(Dataset):
    """Samples whose bytes all tell their index."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((1024,), index, dtype=torch.uint8)


def watched_arena():
    """An arena of one-page slots, watched."""
    arena = Arena(Segment.create(64 * PAGE), Cap(None), 4, PAGE)
    arena.watch = Watch(arena.segment.memory)
    return arena


def take_a_batch(arena):
    """The place that misuse is to name."""
    slot = arena.grant()
    arena.publish(slot)
    return slot, arena.lend(slot, 0, slot.nbytes)


@pytest.mark.parametrize(
    ("argument", "variable", "on"),
    [
        (None, None, False),
        (None, "1", True),
        (None, "0", False),
        (None, "", False),
        (True, "0", True),
        (False, "1", False),
    ],
)
def test_the_argument_wins_over_the_environment(argument, variable, on, monkeypatch):
    """Unset, empty and 0 are off."""
    if variable is None:
        monkeypatch.delenv("SHMLOADER_DEBUG", raising=False)
    else:
        monkeypatch.setenv("SHMLOADER_DEBUG", variable)
    assert wanted(argument) is on


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_the_same_in_debug_mode(num_workers):
    """Two epochs, kept and dropped ones."""
    loader = DataLoader(Numbered(), 4, num_workers=num_workers, debug=True)
    for _ in range(2):
        kept = []
        for number, batch in enumerate(loader):
            assert batch[:, 0].tolist() == list(range(4 * number, 4 * number + 4))
            if number % 3 == 0:
                kept.append((number, batch))
        for number, batch in kept:
            assert (batch == torch.arange(4 * number, 4 * number + 4)[:, None]).all()
    loader.close()


def test_a_stale_pointer_reads_poison():
    """Instead of the next batch, which would look right."""
    loader = DataLoader(Numbered(), 4, debug=True)
    source = iter(loader)
    next(source)
    batch = next(source)
    start = batch.data_ptr() - loader.stats().arena.address
    stale = loader._arenas.newest().segment.memory[start : start + 1024]
    assert (stale == 4).all()
    del batch
    loader.stats()
    assert (stale == POISON).all()
    loader.close()


def test_a_write_after_the_last_view_is_told_with_the_place_where_the_batch_was_taken():
    """When the slot is granted again; afterwards the slot is usable."""
    arena = watched_arena()
    slot, lease = take_a_batch(arena)
    del lease
    assert arena.stats().free == 1
    arena.segment.memory[slot.offset + 17] = 1
    with pytest.raises(StaleSlot) as caught:
        arena.grant()
    assert (caught.value.slot, caught.value.generation) == (slot.index, 1)
    assert "take_a_batch" in caught.value.taken_at
    assert "byte 17" in str(caught.value)
    assert arena.stats().free == 1
    assert arena.grant() is slot
    arena.close()


def test_an_illegal_move_names_the_place_too():
    """The table's own refusal, with the frame of the user's code."""
    arena = watched_arena()
    slot, lease = take_a_batch(arena)
    with pytest.raises(SlotMisuse, match="take_a_batch"):
        arena.reclaim(slot)
    del lease
    arena.close()


def test_views_of_another_use_of_the_slot_are_refused():
    """The generation is checked before and after building."""
    arena = watched_arena()
    slot, lease = take_a_batch(arena)
    build = arena.watch.checked(slot, np.copy)
    assert len(build(lease)) == PAGE
    with pytest.raises(StaleSlot, match="while views"):
        build(lease[:5])
    del lease
    gc.collect()
    again, lease = take_a_batch(arena)
    assert again is slot
    with pytest.raises(StaleSlot, match="use 2"):
        build(lease)
    del lease
    arena.close()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_place_is_the_users_line(num_workers):
    """Not one inside this package or torch's loader; told when the loader comes to that slot again."""
    loader = DataLoader(Numbered(), 4, num_workers=num_workers, debug=True)
    source = iter(loader)
    next(source)
    batch = next(source)
    start = batch.data_ptr() - loader.stats().arena.address
    stale = loader._arenas.newest().segment.memory[start : start + 1]
    del batch
    loader.stats()
    stale[0] = 1
    with pytest.raises(StaleSlot, match="after its last view") as caught:
        list(source)
    assert "batch = next(source)" in caught.value.taken_at
    assert "passes.py" not in caught.value.taken_at
    loader.close()
