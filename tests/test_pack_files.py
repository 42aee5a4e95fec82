"""What is no pack, no whole pack, or a changed one: each says so in one sentence, and nothing crashes."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import zlib
from pathlib import Path

import lmdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmloader.errors import (
    NotAPack,
    PackDamaged,
    PackError,
    PackNotFound,
    PackUnfinished,
    PackVersionError,
    ShmLoaderError,
)
from shmloader.packfile import PackedDataset, PackWriter, pack, verify
from shmloader.packfile.tree import HEAD_BYTES, BadTree, find_values, read_meta
from support import run_command, run_script


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of fixed, ragged, free and string fields in many chunks."""
    rng = np.random.default_rng(0)
    samples = [
        (rng.integers(0, 255, 500, np.uint8), np.arange(i % 9), np.ones((i % 3, i % 4)), f"s{i}", i) for i in range(400)
    ]
    return Path(pack(samples, tmp_path_factory.mktemp("whole") / "p.lmdb", chunk_bytes=16384).path)


def refused(path: Path, kind: type[PackError], words: str) -> None:
    """Opening and verifying raise exactly this, in one sentence that names the file."""
    for open_it in (PackedDataset, verify):
        with pytest.raises(kind, match=words) as caught:
            open_it(path)
        assert type(caught.value) is kind
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_what_is_no_pack_is_named(tmp_path: Path) -> None:
    """Nothing, a directory, an empty file, text, a short file, another LMDB, an empty LMDB."""
    refused(tmp_path / "gone.lmdb", PackNotFound, "there is no such file")
    refused(tmp_path, NotAPack, "is a directory")
    path = tmp_path / "x.lmdb"
    refused(path / "y", PackNotFound, "no such file")
    for content, words in ((b"", "is empty"), (b"hello " * 5000, "is no LMDB file"), (b"x", "is no LMDB file")):
        path.write_bytes(content)
        refused(path, NotAPack, words)
    refused(path / "y", PackNotFound, "no directory")
    path.unlink()
    for key in (None, b"image-0", b"manifest"):
        with lmdb.open(str(path), subdir=False, lock=False, map_size=1 << 20) as env, env.begin(write=True) as txn:
            if key:
                txn.put(key, b"{}" * 3000)
                txn.put(b"seal", b"abcd")
        refused(path, NotAPack, "not a pack|not that of a pack")
    (tmp_path / "z.lmdb.partial").touch()
    refused(tmp_path / "z.lmdb", PackUnfinished, r"only z\.lmdb\.partial")
    refused(tmp_path / "z.lmdb.partial", PackUnfinished, "never sealed")


def rewrite(path: Path, **changes: object) -> None:
    """Change entries of the manifest, and seal it anew."""
    with lmdb.open(str(path), subdir=False, lock=False, map_size=1 << 26) as env, env.begin(write=True) as txn:
        manifest = {**json.loads(bytes(txn.get(b"manifest"))), **changes}
        text = json.dumps(manifest).encode()
        txn.put(b"manifest", text)
        txn.put(b"seal", zlib.crc32(text).to_bytes(4, "little"))


def test_other_formats_and_versions_are_named(whole: Path, tmp_path: Path) -> None:
    """A newer pack says to upgrade; a foreign format says what it is; unknown contents are never guessed."""
    path = tmp_path / "p.lmdb"
    shutil.copy(whole, path)
    rewrite(path, version=2)
    refused(path, PackVersionError, "has format version 2; this library reads up to 1; upgrade shmloader")
    rewrite(path, version=1, format="other-pack")
    refused(path, NotAPack, "of the format 'other-pack'")
    rewrite(path, format="shmloader-pack")
    assert len(PackedDataset(path)) == 400
    fields = PackedDataset(path).manifest.to_bytes()
    unknown = json.loads(fields)["fields"]
    unknown[0]["dtype"] = "uint4"
    rewrite(path, fields=unknown)
    refused(path, PackVersionError, "unknown dtype 'uint4'")


def test_a_changed_manifest_is_refused(whole: Path, tmp_path: Path) -> None:
    """One changed digit in the head cannot be read as another number."""
    data = bytearray(whole.read_bytes())
    at = data.rindex(b'"count":400')
    data[at + 8] = ord("3")
    path = tmp_path / "p.lmdb"
    path.write_bytes(data)
    with pytest.raises(PackDamaged, match="its manifest has changed"):
        PackedDataset(path)
    assert len(verify(path)) == 1


def test_a_cut_file_is_refused_at_any_length(whole: Path, tmp_path: Path) -> None:
    """D6: never SIGBUS, and never fewer samples: in a child, because the wrong answer would end this process."""
    script = """
        import os, sys
        from shmloader.errors import NotAPack, PackDamaged
        from shmloader.packfile import PackedDataset
        path, size = sys.argv[1], os.path.getsize(sys.argv[1])
        lengths = {0, 1, 15, 16, 63, 64, 151, 152, 4095, 4096, 8191, 8192, size // 2, size - 4096, size - 1}
        for length in sorted(lengths, reverse=True):
            os.truncate(path, length)
            try:
                PackedDataset(path)[0]
            except PackDamaged as error:
                assert "is cut" in str(error), error
            except NotAPack:
                assert length < 152
            else:
                raise AssertionError(length)
        print("all refused")
    """
    shutil.copy(whole, tmp_path / "p.lmdb")
    assert run_script(script, args=[str(tmp_path / "p.lmdb")]).check().stdout == "all refused\n"


