"""A packing run that goes on where another was killed, ran out of space, or failed: the same file, to the last bit."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmloader.errors import MisuseError, PackError, ResumeRefused, SampleMismatch
from shmloader.packfile import PackedDataset, PackWriter, verify
from shmloader.packfile.block import fill
from shmloader.packfile.outline import Outline
from shmloader.packfile.values import Value
from support import small_tmpfs

Make = Callable[[int], Any]
CHUNK = 8192


def fixed(i: int) -> Any:
    return np.full((7, 9), i, np.int32), i


def ragged(i: int) -> Any:
    return {"x": np.full((3, i % 11), i, np.float32), "s": "s" * (i % 5), "n": i}


def turns_ragged(i: int) -> Any:
    return (np.full((5 if i < 150 else i % 6, 4), i % 251, np.uint8), np.zeros((2, 2 if i < 300 else 3)), float(i))


def empty(i: int) -> Any:
    return np.empty((0, 2), np.int8)


KINDS = {"fixed": fixed, "ragged": ragged, "turns": turns_ragged, "empty": empty}


def add_blocks(writer: PackWriter, make: Make, start: int, stop: int, step: int) -> None:
    for first in range(start, stop, step):
        samples = [make(i) for i in range(first, min(stop, first + step))]
        if writer.outline is None:
            writer.begin(Outline.of(make(0), 0, None))
        outline = writer.outline
        assert outline is not None
        rows = [outline.values(first + i, sample) for i, sample in enumerate(samples)]
        values, shapes = fill(rows, len(outline.fields), lambda nbytes: np.empty(nbytes, np.uint8))
        writer.add_block(len(rows), values, shapes)


def whole(path: Path, make: Make, count: int) -> bytes:
    with PackWriter(path, chunk_bytes=CHUNK, overwrite=True, fingerprint="same") as writer:
        for i in range(count):
            writer.add(make(i))
    return path.read_bytes()


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(KINDS)), st.integers(1, 700), st.integers(1, 200))
def test_blocks_of_any_size_make_the_same_file(
    tmp_path_factory: pytest.TempPathFactory, kind: str, count: int, step: int
) -> None:
    """How many samples come at a time shows nowhere in the file: form changes and cuts fall on the same rows."""
    folder = tmp_path_factory.getbasetemp()
    expected = whole(folder / "one.lmdb", KINDS[kind], count)
    with PackWriter(folder / "many.lmdb", chunk_bytes=CHUNK, overwrite=True, fingerprint="same") as writer:
        add_blocks(writer, KINDS[kind], 0, count, step)
    assert (folder / "many.lmdb").read_bytes() == expected
    assert verify(folder / "many.lmdb") == []


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(KINDS)), st.integers(0, 600), st.integers(1, 90), st.data())
def test_a_file_cut_anywhere_is_gone_on_with(
    tmp_path_factory: pytest.TempPathFactory, kind: str, stop: int, step: int, data: st.DataObject
) -> None:
    """D6: whatever of the partial file was written when the packer died, the next run ends with the same bytes."""
    folder, make, count = tmp_path_factory.getbasetemp(), KINDS[kind], 600
    expected = whole(folder / "one.lmdb", make, count)
    path, partial = folder / "cut.lmdb", folder / "cut.lmdb.partial"
    path.unlink(missing_ok=True)
    first = PackWriter(path, chunk_bytes=CHUNK, fingerprint="same", restart=True)
    add_blocks(first, make, 0, stop, step)
    if stop == count:
        first.finish()
    first._env.keep()  # as a kill would: nothing else is written
    length = data.draw(st.integers(0, partial.stat().st_size))
    os.truncate(partial, length)
    with PackWriter(path, chunk_bytes=CHUNK, fingerprint="same") as second:
        assert second.resumed <= stop
        add_blocks(second, make, second.resumed, count, step)
    assert path.read_bytes() == expected
    assert not partial.exists()


def test_bytes_lost_with_the_power_are_written_again(tmp_path: Path) -> None:
    """A commit whose values do not match their checksums does not count, nor do those behind it."""
    expected = whole(tmp_path / "one.lmdb", fixed, 600)
    path = tmp_path / "p.lmdb"
    first = PackWriter(path, chunk_bytes=CHUNK, fingerprint="same")
    add_blocks(first, fixed, 0, 500, 500)
    first._env.keep()
    partial = tmp_path / "p.lmdb.partial"
    lost = bytearray(partial.read_bytes())
    lost[len(lost) // 2 : len(lost) // 2 + 4096] = bytes(4096)
    partial.write_bytes(lost)
    with PackWriter(path, chunk_bytes=CHUNK, fingerprint="same") as second:
        assert 0 < second.resumed < 300
        add_blocks(second, fixed, second.resumed, 600, 50)
    assert path.read_bytes() == expected


def test_notes_come_back(tmp_path: Path) -> None:
    """What the caller wanted to know again is there for every commit, and only for those."""
    seen: list[int] = []

    def notes(rows: int) -> dict[str, Any]:
        seen.append(rows)
        return {"rows": rows}

    first = PackWriter(tmp_path / "p.lmdb", chunk_bytes=CHUNK, fingerprint="same", notes=notes)
    add_blocks(first, fixed, 0, 200, 33)
    with pytest.raises(SampleMismatch), first:
        first.add("something else")
    second = PackWriter(tmp_path / "p.lmdb", chunk_bytes=CHUNK, fingerprint="same")
    assert second.recovered_notes == [{"rows": rows} for rows in seen]
    assert second.resumed == sum(seen) > 0
    assert second.outline == Outline.of(fixed(0), 0, None)
    with pytest.raises(MisuseError, match="added already"):
        second.begin(Outline.of(fixed(0), 0, None))
    second.discard()
    assert list(tmp_path.iterdir()) == []


def test_other_data_is_refused_and_kept(tmp_path: Path) -> None:
    """One sentence with the number of samples; ``restart`` begins anew; a run without fingerprint too."""
    path = tmp_path / "p.lmdb"
    first = PackWriter(path, chunk_bytes=CHUNK, fingerprint="one")
    add_blocks(first, fixed, 0, 200, 50)
    first.give_up()
    before = (tmp_path / "p.lmdb.partial").read_bytes()
    with pytest.raises(ResumeRefused, match=r"unfinished pack with \d+ samples.*--restart"):
        PackWriter(path, chunk_bytes=CHUNK, fingerprint="two")
    assert (tmp_path / "p.lmdb.partial").read_bytes() == before
    with PackWriter(path, chunk_bytes=CHUNK, fingerprint="two", restart=True) as second:
        assert second.resumed == 0
        second.add(5)
    assert list(PackedDataset(path)) == [5]


def test_a_run_with_nothing_to_keep_leaves_nothing(tmp_path: Path) -> None:
    """Before the first commit there is nothing to go on with: no file stays."""
    with PackWriter(tmp_path / "p.lmdb", fingerprint="one") as writer:
        writer.add(1)
        writer.give_up()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_gone_on_from(tmp_path: Path) -> None:
    """D6: no space: one sentence, what is committed is kept; with space again the result is that of a quiet run."""
    rows = [np.random.default_rng(i).integers(0, 255, 50_000, np.uint8) for i in range(60)]

    def go_on(path: Path) -> int:
        with PackWriter(path, chunk_bytes=1 << 18, fingerprint="f") as writer:
            for row in rows[writer.resumed :]:
                writer.add(row)
            return writer.resumed

    go_on(tmp_path / "one.lmdb")
    with small_tmpfs(tmp_path / "small", "4m") as folder:
        (folder / "filler").write_bytes(bytes(2 << 20))
        with pytest.raises(PackError, match=r"No space left.* are free there: free some space") as caught:
            go_on(folder / "p.lmdb")
        assert "\n" not in str(caught.value)
        (folder / "filler").unlink()
        assert 10 < go_on(folder / "p.lmdb") < 60
        assert (folder / "p.lmdb").read_bytes() == (tmp_path / "one.lmdb").read_bytes()


def test_values_of_no_axes_and_no_bytes_fill_blocks() -> None:
    """Numbers have shape (), empty arrays no bytes: both are laid out."""
    row = [Value("int", "int64", np.array(5)), Value("array", "int8", np.empty((0, 2), np.int8))]
    values, shapes = fill([row, row], 2, lambda nbytes: np.zeros(nbytes, np.uint8))
    assert values.view(np.int64).tolist() == [5, 5]
    assert shapes.tolist() == [0, 2, 0, 2]
