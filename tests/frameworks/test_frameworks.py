"""Two epochs inside other people's training loops, with our loader and with torch's: nobody can tell which it was.

Needs the extra ``frameworks``; without it the tests of a package that is missing are skipped. DDP needs torch alone.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import shmloader
from frameworks import task
from support import run_command, shm_names

HERE = Path(__file__).resolve().parent
PATH = os.pathsep.join([str(HERE.parent), str(HERE.parent.parent)])
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

pytestmark = [pytest.mark.slow, pytest.mark.frameworks]
datasets = pytest.mark.parametrize("dataset", task.DATASETS)


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plain dataset, packed."""
    path = tmp_path_factory.mktemp("pack") / "lines.lmdb"
    shmloader.pack(task.Lines(), path)
    return path


def run(
    script: str, dataset: str, pack: Path, out: Path, *, launcher: Sequence[str] = (), options: Sequence[str] = ()
) -> list[task.Report]:
    """Run a training script; return the reports of its ranks. Nobody and no name may be left of it."""
    before = shm_names()
    command = [sys.executable, *launcher, str(HERE / script), dataset, str(pack), str(out), *options]
    environment = {"PYTHONPATH": PATH, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = run_command(command, timeout=240, env=environment, cwd=out).check()
    assert "Traceback" not in result.stderr, result.stderr
    assert not {name for name in shm_names() - before if "shmloader" in name}
    return [task.Report.read(path) for path in sorted(out.glob("rank*.json"))]


def judge(reports: list[task.Report], world: int) -> None:
    """Our iterator was used, each sample was seen once per epoch, all is as with torch's loader, nothing is left."""
    assert [report.rank for report in reports] == list(range(world))
    for report in reports:
        theirs, ours = report.trainings["torch"], report.trainings["shmloader"]
        assert (theirs.iterator, ours.iterator) == ("_MultiProcessingDataLoaderIter", "WorkerPass")
        assert ours.arena_bytes == task.ARENA_BYTES
        assert ours.seen == theirs.seen
        assert ours.losses == theirs.losses
        assert len(ours.losses) == task.EPOCHS * task.SAMPLES // task.BATCH // world
        assert all(map(math.isfinite, ours.losses))
        assert ours.workers_left == []
        assert ours.mapped_left == 0
    epochs = [
        [index for report in reports for index in report.trainings["shmloader"].seen[epoch]]
        for epoch in range(task.EPOCHS)
    ]
    for indices in epochs:
        assert sorted(indices) == list(range(task.SAMPLES))
    assert epochs[0] != epochs[1], "shuffled anew"


@datasets
def test_ddp_of_two_processes_trains_as_with_torchs_loader(dataset: str, pack: Path, tmp_path: Path) -> None:
    """torchrun, gloo, DistributedSampler: each rank has its half, to the last bit as with torch."""
    judge(run("train_ddp.py", dataset, pack, tmp_path, launcher=TORCHRUN), world=2)


@datasets
def test_lightning_trains_as_with_torchs_loader(dataset: str, pack: Path, tmp_path: Path) -> None:
    """One device, the loader made in a hook."""
    pytest.importorskip("lightning", reason="needs the extra 'frameworks'")
    judge(run("train_lightning.py", dataset, pack, tmp_path), world=1)


@pytest.mark.parametrize("way", ["hook", "argument"])
def test_lightning_builds_the_loader_anew_with_all_its_arguments(way: str, pack: Path, tmp_path: Path) -> None:
    """Two devices: Lightning puts its own sampler in and must not lose ``arena_bytes``, however the loader came."""
    pytest.importorskip("lightning", reason="needs the extra 'frameworks'")
    judge(run("train_lightning.py", "pack", pack, tmp_path, options=["--devices", "2", "--way", way]), world=2)


@datasets
@pytest.mark.parametrize("world", [1, 2])
def test_accelerate_trains_as_with_torchs_loader(world: int, dataset: str, pack: Path, tmp_path: Path) -> None:
    """Our loader stands where ``prepare`` put torch's: sharded by accelerate, its end of an epoch made known."""
    pytest.importorskip("accelerate", reason="needs the extra 'frameworks'")
    judge(run("train_accelerate.py", dataset, pack, tmp_path, launcher=TORCHRUN if world == 2 else ()), world=world)
