"""What the host has left is asked before memory is committed, and shared by the ranks of a job (A3, G1)."""

import json

import pytest

from shmloader.arenas import share_of
from shmloader.cap import Cap
from shmloader.errors import SharedMemoryFull
from shmloader.host_room import HostRoom, kept_back
from shmloader.limits import UNLIMITED, Limit, Ranks, find_ranks, shared_memory_limit
from shmloader.pieces import Pieces
from shmloader.segment import PAGE, Segment
from support import MIB, run_script

GIB = 1 << 30


def test_a_look_is_made_only_when_the_credit_is_spent():
    """Small commits live on the last look; what they took is counted off; a large one makes a new look."""
    host = HostRoom()
    first = host.room(PAGE)
    assert 0 < first < shared_memory_limit(None).nbytes_total
    host.add(MIB)
    assert host.room(PAGE) == first - MIB
    host.add(-MIB)
    assert host.room(PAGE) == first
    assert host.room(first) != 0  # more than the credit: looked again, whatever others took meanwhile
    assert "(" in host.where  # name and source


def test_something_is_left_to_everything_else():
    """64 MiB, or a sixteenth of a small limit; where there is no limit there is nothing to share."""
    assert kept_back(Limit("x", GIB, 16 * GIB, "f")) == 64 * MIB
    assert kept_back(Limit("x", GIB, 400 * MIB, "f")) == 25 * MIB
    assert kept_back(Limit("x", UNLIMITED, UNLIMITED, "f")) == 0


def test_what_the_host_has_not_is_refused_before_a_page_is_touched():
    """More than control groups and memory leave: SharedMemoryFull names the limit, and nothing was committed."""
    segment = Segment.create(1 << 45, "memfd")
    pieces = Pieces(segment, Cap(None))
    with pytest.raises(SharedMemoryFull) as caught:
        pieces.take(1 << 44)
    assert caught.value.wanted == 1 << 44
    assert 0 < caught.value.free < 1 << 44
    assert "(" in caught.value.where
    assert segment.committed == 0
    assert pieces.take(PAGE) == 0
    segment.close()


def test_ranks_share_a_limit_and_the_message_says_so():
    """Each of four ranks has a quarter; one rank has all; no limit stays none."""
    limit = Limit("shared-memory mount", GIB, 2 * GIB, "/dev/shm")
    quarter = share_of(limit, Ranks(4, "LOCAL_WORLD_SIZE"))
    assert (quarter.nbytes_free, quarter.nbytes_total) == (GIB // 4, GIB // 2)
    assert "4 local ranks" in quarter.where
    assert "LOCAL_WORLD_SIZE" in quarter.where
    assert share_of(limit, Ranks(1, "default")) is limit
    free = Limit("x", UNLIMITED, UNLIMITED, "f")
    assert share_of(free, Ranks(8, "argument")) is free


def test_the_launcher_tells_the_ranks():
    """The first variable that holds a number counts; an explicit number wins; senseless ones are refused."""
    assert find_ranks(environ={"LOCAL_WORLD_SIZE": "4", "MPI_LOCALNRANKS": "2"}) == Ranks(4, "LOCAL_WORLD_SIZE")
    assert find_ranks(environ={"LOCAL_WORLD_SIZE": "x"}).count == 1
    assert find_ranks(3, environ={"LOCAL_WORLD_SIZE": "4"}) == Ranks(3, "argument")
    with pytest.raises(ValueError, match="at least 1"):
        find_ranks(0)


LIMIT_OF_A_LOADER = """
import json, torch
from torch.utils.data import TensorDataset
from shmloader import DataLoader
from shmloader.limits import shared_memory_limit
with DataLoader(TensorDataset(torch.zeros(8)), 2) as loader:
    next(iter(loader))
    print(json.dumps([loader.stats().arena.limit, shared_memory_limit().nbytes_free]))
"""


@pytest.mark.parametrize("ranks", [1, 8])
def test_the_default_cap_is_divided_by_the_local_ranks(ranks):
    """Without arena_bytes a rank of eight takes at most an eighth of half of what is free."""
    env = {"LOCAL_WORLD_SIZE": str(ranks)}
    limit, free = json.loads(run_script(LIMIT_OF_A_LOADER, env=env).silent().stdout)
    assert limit == pytest.approx(free / 2 / ranks, rel=0.2)  # others on this machine move what is free
