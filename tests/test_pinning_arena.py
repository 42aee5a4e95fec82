"""Page-locking of an arena's slots, against a recorder that checks the order on the spot (B9, B10)."""

import gc
import os
import signal

import numpy as np
import pytest

from recorder import Recorder
from shmloader.arena import Arena
from shmloader.cap import Cap
from shmloader.errors import PinningRefused
from shmloader.pinning import Copying, Pins
from shmloader.segment import PAGE, Segment
from support import run_script


def pinned_arena(recorder, cap_pages=64, slots=4, slot_pages=2, pin=True, drain=True):
    """An arena that ``recorder`` reads."""
    arena = Arena(Segment.create(128 * PAGE), Cap(cap_pages * PAGE), slots, slot_pages * PAGE)
    arena.serve(Copying(recorder, pin=pin, drain=drain))
    return arena


def lent(arena, need=0, value=None):
    """The lease of a batch, filled with ``value``."""
    slot = arena.grant(need)
    assert slot is not None
    if value is not None:
        arena.segment.memory[slot.offset : slot.offset + slot.nbytes] = value
    arena.publish(slot)
    return arena.lend(slot, 0, slot.nbytes)


def address_of(lease):
    return lease.__array_interface__["data"][0]


def test_a_slot_is_prefaulted_registered_used_fenced_freed_unregistered_unmapped_in_this_order():
    """Prefault and unmap are checked by the recorder: pages must be there at both ends."""
    recorder = Recorder(pace=0)
    arena = pinned_arena(recorder)
    lease = lent(arena)
    address = address_of(lease)
    assert recorder.log == [("register", address, 2 * PAGE)]
    recorder.default.work.append(lambda: None)
    del lease
    assert arena.stats().draining == 1
    recorder.run()
    assert arena.stats().free == 1
    arena.close()
    assert recorder.log == [("register", address, 2 * PAGE), ("event", "default"), ("unregister", address)]
    assert not recorder.registered


def test_registered_ranges_are_slots():
    """No seam inside a slot, none of the bytes twice; growth registers what is new, and nothing again."""
    recorder = Recorder()
    arena = pinned_arena(recorder)
    leases = [lent(arena, pages * PAGE) for pages in (1, 2, 5, 2)]
    for lease in leases:
        assert recorder.registered[address_of(lease)] == len(lease)
    assert len(recorder.registered) == 4
    assert recorder.words().count("register") == 4
    stats = arena.stats()
    assert stats.pinned
    assert stats.pinned_bytes == stats.nbytes == sum(map(len, leases))
    assert stats.pinned_s > 0
    arena.close()


def test_a_retired_slot_is_unregistered_before_its_pages_are_punched_out():
    """A larger slot in its place is registered after."""
    recorder = Recorder()
    arena = pinned_arena(recorder, cap_pages=4, slots=2)
    lease = lent(arena)
    small = address_of(lease)
    del lease
    lease = lent(arena, 4 * PAGE)
    assert recorder.words("register", "unregister") == ["register", "unregister", "register"]
    assert [entry[1] for entry in recorder.log if entry[0] == "unregister"] == [small]
    del lease
    arena.close()
    assert not recorder.registered


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_when_a_piece_is_refused_all_are_given_back(failing):
    """At once those that nobody reads, the lent one when it comes back; no more are tried; the reason is kept."""
    recorder = Recorder(refuse=lambda number, nbytes: number == failing)
    copying = Copying(recorder, pin=True)
    arena = Arena(Segment.create(128 * PAGE), Cap(64 * PAGE), 4, 2 * PAGE)
    arena.serve(copying)
    first = lent(arena)
    slots = [arena.grant() for _ in range(3)]
    assert recorder.words("register", "refuse").count("register") == failing - 1
    assert set(recorder.registered) <= {address_of(first)}, "the lent one alone may be left"
    assert not arena.stats().pinned
    assert isinstance(copying.refused, PinningRefused)
    assert (copying.refused.nbytes, copying.refused.code) == (2 * PAGE, 2)
    del first
    assert arena.stats().free == 1
    assert not recorder.registered
    for slot in slots:
        arena.reclaim(slot)
    arena.close()
    assert len(recorder.words("refuse")) == 1


