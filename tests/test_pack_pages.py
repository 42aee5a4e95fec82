"""The LMDB file that is written without LMDB: LMDB itself reads it, walks it and changes it."""

from __future__ import annotations

import random
from pathlib import Path

import lmdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmloader.packfile import pack
from shmloader.packfile.environment import Item, WriteEnvironment
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