def test_every_damaged_chunk_is_listed(whole: Path, tmp_path: Path) -> None:
    """D6: verify names field, part and samples of each, and stays silent on a whole pack; progress reaches the end."""
    seen: list[tuple[int, int]] = []
    assert verify(whole, progress=lambda *now: seen.append(now)) == []
    assert seen[-1][0] == seen[-1][1] == PackedDataset(whole).manifest.payload_bytes
    packed = PackedDataset(whole)
    data = bytearray(whole.read_bytes())
    for number, part in ((0, "v"), (1, "o"), (2, "s"), (3, "v")):
        data[int(packed._pack.fields[number].parts[part][2]) + 5] ^= 0x10
    path = tmp_path / "p.lmdb"
    path.write_bytes(data)
    problems = verify(path)
    assert len(problems) == 4
    for problem, words in zip(problems, ("'0': the values", "'1': the offsets", "'2': the shapes", "'3'"), strict=True):
        assert words in problem
        assert "chunk 2 (samples " in problem


@settings(max_examples=150)
@given(seed=st.integers(0, 10**9), where=st.sampled_from(["anywhere", "tree", "offsets"]))
def test_damage_is_an_exception_or_wrong_bytes_but_never_a_crash(whole: Path, seed: int, where: str) -> None:
    """Whatever bytes change, reading ends in an exception of ours or in samples; no index leads out of the file."""
    rng = np.random.default_rng(seed)
    data = bytearray(whole.read_bytes())
    packed = PackedDataset(whole)
    if where == "offsets":
        located = packed._pack.fields[int(rng.integers(1, 4))]
        starts = located.parts["o"]
        spots = starts[rng.integers(0, len(starts), 3)] + rng.integers(0, 40, 3)
    elif where == "tree":
        spots = np.concatenate([rng.integers(0, 300, 2), len(data) - rng.integers(1, 40_000, 8)])
    else:
        spots = rng.integers(0, len(data), 20)
    for spot in spots:
        data[int(spot)] = int(rng.integers(256))
    path = whole.with_name("damaged.lmdb")
    path.write_bytes(data)
    try:
        verify(path)
        changed = PackedDataset(path)
    except ShmLoaderError:
        return
    for i in range(0, len(changed), 7):
        try:
            changed[i]
        except (PackDamaged, UnicodeDecodeError):
            continue
    for field in changed.gather.fields:
        if field.ragged:
            try:
                field.lengths(np.arange(len(changed)))
            except PackDamaged:
                continue


