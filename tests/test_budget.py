"""Sizes in words, and slots under a limit: examples that people type, and properties that must hold for all numbers."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmloader.budget import ArenaPlan, parse_bytes, plan_arena, slots_minimum, slots_wanted
from shmloader.errors import ArenaTooSmall, ResourceError, SharedMemoryFull
from shmloader.limits import UNLIMITED, Limit

MIB = 1 << 20


def mount(free: int) -> Limit:
    return Limit("shared-memory mount", free, 2 * free, "/dev/shm")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("2GiB", 2 << 30),
        ("2 gib", 2 << 30),
        ("512 MB", 512_000_000),
        ("1.5g", 3 << 29),
        ("64m", 64 << 20),
        ("64M", 64 << 20),
        ("3k", 3072),
        ("1KB", 1000),
        ("1tib", 1 << 40),
        (".5KiB", 512),
        ("2.", 2),
        ("4096", 4096),
        (" 7 bytes ", 7),
        ("1B", 1),
        ("0.1GiB", 107374182),
        (2, 2),
        (np.int64(5), 5),
    ],
)
def test_sizes_that_people_write(text: int | str, nbytes: int) -> None:
    """iB is binary, B decimal, a bare letter binary as docker's; case and spaces do not matter."""
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "2 G i B", "-1", "1e9", "2GiBs", "0x10", "1,5g", "nan", "inf", "2 2", "٣", "1_000"]
)
def test_text_that_is_no_size_is_refused_with_examples(text: str) -> None:
    """ValueError quotes the text and shows how to write it."""
    with pytest.raises(ValueError, match="GiB") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("size", [True, False, 1.5, None, b"2g", [1]])
def test_other_types_are_refused(size: object) -> None:
    """TypeError for a bool, a float, None..."""
    with pytest.raises(TypeError, match="a size must be an int or a string"):
        parse_bytes(size)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, -1, "0", "0GiB", "0.5b"])
def test_sizes_below_one_byte_are_refused(size: int | str) -> None:
    """Zero and less are ValueErrors, also after rounding down."""
    with pytest.raises(ValueError, match="at least one byte"):
        parse_bytes(size)


@given(st.integers(1, 1 << 60), st.sampled_from([("", 1), ("k", 1 << 10), ("MiB", 1 << 20), ("GB", 10**9)]))
def test_whole_sizes_are_exact(number: int, unit: tuple[str, int]) -> None:
    """No float is involved: any number of any unit comes back to the byte."""
    assert parse_bytes(f"{number}{unit[0]}") == number * unit[1]
    assert parse_bytes(f"{number}.0 {unit[0].upper()}") == number * unit[1]


def test_slots_for_workers_and_prefetch() -> None:
    """All batches in flight, one in the user's hands, one being handed over."""
    assert slots_wanted(0, None) == 3
    assert slots_wanted(0, 2) == 3
    assert slots_wanted(1, 2) == 4
    assert slots_wanted(8, None) == 18
    assert slots_wanted(8, 16) == 130
    assert slots_minimum(8) == 9
    assert slots_minimum(0) == 2


def test_everything_fits() -> None:
    """The plan takes what it needs, and no more."""
    plan = plan_arena(slot_bytes=5000, slots=6, minimum_slots=3, arena_bytes=None, binding=mount(MIB))
    assert plan == ArenaPlan(6, 8192, 6 * 8192, 6 * 8192, "all 6 slots of 8.0 KiB fit")
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_fewer_slots_where_the_host_has_less() -> None:
    """Without a number from the user slots are given up first, and the reason names the limit (G1)."""
    plan = plan_arena(slot_bytes=MIB, slots=18, minimum_slots=9, arena_bytes=None, binding=mount(12 * MIB + 5))
    assert (plan.slots, plan.nbytes, plan.limit) == (12, 12 * MIB, 12 * MIB)
    assert plan.reason == "12 of 18 slots of 1.0 MiB: the shared-memory mount (/dev/shm) has 12.0 MiB free"


def test_headroom_is_left_to_the_processes() -> None:
    """Bytes set aside under the binding limit are not taken, and said."""
    plan = plan_arena(
        slot_bytes=MIB, slots=18, minimum_slots=3, arena_bytes=None, binding=mount(12 * MIB), headroom=8 * MIB
    )
    assert plan.slots == 4
    assert "8.0 MiB of that are left to the processes" in plan.reason


def test_not_even_the_minimum_fits() -> None:
    """One sentence with wanted bytes, free bytes, the mount and the ways out (A1)."""
    with pytest.raises(SharedMemoryFull) as caught:
        plan_arena(slot_bytes=4 * MIB, slots=9, minimum_slots=2, arena_bytes=None, binding=mount(2 * MIB))
    assert (caught.value.wanted, caught.value.free) == (8 * MIB, 2 * MIB)
    for part in (str(8 * MIB), str(2 * MIB), "/dev/shm", "shared-memory mount", "--shm-size", "arena_bytes="):
        assert part in str(caught.value)


def test_a_given_number_below_the_minimum_names_the_minimum() -> None:
    """workers + 1 slots must fit (G1)."""
    with pytest.raises(ArenaTooSmall) as caught:
        plan_arena(slot_bytes=MIB, slots=9, minimum_slots=3, arena_bytes=2 * MIB, binding=mount(MIB))
    assert caught.value.minimum == 3 * MIB
    assert str(3 * MIB) in str(caught.value)


