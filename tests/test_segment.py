"""One shared mapping: what is committed is there, what is not costs nothing, and no name is ever left."""

import ctypes
import mmap
import multiprocessing
import os
import pickle

import numpy as np
import pytest

from shmloader.errors import SharedMemoryFull
from shmloader.segment import PAGE, Segment, round_up
from support import MIB, context, no_leaks, shm_names, shmem_bytes, small_tmpfs, start_methods

BACKINGS = ("posix", "memfd", "directory")


@pytest.fixture(params=BACKINGS)
def backing(request, tmp_path):
    """Each kind of backing; ``directory`` is a folder for the unlinked file."""
    return str(tmp_path) if request.param == "directory" else request.param


def fill(segment, offset, nbytes, value):
    """Write ``value`` into a part of a segment, in a child."""
    segment.memory[offset : offset + nbytes] = value


@pytest.mark.parametrize(("nbytes", "unit", "expected"), [(0, 8, 0), (1, 8, 8), (8, 8, 8), (9, 8, 16)])
def test_round_up_gives_the_smallest_multiple(nbytes, unit, expected):
    """Never less than asked, never a unit too many."""
    assert round_up(nbytes, unit) == expected


@pytest.mark.alone
def test_a_reserved_range_costs_no_memory(backing):
    """A segment of 64 GiB commits nothing and moves Shmem by less than a mebibyte."""
    with no_leaks():
        before = shmem_bytes()
        segment = Segment.create(64 << 30, backing)
        assert segment.committed == 0
        assert shmem_bytes() - before < 4 * MIB
        segment.close()


def test_no_backing_leaves_a_name(backing, tmp_path):
    """While the segment lives, neither /dev/shm nor the directory shows it."""
    names, files = shm_names(), os.listdir(tmp_path)
    segment = Segment.create(PAGE, backing)
    assert {name for name in shm_names() - names if "shmloader" in name} == set()
    assert os.listdir(tmp_path) == files
    segment.close()


def test_committed_bytes_read_zero_and_come_back_zero_after_decommit(backing):
    """What was given back and committed again shows nothing of its former content."""
    segment = Segment.create(8 * PAGE, backing)
    segment.commit(PAGE, 2 * PAGE)
    part = segment.memory[PAGE : 3 * PAGE]
    assert not part.any()
    part[:] = 7
    assert segment.committed == 2 * PAGE
    segment.decommit(PAGE, 2 * PAGE)
    assert segment.committed == 0
    if backing in ("posix", "memfd"):  # other file systems may not support holes
        segment.commit(PAGE, 2 * PAGE)
        assert not part.any()
    del part
    segment.close()


@pytest.mark.parametrize("nbytes", [130 * MIB, 1100 * MIB + 5 * PAGE])
def test_what_is_committed_is_what_was_asked_for_not_the_next_power_of_two(nbytes):
    """B5: the kernel gave as many bytes as were asked for, to a page, and as many are reported."""
    segment = Segment.create(2 << 30, "memfd")
    if segment.free_bytes() < nbytes + 256 * MIB:
        segment.close()
        pytest.skip(f"{nbytes} bytes of shared memory are not free")
    segment.commit(0, nbytes)
    assert segment.committed == nbytes
    # By inode: a mapping keeps a descriptor of its own.
    (given,) = {os.stat(f"/proc/self/fd/{fd}").st_blocks * 512 for fd in os.listdir("/proc/self/fd") if is_ours(fd)}
    segment.close()
    assert nbytes <= given <= nbytes + PAGE


