"""How large packs get, and how little memory packing takes."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from shmloader.packfile import PackedDataset, PackReport, PackWriter, pack, verify
from support import run_script


@pytest.mark.parametrize("nbytes", [100, 2040, 4080, 4096, 8192, 100_000, 1 << 20])
@pytest.mark.parametrize("kind", ["fixed", "ragged"])
def test_files_are_compact(tmp_path: Path, nbytes: int, kind: str) -> None:
    """D4: length and blocks within 5 % of the payload, whatever the size of a value; the report says so."""
    rng = np.random.default_rng(0)
    count = max(4, (3 << 20) // nbytes)
    rows = [rng.bytes(nbytes - (kind == "ragged" and i % 2)) for i in range(count)]
    report = pack(rows if kind == "ragged" else [np.frombuffer(row, np.uint8) for row in rows], tmp_path / "p.lmdb")
    status = os.stat(report.path)
    assert report.payload_bytes == sum(map(len, rows))
    assert report.file_bytes == status.st_size
    assert report.ratio == status.st_size / report.payload_bytes
    limit = 1.05 + (4 / nbytes if kind == "ragged" else 0)  # each row of its own length costs an offset
    assert report.ratio <= limit
    assert status.st_blocks * 512 <= (limit + 0.01) * report.payload_bytes
    assert report.advice is None


def test_labels_beside_large_values_are_joined(tmp_path: Path) -> None:
    """Small fields of a large pack lie together, so that a column of labels is one read; the file stays compact."""
    images = np.random.default_rng(0).integers(0, 255, (300, 100_000), np.uint8)
    with PackWriter(tmp_path / "p.lmdb", chunk_bytes=1 << 20) as writer:
        writer.add_columns((images, np.arange(300)))
    packed = PackedDataset(tmp_path / "p.lmdb")
    assert [len(located.table) for located in packed._pack.fields] == [38, 1]
    np.testing.assert_array_equal(packed.column("1"), np.arange(300))
    assert all(packed[i][1] == i and packed[i][0][7] == images[i, 7] for i in range(300))
    assert verify(tmp_path / "p.lmdb") == []
    assert writer.seal().ratio <= 1.05


def test_a_million_tiny_samples(tmp_path: Path) -> None:
    """C5, C7: packed in bulk, compact, pickled small, and nothing kept per sample when open."""
    with PackWriter(tmp_path / "p.lmdb") as writer:
        writer.add_columns((np.zeros((1_000_000, 4), np.float32), np.arange(1_000_000)))
    report = writer.seal()
    assert report.ratio <= 1.10
    packed = PackedDataset(report.path)
    assert len(packed) == 1_000_000
    assert packed[-1][1] == 999_999
    assert len(pickle.dumps(packed)) < 1000


def test_advice_is_given_where_a_file_is_large() -> None:
    """The report knows what to say above 1.3 times the payload."""
    assert PackReport("p", 1, 10 << 20, 14 << 20, 1.0, ()).advice is not None
    assert PackReport("p", 1, 10 << 20, 11 << 20, 1.0, ()).advice is None


@pytest.mark.parametrize("size", ["many", "giant"])
def test_no_size_is_stated_beforehand(tmp_path: Path, size: str) -> None:
    """D3: no map size is given; many small samples or one of 30 MiB: count and checksums are right."""
    rng = np.random.default_rng(0)
    rows = [rng.bytes(1000 + i % 100) for i in range(20_000)] if size == "many" else [b"a", rng.bytes(30 << 20), b"b"]
    with PackWriter(tmp_path / "p.lmdb", chunk_bytes=1 << 20) as writer:
        for row in rows:
            writer.add(row)
    packed = PackedDataset(tmp_path / "p.lmdb")
    assert len(packed) == len(rows)
    assert all(packed[i] == rows[i] for i in range(0, len(rows), 101 if size == "many" else 1))
    assert verify(tmp_path / "p.lmdb") == []


@pytest.mark.slow
def test_packing_takes_no_memory_with_the_data(tmp_path: Path) -> None:
    """D5: 600 MB of ragged bytes are packed with less than 150 MB more than before."""
    script = """
        import os, resource, sys
        from shmloader.packfile import pack
        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        block = os.urandom(1 << 20)
        def samples():
            for i in range(600):
                yield {"x": block[i:], "n": i}
        pack([{"x": b"a", "n": 1}], sys.argv[1] + "/warm.lmdb")
        before = peak()
        pack(samples(), sys.argv[1] + "/p.lmdb")
        print(peak() - before)
    """
    done = run_script(script, args=[str(tmp_path)], timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 150_000_000
