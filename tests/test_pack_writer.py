"""Packing: what is refused and how it is said, what a killed or failing packer leaves, how large files get."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shmloader.errors import (
    MisuseError,
    NotAPack,
    PackError,
    PackExists,
    PackUnfinished,
    SampleMismatch,
    UnsupportedField,
)
from shmloader.packfile import PackedDataset, PackReport, PackWriter, pack, verify
from support import no_leaks, run_script, small_tmpfs

# --- samples that do not fit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("good", "odd", "field", "expected", "found"),
    [
        (np.zeros((3, 8, 8), np.uint8), np.zeros((8, 8), np.uint8), "x", "uint8 array of shape (3, 8, 8)", "(8, 8)"),
        (np.zeros(3, np.float32), np.zeros(3), "x", "float32 array", "float64 array of shape (3,)"),
        (torch.zeros(3), 1.0, "x", "float32 array", "a float"),
        (1, 1.5, "x", "an int", "a float"),
        (1, True, "x", "an int", "a bool"),
        ("a", b"a", "x", "a str", "a bytes"),
        (1, (1,), "x", "a single value", "a tuple of 1"),
        ((1, 2), (1, 2, 3), "x", "a tuple of 2", "a tuple of 3"),
        ((1, 2), [1, 2], "x", "a tuple of 2", "a list of 2"),
        ({"a": 1}, {"b": 1}, "x", "keys ['a']", "keys ['b']"),
        ({"a": (1, 2)}, {"a": (1, "s")}, "x.a.1", "an int", "a str"),
    ],
)
def test_a_sample_that_disagrees_is_named(
    tmp_path: Path, good: Any, odd: Any, field: str, expected: str, found: str
) -> None:
    """E1: index, field, and what both are; nothing is left behind; the error crosses processes."""
    samples = [{"y": i, "x": good} for i in range(99)]
    samples.insert(70, {"y": 0, "x": odd})
    with pytest.raises(SampleMismatch) as caught:
        pack(samples, tmp_path / "p.lmdb")
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.index, error.field) == (70, field)
    assert expected in error.expected
    assert found in error.found
    assert "sample 70" in str(error)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "cannot pack None"),
        ({1, 2}, "a value of type set"),
        (2**63, "does not fit into 64 bits"),
        (np.array(["a"]), "dtype <U1"),
        (np.array([object()]), "dtype object"),
        (np.datetime64("2020"), "datetime64"),
        (1j, "a value of type complex"),
        ({b"k": 1}, "a dict with the key b'k' of type bytes"),
        (torch.eye(2).to_sparse(), "sparse"),
    ],
)
def test_a_value_that_cannot_be_kept_is_named(tmp_path: Path, value: Any, said: str) -> None:
    """First or later, in any place: sample, field and kind."""
    for samples in ([(1, value)], [(1, 2), (1, value)]):
        with pytest.raises((UnsupportedField, SampleMismatch)) as caught:
            pack(samples, tmp_path / "p.lmdb", field_names=("a", "b"))
        if isinstance(caught.value, UnsupportedField):
            assert said in str(caught.value)
            assert f"sample {len(samples) - 1}" in str(caught.value)
            assert "'b'" in str(caught.value) or "'1'" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_refused_sample_adds_nothing(tmp_path: Path) -> None:
    """Whoever goes on after an error has a pack of the good samples only, all fields in step."""
    refused = 0
    with PackWriter(tmp_path / "p.lmdb", chunk_bytes=4096) as writer:
        for i in range(900):
            try:
                writer.add((i, np.full(5, i), "x") if i % 7 != 3 else (i, i, "x"))
            except SampleMismatch:
                refused += 1
    packed = PackedDataset(tmp_path / "p.lmdb")
    good = [i for i in range(900) if i % 7 != 3]
    assert (len(packed), refused) == (len(good), 900 - len(good))
    assert [packed[k][0] for k in range(len(good))] == good
    assert [int(packed[k][1][4]) for k in range(len(good))] == good


def test_what_encodings_and_names_say_must_fit(tmp_path: Path) -> None:
    """A misspelt field or encoding is found at once."""
    with pytest.raises(ValueError, match="encodings name the fields"):
        pack([(b"x", 1)], tmp_path / "p.lmdb", encodings={"image": "encoded-image"})
    with pytest.raises(ValueError, match="is none of encoded-image"):
        pack([b"x"], tmp_path / "p.lmdb", encodings={"0": "jpeg"})
    with pytest.raises(SampleMismatch, match="bytes, to be kept as encoded-image"):
        pack([1], tmp_path / "p.lmdb", encodings={"0": "encoded-image"})
    with pytest.raises(ValueError, match="chunk_bytes is 5"):
        pack([1], tmp_path / "p.lmdb", chunk_bytes=5)
    with pytest.raises(UnsupportedField, match="neither len"):
        pack(3, tmp_path / "p.lmdb")
    assert list(tmp_path.iterdir()) == []


# --- whole columns ----------------------------------------------------------------------------------------------------


def test_columns_in_pieces_equal_samples(tmp_path: Path) -> None:
    """Any mixture of add and add_columns, in pieces that fit no chunk, gives the pack of the samples."""
    x, y = np.arange(5000, dtype=np.float32).reshape(1000, 5), torch.arange(1000).to(torch.int16)
    pack([{"x": x[i], "y": y[i]} for i in range(1000)], tmp_path / "a.lmdb", chunk_bytes=4096)
    with PackWriter(tmp_path / "b.lmdb", chunk_bytes=4096) as writer:
        at = 0
        for step in (1, 700, 0, 99, 200):
            writer.add_columns({"x": x[at : at + step], "y": y[at : at + step]})
            at += step
    assert verify(tmp_path / "b.lmdb") == []
    assert (tmp_path / "a.lmdb").read_bytes() == (tmp_path / "b.lmdb").read_bytes()
    with PackWriter(tmp_path / "c.lmdb", chunk_bytes=4096) as writer:
        writer.add({"x": x[0], "y": y[0]})
        writer.add_columns({"x": x[1:], "y": y[1:]})
    assert PackedDataset(tmp_path / "c.lmdb").manifest == PackedDataset(tmp_path / "a.lmdb").manifest


def test_columns_of_another_length_make_the_field_ragged(tmp_path: Path) -> None:
    """Two blocks of different row length are one ragged field."""
    with PackWriter(tmp_path / "p.lmdb", chunk_bytes=4096) as writer:
        writer.add_columns(np.ones((300, 4), np.int32))
        writer.add_columns(np.ones((300, 7), np.int32))
    packed = PackedDataset(tmp_path / "p.lmdb")
    assert packed.fields[0].shape == (None,)
    assert [len(packed[i]) for i in (0, 299, 300, 599)] == [4, 4, 7, 7]


def test_columns_that_do_not_fit_are_named(tmp_path: Path) -> None:
    """Different lengths, another dtype, no array: which, and what both are."""
    with PackWriter(tmp_path / "p.lmdb") as writer:
        with pytest.raises(ValueError, match="column 'b' has 3 rows, column 'a' has 2"):
            writer.add_columns({"a": np.zeros(2), "b": np.zeros(3)})
        writer.add_columns({"a": np.zeros(2), "b": np.zeros(2)})
        with pytest.raises(SampleMismatch, match="field 'b': expected float64 array"):
            writer.add_columns({"a": np.zeros(2), "b": np.zeros(2, np.float32)})
        with pytest.raises(UnsupportedField, match="as a whole column"):
            writer.add_columns({"a": np.zeros(2), "b": 3.0})
        with pytest.raises(SampleMismatch, match="a dict with the keys"):
            writer.add_columns((np.zeros(2), np.zeros(2)))
    assert len(PackedDataset(tmp_path / "p.lmdb")) == 2


# --- sizes ------------------------------------------------------------------------------------------------------------


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
def test_the_map_grows_by_itself(tmp_path: Path, size: str) -> None:
    """D3: from 1 MiB, past many small samples or one of 30 MiB: count and checksums are right."""
    rng = np.random.default_rng(0)
    rows = [rng.bytes(1000 + i % 100) for i in range(20_000)] if size == "many" else [b"a", rng.bytes(30 << 20), b"b"]
    with PackWriter(tmp_path / "p.lmdb", map_bytes=1 << 20, chunk_bytes=1 << 20) as writer:
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


# --- the life of the file ---------------------------------------------------------------------------------------------


def test_a_pack_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    """Until sealed there is no target; the partial file is refused as unfinished, in one sentence."""
    target = tmp_path / "p.lmdb"
    with PackWriter(target, chunk_bytes=4096) as writer:
        writer.add_columns(np.arange(10_000))
        for path in (target, tmp_path / "p.lmdb.partial"):
            with pytest.raises(PackUnfinished, match="never sealed") as caught:
                PackedDataset(path)
            assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["p.lmdb"]
    assert len(PackedDataset(target)) == 10_000


def test_a_failing_dataset_leaves_the_target_as_it_was(tmp_path: Path) -> None:
    """D6: its own exception comes out, an old pack stays, nothing else is left, no descriptor leaks."""

    def failing() -> Iterator[int]:
        yield 1
        raise RuntimeError("no more")

    target = tmp_path / "p.lmdb"
    pack([5], target)
    before = target.read_bytes()
    with no_leaks():
        for _ in range(5):
            with pytest.raises(RuntimeError, match="no more"):
                pack(failing(), target, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["p.lmdb"]
    assert target.read_bytes() == before


def test_an_existing_file_is_replaced_only_when_told(tmp_path: Path) -> None:
    """Nothing is lost by a typo; readers of the old file keep it."""
    target = tmp_path / "p.lmdb"
    pack([1], target)
    with pytest.raises(PackExists, match=r"exists already; .*overwrite=True"):
        pack([2], target)
    old = PackedDataset(target)
    pack([2, 3], target, overwrite=True)
    assert (list(old), list(PackedDataset(target))) == ([1], [2, 3])
    with pytest.raises(NotAPack, match="is a directory"):
        pack([1], tmp_path)
    with pytest.raises(PackError, match=r"the folder .* does not exist"):
        pack([1], tmp_path / "no" / "p.lmdb")
    with PackWriter(tmp_path / "q.lmdb") as writer:
        writer.add(1)
        pack([9], tmp_path / "q2.lmdb")
        os.rename(tmp_path / "q2.lmdb", tmp_path / "q.lmdb")
        with pytest.raises(PackExists, match="has appeared"):
            writer.seal()
    assert list(PackedDataset(tmp_path / "q.lmdb")) == [9]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p.lmdb", "q.lmdb"]


def test_two_packers_of_one_name_do_not_meet(tmp_path: Path) -> None:
    """The second is refused while the first is at work, in another process or this one."""
    with PackWriter(tmp_path / "p.lmdb") as writer:
        writer.add(1)
        with pytest.raises(PackExists, match="another process is packing"):
            PackWriter(tmp_path / "p.lmdb")
        done = run_script(
            "import sys; from shmloader.packfile import pack; pack([1], sys.argv[1])", args=[str(tmp_path / "p.lmdb")]
        )
        assert done.returncode == 1
        assert "PackExists" in done.stderr
    assert list(PackedDataset(tmp_path / "p.lmdb")) == [1]


def test_a_finished_writer_says_so(tmp_path: Path) -> None:
    """Sealing twice is one report; adding after the end is an error; leaving a block after giving up is none."""
    with PackWriter(tmp_path / "p.lmdb") as writer:
        writer.add(1)
        report = writer.seal()
        assert writer.seal() is report
        with pytest.raises(MisuseError, match="has sealed"):
            writer.add(2)
    with PackWriter(tmp_path / "q.lmdb") as writer:
        writer.add(1)
        writer.discard()
        for call in (writer.seal, lambda: writer.add(1), lambda: writer.add_columns(np.zeros(1))):
            with pytest.raises(MisuseError, match="has given up"):
                call()
    assert [p.name for p in tmp_path.iterdir()] == ["p.lmdb"]


MADE = """
    import os, signal, sys
    import numpy as np
    from shmloader.packfile import pack
    def samples(reached):
        for i in range(400):
            reached(i)
            yield {"x": np.full((25, 100), i, np.int16), "n": i, "s": "s" * (i % 9)}
    def make(path, reached=lambda i: None):
        return pack(samples(reached), path, overwrite=True, chunk_bytes=65536)
