"""LMDB files of others: written by py-lmdb as people do, read without a handle, told apart from packs."""

from __future__ import annotations

import io
import pickle
import struct
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import torch
from PIL import Image
from shmloader_tools import pack as pack_tool

from shmloader import DataLoader, PackedDataset, pack
from shmloader.errors import BrokenImage, MisuseError, SourceError
from shmloader.images import Fit
from shmloader.sources import ArrayFiles, KeyValueLmdb, Options, open_source, pack_parts, pack_source, recognise
from support import run_script

Captured = pytest.CaptureFixture[str]


def write(path: Path, values: dict[bytes, bytes], *, subdir: bool = True, **options: Any) -> Path:
    with lmdb.open(str(path), map_size=1 << 28, subdir=subdir, **options) as env, env.begin(write=True) as txn:
        for key, value in values.items():
            txn.put(key, value)
    return path


def png(seed: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (8 + seed, 10, 3), np.uint8)).save(out, "PNG")
    return out.getvalue()


def words(count: int = 12) -> dict[bytes, bytes]:
    """A set for text recognition, as its tools write it: images and labels by number from 1, and how many."""
    values = {b"num-samples": str(count).encode()}
    for i in range(1, count + 1):
        values[b"image-%09d" % i] = png(i)
        values[b"label-%09d" % i] = f"wörd{i}".encode()
    return values


@pytest.mark.parametrize("subdir", [True, False])
def test_one_sample_a_key(tmp_path: Path, subdir: bool) -> None:
    """Values of any size, from nothing to many pages, in the order of the keys; keys are data too."""
    random = np.random.default_rng(0)
    sizes = (0, 1, 100, 2000, 4000, 4096, 5000, 100_000)
    values = {b"%05d" % i: random.bytes(sizes[i % len(sizes)]) for i in random.permutation(900).tolist()}
    values[b"\xff\x00binary"] = b"x"
    path = write(tmp_path / "theirs", values, subdir=subdir)
    before = sorted(p.name for p in tmp_path.rglob("*"))
    assert recognise(path) is KeyValueLmdb
    data = open_source(path)
    assert isinstance(data, KeyValueLmdb)
    assert [data.key(i) for i in range(len(data))] == sorted(values)
    for i, key in enumerate(sorted(values)):
        assert data[i]["value"] == values[key]
        assert data[i]["key"].encode("utf-8", "surrogateescape") == key
    pack_source(data, tmp_path / "ours.lmdb")
    packed = PackedDataset(tmp_path / "ours.lmdb")
    assert all(packed[i] == data[i] for i in range(len(data)))
    assert sorted(p.name for p in tmp_path.rglob("*") if p.name != "ours.lmdb") == before  # no lock, nothing changed


def test_keys_that_share_a_number_make_a_sample(tmp_path: Path, capsys: Captured) -> None:
    """--keys image-%09d,label-%09d: a field each, images as images, in the order of the numbers; a counter is noted."""
    path = write(tmp_path / "theirs", words())
    data = KeyValueLmdb(path, keys=("image-%09d", "label-%09d"))
    assert len(data) == 12
    assert data[9]["key"] == "10"
    assert data[9]["label"] == "wörd10".encode()
    assert data[9]["image"].shape == (3, 18, 10)
    assert data.notes == ("left out, keys of no pattern: 1 (num-samples)",)
    out = tmp_path / "a.lmdb"
    assert pack_tool.main([str(path), str(out), "--keys", "image-%09d,label-%09d"]) == 0
    assert "images stored as their files" in capsys.readouterr().out
    packed = PackedDataset(out)
    assert torch.equal(packed[9]["image"], data[9]["image"])
    assert packed[9]["label"] == data[9]["label"]
    assert pack_tool.main([str(path), str(out), "--keys", "image-%09d", "--size", "8x8", "--overwrite"]) == 0
    batch = next(iter(DataLoader(PackedDataset(out, fields="image"), batch_size=12)))
    assert batch.shape == (12, 3, 8, 8)


def test_numbers_are_ordered_as_numbers(tmp_path: Path) -> None:
    """%d has no zeros, so the file's order of keys is not the samples'; a key that only looks alike is none."""
    path = write(tmp_path / "theirs", {b"%d" % i: b"%d" % i for i in range(25)} | {b"007": b"", b"x1": b"", b"1x": b""})
    data = KeyValueLmdb(path, keys=("%d",))
    assert [data[i]["value"] for i in range(25)] == [b"%d" % i for i in range(25)]
    assert len(data) == 25
    assert data.notes == ("left out, keys of no pattern: 3 (007, 1x, x1)",)


def test_a_sample_that_is_not_whole_is_named(tmp_path: Path) -> None:
    """One key of two is missing: which sample, which key."""
    values = words()
    del values[b"label-000000007"]
    path = write(tmp_path / "theirs", values)
    with pytest.raises(
        SourceError, match=r"sample 7 is not whole: .*a key 'image-000000007' and no key 'label-000000007'"
    ):
        KeyValueLmdb(path, keys=("image-%09d", "label-%09d"))
    for wrong in (("image",), ("%d-%d",), ("a-%d", "a_%d"), ("key-%d",)):
        with pytest.raises(MisuseError, match="pattern"):
            KeyValueLmdb(path, keys=wrong)
    with pytest.raises(SourceError, match=r"no sample in it; keys are like"):
        KeyValueLmdb(path, keys=("picture-%d",))


DECODER = '''
import io, pickle, struct
import numpy as np

def record(key, value):
    """Values are a number and float32s."""
    (label,) = struct.unpack_from("<q", value)
    return np.frombuffer(value, np.float32, offset=8).copy(), label

def word(key, values):
    return {"at": key.decode(), "text": values["label"].decode(), "nbytes": len(values["image"])}

def unpickled(key, value):
    return pickle.loads(value)
'''


