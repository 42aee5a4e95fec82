"""What our way to the GPU costs, beside torch's: bandwidth, page-locking, a small training, overlap.

Every function returns a dict of numbers; ``targets`` says which of them are promised.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.utils.data
from torch.utils.data import Dataset

import shmloader
from gpu_bench import Numbered
from shmloader.pinning import Engine
from shmloader.segment import Segment

GIB = 1 << 30
TICKS = os.sysconf("SC_CLK_TCK")


class Images(Dataset[tuple[torch.Tensor, int]]):
    """uint8 3x224x224 images in memory, and a label."""

    def __init__(self, count: int) -> None:
        self.images = torch.randint(0, 256, (count, 3, 224, 224), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index], index % 10


def timed_on_device(work: Callable[[], object], repeats: int) -> float:
    """Seconds that the device takes for ``repeats`` times ``work``, by its own clock."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    work()
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def bandwidth(mib: int, repeats: int, rounds: int) -> dict[str, float]:
    """Host to device, GB/s, from a slot of ours, from memory that torch pinned, and from pageable memory.

    Medians of ``rounds`` in turns.
    """
    elements = (mib << 20) // 16 // 4
    with shmloader.DataLoader(Numbered(1, 16, elements), 16, pin_memory=True) as loader:
        slot = next(iter(loader))
        sources = {"slot": slot, "torch_pinned": slot.clone().pin_memory(), "pageable": slot.clone()}
        target = torch.empty_like(slot, device="cuda")
        found: dict[str, list[float]] = {name: [] for name in sources}
        for _ in range(rounds):
            for name, source in sources.items():
                seconds = timed_on_device(partial(target.copy_, source, non_blocking=True), repeats)
                found[name].append(repeats * source.nbytes / seconds / 1e9)
        del slot, source, sources
    numbers = {f"{name}_gb_per_s": statistics.median(values) for name, values in found.items()}
    return numbers | {"slot_to_torch_pinned": numbers["slot_gb_per_s"] / numbers["torch_pinned_gb_per_s"]}


def registration(engine: Engine, gib: float) -> dict[str, float]:
    """Seconds per GiB to page-lock committed memory that was never touched here, to map it, and to lock it then."""
    nbytes = int(gib * GIB) // 4096 * 4096
    numbers: dict[str, float] = {}
    for how in ("cold", "prefaulted"):
        segment = Segment.create(nbytes, "memfd")
        segment.commit(0, nbytes)
        if how == "prefaulted":
            start = time.perf_counter()
            segment.populate(0, nbytes)
            numbers["prefault_s_per_gib"] = (time.perf_counter() - start) / gib
        start = time.perf_counter()
        engine.register(segment.address, nbytes)
        numbers[f"{how}_s_per_gib"] = (time.perf_counter() - start) / gib
        start = time.perf_counter()
        engine.unregister(segment.address)
        numbers[f"{how}_unregister_s_per_gib"] = (time.perf_counter() - start) / gib
        segment.close()
    return numbers


def cpu_s(pids: list[int]) -> float:
    """CPU seconds of these processes so far, all threads, user and system."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICKS


def finish(device: str) -> None:
    """Wait until ``device`` has done everything."""
    if device == "cuda":
        torch.cuda.synchronize()


def network() -> torch.nn.Module:
    """Small enough that the data is what is waited for."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 7, stride=4), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(),
        torch.nn.Linear(16, 10),
    )  # fmt: skip


