"""Damage under a reader: an exception with file, place and cure, in every process; never a signal, never wrong data."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from shmloader import BadSampleWarning, DataLoader, ListCollate, PackDamaged, PackedDataset, pack
from support import no_leaks, run_file, write_script

COUNT = 400


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of numbers, rows, ragged rows and strings, in many chunks; sample i is told from i."""
    samples = [(np.full(500, i % 250, np.uint8), np.arange(i % 9), f"s{i}", i) for i in range(COUNT)]
    target = tmp_path_factory.mktemp("whole") / "p.lmdb"
    return Path(pack(samples, target, chunk_bytes=16384, field_names=("x", "r", "s", "n")).path)


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copy(whole, tmp_path / "copy.lmdb"))


def place_of(dataset: PackedDataset, field: int, index: int) -> int:
    """Where the stored value of a sample begins in the file, for a field of fixed rows."""
    located = dataset._pack.fields[field]
    chunk = int(np.flatnonzero(located.table[:, 1] <= index)[-1])
    _, first, rows, nbytes, *_ = located.table[chunk].tolist()
    return int(located.parts["v"][chunk]) + (index - first) * (nbytes // rows)


def flip(path: Path, place: int) -> None:
    """Change one bit in the file."""
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 8]))


def test_open_finds_a_flipped_bit_before_anything_is_read(copy: Path) -> None:
    """The message has the file, the field, the samples, the place and the cure."""
    flip(copy, place_of(PackedDataset(copy), 0, 333))
    PackedDataset(copy)  # "off" is the default
    PackedDataset(copy, fields=("r", "s", "n"), verify="open")  # what is not selected is not read
    with pytest.raises(PackDamaged) as caught:
        PackedDataset(copy, verify="open")
    text = str(caught.value)
    assert str(copy) in text
    assert "field 'x': the values of chunk" in text
    assert "pack it again" in text


def test_first_touch_finds_it_when_its_chunk_is_read_and_not_before(copy: Path) -> None:
    """One by one, in bulk, as a column, gathered; other chunks can be read, and the damage is told again and again."""
    flip(copy, place_of(PackedDataset(copy), 0, 333))
    dataset = PackedDataset(copy, verify="first-touch")
    assert dataset[5][3] == 5
    assert [sample[3] for sample in dataset.__getitems__([1, 2, 3, 4, 5])] == [1, 2, 3, 4, 5]
    for _ in range(2):
        for read in (
            lambda: dataset[333],
            lambda: dataset.__getitems__([1, 2, 3, 333]),
            lambda: dataset.column("x"),
            lambda: dataset.before(np.array([7, 333])),
        ):
            with pytest.raises(PackDamaged, match="field 'x'"):
                read()
    assert len(dataset.column("n")) == COUNT
    assert [dataset[i][3] for i in range(20)] == list(range(20))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("fields", [("x", "n"), ("x", "s")])
def test_damage_reaches_the_user_of_a_loader(copy: Path, num_workers: int, fields: tuple[str, ...]) -> None:
    """Gathered or built one by one: the batches before come, then PackDamaged; as bad samples it can be left out."""
    flip(copy, place_of(PackedDataset(copy), 0, 333))
    dataset = PackedDataset(copy, fields=fields, verify="first-touch")
    loader = DataLoader(dataset, 50, num_workers=num_workers)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    with pytest.raises(PackDamaged, match="field 'x'"):
        list(iterator)
    loader.close()
    loader = DataLoader(dataset, 50, num_workers=num_workers, on_bad_sample="skip")
    with pytest.warns(BadSampleWarning, match="PackDamaged"):
        count = sum(len(x) for x, _ in loader)
    bad = loader.stats().bad_count
    assert count + bad == COUNT
    assert 0 < bad <= 40  # one chunk of 32 samples
    loader.close()


def test_ragged_offsets_are_compared_before_they_are_believed(copy: Path) -> None:
    """A wrong offset would give wrong lengths, so wrong data: found at the first batch."""
    dataset = PackedDataset(copy, fields=("r", "n"))
    flip(copy, int(dataset._pack.fields[1].parts["o"][0]) + 8)
    loader = DataLoader(PackedDataset(copy, fields=("r", "n"), verify="first-touch"), 8, collate_fn=ListCollate(0))
    with pytest.raises(PackDamaged, match="the offsets of chunk 0"):
        next(iter(loader))
    loader.close()


@pytest.mark.parametrize("verify", ["open", "first-touch"])
def test_a_change_under_a_running_reader_is_found(copy: Path, verify: str) -> None:
    """What was compared counts no more once the file was written to; touching it alone harms nothing."""
    dataset = PackedDataset(copy, verify=verify)
    assert dataset[333][3] == 333
    os.utime(copy)
    assert dataset[333][3] == 333
    flip(copy, place_of(dataset, 0, 333))
    os.utime(copy)  # a clock that ticks in milliseconds may not have moved meanwhile
    with pytest.raises(PackDamaged, match="field 'x'"):
        dataset[333]