def test_a_given_number_that_the_host_does_not_have() -> None:
    """A promise that cannot be kept is refused at once, though fewer slots would fit."""
    with pytest.raises(SharedMemoryFull, match=r"wanted 8\.0 MiB .* free 2\.0 MiB .* at the shared-memory mount"):
        plan_arena(slot_bytes=4096, slots=9, minimum_slots=2, arena_bytes=8 * MIB, binding=mount(2 * MIB))


def test_a_given_number_is_the_limit_also_for_growth() -> None:
    """Fewer slots are committed than the number allows, but the arena may grow up to it."""
    plan = plan_arena(slot_bytes=MIB, slots=4, minimum_slots=2, arena_bytes=64 * MIB, binding=None)
    assert (plan.slots, plan.nbytes, plan.limit) == (4, 4 * MIB, 64 * MIB)
    small = plan_arena(slot_bytes=MIB, slots=4, minimum_slots=2, arena_bytes=3 * MIB + 1, binding=None)
    assert (small.slots, small.limit) == (3, 3 * MIB + 1)
    assert small.reason == "3 of 4 slots of 1.0 MiB: arena_bytes=3145729 (3.0 MiB) allows no more"


@pytest.mark.parametrize("wrong", [{"slot_bytes": 0}, {"minimum_slots": 0}, {"page": 0}, {"headroom": -1}])
def test_senseless_numbers_are_refused(wrong: dict[str, int]) -> None:
    """A slot of no bytes is a mistake of the caller."""
    right = {"slot_bytes": 1, "slots": 1, "minimum_slots": 1, "page": 4096, "headroom": 0}
    with pytest.raises(ValueError, match="must be at least 1"):
        plan_arena(**{**right, **wrong}, arena_bytes=None, binding=None)


sizes = st.integers(1, 1 << 34)
counts = st.integers(1, 300)
numbers = st.none() | st.integers(1, 1 << 44)
frees = st.none() | st.integers(0, 1 << 44) | st.just(UNLIMITED)


def attempt(
    slot_bytes: int, slots: int, minimum: int, arena: int | None, free: int | None, headroom: int = 0
) -> ArenaPlan | ResourceError:
    binding = None if free is None else mount(free)
    try:
        return plan_arena(
            slot_bytes=slot_bytes,
            slots=slots,
            minimum_slots=minimum,
            arena_bytes=arena,
            binding=binding,
            headroom=headroom,
        )
    except (ArenaTooSmall, SharedMemoryFull) as error:
        return error


@given(sizes, counts, counts, numbers, frees, st.integers(0, 1 << 40))
def test_a_plan_is_never_over_and_never_under_the_minimum(
    slot_bytes: int, slots: int, minimum: int, arena: int | None, free: int | None, headroom: int
) -> None:
    """Every plan keeps within the number, the host and the wish; every refusal is true (G1)."""
    result = attempt(slot_bytes, slots, minimum, arena, free, headroom)
    page_slot = -(-slot_bytes // 4096) * 4096
    allowed = UNLIMITED if free is None else max(0, free - headroom)
    if isinstance(result, ArenaPlan):
        assert result.slot_bytes == page_slot
        assert result.nbytes == result.slots * result.slot_bytes <= result.limit <= allowed
        assert minimum <= result.slots <= max(slots, minimum)
        assert arena is None or result.limit == arena
        if result.slots < max(slots, minimum):  # one more would not fit
            assert result.nbytes + page_slot > (allowed if arena is None else arena)
    elif isinstance(result, ArenaTooSmall):
        assert arena is not None
        assert result.minimum == minimum * page_slot > arena
    else:
        assert isinstance(result, SharedMemoryFull)
        assert result.wanted > result.free == allowed
        assert result.wanted == (minimum * page_slot if arena is None else arena)
    assert str(pickle.loads(pickle.dumps(result))) == str(result)


def enough_for(slots: int, slot_bytes: int) -> int:
    """Return bytes that hold so many slots, each rounded up to pages."""
    return slots * (slot_bytes + 4096)


@given(sizes, counts, counts, st.integers(0, 1 << 44), st.integers(0, 1 << 40))
def test_more_free_memory_never_means_fewer_slots(
    slot_bytes: int, slots: int, minimum: int, free: int, more: int
) -> None:
    """The default plan is monotone in what the host has."""
    free += enough_for(minimum, slot_bytes)
    before, after = (attempt(slot_bytes, slots, minimum, None, have) for have in (free, free + more))
    assert isinstance(before, ArenaPlan)
    assert isinstance(after, ArenaPlan)
    assert after.slots >= before.slots


@given(sizes, counts, counts, st.integers(1, 1 << 44), st.integers(0, 1 << 40))
def test_a_larger_number_never_means_fewer_slots(
    slot_bytes: int, slots: int, minimum: int, arena: int, more: int
) -> None:
    """The plan under a given number is monotone in that number."""
    arena += enough_for(minimum, slot_bytes)
    before, after = (attempt(slot_bytes, slots, minimum, number, None) for number in (arena, arena + more))
    assert isinstance(before, ArenaPlan)
    assert isinstance(after, ArenaPlan)
    assert after.slots >= before.slots


@given(sizes, counts, counts, counts, st.integers(0, 1 << 44))
def test_wishing_for_more_slots_never_gives_fewer(
    slot_bytes: int, slots: int, more: int, minimum: int, free: int
) -> None:
    """The plan is monotone in the wish."""
    free += enough_for(minimum, slot_bytes)
    before, after = (attempt(slot_bytes, wish, minimum, None, free) for wish in (slots, slots + more))
    assert isinstance(before, ArenaPlan)
    assert isinstance(after, ArenaPlan)
    assert after.slots >= before.slots