"""


def test_a_killed_packer_leaves_the_target_and_blocks_nobody(tmp_path: Path) -> None:
    """D6: SIGKILL at any moment: the old pack stays, the leftover is refused, the next run is as if nothing was."""
    script = """
    import random
    from pathlib import Path
    from shmloader.errors import PackUnfinished
    from shmloader.packfile import PackedDataset
    def read(path):
        return Path(path).read_bytes()
    folder = sys.argv[1]
    make(folder + "/undisturbed.lmdb")
    whole = read(folder + "/undisturbed.lmdb")
    target = folder + "/p.lmdb"
    pack([7], target)
    old = read(target)
    moments = random.Random(0)
    for moment in [0, 1, 399, *moments.sample(range(400), 7)]:
        listen, tell = os.pipe()
        child = os.fork()
        if child == 0:
            make(target, lambda i: os.write(tell, b"x") if i == moment else None)
            os._exit(0)
        os.close(tell)
        assert os.read(listen, 1) == b"x"
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(listen)
        assert read(target) in (old, whole)
        if os.path.exists(target + ".partial"):
            try:
                PackedDataset(target + ".partial")
            except PackUnfinished as refused:
                assert target in str(refused)
            else:  # killed between sealing and renaming
                assert read(target + ".partial") == whole
        make(target)
        assert read(target) == whole
        assert sorted(os.listdir(folder)) == ["p.lmdb", "undisturbed.lmdb"], os.listdir(folder)
        with open(target, "wb") as file:
            file.write(old)
    """
    run_script(MADE + script, args=[str(tmp_path)]).check()


def test_an_interrupted_packer_cleans_up(tmp_path: Path) -> None:
    """Ctrl-C: KeyboardInterrupt comes out, no file stays."""
    script = """
    try:
        make(sys.argv[1], lambda i: os.kill(os.getpid(), signal.SIGINT) if i == 100 else None)
    except KeyboardInterrupt:
        print("interrupted")
    """
    done = run_script(MADE + script, args=[str(tmp_path / "p.lmdb")]).check()
    assert done.stdout == "interrupted\n"
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    """No space: PackError names file and reason; the disk is given back."""
    with small_tmpfs(tmp_path / "small", "2m") as folder:
        with pytest.raises(PackError, match=r"p\.lmdb\.partial: cannot be written: .* are free there"):
            pack([np.zeros(100_000, np.uint8)] * 100, folder / "p.lmdb", chunk_bytes=1 << 20)
        assert list(folder.iterdir()) == []
        pack([np.zeros(100_000, np.uint8)] * 5, folder / "p.lmdb")


def test_a_limit_on_address_space_is_one_sentence(tmp_path: Path) -> None:
    """D3: where the map cannot grow, the number is said."""
    script = """
        import resource, sys, numpy as np
        from shmloader.packfile import PackWriter
        writer = PackWriter(sys.argv[1])
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + (96 << 20), -1))
        for i in range(100):
            writer.add_columns(np.zeros((16, 1 << 20), np.uint8))
    """
    done = run_script(script, args=[str(tmp_path / "p.lmdb")])
    assert done.returncode == 1
    assert "MemoryError" in done.stderr or "its memory map cannot grow to" in done.stderr


def test_progress_is_told_seldom_and_at_the_end(tmp_path: Path) -> None:
    """At most ten calls a second; the last one is exact; unknown totals are None until then."""
    seen: list[tuple[int, int | None, int]] = []
    pack((b"xyz" for _ in range(3000)), tmp_path / "p.lmdb", progress=lambda *now: seen.append(now))
    assert seen[-1] == (3000, 3000, 9000)
    assert all(total is None for _, total, _ in seen[:-1])
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)


def test_a_pack_is_made_where_the_umask_says(tmp_path: Path) -> None:
    """The mode is that of any file of this user; only one file is made."""
    script = "import os, sys; from shmloader.packfile import pack; os.umask(0o027); pack([1], sys.argv[1])"
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "p.lmdb")], check=True, timeout=60)
    assert (tmp_path / "p.lmdb").stat().st_mode & 0o777 == 0o640
