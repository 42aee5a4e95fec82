"""Token files: cut into windows, checked against the vocabulary, packed without their overlaps."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shmloader_tools import pack as pack_tool

from shmloader import DataLoader, PackedDataset
from shmloader.errors import MisuseError, SourceError
from shmloader.sources import Options, PackSettings, TokenWindows, open_source, pack_parts, pack_source, recognise

Captured = pytest.CaptureFixture[str]


def ids(count: int = 10_000, dtype: str = "uint16", below: int = 50_257) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, below, count).astype(dtype)


@pytest.fixture
def nano(tmp_path: Path) -> Path:
    """A file as nanoGPT's prepare.py writes it: ``arr.tofile``, no head."""
    path = tmp_path / "train.bin"
    ids().tofile(path)
    return path


def llm_c(path: Path, tokens: np.ndarray[Any, Any], magic: int, announced: int | None = None) -> Path:
    """A file as llm.c writes it: 256 numbers of head, then the tokens."""
    head = np.zeros(256, "<i4")
    head[:3] = magic, 1, len(tokens) if announced is None else announced
    path.write_bytes(head.tobytes() + tokens.tobytes())
    return path


def test_windows_of_a_file(nano: Path) -> None:
    """Samples are int64, one every stride; what is left at the end is noted; indices count from both ends."""
    data = TokenWindows(nano, 65, 64)
    assert len(data) == (10_000 - 65) // 64 + 1
    assert data[3].dtype == torch.int64
    assert data[3].tolist() == ids()[192:257].tolist()
    assert torch.equal(data[-1], data[len(data) - 1])
    assert data.notes == ("left out at the end, too few for a window: 15 tokens",)
    assert TokenWindows(nano, 100).notes == ()
    assert len(TokenWindows(nano, 100)) == 100
    with pytest.raises(IndexError):
        data[len(data)]
    batch = next(iter(DataLoader(pickle.loads(pickle.dumps(data)), batch_size=8, num_workers=1)))
    assert torch.equal(batch[2], data[2])


def test_pairs_are_views_of_one_batch(nano: Path, tmp_path: Path) -> None:
    """Inputs and targets of a next-token model are two views of the batch of windows; every token is a target once."""
    pack_source(TokenWindows(nano, 65, 64), tmp_path / "a.lmdb")
    targets = []
    for batch in DataLoader(PackedDataset(tmp_path / "a.lmdb"), batch_size=16):
        x, y = batch[:, :-1], batch[:, 1:]
        assert x.data_ptr() + 8 == y.data_ptr()
        assert torch.equal(x[:, 1:], y[:, :-1])
        targets.append(y.flatten().clone())
    assert torch.cat(targets).tolist() == ids()[1 : 1 + 64 * 156].tolist()


def test_a_pack_of_all_offsets_is_hardly_larger_than_the_file(nano: Path, tmp_path: Path) -> None:
    """A stride of 1 gives nanoGPT's random crops: 9,936 windows of 65 tokens, stored in the tokens' own bytes."""
    source = TokenWindows(nano, 65, 1)
    report = pack_source(source, tmp_path / "a.lmdb")
    packed = PackedDataset(tmp_path / "a.lmdb")
    assert report.samples == len(source) == 9_936
    assert report.payload_bytes <= nano.stat().st_size
    assert report.file_bytes <= nano.stat().st_size + 40_960
    rows = np.random.default_rng(1).integers(0, len(source), 200)
    assert all(torch.equal(packed[int(i)], source[int(i)]) for i in rows)
    assert packed.manifest.metadata["tokens"] == 10_000


@pytest.mark.parametrize(("magic", "dtype"), [(20240520, "uint16"), (20240801, "uint32")])
def test_a_head_tells_the_dtype(tmp_path: Path, magic: int, dtype: str) -> None:
    """llm.c's files say what they hold; the head is no token, and a file that is cut is noticed."""
    path = llm_c(tmp_path / "fineweb.bin", ids(1000, dtype), magic)
    data = TokenWindows(path, 10)
    assert data[0].tolist() == ids(1000)[:10].tolist()
    assert len(data.tokens) == 1000
    with pytest.raises(SourceError, match=f"holds {dtype}, not uint8"):
        TokenWindows(path, 10, dtype="uint8")
    with pytest.raises(SourceError, match="announces 1200 tokens, 1000 are there"):
        TokenWindows(llm_c(path, ids(1000, dtype), magic, 1200), 10)


