"""Batches delivered on a device, against a recorder whose copies are late (issue: device=)."""

import dataclasses
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils.data import Dataset

from recorder import Recorded, Recorder
from shmloader import IteratorClosed
from shmloader.device import Feed, Mover
from shmloader.pinning import Copying
from shmloader.slot import Slot
from support import MIB


class Numbered(Dataset):
    """Samples whose bytes all tell their index; those of ``bad`` cannot be read."""

    def __init__(self, length=64, bad=()):
        self.length, self.bad = length, bad

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index in self.bad:
            raise KeyError(f"sample {index} is gone")
        return torch.full((4096,), index % 90, dtype=torch.uint8), index


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    name: str
    unset: int = dataclasses.field(init=False)


class Tagged(dict):
    """A mapping with an attribute."""

    tag = "?"


class Movable:
    """A batch type that moves itself, as trainers expect it."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        return Movable(self.x.to(device))


def rows_of(number):
    return torch.arange(4 * number, 4 * number + 4)[:, None] % 90


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("pace", [None, 1, 0])
def test_device_batches_are_right_however_slow_the_device(num_workers, pace):
    """The host goes through the whole epoch even if the device does nothing meanwhile; then all copies are right."""
    recorder = Recorder(pace=pace)
    loader = Recorded(
        Numbered(400), 4, num_workers=num_workers, recorder=recorder, on_device=True, arena_bytes=MIB, drain=False
    )
    with pytest.warns(UserWarning, match="copies") if pace == 0 else nullcontext():
        batches = list(loader)
    recorder.run()
    for number, (rows, labels) in enumerate(batches):
        assert (rows == rows_of(number)).all(), number
        assert labels.tolist() == list(range(4 * number, 4 * number + 4))
    assert loader.stats().arena.draining == 0
    loader.close()
    assert not recorder.registered


def test_each_batch_is_copied_on_the_side_waited_for_by_the_consumer_and_kept_for_it():
    """In this order; the arena is page-locked without pin_memory; the side stream is one for all epochs."""
    recorder = Recorder()
    loader = Recorded(Numbered(8), 4, num_workers=1, recorder=recorder, on_device=True, device_prefetch=0)
    for _ in range(2):
        for _ in loader:
            pass
    words = [entry for entry in recorder.log if entry[0] not in ("register", "unregister")]
    one = [("copy", "side")] * 2 + [("event", "side"), ("wait", "default", "side")] + [("keep_for", "default")] * 2
    assert words == one * 4
    assert len(recorder.streams) == 2
    assert loader.stats().arena.pinned
    loader.close()


def test_a_slot_comes_back_when_its_copies_are_done_whatever_else_the_device_does():
    """The event is the side stream's; the consumer's long queue is not waited for."""
    recorder = Recorder(pace=0)
    loader = Recorded(Numbered(), 4, recorder=recorder, on_device=True)
    source = iter(loader)
    batch = next(source)
    recorder.default.work += [lambda: None] * 100
    assert loader.stats().arena.draining == 1
    recorder.streams[1].run()
    assert loader.stats().arena.draining == 0
    assert loader.stats().arena.free == loader.stats().arena.slots
    del batch
    loader.close()


def arrays(samples):
    """A collate_fn with a NumPy array beside the tensor."""
    return torch.stack([row for row, _ in samples]), np.array([label for _, label in samples])


def test_what_stays_on_the_host_keeps_its_slot():
    """A NumPy array is a view as before; when it dies too, the slot waits for the consumer's stream as well."""
    recorder = Recorder(pace=0)
    loader = Recorded(
        Numbered(), 4, num_workers=1, recorder=recorder, on_device=True, collate_fn=arrays, device_prefetch=0
    )
    source = iter(loader)
    rows, labels = next(source)
    assert isinstance(labels, np.ndarray)
    assert loader.stats().arena.lent == 1
    recorder.default.work.append(lambda: None)
    recorder.streams[1].run()
    del labels
    assert loader.stats().arena.draining == 1
    recorder.run()
    assert loader.stats().arena.draining == 0
    assert (rows == rows_of(0)).all()
    loader.close()


class Script:
    """Host batches that are ready when the script says so."""

    def __init__(self, ready):
        self.ready_after = list(ready)
        self.pulled = 0

    def pull(self):
        if self.pulled == 6:
            raise StopIteration
        self.pulled += 1
        return torch.full((3,), self.pulled), None

    def ready(self):
        return self.ready_after.pop(0) if self.ready_after else False


