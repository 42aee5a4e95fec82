"""Slots: every move is in the table, the cap holds, and a lent slot is out of reach. The walk is in test_arena_walk."""

import gc
import threading
import time

import numpy as np
import pytest

from shmloader.arena import Arena
from shmloader.cap import Cap
from shmloader.errors import BatchTooLarge, SharedMemoryFull, SlotMisuse
from shmloader.segment import PAGE, Segment
from shmloader.slot import FREE, MOVES, RETIRED, Slot
from support import no_leaks, small_tmpfs

EVENTS = sorted({event for _, event in MOVES})
STATES = sorted({state for state, _ in MOVES} | set(MOVES.values()))


def make_arena(cap_pages=8, slots=4, slot_pages=1, reserve_pages=64):
    """An arena of pages, its cap included."""
    cap = Cap(None if cap_pages is None else cap_pages * PAGE)
    return Arena(Segment.create(reserve_pages * PAGE), cap, slots, slot_pages * PAGE)


def ready(arena, need=0):
    """A slot whose batch is finished."""
    slot = arena.grant(need)
    assert slot is not None
    arena.publish(slot)
    return slot


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("event", EVENTS)
def test_a_move_is_made_exactly_if_the_table_has_it(state, event):
    """Any other is refused, changes nothing, and the error lists what was legal."""
    slot = Slot(7, 0, PAGE, lambda slot: None)
    slot.state = state
    if (state, event) in MOVES:
        slot.move(event)
        assert slot.state == MOVES[state, event]
        return
    with pytest.raises(SlotMisuse) as caught:
        slot.move(event)
    assert slot.state == state
    assert caught.value.slot == 7
    assert set(caught.value.legal) == {e for s, e in MOVES if s == state}


def test_a_lent_slot_is_out_of_reach_until_its_last_view_is_gone():
    """A slice of a slice keeps the slot; when it dies, the slot is granted again."""
    arena = make_arena(cap_pages=1, slots=1)
    base = arena.lend(ready(arena), 0, 100)
    view = base[10:20][::2]
    del base
    gc.collect()
    assert arena.grant() is None
    assert arena.stats().lent == 1
    del view
    gc.collect()
    assert arena.stats().lent == 0
    assert arena.grant() is not None
    arena.close()


def test_a_lease_may_end_in_another_thread():
    """The finaliser runs wherever the last view dies; the slot is free for the thread that grants."""
    arena = make_arena(cap_pages=1, slots=1)
    box = [arena.lend(ready(arena), 0, PAGE)]
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert arena.grant() is not None
    arena.close()


def test_the_cap_is_never_exceeded_and_none_is_the_answer():
    """With all slots out, one more is not to be had, and committed bytes stay at the cap."""
    arena = make_arena(cap_pages=3, slots=9)
    slots = [arena.grant() for _ in range(3)]
    assert None not in slots
    assert arena.grant() is None
    assert arena.stats().nbytes == 3 * PAGE == arena.cap.used == arena.cap.peak
    arena.close()


def test_a_need_above_the_cap_is_refused_with_numbers_when_nothing_can_come_back():
    """BatchTooLarge names need and limit at once instead of waiting for slots that cannot help."""
    arena = make_arena(cap_pages=3)
    with pytest.raises(BatchTooLarge) as caught:
        arena.grant(4 * PAGE)
    assert (caught.value.need, caught.value.limit) == (4 * PAGE, 3 * PAGE)
    assert arena.stats().nbytes == 0
    arena.close()


def test_a_giant_takes_the_place_of_smaller_free_slots():
    """A need of three pages under a cap of three retires free slots of one page each."""
    arena = make_arena(cap_pages=3, slots=3)
    slots = [arena.grant() for _ in range(3)]
    for slot in slots:
        arena.reclaim(slot)
    giant = arena.grant(3 * PAGE)
    assert giant is not None
    assert giant.nbytes == 3 * PAGE
    assert [slot.state for slot in slots] == [RETIRED] * 3
    assert arena.stats().nbytes == 3 * PAGE
    arena.close()


def test_a_lent_slot_is_never_retired_for_a_giant():
    """The giant is not to be had, and the lent bytes stay."""
    arena = make_arena(cap_pages=3, slots=3)
    base = arena.lend(ready(arena), 0, PAGE)
    base[:] = 9
    assert arena.grant(3 * PAGE) is None
    assert (base == 9).all()
    arena.close()


def test_the_free_slot_used_last_is_granted_first():
    """Its pages are warm."""
    arena = make_arena()
    first, second = arena.grant(), arena.grant()
    arena.reclaim(first)
    arena.reclaim(second)
    assert arena.grant() is second
    arena.close()


def test_a_surplus_of_free_slots_makes_room_for_a_larger_one():
    """Slots made while the user kept batches are retired, all that are too many, when a larger one is needed."""
    arena = make_arena(cap_pages=8, slots=4)
    kept = [arena.lend(ready(arena), 0, PAGE) for _ in range(6)]
    kept.clear()
    gc.collect()
    assert arena.stats().free == 6
    large = arena.grant(3 * PAGE)
    assert large is not None
    assert large.nbytes == 3 * PAGE
    arena.close()


def test_whatever_is_free_is_better_than_nothing():
    """A smaller slot is granted where no other can be had, but not to who cannot use it."""
    arena = make_arena(cap_pages=3, slots=4)
    first, second = arena.grant(), arena.grant(2 * PAGE)
    arena.slot_bytes = 2 * PAGE
    arena.reclaim(first)
    assert arena.grant() is first
    arena.reclaim(first)
    arena.reclaim(second)
    assert arena.grant() is second
    assert arena.grant(2 * PAGE) is None
    arena.close()


