"""The plan as a Python call: facts that are measured, numbers that add up, and advice that says what is wrong."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from shmloader import PackedDataset, pack
from shmloader.errors import WorkerDied
from shmloader.facts import BatchFacts
from shmloader.limits import UNLIMITED, Cpus, HostLimits, HugePages, Limit, Ranks
from shmloader.plan import ASSUMED_PRIVATE, MemoryPlan, plan_memory, plan_with
from shmloader.probe import private_bytes, probe_batches

MIB = 1 << 20


def host(free: int = 1 << 34, shm: int | None = 1 << 34, cpus: int = 4, ranks: int = 1) -> HostLimits:
    """Return the facts of a made-up host."""
    mount = None if shm is None else Limit("shared-memory mount", shm, shm, "/dev/shm")
    return HostLimits(
        shm=mount,
        shm_problem="" if mount else "/dev/shm is mounted read-only",
        memory=(Limit("host's available memory", free, free, "/proc/meminfo: MemAvailable"),),
        memlock=Limit("locked-memory limit", UNLIMITED, UNLIMITED, "getrlimit(RLIMIT_MEMLOCK)"),
        cpus=Cpus(cpus, cpus, None),
        local_ranks=Ranks(ranks, "default"),
        numa_nodes=(0,),
        huge_pages=HugePages("never", "madvise", 2 * MIB, 0, "/sys"),
    )


class Rows(Dataset[Any]):
    """Samples of ``nbytes`` each."""

    def __init__(self, samples: int = 200, nbytes: int = 1000) -> None:
        self.samples, self.nbytes = samples, nbytes

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.nbytes,), index % 256, dtype=torch.uint8)


class Growing(Rows):
    """Sample i has i + 1 rows."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(index + 1, 8)


class Hoarding(Rows):
    """Keeps 24 MiB to itself in every process that reads it."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if "kept" not in self.__dict__:
            self.kept = torch.ones(24 * MIB, dtype=torch.uint8)
        return super().__getitem__(index)


class Raising(Rows):
    def __getitem__(self, index: int) -> torch.Tensor:
        raise KeyError(f"no sample {index}")


class Dying(Rows):
    def __getitem__(self, index: int) -> torch.Tensor:
        import os

        os._exit(7)


def test_batch_and_private_bytes_are_measured() -> None:
    """64 samples of 1,000 bytes and their indices take that in whole pages; the worker's own memory is seen."""
    probe = probe_batches(Rows(), [list(range(64))] * 2, None)
    assert len(probe.batch_bytes) == 2
    assert all(64 * 1008 <= nbytes <= 64 * 1008 + 2 * 4096 for nbytes in probe.batch_bytes)
    assert 0 < probe.private_bytes < 256 * MIB


def test_memory_that_a_dataset_keeps_counts_as_the_workers_own() -> None:
    """A cache of 24 MiB per process is in the private bytes, to a tenth."""
    indices = [list(range(64))]
    plain = probe_batches(Rows(), indices, None).private_bytes
    hoarding = probe_batches(Hoarding(), indices, None).private_bytes
    assert abs(hoarding - plain - 24 * MIB) < 2.4 * MIB


def test_private_memory_of_a_process_that_is_gone_is_nothing() -> None:
    """No such process, no bytes; this process has some."""
    assert private_bytes(1 << 30) == 0
    assert private_bytes() > 0


def test_what_the_dataset_raises_is_raised() -> None:
    """The user's own exception arrives, with the child's traceback."""
    with pytest.raises(KeyError, match="no sample"):
        plan_memory(Raising(), batch_size=4, limits=host())


def test_a_dataset_that_kills_its_process_is_named() -> None:
    """An exit of the child is WorkerDied with its exit code, not a hang."""
    with pytest.raises(WorkerDied) as caught:
        plan_memory(Dying(), batch_size=4, limits=host())
    assert caught.value.exitcode == 7


def test_the_plan_adds_up() -> None:
    """Slots, arena and total follow from the batch, the workers and the ranks."""
    plan = plan_memory(Rows(), batch_size=64, num_workers=2, prefetch_factor=3, local_ranks=2, limits=host())
    assert plan.slots == 2 * 3 + 2
    assert plan.slots * plan.slot_bytes <= plan.arena_used_bytes <= plan.arena_bytes
    assert plan.total_bytes == 2 * (plan.arena_used_bytes + 2 * plan.private_bytes)
    assert plan.fits
    assert plan.backing == "posix"
    assert plan.missing_bytes == 0