@pytest.mark.parametrize(
    ("ahead", "ready", "pulled"), [(0, [True] * 9, 1), (2, [True] * 9, 3), (2, [], 1), (4, [True], 2)]
)
def test_copies_run_ahead_by_the_stated_depth_as_far_as_batches_are_ready(ahead, ready, pulled):
    """And never a pull that would wait for a batch that is not needed now."""
    recorder, script = Recorder(), Script(ready)
    feed = Feed(Copying(recorder, to_device=True), ahead)
    feed.next(script.pull, script.ready)
    assert script.pulled == pulled
    rest = [int(feed.next(script.pull, script.ready)[0]) for _ in range(5)]
    assert rest == [2, 3, 4, 5, 6]
    with pytest.raises(StopIteration):
        feed.next(script.pull, script.ready)


def test_an_error_ahead_is_raised_in_its_turn():
    """The batches before it come first, those after it too."""
    recorder = Recorder()
    loader = Recorded(Numbered(40, bad={13}), 4, num_workers=2, recorder=recorder, on_device=True)
    source, found = iter(loader), []
    while True:
        try:
            found.append(next(source)[1].tolist()[0])
        except KeyError:
            found.append("error")
        except StopIteration:
            break
    recorder.run()
    assert len(found) == 10
    assert found[3] == "error"
    loader.close()


def test_close_drops_what_is_ahead():
    """The next batch is not one of those that were copied already."""
    loader = Recorded(Numbered(), 4, num_workers=1, recorder=Recorder(), on_device=True)
    source = iter(loader)
    next(source)
    next(source)
    loader.close()
    with pytest.raises(IteratorClosed):
        next(source)


def test_a_persistent_epoch_begins_with_its_own_first_batch():
    """An epoch that is left early leaves nothing of its look-ahead to the next one."""
    recorder = Recorder()
    loader = Recorded(Numbered(), 4, num_workers=1, persistent_workers=True, recorder=recorder, on_device=True)
    for _ in range(2):
        for number, (_, labels) in enumerate(loader):
            recorder.run()
            assert labels[0] == 4 * number
            if number == 5:
                break
    loader.close()


def moved(value):
    mover = Mover(recorder := Recorder())
    result = mover.move(value)
    recorder.run()
    return result, mover


PACKED = pack_padded_sequence(torch.ones(2, 3), torch.tensor([3, 2]), batch_first=True)
X = torch.arange(6).view(2, 3)


@pytest.mark.parametrize(
    ("value", "exact"),
    [
        (X, True),
        (X.t(), True),
        ([X, "a", None, 1.5], True),
        ((X, (X, [])), True),
        ({"a": X, "b": {"c": X}}, True),
        (Point(X, "y"), True),
        (Tagged(a=X), True),
        (Record(X, "n"), True),
        (PACKED, False),
        (Movable(X), False),
        (np.ones(3), False),
        ({1, 2}, False),
        (torch.empty(0), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_structures_keep_their_types(value, exact):
    """B7: and it is known whether something in them may still look at the host's memory."""
    result, mover = moved(value)
    assert type(result) is type(value)
    assert mover.exact == exact
    flat, expected = leaves(result), leaves(value)
    assert len(flat) == len(expected)
    for one, other in zip(flat, expected, strict=True):
        if isinstance(other, torch.Tensor):
            assert torch.equal(one, other)
        elif isinstance(other, np.ndarray | set):
            assert one is other
        else:
            assert one == other


def leaves(value):
    if isinstance(value, PackedSequence):
        return [value.data, value.batch_sizes]
    if isinstance(value, Movable):
        return [value.x]
    if isinstance(value, Record):
        return [value.x, value.name]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def test_attributes_of_containers_and_shared_tensors_survive():
    """A dict subclass keeps its attributes; one tensor in two places is one tensor; the host's batch is not changed."""
    tagged = Tagged(a=X, b=X)
    tagged.tag = "set"
    result, mover = moved(tagged)
    assert result.tag == "set"
    assert result["a"] is result["b"]
    assert len(mover.moved) == 1
    assert tagged["a"] is X


def test_tensors_that_require_gradients_are_leaves_on_the_device():
    """As they are on the host."""
    result, _ = moved(torch.ones(3, requires_grad=True))
    assert result.requires_grad
    assert result.is_leaf


def test_a_copy_that_fails_leaves_the_slot_to_the_usual_events():
    """Half of a batch may be on its way: nothing says that the slot's copies are known."""

    class Full(Recorder):
        def copy(self, tensor):
            if len(tensor) == 4:
                raise RuntimeError("CUDA out of memory")
            return super().copy(tensor)

    recorder = Full(pace=0)
    copying = Copying(recorder, to_device=True)
    feed = Feed(copying, 0)
    slot = Slot(0, 0, 4096, lambda slot: None)
    with pytest.raises(RuntimeError, match="out of memory"):
        feed.next(lambda: ([torch.ones(3), torch.ones(4)], slot), lambda: False)
    assert slot.fence is None
    assert copying.streams == [copying.side_stream], "and the side stream is among those that are waited for"