def is_ours(fd):
    """Whether a descriptor of this process is that of an arena without a name."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:shmloader")
    except FileNotFoundError:  # that of the listing itself
        return False


@pytest.mark.alone
def test_decommit_gives_pages_back_at_once():
    """8 MiB committed and decommitted leave Shmem where it was, while the mapping still lives."""
    segment = Segment.create(64 * MIB)
    before = shmem_bytes()
    segment.commit(0, 32 * MIB)
    assert shmem_bytes() - before > 24 * MIB
    segment.decommit(0, 32 * MIB)
    assert shmem_bytes() - before < 8 * MIB
    segment.close()


def test_address_is_where_memory_begins():
    """A byte written through the array lies at ``address``."""
    segment = Segment.create(PAGE)
    segment.commit(0, PAGE)
    segment.memory[5] = 42
    assert ctypes.c_uint8.from_address(segment.address + 5).value == 42
    segment.close()


def test_views_outlive_close():
    """Closing forgets the handle; a view taken before stays readable, and the mapping goes with it."""
    with no_leaks():
        segment = Segment.create(PAGE)
        segment.commit(0, PAGE)
        view = segment.memory[:16]
        view[:] = 3
        segment.close()
        segment.close()  # idempotent
        assert segment.closed
        assert view.tolist() == [3] * 16
        del view


def test_a_closed_segment_refuses_to_commit():
    """No memory is committed through a descriptor number that may belong to somebody else by now."""
    segment = Segment.create(PAGE)
    segment.close()
    with pytest.raises(ValueError, match="closed"):
        segment.commit(0, PAGE)
    assert segment.free_bytes() == 0


def test_missing_space_is_an_error_with_numbers_and_nothing_stays(tmp_path):
    """On a full mount ``commit`` says what was wanted and free and where, and keeps not one page (no SIGBUS later)."""
    with small_tmpfs(tmp_path / "shm", "2m") as mount:
        segment = Segment.create(64 * MIB, str(mount))
        segment.commit(0, MIB)
        with pytest.raises(SharedMemoryFull) as caught:
            segment.commit(MIB, 8 * MIB)
        assert caught.value.wanted == 8 * MIB
        assert 0 < caught.value.free <= MIB
        assert caught.value.where == str(mount)
        assert segment.committed == MIB
        assert segment.free_bytes() == MIB
        segment.commit(MIB, MIB)  # what is left can still be had
        segment.memory[: 2 * MIB] = 1
        segment.close()


def test_populate_changes_no_byte():
    """Mapping pages early is invisible, by one thread or several."""
    segment = Segment.create(4 * PAGE)
    segment.commit(0, 4 * PAGE)
    segment.memory[: 4 * PAGE] = 9
    segment.populate(0, 4 * PAGE)
    segment.populate(0, 4 * PAGE, threads=3)
    assert (segment.memory[: 4 * PAGE] == 9).all()
    segment.close()


@pytest.mark.slow
@start_methods
@pytest.mark.parametrize("kind", ["posix", "memfd"])
def test_a_child_writes_into_the_same_memory(start_method, kind):
    """Whatever the start method, the child's writes are read here, also into parts committed after it began."""
    chosen = context(start_method)
    with no_leaks():
        segment = Segment.create(16 * PAGE, kind)
        segment.commit(0, 4 * PAGE)
        process = chosen.Process(target=fill, args=(segment, PAGE, 2 * PAGE, 5))
        process.start()
        process.join(60)
        assert process.exitcode == 0
        process.close()
        assert not segment.memory[:PAGE].any()
        assert (segment.memory[PAGE : 3 * PAGE] == 5).all()
        segment.close()


def test_pickling_outside_of_a_process_start_is_refused():
    """A segment is not a file: it crosses only while a child is being started."""
    segment = Segment.create(PAGE)
    with pytest.raises((RuntimeError, ValueError, AttributeError, TypeError)):
        pickle.dumps(segment)
    segment.close()
    with pytest.raises(ValueError, match="closed"):
        pickle.dumps(segment)


def test_a_directory_that_does_not_exist_is_an_os_error(tmp_path):
    """The user named it, so it is the user who hears about it; nothing leaks."""
    with no_leaks(), pytest.raises(OSError, match="missing"):
        Segment.create(PAGE, str(tmp_path / "missing"))


def test_an_impossible_range_leaks_no_descriptor():
    """More addresses than the machine has: OSError, and the descriptor is closed."""
    with no_leaks(), pytest.raises((OSError, OverflowError, ValueError)):
        Segment.create(1 << 62)


def test_a_forked_child_maps_the_same_memory_without_help():
    """A plain fork inherits the mapping."""
    segment = Segment.create(PAGE)
    segment.commit(0, PAGE)
    process = multiprocessing.get_context("fork").Process(target=fill, args=(segment, 0, PAGE, 8))
    process.start()
    process.join(30)
    assert process.exitcode == 0
    assert (segment.memory[:PAGE] == 8).all()
    segment.close()


def test_memory_is_a_writable_array_over_the_whole_range():
    """uint8, one dimension, page aligned."""
    segment = Segment.create(3 * PAGE + 1)
    assert segment.memory.dtype == np.uint8
    assert segment.memory.shape == (4 * PAGE,) == (segment.nbytes,)
    assert segment.memory.flags.writeable
    assert segment.address % mmap.PAGESIZE == 0
    segment.close()
