"""The pieces of a reserved range: what is handed out never overlaps, and what comes back merges."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmloader.extents import Extents

SIZE = 40


def test_a_new_range_is_one_free_piece():
    """All of it can be taken at once, and then nothing."""
    extents = Extents(SIZE)
    assert extents.free == SIZE
    assert extents.take(SIZE) == 0
    assert extents.free == 0
    assert extents.take(1) is None


def test_an_empty_range_hands_out_nothing():
    """A range of 0 units has no piece of 1."""
    assert Extents(0).take(1) is None


def test_neighbours_merge_whatever_the_order_of_return():
    """Three pieces returned middle last make one piece of the whole range again."""
    for order in ((0, 20, 10), (20, 0, 10), (10, 0, 20), (10, 20, 0)):
        extents = Extents(30)
        assert [extents.take(10) for _ in range(3)] == [0, 10, 20]
        for offset in order:
            extents.give(offset, 10)
        assert extents.take(30) == 0


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 10), (5, 10), (9, 1), (20, 5)])
def test_a_piece_that_is_not_taken_cannot_be_given(offset, nbytes):
    """Giving back what is free, wholly or partly, is refused instead of corrupting the list."""
    extents = Extents(30)
    extents.take(20)
    extents.give(0, 10)
    with pytest.raises(ValueError, match="is not taken"):
        extents.give(offset, nbytes)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12), st.integers(0, 99)), max_size=60))
@settings(max_examples=150, deadline=None)
def test_any_sequence_of_takes_and_gives_matches_a_set_of_units(moves):
    """Pieces never overlap, ``free`` is exact, and None is only said when no run of free units is long enough."""
    extents, taken = Extents(SIZE), {}
    for take, nbytes, choice in moves:
        used = {unit for offset, length in taken.items() for unit in range(offset, offset + length)}
        if take:
            offset = extents.take(nbytes)
            if offset is None:
                runs = "".join("x" if unit in used else "." for unit in range(SIZE)).split("x")
                assert max(map(len, runs)) < nbytes
            else:
                assert offset >= 0
                assert offset + nbytes <= SIZE
                assert used.isdisjoint(range(offset, offset + nbytes))
                taken[offset] = nbytes
        elif taken:
            offset = sorted(taken)[choice % len(taken)]
            extents.give(offset, taken.pop(offset))
        assert extents.free == SIZE - sum(taken.values())


def test_a_piece_reaches_over_the_free_pieces_that_touch_it():
    """Free neighbours count, taken ones do not, and the piece itself may be free or taken meanwhile."""
    extents = Extents(100)
    places = [extents.take(10) for _ in range(6)]
    assert places == [0, 10, 20, 30, 40, 50]
    extents.give(10, 10)
    extents.give(30, 10)
    assert extents.reach(20, 10) == (10, 40)
    assert extents.reach(0, 10) == (0, 20)
    assert extents.reach(50, 10) == (50, 100)
    assert extents.reach(40, 10) == (30, 50)