def test_samples_may_have_another_dtype(nano: Path) -> None:
    """int32 and the stored dtype too; never one that has no room for what the file may hold."""
    assert TokenWindows(nano, 10, given="uint16")[0].dtype == torch.uint16
    assert TokenWindows(nano, 10, given="int32")[0].tolist() == ids()[:10].tolist()
    with pytest.raises(MisuseError, match="no room"):
        TokenWindows(nano, 10, given="uint8")
    with pytest.raises(MisuseError, match="float16"):
        TokenWindows(nano, 10, dtype="float16")


def test_tokens_outside_of_the_vocabulary_are_found(nano: Path, tmp_path: Path) -> None:
    """The wrong dtype shows as ids that cannot be: packing stops with the first; a sample's problems list them."""
    tokens = ids()
    tokens[777] = 60_000
    tokens.tofile(nano)
    with pytest.raises(SourceError, match=r"1 of 10000 tokens .* vocabulary of 50257; the first is number 777, 60000"):
        open_source(nano, None, Options(window=64, vocab_size=50_257))
    data = TokenWindows(nano, 100, vocab_size=50_257)
    assert list(data.problems(0, data[0])) == []
    (problem,) = data.problems(7, data[7])
    assert (problem.kind, problem.severity) == ("token-outside", "error")
    assert "60000 at 77" in str(problem)
    assert "tokens 700 to 799" in str(problem)
    assert open_source(nano, None, Options(window=64, vocab_size=60_001)).metadata["vocab_size"] == 60_001


def test_what_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    """Half a token, too few tokens, no window, nonsense: one sentence each."""
    path = tmp_path / "a.bin"
    path.write_bytes(b"123")
    with pytest.raises(SourceError, match="3 bytes are no whole number of uint16"):
        TokenWindows(path, 1)
    path.write_bytes(b"1234")
    with pytest.raises(SourceError, match="2 tokens are not enough for one window of 3"):
        TokenWindows(path, 3)
    with pytest.raises(MisuseError, match="at least 1"):
        TokenWindows(path, 0)
    assert recognise(path) is TokenWindows
    with pytest.raises(MisuseError, match="--window 1025"):
        open_source(path)


def test_the_command_packs_tokens(nano: Path, tmp_path: Path, capsys: Captured) -> None:
    """The report of shmloader-pack tells tokens and windows; options of other kinds are refused."""
    out = tmp_path / "a.lmdb"
    assert pack_tool.main([str(nano), str(out), "--window", "65", "--stride", "64", "--vocab-size", "50257"]) == 0
    text = capsys.readouterr().out
    assert "10,000 tokens of uint16, windows of 65 every 64" in text
    assert "tokens int64[65] (windows of uint16, one every 64)" in text
    assert torch.equal(PackedDataset(out)[5], TokenWindows(nano, 65, 64)[5])
    assert pack_tool.main([str(nano), str(tmp_path / "b.lmdb"), "--window", "65", "--keys", "a%d"]) == 1
    assert "'keys' means nothing for tokens data" in capsys.readouterr().err


def test_the_order_of_windows_is_that_of_the_tokens(nano: Path, tmp_path: Path, capsys: Captured) -> None:
    """A limit takes the first ones; to shuffle, split or convert them is refused, with what to do instead."""
    words = [str(nano), str(tmp_path / "a.lmdb"), "--window", "65", "--stride", "64"]
    assert pack_tool.main([*words, "--limit", "10", "--quiet"]) == 0
    packed = PackedDataset(tmp_path / "a.lmdb")
    assert len(packed) == 10
    assert packed[9].tolist() == ids()[576:641].tolist()
    words += ["--overwrite"]
    for refused, says in (
        (["--shuffle", "1"], "shuffle in the DataLoader"),
        (["--split", "0.5,0.5"], "a file of its own"),
        (["--dtype", "tokens=int32"], "no dtype applies"),
    ):
        assert pack_tool.main([*words, *refused]) == 1
        assert says in capsys.readouterr().err
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["a.lmdb", "train.bin"]


def test_a_run_that_was_given_up_goes_on(tmp_path: Path) -> None:
    """Packing tokens again after a failure goes on behind what was committed, and makes the same file."""
    path = tmp_path / "train.bin"
    ids(200_000).tofile(path)
    source = TokenWindows(path, 65, 64)
    settings = PackSettings(chunk_bytes=16_384)
    pack_source(source, tmp_path / "whole.lmdb", settings=settings)

    def stop(done: int, total: int | None, nbytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack_source(source, tmp_path / "a.lmdb", settings=settings, progress=stop)
    assert (tmp_path / "a.lmdb.partial").exists()
    run = pack_parts(source, tmp_path / "a.lmdb", settings=settings)
    assert 0 < run.resumed < len(source)
    assert (tmp_path / "a.lmdb").read_bytes() == (tmp_path / "whole.lmdb").read_bytes()