def test_samples_of_unequal_size_give_room_for_larger_ones() -> None:
    """If the batches that were made differ, the arena gets an eighth more and the advice says why."""
    plan = plan_memory(Growing(), batch_size=20, num_workers=1, collate_fn=list, limits=host())
    assert not plan.batch.certain
    assert plan.batch.largest_bytes > plan.batch.batch_bytes
    assert any("largest batch is not known" in text for text in plan.advice)


def test_given_sample_bytes_measure_nothing() -> None:
    """sample_bytes= plans even for a dataset that cannot be read here."""
    plan = plan_memory(Raising(), batch_size=10, sample_bytes=5000, num_workers=1, limits=host())
    assert plan.batch.source == "given"
    assert plan.slot_bytes >= 50_000


def test_a_small_mount_means_memfd_and_says_what_would_change_it() -> None:
    """64 KiB of /dev/shm do not make the plan fail: memory without a mount is used (A1)."""
    plan = plan_memory(Rows(), batch_size=64, num_workers=2, limits=host(shm=64 << 10))
    assert plan.fits
    assert plan.backing == "memfd"
    assert any("--shm-size=" in text and "64.0 KiB free" in text for text in plan.advice)
    missing = plan_memory(Rows(), batch_size=64, num_workers=2, limits=host(shm=None))
    assert any("read-only" in text for text in missing.advice)


def test_ram_reduces_slots_and_then_workers() -> None:
    """What the user gives is kept to: fewer slots first; workers that were not asked for go as well."""
    private = plan_memory(Rows(nbytes=40_000), batch_size=64, num_workers=1, limits=host()).private_bytes
    ram = 2 * private + 12 * MIB + MIB
    plan = plan_memory(Rows(nbytes=40_000), batch_size=64, num_workers=2, ram=ram, limits=host())
    assert plan.fits
    assert 3 <= plan.slots < 6
    assert plan.total_bytes <= ram
    assert any("instead of 6" in text for text in plan.advice)
    fewer = plan_memory(Rows(nbytes=40_000), batch_size=64, ram=ram, limits=host(cpus=16))
    assert fewer.fits
    assert fewer.num_workers < 16
    assert fewer.num_workers * fewer.private_bytes + fewer.local_ranks * fewer.arena_bytes <= ram


def test_what_does_not_fit_is_said_with_numbers_and_a_way_out() -> None:
    """The advice has the bytes that are needed and missing, and a batch size that then does fit."""
    ram = ASSUMED_PRIVATE + 16 * MIB
    plan = plan_memory(Rows(), batch_size=128, num_workers=1, ram=ram, sample_bytes=100_000, limits=host())
    assert not plan.fits
    assert plan.missing_bytes > 0
    (text,) = [text for text in plan.advice if "at least" in text]
    fewer = int(text.partition("a batch size of about ")[2].partition(",")[0])
    assert fewer > 64
    smaller = plan_memory(Rows(), batch_size=fewer, num_workers=1, ram=ram, sample_bytes=100_000, limits=host())
    assert smaller.fits


def test_more_ram_than_the_host_has_is_noticed() -> None:
    """The host's limit rules, and the plan says so (A3)."""
    plan = plan_memory(Rows(), batch_size=8, num_workers=0, ram=1 << 40, limits=host())
    assert plan.limit.name == "host's available memory"
    assert any("You gave 1.0 TiB" in text for text in plan.advice)


def test_default_workers_are_the_usable_cpus_shared_by_the_ranks() -> None:
    """Not the host's cores: what affinity and quota leave, divided by the ranks (C11)."""
    assert plan_memory(Rows(), batch_size=8, sample_bytes=1, limits=host(cpus=6)).num_workers == 6
    assert plan_memory(Rows(), batch_size=8, sample_bytes=1, local_ranks=4, limits=host(cpus=6)).num_workers == 1
    crowded = plan_memory(Rows(), batch_size=8, sample_bytes=1, num_workers=9, limits=host(cpus=6))
    assert any("share 6 CPUs" in text for text in crowded.advice)


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": 0},
        {"batch_size": 1, "ram": 0},
        {"batch_size": 1, "num_workers": -1},
        {"batch_size": 1, "prefetch_factor": 0},
        {"batch_size": 1, "sample_bytes": 0},
    ],
)
def test_senseless_numbers_are_refused(wrong: dict[str, int]) -> None:
    """ValueError names the argument."""
    with pytest.raises(ValueError, match="at least"):
        plan_memory(Rows(), limits=host(), **wrong)


