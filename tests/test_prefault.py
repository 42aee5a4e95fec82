"""Pages are mapped before they are used, in this process, by several threads, without touching a byte (A, B9)."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from shmloader import DataLoader
from shmloader.prefault import MOST_THREADS, PIECE, populate, prefault, threads_for
from shmloader.segment import PAGE, Segment
from support import MIB, small_tmpfs


def mapped_bytes(address: int) -> int:
    """Bytes of the mapping at ``address`` that this process has mapped (Rss of smaps)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split("-", 1)[0]
        if len(line.split()) >= 5 and "-" in line.split()[0]:
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            inside = begin <= address < end
        elif inside and first.startswith("Rss:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no such mapping")


@pytest.fixture
def segment():
    made = Segment.create(64 * MIB, "memfd")
    made.commit(0, 32 * MIB)
    yield made
    made.close()


@pytest.mark.parametrize("threads", [None, 1, 2, 5])
def test_all_pages_of_a_range_are_mapped_and_no_other(segment, threads):
    """Committing maps nothing; ``prefault`` maps what it is given, in whole pages, and changes no byte."""
    segment.memory[7 * MIB] = 9
    before = mapped_bytes(segment.address)
    assert before <= 64 << 10  # a fault maps some neighbours
    prefault(segment.view(8 * MIB + 5, 16 * MIB), threads)
    assert 16 * MIB <= mapped_bytes(segment.address) - before <= 16 * MIB + 2 * PAGE
    assert segment.memory[7 * MIB] == 9
    assert not segment.memory[8 * MIB : 24 * MIB].any()


def test_a_byte_that_is_written_meanwhile_stays_written(segment):
    """Mapping runs beside writers: what they write is there afterwards."""
    memory = segment.view(0, 32 * MIB)
    writer = threading.Thread(target=lambda: memory.fill(3))
    writer.start()
    prefault(memory, 4)
    writer.join()
    assert (memory == 3).all()


def test_nothing_is_mapped_for_nothing(segment):
    """An empty array is no error."""
    prefault(segment.view(0, 0))


def test_memory_that_is_not_there_is_told_and_raises_no_signal(tmp_path):
    """On a full mount ``populate`` says False, where a plain write would be SIGBUS (A1)."""
    with small_tmpfs(tmp_path / "shm", "2m") as mount:
        made = Segment.create(64 * MIB, str(mount))
        assert not populate(made.view(0, 8 * MIB), 2)
        made.close()


def test_threads_grow_with_the_work_and_stop_at_the_cpus():
    """Small ranges are not worth a thread; large ones get no more than this process has CPUs."""
    assert threads_for(1) == threads_for(PIECE) == 1
    assert 1 <= threads_for(1000 * PIECE) <= MOST_THREADS


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_tells_what_it_has_mapped_ahead(num_workers):
    """Each slot is mapped when its first batch is lent, once, and given back it no longer counts."""
    data = torch.from_numpy(np.arange(64 * 4096, dtype=np.int64).reshape(64, 4096))
    with DataLoader(TensorDataset(data), 4, num_workers=num_workers) as loader:
        for _ in range(2):
            for (batch,) in loader:
                assert batch.shape == (4, 4096)
        arena = loader.stats().arena
        assert arena.slot_bytes <= arena.prefaulted <= arena.nbytes
        assert arena.prefaulted % PAGE == 0
    assert loader.stats().arena is None or loader.stats().arena.nbytes == 0
