"""Packing: what a killed, failing or second packer leaves behind, and when a pack has its name."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shmloader.errors import (
    MisuseError,
    NotAPack,
    PackError,
    PackExists,
    PackUnfinished,
)
from shmloader.packfile import PackedDataset, PackWriter, pack
from support import no_leaks, run_script, small_tmpfs


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
        assert "PackInUse" in done.stderr
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


def test_packing_needs_no_address_space(tmp_path: Path) -> None:
    """D3: nothing is mapped while packing, so no limit on address space, and no map size, can stop it."""
    script = """
        import resource, sys, numpy as np
        from shmloader.packfile import PackWriter
        writer = PackWriter(sys.argv[1])
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + (96 << 20), -1))
        for i in range(16):
            writer.add_columns(np.zeros((16, 1 << 20), np.uint8))
        assert writer.payload_bytes == 256 << 20
        writer.discard()
    """
    run_script(script, args=[str(tmp_path / "p.lmdb")]).check()


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
