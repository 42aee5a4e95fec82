"""Loaders whose accelerator is a recorder: pinned views, growth, forks, kept batches, a slow device (B1, B2, B4)."""

import gc
import os
import warnings

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from recorder import Recorded, Recorder
from shmloader import CopiedOutWarning, NotPinnedWarning
from support import MIB, no_leaks, run_file, write_script

ROW = 4096


class Numbered(Dataset):
    """Samples of 4 KiB whose bytes all tell their index."""

    def __init__(self, length=64, row=ROW):
        self.length, self.row = length, row

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.full((self.row,), index % 90, dtype=torch.uint8), index


class Custom:
    """A batch type with torch's protocol for pinning."""

    def __init__(self, samples):
        self.data = torch.stack([sample[0] for sample in samples])
        self.pins = 0

    def pin_memory(self):
        self.pins += 1
        return self


@pytest.fixture(autouse=True)
def copies_are_expected():
    """The warning about copies has its own tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CopiedOutWarning)
        yield


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_tensor_of_every_batch_lies_in_page_locked_memory(num_workers):
    """B4: after the first batches not one more registration; stats say pinned; close gives everything back."""
    recorder = Recorder()
    loader = Recorded(Numbered(), 4, num_workers=num_workers, pin_memory=True, recorder=recorder)
    for epoch in range(2):
        for number, (rows, labels) in enumerate(loader):
            assert recorder.is_pinned(rows)
            assert recorder.is_pinned(labels)
            assert labels.tolist() == list(range(4 * number, 4 * number + 4))
            if epoch == 0 and number == 10:
                registered = recorder.words().count("register")
    assert recorder.words().count("register") == registered
    assert loader.stats().arena.pinned
    del rows, labels
    loader.close()
    assert not recorder.registered


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dropped_batch_is_not_overwritten_while_a_slow_device_reads_it(num_workers):
    """B1: copies are issued and the batch is dropped at once; the device runs far behind; every copy is right."""
    recorder = Recorder(pace=0)
    loader = Recorded(Numbered(200), 4, num_workers=num_workers, pin_memory=True, recorder=recorder, arena_bytes=MIB)
    copies = []
    for number, (rows, _labels) in enumerate(loader):
        copies.append(recorder.copy(rows))
        if number % 7 == 6:
            recorder.default.run(3)
    del rows, _labels
    recorder.run()
    for number, rows in enumerate(copies):
        assert (rows == torch.arange(4 * number, 4 * number + 4)[:, None] % 90).all(), number
    loader.close()
    assert not recorder.registered


def test_the_opt_out_is_what_makes_that_go_wrong():
    """The test above can fail: with drain=False late copies read what was written later."""
    recorder = Recorder(pace=0)
    loader = Recorded(Numbered(200), 4, num_workers=1, pin_memory=True, recorder=recorder, drain=False)
    copies = [recorder.copy(rows) for rows, labels in loader]
    recorder.run()
    assert any((rows != torch.arange(4 * n, 4 * n + 4)[:, None] % 90).any() for n, rows in enumerate(copies)), (
        "nothing was overwritten"
    )
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_kept_batches_beside_a_device_that_never_comes_back(num_workers):
    """B2: all slots are kept or draining for ever: never wrong, never stuck, within the cap; the rest is copied out."""
    recorder = Recorder(pace=0)
    loader = Recorded(Numbered(400), 4, num_workers=num_workers, pin_memory=True, recorder=recorder, arena_bytes=MIB)
    kept, copies = [], []
    for number, (rows, _labels) in enumerate(loader):
        if number % 2:
            kept.append((number, rows))
        copies.append(recorder.copy(rows) if recorder.is_pinned(rows) else rows.clone())
        assert loader.stats().arena.nbytes <= MIB + 64 * 1024
    del rows, _labels
    stats = loader.stats()
    assert stats.batches == 100
    assert stats.copied_out > 0
    assert stats.arena.draining > 0
    recorder.run()
    for number, rows in [*kept, *enumerate(copies)]:
        assert (rows == torch.arange(4 * number, 4 * number + 4)[:, None] % 90).all(), number
    kept.clear()
    assert loader.stats().arena.draining == 0
    loader.close()


def test_the_warning_about_copies_names_the_device():
    """So that nobody looks for batches that he does not keep."""
    recorder = Recorder(pace=0)
    loader = Recorded(Numbered(400), 4, num_workers=1, pin_memory=True, recorder=recorder, arena_bytes=MIB // 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in loader:
            recorder.default.work.append(lambda: None)
    assert sum("by copies to a device" in str(warning.message) for warning in caught) == 1
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("failing", [1, 3])
def test_refused_page_locking_costs_one_warning_and_nothing_else(num_workers, failing):
    """Over two epochs and as many refusals as there are slots: right data, range, code, meaning and cure told."""
    recorder = Recorder(refuse=lambda number, nbytes: number >= failing)
    loader = Recorded(Numbered(), 4, num_workers=num_workers, pin_memory=True, recorder=recorder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kept = []
        for _ in range(2):
            labels = [
                label for _, batch in (kept.append(batch) or batch for batch in loader) for label in batch.tolist()
            ]
            assert labels == list(range(64))
    told = [str(warning.message) for warning in caught if warning.category is NotPinnedWarning]
    assert len(told) == 1
    for part in ("bytes) at [0x", "error 2", "OUT_OF_MEMORY", "lower it"):
        assert part in told[0]
    assert recorder.words().count("refuse") == 1
    assert not loader.stats().arena.pinned
    kept.clear()
    loader.stats()
    loader.close()
    assert not recorder.registered


def test_growth_is_page_locked():
    """Slots that are added while batches are kept, and a larger slot in the middle, are registered like the first."""
    recorder = Recorder()

    def uneven(samples):
        return torch.cat([sample[0] for sample in samples * (9 if samples[0][1] == 24 else 1)])

    loader = Recorded(Numbered(), 4, num_workers=1, pin_memory=True, recorder=recorder, collate_fn=uneven)
    kept = list(loader)
    assert all(recorder.is_pinned(batch) for batch in kept)
    assert loader.stats().arena.pinned
    kept.clear()
    loader.close()
    assert not recorder.registered


class Called(Recorded):
    """As on a machine with an accelerator: custom types are asked to pin themselves."""

    def _choose_copying(self):
        copying = super()._choose_copying()
        copying.call_types = True
        return copying


def test_pin_memory_of_custom_types_is_called_once_and_types_stay():
    """B7: as torch does; the tensors inside lie in page-locked memory already."""
    recorder = Recorder()
    loader = Called(Numbered(8), 4, num_workers=1, pin_memory=True, recorder=recorder, collate_fn=Custom)
    for batch in loader:
        assert type(batch) is Custom
        assert batch.pins == 1
        assert recorder.is_pinned(batch.data)
    del batch
    loader.close()


def test_a_loader_that_is_dropped_without_close_unregisters():
    """B10: a hundred loaders, every second one dropped; the addresses come again, no registration is left behind."""
    recorder = Recorder()
    data = TensorDataset(torch.arange(64))
    with no_leaks():
        for round_ in range(100):
            loader = Recorded(data, 8, pin_memory=True, recorder=recorder)
            for (batch,) in loader:
                assert recorder.is_pinned(batch)
            if round_ % 2:
                loader.close()
            del loader
            batch = None
            gc.collect()
            assert not recorder.registered


def test_streams_named_before_and_after_the_first_batch_are_waited_for():
    """Once each, however often they are named."""
    recorder = Recorder()
    early, late = recorder.open_stream("early"), recorder.open_stream("late")
    loader = Recorded(Numbered(), 4, pin_memory=True, recorder=recorder)
    loader.record_stream(early)
    loader.record_stream(early)
    source = iter(loader)
    next(source)
    loader.record_stream(late)
    mark = len(recorder.log)
    next(source)
    events = [what for what in recorder.log[mark:] if what[0] == "event"]  # the first, small slot is unlocked as well
    assert events == [("event", name) for name in ("default", "early", "late")]
    loader.close()


SCRIPT = """
import gc, os, sys
sys.path.insert(0, {tests!r})
from recorder import Recorded, Recorder
from test_pinning_loader import Numbered