def test_a_refusal_by_size_is_a_refusal():
    """B9: an engine that takes no call above a limit."""
    recorder = Recorder(refuse=lambda number, nbytes: nbytes > 4 * PAGE)
    arena = pinned_arena(recorder)
    kept = [lent(arena), lent(arena, 8 * PAGE)]
    assert not arena.stats().pinned
    kept.clear()
    assert arena.stats().pinned_bytes == 0
    arena.close()
    assert not recorder.registered


def test_pins_name_range_and_piece():
    """B10: bytes, address, code and meaning are in the sentence."""
    recorder = Recorder(refuse=lambda number, nbytes: True)
    segment = Segment.create(4 * PAGE)
    segment.commit(PAGE, PAGE)
    segment.populate(PAGE, PAGE)
    pins = Pins(recorder, segment.address)
    with pytest.raises(PinningRefused) as caught:
        pins.add(PAGE, PAGE)
    text = str(caught.value)
    for part in (f"{PAGE} bytes", hex(segment.address + PAGE), "error 2", "OUT_OF_MEMORY", "lower it"):
        assert part in text
    assert pins.nbytes == 0
    segment.close()


def test_a_batch_that_outlives_its_arena_keeps_its_pages_locked_and_mapped():
    """close() unregisters the rest; the last view's death unregisters this one, while the mapping is still there."""
    recorder = Recorder(pace=0)
    arena = pinned_arena(recorder)
    lease, other = lent(arena, value=7), lent(arena)
    del other
    arena.close()
    recorder.run()
    assert set(recorder.registered) == {address_of(lease)}
    assert (lease == 7).all()
    recorder.default.work.append(lambda: None)
    del lease
    assert recorder.registered, "a copy may still read it"
    recorder.run()
    pinned_arena(recorder).close()  # any look around will do
    assert not recorder.registered


def test_a_copy_in_flight_survives_close():
    """The slot of a closed arena is read by the device after close: the bytes are still there."""
    import torch

    recorder = Recorder(pace=0)
    arena = pinned_arena(recorder)
    lease = lent(arena, value=5)
    copied = recorder.copy(torch.from_numpy(lease))
    del lease
    arena.close()
    del arena
    gc.collect()
    assert len(recorder.registered) == 1
    recorder.run()
    assert (copied == 5).all()
    pinned_arena(recorder).close()
    assert not recorder.registered


def test_an_arena_that_nobody_closes_is_unregistered_when_it_is_collected():
    """While its pages are still there."""
    recorder = Recorder()
    arena = pinned_arena(recorder)
    lent(arena)
    assert recorder.registered
    del arena
    gc.collect()
    assert not recorder.registered


def test_unpinned_slots_wait_for_copies_too():
    """Whether a copy from ordinary memory has ended when the call returns is the driver's secret."""
    recorder = Recorder(pace=0)
    arena = pinned_arena(recorder, pin=False)
    lease = lent(arena)
    recorder.default.work.append(lambda: None)
    del lease
    assert arena.stats().draining == 1
    recorder.run()
    assert arena.stats().free == 1
    assert recorder.words("register") == []
    arena.close()


def test_without_drain_a_slot_is_free_at_once():
    """The explicit opt-out: no event at all."""
    recorder = Recorder(pace=0)
    arena = pinned_arena(recorder, drain=False)
    lease = lent(arena)
    recorder.default.work.append(lambda: None)
    del lease
    assert arena.stats().free == 1
    assert recorder.words("event") == []
    arena.close()


@pytest.mark.parametrize("trouble", ["capturing", "broken"])
def test_a_slot_whose_event_cannot_be_recorded_stays_away_until_it_can(trouble):
    """A graph is being captured, or the device has failed: never reused, never stuck, never an error in a finaliser."""
    recorder = Recorder()
    arena = pinned_arena(recorder)
    lease = lent(arena)
    setattr(recorder, trouble, True)
    del lease
    assert arena.stats().draining == 1
    assert arena.stats().draining == 1
    setattr(recorder, trouble, False)
    assert arena.stats().free == 1
    arena.close()
    assert not recorder.registered