def test_an_exchange_gives_something_in_any_case():
    """What a worker gave back for more is given to it again if nothing larger is free or can be made."""
    arena = make_arena(cap_pages=3, slots=4)
    first, second, third = arena.grant(), arena.grant(), arena.grant()
    assert arena.exchange(first, 2 * PAGE) is first
    arena.reclaim(second)
    larger = arena.exchange(first, 2 * PAGE)
    assert larger.nbytes == 2 * PAGE
    assert arena.exchange(None, 2 * PAGE) is None
    arena.reclaim(third)
    assert arena.exchange(None, 2 * PAGE) is third
    arena.close()


def test_seeds_go_and_one_slot_is_kept_for_who_holds_them():
    """Slots from before the size was known carry tickets; once it is known no new ticket and no user gets the last
    slot that can be had, until all who hold a seed have asked for a larger one."""
    arena = make_arena(cap_pages=8, slots=4, slot_pages=0)
    seeds = [arena.grant() for _ in range(3)]
    arena.keep_back = 1
    arena.plan(4 * PAGE, 2)  # one fits beside three seeds, two do without
    first = arena.exchange(seeds[0], 4 * PAGE)
    assert first.nbytes == 4 * PAGE
    assert arena.grant() is None, "what is left is for the seeds"
    assert arena.lend_if_spare(first, PAGE) is None, "and this is all there is"
    arena.reclaim(first)
    assert arena.exchange(seeds[1], 4 * PAGE) is first
    arena.publish(first)
    arena.reclaim(first)
    second = arena.exchange(seeds[2], 4 * PAGE)
    assert arena.grant() is not None
    assert second.nbytes == 4 * PAGE
    assert arena.stats().slots == 2
    arena.close()


def test_seeds_that_nobody_holds_go_at_once():
    """Free when the size becomes known: gone, their pages too."""
    arena = make_arena(cap_pages=10, slots=4, slot_pages=0)
    seeds = [arena.grant() for _ in range(3)]
    for seed in seeds:
        arena.reclaim(seed)
    arena.plan(2 * PAGE, 4)
    assert arena.stats().slots == 0
    assert arena.stats().nbytes == 0
    arena.close()


def test_close_leaves_lent_batches_right_and_counts_them_until_they_end():
    """After close only what is lent is committed, unchanged, and the cap forgets it with its last view."""
    with no_leaks():
        arena = make_arena(cap_pages=8)
        arena.reclaim(arena.grant())
        base = arena.lend(ready(arena), 0, PAGE)
        base[:] = 5
        cap = arena.cap
        arena.close()
        arena.close()
        assert (base == 5).all()
        assert cap.used == PAGE
        assert cap.room() == 7 * PAGE
        del base
        gc.collect()
        assert cap.room() == 8 * PAGE
        del arena


def test_control_pieces_are_not_counted_by_the_cap_and_come_back():
    """A control block next to slots leaves the whole cap to the slots."""
    arena = make_arena(cap_pages=2)
    piece = arena.take_piece(100)
    slots = [arena.grant(), arena.grant()]
    assert None not in slots
    assert all(slot.offset != piece for slot in slots)
    arena.give_piece(piece, 100)
    assert arena.stats().nbytes == 2 * PAGE
    arena.close()


def test_a_full_mount_is_an_error_when_nothing_can_come_back(tmp_path):
    """The host's no, not the cap's: SharedMemoryFull with the mount's name, and no slot is half made."""
    with small_tmpfs(tmp_path / "shm", "64k") as mount:
        arena = Arena(Segment.create(64 * PAGE, str(mount)), Cap(None), 4, 8 * PAGE)
        assert arena.grant() is not None
        assert arena.grant() is not None
        assert arena.grant() is None  # slots are out that may come back
        arena.close()
        arena = Arena(Segment.create(64 * PAGE, str(mount)), Cap(None), 4, 32 * PAGE)
        with pytest.raises(SharedMemoryFull, match=str(mount)):
            arena.grant()
        assert arena.stats().slots == 0
        arena.close()


def test_leases_of_many_threads_all_come_back():
    """Four threads drop 200 leases each while one grants: no slot is lost and none is granted twice."""
    arena = make_arena(cap_pages=None, slots=8)
    queue: list[np.ndarray] = []
    done = threading.Event()

    def drop():
        while not done.is_set() or queue:
            try:
                queue.pop()
            except IndexError:
                done.wait(0.0005)

    threads = [threading.Thread(target=drop) for _ in range(4)]
    for thread in threads:
        thread.start()
    lent = 0
    deadline = time.monotonic() + 60
    while lent < 800:
        assert time.monotonic() < deadline, f"only {lent} leases came back"
        slot = arena.grant()
        if slot is not None:
            arena.publish(slot)
            queue.append(arena.lend(slot, 0, 64))
            lent += 1
    done.set()
    for thread in threads:
        thread.join(30)
    queue.clear()
    stats = arena.stats()
    assert (stats.lent, stats.free) == (0, stats.slots)
    arena.close()


def test_a_quarantined_slot_is_out_of_reach_until_it_is_released():
    """Whatever its worker still looks at is neither granted nor retired, and does not count as circulating."""
    arena = make_arena(cap_pages=2, slots=1)
    slot = arena.grant()
    arena.quarantine(slot)
    assert arena.circulating() == 0
    other = arena.grant()
    assert other is not None
    assert other is not slot
    arena.reclaim(other)
    assert arena.grant(2 * PAGE) is None
    arena.release_quarantined()
    assert slot.state == FREE
    assert arena.grant(2 * PAGE) is not None
    arena.close()