def test_an_empty_dataset_is_refused() -> None:
    """There is nothing to measure."""
    with pytest.raises(ValueError, match="empty"):
        plan_memory(Rows(samples=0), batch_size=1, limits=host())


def test_fewer_samples_than_a_batch() -> None:
    """The batch is the whole dataset."""
    plan = plan_memory(Rows(samples=3), batch_size=64, num_workers=1, limits=host())
    assert plan.fits
    assert plan.slot_bytes == 4096


def test_the_plan_is_plain_data() -> None:
    """to_dict survives JSON and holds every field, and the line to paste."""
    plan = plan_memory(Rows(), batch_size=8, sample_bytes=10, num_workers=2, limits=host())
    document = json.loads(json.dumps(plan.to_dict()))
    assert {field.name for field in dataclasses.fields(MemoryPlan)} < set(document)
    assert document["call"] == plan.call()
    assert document["host"]["memory"][0]["source"] == "/proc/meminfo: MemAvailable"


def test_the_line_to_paste_is_python_that_the_loader_takes() -> None:
    """The line makes a loader with exactly these numbers."""
    from shmloader import DataLoader

    plan = plan_memory(Rows(), batch_size=8, num_workers=2, limits=host())
    loader = eval(plan.call(), {"DataLoader": DataLoader, "dataset": Rows()})
    assert (loader.batch_size, loader.num_workers, loader.prefetch_factor) == (8, 2, 2)
    assert loader.arena_bytes == plan.arena_bytes


def test_without_workers_no_prefetch_is_written() -> None:
    """torch refuses prefetch_factor without workers."""
    plan = plan_memory(Rows(), batch_size=8, sample_bytes=10, num_workers=0, limits=host())
    assert "prefetch_factor" not in plan.call()
    assert plan.slots == 3


def test_the_call_names_the_pack_if_that_says_all(tmp_path: Path) -> None:
    """Fields are repeated; a transform cannot be, so then the dataset is the user's."""
    path = pack([(torch.ones(3), i) for i in range(40)], tmp_path / "p.lmdb").path
    for dataset, start in (
        (PackedDataset(path), f"DataLoader(PackedDataset({path!r}), batch_size=4"),
        (PackedDataset(path, fields="0"), f"DataLoader(PackedDataset({path!r}, fields='0'), batch_size=4"),
        (
            PackedDataset(path, fields=("1", "0")),
            f"DataLoader(PackedDataset({path!r}, fields=('1', '0')), batch_size=4",
        ),
        (PackedDataset(path, transform=list), "DataLoader(dataset, batch_size=4"),
    ):
        assert plan_memory(dataset, batch_size=4, sample_bytes=100, limits=host()).call().startswith(start)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    sample=st.integers(1, 1 << 22),
    batch=st.integers(1, 2048),
    workers=st.none() | st.integers(0, 64),
    prefetch=st.none() | st.integers(1, 16),
    ram=st.none() | st.integers(1, 1 << 38),
    ranks=st.integers(1, 16),
    free=st.integers(1, 1 << 40),
)
def test_a_plan_that_fits_keeps_to_every_limit(
    sample: int, batch: int, workers: int | None, prefetch: int | None, ram: int | None, ranks: int, free: int
) -> None:
    """Arenas at their cap and all workers' memory never exceed what was given or what the host has (G1)."""
    plan = plan_memory(
        Rows(),
        batch_size=batch,
        sample_bytes=sample,
        num_workers=workers,
        prefetch_factor=prefetch,
        ram=ram,
        local_ranks=ranks,
        limits=host(free=free, cpus=8),
    )
    at_most = ranks * (plan.arena_bytes + plan.num_workers * plan.private_bytes)
    assert plan.total_bytes <= at_most
    if plan.fits:
        assert at_most <= min(free, free if ram is None else ram)
        assert plan.slots > plan.num_workers
        assert plan.arena_bytes >= plan.slots * plan.slot_bytes
    else:
        assert plan.missing_bytes > 0
        assert any("at least" in text for text in plan.advice)
    again = plan_with(plan, num_workers=plan.num_workers, prefetch_factor=prefetch or 2)
    assert (again.slots, again.arena_bytes, again.fits) == (plan.slots, plan.arena_bytes, plan.fits)


def test_batch_facts_are_frozen() -> None:
    """Facts do not change under a plan."""
    facts = BatchFacts(1, 1, 1, 1, True, "given")
    with pytest.raises(dataclasses.FrozenInstanceError):
        facts.batch_size = 2  # type: ignore[misc]
