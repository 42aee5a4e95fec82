"""One pack, many readers: loaders beside each other, in threads, in two jobs, after the parent read (D1, D8)."""

from __future__ import annotations

import subprocess
import threading

import numpy as np
import pytest
import torch

from shmloader import DataLoader, PackedDataset, pack
from support import DEADLINE_S, no_leaks, run_script, script_command

COUNT = 320


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Sample i is (300 numbers i, i)."""
    samples = [(np.full(300, i, np.int32), i) for i in range(COUNT)]
    return pack(samples, tmp_path_factory.mktemp("shared") / "p.lmdb", chunk_bytes=16384).path


def epoch(dataset: PackedDataset, **arguments: object) -> list[int]:
    """The labels of one epoch, every row compared."""
    found: list[int] = []
    loader: DataLoader[object] = DataLoader(dataset, 16, num_workers=2, **arguments)  # type: ignore[arg-type]
    for x, label in loader:  # type: ignore[misc]
        assert bool((x == label[:, None]).all())
        found += label.tolist()
    loader.close()
    return found


def test_two_loaders_on_one_pack_take_turns_batch_by_batch(path: str) -> None:
    """D1: one dataset, read in the parent first; training and validation at once, over two epochs."""
    with no_leaks():
        dataset = PackedDataset(path, verify="first-touch")
        assert dataset[7][1] == 7
        loaders = [DataLoader(dataset, 16, num_workers=2, persistent_workers=True) for _ in range(2)]
        for _ in range(2):
            for number, pair in enumerate(zip(*loaders, strict=True)):
                for x, label in pair:
                    assert label.tolist() == list(range(16 * number, 16 * number + 16))
                    assert bool((x == label[:, None]).all())
            assert dataset[9][1] == 9
        for loader in loaders:
            loader.close()
        del loader, loaders, dataset, pair, x, label


def test_loaders_in_threads_are_strangers_to_each_other(path: str) -> None:
    """Three threads, each with a loader of its own on one dataset, and one that reads samples itself."""
    dataset = PackedDataset(path)
    found: list[object] = []
    failed: list[BaseException] = []

    def run(body: object) -> None:
        try:
            found.append(body())  # type: ignore[operator]
        except BaseException as error:  # noqa: BLE001 - told below
            failed.append(error)

    bodies = [lambda: epoch(dataset)] * 2 + [lambda: [dataset[i][1] for i in range(COUNT)]]
    threads = [threading.Thread(target=run, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not failed
    assert found == [list(range(COUNT))] * 3


@pytest.mark.parametrize("num_workers", [0, 2])
def test_threads_that_share_an_iterator_get_each_batch_once(path: str, num_workers: int) -> None:
    """Three threads call next() on one iterator, as prefetching trainers do: no batch is lost, torn or given twice."""
    iterator = iter(DataLoader(PackedDataset(path), 2, num_workers=num_workers))
    found: list[list[int]] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            for x, label in iterator:
                assert bool((x == label[:, None]).all())
                found.append(label.tolist())
        except BaseException as error:  # noqa: BLE001 - told below
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not failed
    assert sorted(found) == [[i, i + 1] for i in range(0, COUNT, 2)]


JOB = """
    import sys
    from shmloader import DataLoader, PackedDataset
    dataset = PackedDataset(sys.argv[1], verify="first-touch")
    for _ in range(3):
        labels = [i for x, label in DataLoader(dataset, 16, num_workers=2) for i in label.tolist()]
        assert labels == list(range(320))
    print("right")
"""


def test_two_jobs_on_one_machine_share_a_pack_and_nothing_else(path: str) -> None:
    """A4, D8: started at one time, with arenas of their own; both are right and silent."""
    jobs = [
        subprocess.Popen(script_command(JOB, [path]), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for job in jobs:
        out, err = job.communicate(timeout=2 * DEADLINE_S)
        assert (job.returncode, out, err) == (0, "right\n", "")


SUBPROCESSES = """
    import subprocess, sys
    import torch
    from torch.utils.data import Dataset
    from shmloader import DataLoader

    class Calls(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            out = subprocess.run([sys.executable, "-S", "-c", f"print({index} ** 2)"], capture_output=True, check=True)
            return int(out.stdout)

    loader = DataLoader(Calls(), 2, num_workers=2)
    iterator = iter(loader)
    first = next(iterator).tolist()
    subprocess.run([sys.executable, "-S", "-c", "pass"], check=True)
    print(first + [i for batch in iterator for i in batch.tolist()])
"""


def test_subprocesses_of_workers_and_of_the_main_process_are_nobodys_business() -> None:
    """Programs that a dataset or a training loop runs in the middle of an epoch."""
    assert run_script(SUBPROCESSES).silent().stdout == f"{[i * i for i in range(8)]}\n"


def test_a_loader_in_a_worker_of_a_loader_is_its_own(path: str) -> None:
    """A dataset that reads by a loader without workers; workers are daemons and may have no children."""

    class Inner(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            loader: DataLoader[object] = DataLoader(PackedDataset(path), 80)
            return int(list(loader)[index][1][3])  # type: ignore[index]

    assert [batch.tolist() for batch in DataLoader(Inner(), 2, num_workers=1)] == [[3, 83], [163, 243]]
