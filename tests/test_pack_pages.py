"""The LMDB file that is written without LMDB: LMDB itself reads it, walks it and changes it."""

from __future__ import annotations

import random
from pathlib import Path

import lmdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmloader.packfile import pack, verify
from shmloader.packfile.environment import Item, WriteEnvironment
from shmloader.packfile.mapping import open_pack
from shmloader.packfile.pagecheck import page_problems
from shmloader.packfile.pages import LONGEST_KEY


def written(path: Path, values: dict[bytes, bytes]) -> Path:
    env = WriteEnvironment(str(path), overwrite=True)
    for key, value in values.items():
        env.put(Item.of(key, value))
    env.settle()
    env.publish()
    return path


def read_by_lmdb(path: Path) -> tuple[dict[bytes, bytes], dict[str, int]]:
    with lmdb.open(str(path), subdir=False, readonly=True, lock=False) as env, env.begin() as txn:
        return {bytes(key): bytes(value) for key, value in txn.cursor()}, env.stat()


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.binary(min_size=1, max_size=LONGEST_KEY), st.integers(0, 20_000).map(bytes), max_size=60))
def test_lmdb_reads_whatever_is_written(tmp_path_factory: pytest.TempPathFactory, values: dict[bytes, bytes]) -> None:
    """Any keys up to LMDB's limit, values of any size, none at all: LMDB finds all of them, in order."""
    path = written(tmp_path_factory.getbasetemp() / "any.lmdb", values)
    found, stat = read_by_lmdb(path)
    assert found == values
    assert list(found) == sorted(values)
    assert stat["entries"] == len(values)


@pytest.mark.parametrize("count", [1, 2, 50, 120, 121, 122, 20_000])
def test_trees_of_every_depth_are_lmdbs(tmp_path: Path, count: int) -> None:
    """One leaf, two, three levels: each key is found by a search from the root, the numbers agree, LMDB can go on."""
    keys = [b"%05x/some-longer-key" % i for i in range(count)]
    mixed = keys.copy()
    random.Random(0).shuffle(mixed)
    path = written(tmp_path / "p.lmdb", {key: key[:5] for key in mixed})
    with lmdb.open(str(path), subdir=False, lock=False, map_size=1 << 28) as env:
        stat = env.stat()
        with env.begin() as txn:
            assert all(txn.get(key) == key[:5] for key in keys)
            assert txn.get(b"zzz") is None
            cursor = txn.cursor()
            assert sum(1 for _ in cursor.iterprev()) == count
        assert (stat["entries"], stat["overflow_pages"]) == (count, count)
        assert (stat["depth"] > 1) == (stat["branch_pages"] > 0) == (stat["leaf_pages"] > 1)
        with env.begin(write=True) as txn:
            for key in keys[::2]:
                assert txn.delete(key)
            txn.put(b"new", b"x" * 5000)
        with env.begin() as txn:
            left = [bytes(key) for key, _ in txn.cursor()]
        assert left == sorted([*keys[1::2], b"new"])


def test_lmdb_copies_a_pack(tmp_path: Path) -> None:
    """LMDB's compacting copy, which walks every page and counts the free ones, gives a file with the same values."""
    rng = np.random.default_rng(0)
    samples = [{"x": rng.random((20, 3000)), "s": "a" * (i % 7), "label": i} for i in range(200)]
    pack(samples, tmp_path / "p.lmdb", chunk_bytes=1 << 20)  # labels are joined: their first chunks are given up
    with lmdb.open(str(tmp_path / "p.lmdb"), subdir=False, readonly=True, lock=False) as env:
        env.copy(str(tmp_path / "copy.lmdb"), compact=True)
    assert read_by_lmdb(tmp_path / "p.lmdb")[0] == read_by_lmdb(tmp_path / "copy.lmdb")[0]
    assert (tmp_path / "copy.lmdb").stat().st_size < (tmp_path / "p.lmdb").stat().st_size


def test_every_page_is_accounted_for(tmp_path: Path) -> None:
    """Packs of every kind have no page without a use; so has one that LMDB itself has changed afterwards."""
    samples = [{"x": np.zeros((40, 3000)), "s": "a" * (i % 7), "label": i} for i in range(60)]
    for name, data, chunk in (("few", samples, 1 << 20), ("none", [], 4096), ("one", [5], 4096)):
        pack(data, tmp_path / name, chunk_bytes=chunk)
        assert page_problems(open_pack(tmp_path / name)) == []
    with lmdb.open(str(tmp_path / "few"), subdir=False, lock=False, map_size=1 << 28) as env:
        for i in range(5):
            with env.begin(write=True) as txn:
                txn.put(b"%d" % i, bytes(9000))
                txn.delete(b"%d" % (i - 2))
    assert page_problems(open_pack(tmp_path / "few")) == []


@pytest.mark.parametrize("seed", range(8))
def test_changed_page_heads_are_found(tmp_path: Path, seed: int) -> None:
    """A byte changed in the head of a value, which no checksum covers, is a damage that verify tells."""
    pack([np.zeros(5000, np.uint8)] * 50, tmp_path / "p.lmdb", chunk_bytes=1 << 16)
    data = bytearray((tmp_path / "p.lmdb").read_bytes())
    places = open_pack(tmp_path / "p.lmdb").fields[0].parts["v"].tolist()
    rng = random.Random(seed)
    data[rng.choice(places) - 16 + rng.choice([0, 1, 10, 12])] ^= 1 << rng.randrange(8)
    (tmp_path / "q.lmdb").write_bytes(data)
    [problem] = verify(tmp_path / "q.lmdb")
    assert "the head of the value b'0000/v/" in problem