@settings(max_examples=25)
@given(sizes=st.lists(st.integers(0, 9000), max_size=300), seed=st.integers(0, 99))
def test_our_reading_of_the_tree_is_that_of_lmdb(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seed: int
) -> None:
    """Every key and value of any LMDB file, many levels deep, deleted and overwritten ones too."""
    rng = np.random.default_rng(seed)
    path = str(tmp_path_factory.mktemp("tree") / "t.lmdb")
    with lmdb.open(path, subdir=False, lock=False, map_size=1 << 26, sync=False) as env:
        for begin in range(0, max(1, len(sizes)), 100):
            with env.begin(write=True) as txn:
                for size in sizes[begin : begin + 100]:
                    txn.put(rng.bytes(int(rng.integers(1, 400))), rng.bytes(size))
                for i in range(0, begin, 3):
                    txn.put(b"again%d" % i, b"x" * (i * 10))
                    txn.delete(b"again%d" % (i // 2))
        with env.begin() as txn:
            expected = dict(txn.cursor())
    data = Path(path).read_bytes()
    metas = [read_meta(data[at : at + HEAD_BYTES]) for at in (0, 4096)]
    meta = max(metas, key=lambda each: each.transaction)
    if meta.page_bytes == 4096:
        found = find_values(memoryview(data), meta)
        assert {key: data[place.start : place.start + place.nbytes] for key, place in found.items()} == expected
        assert all(place.start % 4096 == 16 for place in found.values() if place.own_pages)


def test_a_tree_that_goes_in_circles_ends(whole: Path) -> None:
    """A page that is its own child is damage, not an endless loop."""
    data = bytearray(whole.read_bytes())
    metas = [read_meta(bytes(data[at : at + HEAD_BYTES])) for at in (0, 4096)]
    meta = max(metas, key=lambda each: each.transaction)
    root = meta.root * meta.page_bytes
    assert data[root + 10] & 1, "the tree of this pack should have more than one level"
    node = root + int.from_bytes(data[root + 16 : root + 18], "little")
    data[node : node + 6] = meta.root.to_bytes(6, "little")
    with pytest.raises(BadTree, match=f"page {meta.root} of its tree cannot be"):
        find_values(memoryview(bytes(data)), meta)


def test_opening_reads_no_samples(tmp_path: Path) -> None:
    """C7: of a pack that is not in the page cache, opening and one sample read little."""
    rng = np.random.default_rng(0)
    with PackWriter(tmp_path / "p.lmdb", chunk_bytes=1 << 20) as writer:
        for _ in range(24):
            writer.add_columns((rng.integers(0, 255, (10, 100_000), np.uint8), np.arange(10)))
    script = """
        import os, sys
        from shmloader.packfile import PackedDataset
        fd = os.open(sys.argv[1], os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        def resident():
            with open("/proc/self/status") as status:
                return next(int(line.split()[1]) for line in status if line.startswith("RssFile"))
        def read():
            with open("/proc/self/io") as io:
                return next(int(line.split()[1]) for line in io if line.startswith("read_bytes"))
        before, mapped = read(), resident()
        packed = PackedDataset(sys.argv[1])
        packed[137]
        print(read() - before, (resident() - mapped) * 1024)
    """
    from_disk, mapped = map(int, run_script(script, args=[str(tmp_path / "p.lmdb")]).check().stdout.split())
    assert from_disk < 1_000_000
    assert mapped < 8_000_000


def test_cold_random_batches_read_what_they_need(tmp_path: Path) -> None:
    """D10: a tenth of a pack that is not in the page cache, in batches: at most 1.5 times its bytes come from disk."""
    rng = np.random.default_rng(0)
    with PackWriter(tmp_path / "p.lmdb", chunk_bytes=1 << 20) as writer:
        for _ in range(20):
            writer.add_columns(rng.integers(0, 255, (30, 100_000), np.uint8))
    script = """
        import os, sys
        import numpy as np
        import torch
        from shmloader.packfile import PackedDataset
        packed = PackedDataset(sys.argv[1])
        out = torch.empty(6, 100_000, dtype=torch.uint8)
        fd = os.open(sys.argv[1], os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        def read():
            with open("/proc/self/io") as io:
                return next(int(line.split()[1]) for line in io if line.startswith("read_bytes"))
        picked = np.random.default_rng(1).permutation(600)[:60].reshape(10, 6)
        before = read()
        for indices in picked:
            packed.gather.fields[0].gather(np.ascontiguousarray(indices), out)
            for row, index in zip(out, indices):
                assert torch.equal(row, packed[int(index)])
        print(read() - before)
    """
    from_disk = int(run_script(script, args=[str(tmp_path / "p.lmdb")]).check().stdout)
    assert from_disk <= 1.5 * 60 * 100_000


READ_ALL = """
    import os, sys
    from shmloader.packfile import PackedDataset
    if len(sys.argv) > 2:  # after importing: the other user may not see where Python lies
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    packed = PackedDataset(sys.argv[1])
    print(len(list(packed)))
"""


def test_reading_needs_no_right_to_write(whole: Path) -> None:
    """D9: as another user, from a directory of mode 555 with a file of mode 444; names and times stay."""
    other = os.getuid() == 0
    # pytest's own folders are closed to others, and several of its processes set their modes.
    with tempfile.TemporaryDirectory(prefix="shmloader-test-") as text:
        Path(text).chmod(0o755)
        folder = Path(text) / "ro"
        folder.mkdir()
        shutil.copy(whole, folder / "p.lmdb")
        (folder / "p.lmdb").chmod(0o444)
        folder.chmod(0o555)
        status = (folder / "p.lmdb").stat()
        try:
            done = run_script(READ_ALL, args=[str(folder / "p.lmdb"), *(["other"] if other else [])])
            assert done.check().stdout == "400\n"
            assert os.listdir(folder) == ["p.lmdb"]
            now = (folder / "p.lmdb").stat()
        finally:
            folder.chmod(0o755)
    assert all(getattr(now, name) == getattr(status, name) for name in ("st_mtime_ns", "st_ctime_ns", "st_size"))


def test_reading_works_on_a_read_only_mount(whole: Path, tmp_path: Path) -> None:
    """D9: a bind mount that nobody can write to."""
    if os.getuid() != 0:
        pytest.skip("mounting needs root")
    target = tmp_path / "mounted"
    target.mkdir()
    mounted = run_command(["mount", "--bind", "-o", "ro", str(whole.parent), str(target)])
    if mounted.returncode:
        pytest.skip(f"cannot mount here: {mounted.stderr.strip()}")
    try:
        with pytest.raises(PackError, match="Read-only file system"):
            pack([1], target / "q.lmdb")
        assert len(list(PackedDataset(target / whole.name))) == 400
    finally:
        run_command(["umount", "-l", str(target)]).check()


def test_a_file_without_the_right_to_read_is_named(whole: Path, tmp_path: Path) -> None:
    """As another user: permission denied, with the path."""
    if os.getuid() != 0:
        pytest.skip("changing the user needs root")
    shutil.copy(whole, tmp_path / "p.lmdb")
    done = run_script(READ_ALL, args=[str(tmp_path / "p.lmdb"), "other"])
    assert done.returncode == 1
    assert "Permission denied" in done.stderr