def test_events_cover_the_streams_of_lending_of_dropping_and_those_named():
    """Beside the default stream."""
    recorder = Recorder()
    copying = Copying(recorder, streams=[recorder.open_stream("named")])
    arena = Arena(Segment.create(128 * PAGE), Cap(None), 4, PAGE)
    arena.serve(copying)
    with recorder.on(recorder.open_stream("lending")):
        lease = lent(arena)
    with recorder.on(recorder.open_stream("dropping")):
        del lease
    assert {entry[1] for entry in recorder.log} == {"default", "lending", "dropping", "named"}
    arena.close()


def test_draining_slots_are_not_written_and_count_as_lent():
    """With one slot and a slow device there is nothing to grant; what it reads later is what was there."""
    import torch

    recorder = Recorder(pace=0)
    arena = pinned_arena(recorder, cap_pages=2, slots=1)
    lease = lent(arena, value=3)
    copied = recorder.copy(torch.from_numpy(lease))
    del lease
    assert arena.grant() is None
    assert arena.circulating() == 0
    recorder.run()
    lease = lent(arena, value=4)
    assert (copied == 3).all()
    del lease
    arena.close()


FORKED_CHILD = """
import gc, os, sys
sys.path.insert(0, sys.argv[1])
from recorder import Recorder
from test_pinning_arena import lent, pinned_arena
recorder = Recorder()
arena = pinned_arena(recorder)
lease, other = lent(arena), lent(arena)
pid = os.fork()
if pid == 0:
    del lease              # the finaliser of a view
    arena.stats()          # the books
    arena.close()          # the end of an arena
    del arena, other
    gc.collect()           # the end of everything
    sys.exit(5)            # and of the interpreter, with its exit handlers
_, status = os.waitpid(pid, 0)
code = os.waitstatus_to_exitcode(status)
assert code == 5, code     # 77: the recorder was called in the child
assert len(recorder.registered) == 2
del lease, other
arena.close()
assert not recorder.registered
"""


def test_a_forked_child_neither_unregisters_nor_asks():
    """B13: views die, the arena is closed and collected, the child exits: not one call to the engine."""
    run_script(FORKED_CHILD, args=[os.path.dirname(__file__)]).silent()


EXIT = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from recorder import Recorder
from test_pinning_arena import lent, pinned_arena
recorder = Recorder(out=Path(sys.argv[2]))
arena = pinned_arena(recorder)
free = lent(arena); lease = lent(arena); del free
if sys.argv[3] == "exception":
    raise SystemExit(3)
"""


@pytest.mark.parametrize("how", ["end", pytest.param("exception", marks=pytest.mark.slow)])
def test_at_exit_everything_is_unregistered_lent_or_not(how, tmp_path):
    """Nobody closes anything, one batch is still alive."""
    out = tmp_path / "log"
    result = run_script(EXIT, args=[os.path.dirname(__file__), str(out), how])
    assert (result.returncode, result.stderr) == (3 if how == "exception" else 0, "")
    words = [line.split()[0] for line in out.read_text().splitlines()]
    assert words.count("register") == words.count("unregister") == 2


def test_the_recorder_would_notice():
    """Registering pages that are not there, unregistering pages that went, calls from a child."""
    recorder = Recorder()
    segment = Segment.create(4 * PAGE)
    segment.commit(0, 4 * PAGE)
    with pytest.raises(AssertionError, match="before the pages"):
        recorder.register(segment.address, PAGE)
    segment.populate(0, PAGE)
    recorder.register(segment.address, PAGE)
    with pytest.raises(AssertionError, match="twice"):
        recorder.register(segment.address, 2 * PAGE)
    segment.decommit(0, PAGE)
    with pytest.raises(AssertionError, match="the pages went"):
        recorder.unregister(segment.address)
    pid = os.fork()
    if pid == 0:
        recorder.current_stream()
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 77
    assert np.all(segment.memory[PAGE:] == 0)
    segment.close()