def test_a_function_makes_the_samples(tmp_path: Path) -> None:
    """--decode module:function, found in the current folder; it may unpickle, and nothing else does."""
    (tmp_path / "decoders.py").write_text(DECODER)
    rows = np.random.default_rng(0).normal(size=(50, 5)).astype(np.float32)
    write(tmp_path / "records", {b"%04d" % i: struct.pack("<q", i) + row.tobytes() for i, row in enumerate(rows)})
    write(tmp_path / "words", words())
    write(tmp_path / "pickles", {b"%d" % i: pickle.dumps({"x": i, "y": [1.5, 2.5]}) for i in range(9)})
    script = """
        import sys
        from shmloader_tools.pack import main
        code = main(["records", "records.lmdb", "--decode", "decoders:record", "--quiet"])
        code += main(["words", "words.lmdb", "--keys", "image-%09d,label-%09d", "--decode", "decoders:word", "--quiet"])
        code += main(["pickles", "pickles.lmdb", "--decode", "decoders:unpickled", "--quiet"])
        sys.exit(code)
    """
    done = run_script(script, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    packed = PackedDataset(tmp_path / "records.lmdb")
    assert all(torch.equal(packed[i][0], torch.from_numpy(rows[i])) and packed[i][1] == i for i in range(50))
    assert PackedDataset(tmp_path / "words.lmdb")[3] == {
        "at": "image-000000004",
        "text": "wörd4",
        "nbytes": len(png(4)),
    }
    assert PackedDataset(tmp_path / "pickles.lmdb")[3] == {"x": 3, "y": [1.5, 2.5]}
    assert PackedDataset(tmp_path / "words.lmdb").manifest.metadata["decode"] == "decoders:word"


def test_values_are_never_unpickled(tmp_path: Path) -> None:
    """Without a function of the user's, a pickle is bytes."""
    value = pickle.dumps(print)
    assert KeyValueLmdb(write(tmp_path / "theirs", {b"a": value}))[0]["value"] == value


def test_it_is_read_in_the_parent_and_in_forked_workers(tmp_path: Path) -> None:
    """There is no handle to cross a fork: read here, then in workers, while py-lmdb has it open too (D1)."""
    path = write(tmp_path / "theirs", {b"%04d" % i: struct.pack("<q", i) for i in range(64)})
    data = KeyValueLmdb(path, decode=_number)
    with lmdb.open(str(path), readonly=True, lock=False):
        assert data[5] == 5
        loader = DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context="fork")
        assert torch.cat(list(loader)).tolist() == list(range(64))
        assert data[6] == 6
    assert pickle.loads(pickle.dumps(data))[7] == 7


def test_what_the_users_function_raises_names_the_key(tmp_path: Path) -> None:
    """One sentence with key, function and reason; such samples can be left out like other bad ones."""
    path = write(tmp_path / "theirs", {b"a": struct.pack("<q", 1), b"b": b"short", b"c": struct.pack("<q", 3)})
    data = KeyValueLmdb(path, decode=_number)
    with pytest.raises(SourceError, match=r"key 'b' of .*_number raised error: unpack requires a buffer of 8 bytes"):
        data[1]
    run = pack_parts(data, tmp_path / "a.lmdb", on_error="skip")
    assert run.skipped == 1
    assert PackedDataset(tmp_path / "a.lmdb").column("0").tolist() == [1, 3]  # type: ignore[union-attr]


def _number(key: bytes, value: bytes) -> int:
    return int(struct.unpack("<q", value)[0])


def test_packs_are_told_apart(tmp_path: Path) -> None:
    """A pack as a source is refused in one sentence that says what to do."""
    pack([1, 2, 3], tmp_path / "a.lmdb")
    with pytest.raises(SourceError, match="is a pack already: use it with PackedDataset"):
        open_source(tmp_path / "a.lmdb")


def test_what_is_no_readable_lmdb(tmp_path: Path) -> None:
    """Empty, cut, named databases, a broken image: one sentence each."""
    with pytest.raises(SourceError, match="there is no sample in it"):
        KeyValueLmdb(write(tmp_path / "empty", {}))
    path = write(tmp_path / "cut.lmdb", {b"a": bytes(100_000), b"b": bytes(100_000)}, subdir=False)
    with lmdb.open(str(path), subdir=False, readonly=True, lock=False) as env:
        used = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    path.write_bytes(path.read_bytes()[: used - 4096])
    with pytest.raises(SourceError, match="is cut"):
        KeyValueLmdb(path)
    with lmdb.open(str(tmp_path / "named"), max_dbs=2) as env:
        inner = env.open_db(b"images")
        with env.begin(write=True) as txn:
            txn.put(b"k", b"v", db=inner)
    with pytest.raises(SourceError, match="names a database of its own"):
        KeyValueLmdb(tmp_path / "named")
    (tmp_path / "other.lmdb").write_bytes(bytes(8192))
    with pytest.raises(SourceError, match="is no LMDB file"):
        KeyValueLmdb(tmp_path / "other.lmdb")
    broken = KeyValueLmdb(write(tmp_path / "broken", {b"a": png(1), b"b": png(2)[:60]}), encoded=True)
    with pytest.raises(BrokenImage, match="key 'b' of"):
        broken[1]
    with pytest.raises(MisuseError, match="--size"):
        KeyValueLmdb(write(tmp_path / "text", {b"a": b"no image"}), fit=Fit(8, 8))
    with pytest.raises(MisuseError, match="means nothing"):
        open_source(tmp_path / "text", None, Options(window=3))
    assert not ArrayFiles.recognises(str(tmp_path / "text"))
