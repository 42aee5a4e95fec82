"""Packs in many processes and threads: opened before a fork, after it, at one instant, and across kills."""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path

import lmdb
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from shmloader.errors import PackDamaged
from shmloader.packfile import PackedDataset, pack
from support import no_leaks, run_file, run_script, write_script

COUNT = 300


def make(path: Path) -> Path:
    """A pack in which every field of sample i can be told from i."""
    samples = [(np.full((20, 10), i, np.int32), f"s{i}", np.arange(i % 5), i) for i in range(COUNT)]
    return Path(pack(samples, path, chunk_bytes=16384, field_names=("x", "s", "r", "n")).path)


def right(packed: PackedDataset, indices: range | np.ndarray = range(COUNT)) -> bool:
    """Whether these samples are what ``make`` wrote, one by one and gathered."""
    for i in map(int, indices):
        x, s, r, n = packed[i]
        if not (bool((x == i).all()) and s == f"s{i}" and len(r) == i % 5 and n == i):
            return False
    picked = np.array(indices, np.int64)
    out = torch.empty(len(picked), 20, 10, dtype=torch.int32)
    packed.gather.fields[0].gather(picked, out)
    return np.array_equal(out[:, 3, 3].numpy(), picked)


CHECK = """
    import os, signal, sys
    import numpy as np
    import torch
    from shmloader.packfile import PackedDataset
    def right(packed, count=300):
        for i in range(count):
            x, s, r, n = packed[i]
            assert bool((x == i).all()) and s == f"s{i}" and len(r) == i % 5 and n == i, i
        picked = np.random.default_rng(os.getpid()).integers(0, count, 64)
        out = torch.empty(64, 20, 10, dtype=torch.int32)
        packed.gather.fields[0].gather(picked, out)
        assert np.array_equal(out[:, 3, 3].numpy(), picked)
"""


def test_reading_before_during_and_after_a_fork(tmp_path: Path) -> None:
    """D1: the parent reads, forks, and goes on reading, while four children read all; twenty rounds in any order."""
    script = """
    path = sys.argv[1]
    used = PackedDataset(path)
    for round in range(20):
        if round % 2:
            used[round]
        children = []
        for number in range(4):
            child = os.fork()
            if child == 0:
                try:
                    right(used if number % 2 else PackedDataset(path))
                except BaseException:
                    os._exit(1)
                os._exit(0)
            children.append(child)
            used[number]
        right(used if round % 3 else PackedDataset(path))
        assert all(os.waitpid(child, 0)[1] == 0 for child in children)
    print("right")
    """
    done = run_script(CHECK + script, args=[str(make(tmp_path / "p.lmdb"))]).silent()
    assert done.stdout == "right\n"


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_torchs_own_loader_reads_packs(tmp_path: Path, method: str) -> None:
    """C6: a dataset that was used in the parent goes to workers of every start method, twice."""
    path = make(tmp_path / "p.lmdb")
    script = write_script(
        tmp_path,
        """
        import sys
        from torch.utils.data import DataLoader
        from shmloader.packfile import PackedDataset
        if __name__ == "__main__":
            packed = PackedDataset(sys.argv[1], fields=("x", "s", "n"))
            packed[5]
            loader = DataLoader(packed, 32, num_workers=2, multiprocessing_context=sys.argv[2])
            for epoch in range(2):
                seen = [n for x, s, n in loader for n in n.tolist()]
                assert seen == list(range(300)), seen
            print("right")
        """,
    )
    assert run_file(script, args=[str(path), method]).check().stdout == "right\n"


def test_threads_read_at_one_time(tmp_path: Path) -> None:
    """Eight threads open and read the same pack at once."""
    path = make(tmp_path / "p.lmdb")
    barrier, results = threading.Barrier(8), []

    def read(seed: int) -> None:
        barrier.wait(30)
        picked = np.random.default_rng(seed).permutation(COUNT)
        results.append(right(PackedDataset(path), picked))

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [True] * 8


def test_a_fork_in_the_middle_of_an_opening_harms_nobody(tmp_path: Path) -> None:
    """D1: one thread opens packs all the time, another forks: every child can open and read."""
    script = """
    import threading
    path, stop = sys.argv[1], threading.Event()
    def churn():
        while not stop.is_set():
            PackedDataset(path)[0]
    thread = threading.Thread(target=churn)
    thread.start()
    for round in range(40):
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            ok = PackedDataset(path)[7][3] == 7
            os._exit(0 if ok else 1)
        assert os.waitpid(child, 0)[1] == 0
    stop.set()
    thread.join()
    print("right")
    """
    assert run_script(CHECK + script, args=[str(make(tmp_path / "p.lmdb"))]).check().stdout == "right\n"