def main():
    recorder = Recorder()
    loader = Recorded(Numbered(), 4, num_workers=2, pin_memory=True, recorder=recorder,
                      multiprocessing_context={start_method!r})
    source = iter(loader)
    batch = next(source)
    pid = os.fork()                      # a child of the user's, amid it all
    if pid == 0:
        del batch
        gc.collect()
        loader.close()
        sys.exit(5)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 5, code
    labels = [label for _, labels in [batch, *source] for label in labels.tolist()]
    assert labels == list(range(64)), labels
    loader.close()
    del batch, source
    gc.collect()
    assert not recorder.registered

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    "start_method", ["fork", *(pytest.param(name, marks=pytest.mark.slow) for name in ("forkserver", "spawn"))]
)
def test_workers_and_forked_children_never_reach_the_engine(start_method, tmp_path):
    """B13: a recorder that is called in another process ends that process; all batches come, in every start method."""
    source = SCRIPT.format(tests=os.path.dirname(__file__), start_method=start_method)
    run_file(write_script(tmp_path, source)).silent()


EXIT = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from recorder import Recorded, Recorder
from test_pinning_loader import Numbered
recorder = Recorder(out=Path({out!r}))
loader = Recorded(Numbered(), 4, num_workers=1, pin_memory=True, recorder=recorder)
source = iter(loader)
batch = next(source)
"""


def test_a_program_that_just_ends_unregisters(tmp_path):
    """Workers run, a batch is alive, nothing was closed: as many unregistered as registered, and silence."""
    out = tmp_path / "log"
    path = write_script(tmp_path, EXIT.format(tests=os.path.dirname(__file__), out=str(out)))
    run_file(path).silent()
    words = [line.split()[0] for line in out.read_text().splitlines()]
    assert words.count("register") == words.count("unregister") > 1