@pytest.mark.parametrize("verify", ["open", "first-touch"])
def test_a_changed_head_under_a_running_reader_is_found(copy: Path, verify: str) -> None:
    """The manifest is looked at again when the file has changed."""
    dataset = PackedDataset(copy, verify=verify)
    dataset[0]
    flip(copy, bytes(dataset._pack.bytes).index(b'"format"') + 3)
    os.utime(copy)
    with pytest.raises(PackDamaged, match="was changed while it was being read"):
        dataset[0]


@pytest.mark.parametrize("verify", ["open", "first-touch", "off"])
@pytest.mark.parametrize("kept", [0, 5000, 0.5, -4096])
def test_a_file_cut_under_a_running_reader_is_an_exception(copy: Path, verify: str, kept: float) -> None:
    """Reading what is not there any more would be a SIGBUS: refused, with the lengths and the cure."""
    dataset = PackedDataset(copy, verify=verify)
    dataset[0]
    size = copy.stat().st_size
    os.truncate(copy, int(size * kept) if 0 < kept < 1 else int(kept) % size)
    for read in (
        lambda: dataset[0],
        lambda: dataset.__getitems__([1, 2, 3, 4]),
        lambda: dataset.column("n"),
        lambda: dataset.before(np.arange(3)),
    ):
        with pytest.raises(PackDamaged, match=r"cut while it was being read.*renaming"):
            read()


CUT = """
    import os, sys, time, torch
    from shmloader import DataLoader, PackDamaged, PackedDataset

    if __name__ == "__main__":
        path, method = sys.argv[1:]
        dataset = PackedDataset(path, fields=("x", "n"))
        loader = DataLoader(dataset, 8, num_workers=2, prefetch_factor=1, multiprocessing_context=method)
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
        deadline = time.monotonic() + 60
        while not all(iterator._replies.ready([worker]) for worker in (0, 1)):  # each has made the one it may
            assert time.monotonic() < deadline
            os.sched_yield()
        os.truncate(path, 8192)
        told = 0
        while True:
            try:
                x, n = next(iterator)
                assert (x == (n % 250)[:, None]).all()
            except PackDamaged as error:
                assert path in str(error)
                told += 1
            except StopIteration:
                break
        print("told", told > 40)
"""


@pytest.mark.parametrize(
    "start_method", ["fork", *(pytest.param(method, marks=pytest.mark.slow) for method in ("forkserver", "spawn"))]
)
def test_a_file_cut_under_a_running_loader_is_an_exception_in_every_worker(
    copy: Path, tmp_path: Path, start_method: str
) -> None:
    """Cut between two batches: no worker dies, no batch is wrong, each batch that cannot be read says why.

    Cut while a worker copies out of it, the file takes that worker along: SIGBUS, which is told (see checks.py).
    """
    result = run_file(write_script(tmp_path, CUT), args=[str(copy), start_method])
    assert result.silent().stdout == "told True\n"


def test_forked_processes_share_what_was_compared(whole: Path) -> None:
    """One of all workers compares a chunk: what a child has read first is known to be whole in its parent."""
    dataset = PackedDataset(whole, fields="x", verify="first-touch")
    marks = dataset._pack.watch.marks[0]
    assert not marks.any()
    loader = DataLoader(dataset, 50, num_workers=2)
    assert sum(len(batch) for batch in loader) == COUNT
    loader.close()
    assert (marks == whole.stat().st_mtime_ns).all()


def test_what_open_has_found_whole_is_not_compared_again_by_who_unpickles_it(whole: Path, copy: Path) -> None:
    """Unless the file has changed meanwhile: then it is, at first touch."""
    blob = pickle.dumps(PackedDataset(copy, verify="open"))
    other = pickle.loads(blob)
    assert other.verify == "open"
    assert other[333][3] == 333
    flip(copy, place_of(other, 0, 333))
    os.utime(copy)
    del other
    late = pickle.loads(blob)
    assert late[0][3] == 0
    with pytest.raises(PackDamaged):
        late[333]


def test_a_pack_leaves_nothing_open(whole: Path) -> None:
    """One descriptor a pack and process, gone with the last dataset."""

    def use() -> None:
        dataset = PackedDataset(whole, verify="first-touch")
        torch.utils.data.default_collate([dataset[0], dataset[0]])
        for verify in ("open", "off"):
            PackedDataset(whole, verify=verify)

    with no_leaks():
        use()


def test_unknown_words_are_refused(whole: Path) -> None:
    """A misspelt choice is not "off"."""
    with pytest.raises(ValueError, match="verify='always' must be 'open', 'first-touch', 'off'"):
        PackedDataset(whole, verify="always")