def test_reading_imports_nothing(tmp_path: Path) -> None:
    """D1: a module that another thread is importing while a worker is forked stays locked in the worker for ever."""
    script = """
    np.random.default_rng(0)  # numpy's own lazy import
    before = set(sys.modules)
    packed = PackedDataset(sys.argv[1])
    right(packed)
    for field in packed.gather.fields:
        if not field.is_plain:
            field.gather_ragged(np.zeros(1, np.int64), torch.empty(
                int(field.lengths(np.zeros(1, np.int64))[0]), dtype=torch.uint8 if field.dtype == "str" else torch.int64
            ))
    print(sorted(name for name in set(sys.modules) - before if not name.startswith("encodings")))
    """
    done = run_script(CHECK + script, args=[str(make(tmp_path / "p.lmdb"))]).check()
    assert done.stdout == "[]\n"


@pytest.mark.slow
def test_a_hundred_and_forty_readers(tmp_path: Path) -> None:
    """D8: 140 processes open at one instant and read, five rounds with SIGKILL between; nothing is left to clean."""
    script = """
    path = sys.argv[1]
    for round in range(5):
        begin, begun = os.pipe()
        ready, tell = os.pipe()
        children = []
        for number in range(140):
            child = os.fork()
            if child == 0:
                os.close(begun)
                os.read(begin, 1)  # ends for all at once, when the parent closes its side
                try:
                    packed = PackedDataset(path)
                    right(packed, 20)
                except BaseException:
                    os.write(tell, b"!")
                    os._exit(1)
                os.write(tell, b".")
                signal.pause()
            children.append(child)
        os.close(begin)
        os.close(begun)
        said = b""
        while len(said) < 140:
            said += os.read(ready, 140)
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        os.close(ready)
        os.close(tell)
        assert said == b"." * 140, said
    assert os.listdir(os.path.dirname(path)) == ["p.lmdb"]
    print("right")
    """
    done = run_script(CHECK + script, args=[str(make(tmp_path / "p.lmdb"))], timeout=300).check()
    assert done.stdout == "right\n"


def test_a_dataset_is_pickled_as_path_and_options(tmp_path: Path) -> None:
    """C6: a few hundred bytes, with selection and transform; what comes out is the same dataset."""
    path = make(tmp_path / "p.lmdb")
    packed = PackedDataset(path, fields=("n", "x"), transform=len)
    pickled = pickle.dumps(packed)
    assert len(pickled) < 1000
    again = pickle.loads(pickled)
    assert (len(again), again[3], again.fields, again.path) == (COUNT, 2, packed.fields, str(path))
    assert pickle.loads(pickle.dumps(PackedDataset(path, fields="n")))[7] == 7


def test_a_relative_path_survives_a_change_of_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that starts elsewhere finds the file."""
    make(tmp_path / "p.lmdb")
    monkeypatch.chdir(tmp_path)
    pickled = pickle.dumps(PackedDataset("p.lmdb"))
    monkeypatch.chdir("/")
    assert pickle.loads(pickled)[-1][3] == COUNT - 1


def test_a_pack_that_was_replaced_is_not_mixed_up(tmp_path: Path) -> None:
    """A worker that would read other samples than its parent is told; an equal pack is welcome."""
    path = make(tmp_path / "p.lmdb")
    packed = PackedDataset(path)
    pickled = pickle.dumps(packed)
    make(tmp_path / "equal.lmdb")
    os.replace(tmp_path / "equal.lmdb", path)
    assert right(pickle.loads(pickled))
    pack([(1, 2)], path, overwrite=True)
    with pytest.raises(PackDamaged, match="has been replaced by another pack"):
        pickle.loads(pickled)
    assert right(packed)
    assert len(PackedDataset(path)) == 1


def test_one_mapping_for_all_datasets_of_a_file(tmp_path: Path) -> None:
    """Datasets of one file share it, also by another name; closing is forgetting, and leaves nothing."""
    path = make(tmp_path / "p.lmdb")
    (tmp_path / "link.lmdb").symlink_to(path)
    PackedDataset(path)
    with no_leaks():
        many = [PackedDataset(tmp_path / name) for name in ("p.lmdb", "link.lmdb") for _ in range(20)]
        assert len({id(each._pack) for each in many}) == 1
        del many


def test_a_pack_can_be_open_in_lmdb_too(tmp_path: Path) -> None:
    """Who looks at the file with LMDB's own tools does not disturb us, nor we them."""
    path = make(tmp_path / "p.lmdb")
    with lmdb.open(str(path), subdir=False, readonly=True, lock=False) as env, env.begin() as txn:
        packed = PackedDataset(path)
        assert right(packed)
        assert txn.get(b"manifest") == packed.manifest.to_bytes()
    assert right(packed)


def test_an_epoch_through_torchs_loader_leaks_nothing(tmp_path: Path) -> None:
    """Descriptors, mappings and processes are as before, epoch after epoch."""
    packed = PackedDataset(make(tmp_path / "p.lmdb"), fields=("x", "n"))
    list(DataLoader(packed, 50))
    with no_leaks():
        for _ in range(3):
            assert sum(len(n) for _, n in DataLoader(packed, 50)) == COUNT