def train(loader: Any, pids: Callable[[], list[int]], warm: int, batches: int, device: str) -> dict[str, float]:
    """Train for ``batches`` batches after ``warm`` ones; return speeds, and CPU seconds per GB of all and of main."""
    model = network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    source = iter(loader)

    def step() -> int:
        images, labels = next(source)
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        loss = torch.nn.functional.cross_entropy(model(images.float() / 255), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return int(images.nbytes)

    for _ in range(warm):
        step()
    finish(device)
    who = [os.getpid(), *pids()]
    tree, main, start = cpu_s(who), time.process_time(), time.perf_counter()
    nbytes = sum(step() for _ in range(batches))
    finish(device)
    wall, main, tree = time.perf_counter() - start, time.process_time() - main, cpu_s(who) - tree
    return {
        "images_per_s": nbytes / (3 * 224 * 224) / wall,
        "gb_per_s": nbytes / wall / 1e9,
        "cpu_s_per_gb": tree / nbytes * 1e9,
        "main_cpu_s_per_gb": main / nbytes * 1e9,
    }


@contextmanager
def torch_loader(dataset: Any, **options: Any) -> Iterator[tuple[Any, Callable[[], list[int]]]]:
    loader = torch.utils.data.DataLoader(dataset, pin_memory=True, **options)
    yield loader, lambda: [process.pid for process in loader._iterator._workers]  # type: ignore[union-attr]
    loader._iterator = None


@contextmanager
def our_loader(dataset: Any, **options: Any) -> Iterator[tuple[Any, Callable[[], list[int]]]]:
    with shmloader.DataLoader(dataset, pin_memory=True, **options) as loader:
        yield loader, lambda: list(loader.stats().worker_pids)


def training(
    folder: Path, images: int, batch_size: int, workers: int, warm: int, batches: int, device: str = "cuda"
) -> dict[str, Any]:
    """A small network fed by torch's loader with pin_memory, and by ours: plain, with device=, and from a pack."""
    plain = Images(images)
    shmloader.pack(plain, folder / "images.lmdb")
    packed = shmloader.PackedDataset(str(folder / "images.lmdb"))
    options: dict[str, Any] = {"batch_size": batch_size, "num_workers": workers, "persistent_workers": True}
    drawn = (warm + batches + 4 * workers) * batch_size  # one epoch, which is left while workers are still busy
    numbers: dict[str, Any] = {}
    for name, make, dataset, more in (
        ("torch", torch_loader, plain, {}),
        ("ours", our_loader, plain, {}),
        ("ours_device", our_loader, plain, {"device": device}),
        ("ours_pack_device", our_loader, packed, {"device": device}),
    ):
        sampler = torch.utils.data.RandomSampler(dataset, replacement=True, num_samples=drawn)
        with make(dataset, sampler=sampler, **options, **more) as (loader, pids):
            numbers[name] = train(loader, pids, warm, batches, device)
    numbers["cpu_to_torch"] = numbers["ours"]["cpu_s_per_gb"] / numbers["torch"]["cpu_s_per_gb"]
    numbers["speed_to_torch"] = numbers["ours"]["images_per_s"] / numbers["torch"]["images_per_s"]
    return numbers


def overlap(workers: int, batches: int, mib: int) -> dict[str, float]:
    """How much of the time of batches (made, and copied) disappears behind computing, with ``device=``: at most 1.0.

    Batches alone, computing alone, and both; the computing is tuned to take as long as the batches.
    """
    elements = (mib << 20) // 16 // 4
    data = Numbered(batches + 8, 16, elements)
    matrix = torch.randn(2048, 2048, device="cuda")
    once = timed_on_device(lambda: matrix @ matrix, 20) / 20

    def run(times: int, copies: bool) -> float:
        with shmloader.DataLoader(data, 16, num_workers=workers, device="cuda") as loader:
            source = iter(loader)
            for _ in range(8):
                batch = next(source)
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(batches):
                if copies:
                    batch = next(source)
                for _ in range(times):
                    torch.mm(matrix, matrix)
            torch.cuda.synchronize()
            assert batch.device.type == "cuda"
            return time.perf_counter() - start

    feeding = run(0, True)
    times = max(1, round(feeding / batches / once))
    computing, both = run(times, False), run(times, True)
    hidden = (feeding + computing - both) / min(feeding, computing)
    return {"batches_s": feeding, "computing_s": computing, "both_s": both, "hidden": hidden}


def targets(figures: dict[str, Any]) -> dict[str, tuple[float, str, bool]]:
    """Return what was promised: the value, the promise in words, and whether it was kept. Pure."""
    found: dict[str, tuple[float, str, bool]] = {}
    for group, key, most, limit in (
        ("bandwidth", "slot_to_torch_pinned", False, 0.97),
        ("registration", "prefaulted_s_per_gib", True, 0.5),
        ("training", "cpu_to_torch", True, 0.5),
    ):
        value = figures.get(group, {}).get(key)
        if value is not None:
            kept = value <= limit if most else value >= limit
            found[f"{group}: {key}"] = (value, f"{'<=' if most else '>='} {limit}", kept)
    return found
