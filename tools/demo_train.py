"""The demo: from a folder of real photographs to a network that learns, and what it cost.

    photographs ──shmloader-pack──▶ two packs ──shmloader-tune──▶ a memory plan ──▶ two epochs ──▶ beside torch's loader

Run it with ``tools/demo``, which first makes the environment. Everything is written below ``--work``, which the caller
removes. Exit code 0: all steps ran, the loss fell, shared memory stayed under its limit. 1: one of them did not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.nn import functional

from shmloader import DataLoader, PackedDataset
from shmloader.errors import human_bytes

from . import demo_compare, demo_detect, demo_photos
from .demo_steps import command, heading

SIDE = 96  # pixels: what the network sees
BATCH = 32
WORKERS = 2
RAM = "1GiB"  # the limit that the plan is made for
SEED = 0


def training_data(pack: PackedDataset) -> PackedDataset:
    """Return the pack's photographs, decoded and scaled to what the network sees. ``shmloader-tune`` measures this."""
    return PackedDataset(pack.path, transform=demo_compare.Resized(SIDE))


def small_network(classes: int) -> nn.Module:
    """Four convolutions and one linear layer: 100,000 weights, enough to tell ten photographs apart."""
    layers: list[nn.Module] = []
    for channels_in, channels in ((3, 16), (16, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(channels_in, channels, 3, stride=2, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, classes))


def plan(pack: str) -> dict[str, Any]:
    """Show the memory plan for training from ``pack`` under RAM, and return it as the command's JSON tells it."""
    words = ["shmloader-tune", pack, "--dataset", "shmloader_tools.demo_train:training_data"]
    words += ["--batch-size", str(BATCH), "--workers", str(WORKERS), "--ram", RAM]
    command(*words)
    told: dict[str, Any] = json.loads(command(*words, "--json", show=False))
    return told


class SharedMemory:
    """The most shared memory seen: what our arena had committed, and what the whole machine had more than at first."""

    def __init__(self) -> None:
        self.arena = 0
        self.machine = 0
        self._before = psutil.virtual_memory().shared

    def look(self, loader: DataLoader[Any]) -> None:
        arena = loader.stats().arena
        self.arena = max(self.arena, arena.nbytes if arena is not None else 0)
        self.machine = max(self.machine, psutil.virtual_memory().shared - self._before)


def train(path: str, arena_bytes: int, epochs: int, memory: SharedMemory) -> list[float]:
    """Train for some epochs and print each; return the mean loss of each."""
    torch.manual_seed(SEED)
    torch.set_num_threads(1)  # the workers have the other CPUs; threads that fight for them make all of it slower
    data = training_data(PackedDataset(path))
    network = small_network(len(data.classes or ()))
    optimiser = torch.optim.Adam(network.parameters(), lr=3e-3)
    losses: list[float] = []
    with DataLoader(
        data, batch_size=BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True, arena_bytes=arena_bytes
    ) as loader:
        for epoch in range(epochs):
            began = time.perf_counter()
            total, right = 0.0, 0
            for images, labels in loader:
                scores = network(images.float().div_(255))
                loss = functional.cross_entropy(scores, labels)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                total += loss.item() * len(labels)
                right += int((scores.argmax(1) == labels).sum())
                memory.look(loader)
            losses.append(total / len(data))
            seconds = time.perf_counter() - began
            print(
                f"epoch {epoch + 1}   loss {losses[-1]:.3f}   right {right / len(data):4.0%}   "
                f"{len(data) / seconds:,.0f} samples/s   waited for data {loader.stats().waited_s:.2f} s in all",
                flush=True,
            )
    return losses


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return its exit code."""
    parser = argparse.ArgumentParser(prog="demo", description="From a folder of photographs to a training loop.")
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="existing folder to write into")
    parser.add_argument("--per-class", type=int, default=40, metavar="N", help="photographs per class (default 40)")
    parser.add_argument("--pictures", type=int, default=60, metavar="N", help="pictures with boxes (default 60)")
    parser.add_argument("--epochs", type=int, default=2, metavar="N", help="epochs to train (default 2)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds of the comparison (default 5)")
    parser.add_argument(
        "--sheet", type=Path, metavar="OUT.png", help="keep the sheet of pictures with their boxes, which step 7 draws"
    )
    options = parser.parse_args(argv)
    sheet = "sheet.png" if options.sheet is None else str(options.sheet.absolute())
    began = time.perf_counter()
    os.chdir(options.work)
    # torch makes this folder when it makes an optimiser, by default one that stays in the temporary directory.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path("torchinductor").absolute()))
    print(
        f"shmloader demo: Python {platform.python_version()}, torch {torch.__version__}, "
        f"{len(os.sched_getaffinity(0))} CPUs",
        flush=True,
    )

    heading("1. A folder of real photographs")
    count = demo_photos.build(Path("photos"), per_class=options.per_class)
    print(f"{count} files in {len(demo_photos.PHOTOGRAPHS)} classes: different sizes, grey, EXIF-rotated, with alpha")

    heading("2. Packed: once as the files they are, once as pixels of one size")
    command("shmloader-pack", "photos", "photos.lmdb")
    command("shmloader-pack", "photos", "pixels.lmdb", "--size", f"{SIDE}x{SIDE}", "--quiet")
    command("shmloader-inspect", "pixels.lmdb", "--verify")

    heading(f"3. Memory planned for {RAM}")
    limit = plan("photos.lmdb")["arena_bytes"]

    heading(f"4. Training: {options.epochs} epochs, {WORKERS} workers, arena of at most {human_bytes(limit)}")
    memory = SharedMemory()
    losses = train("photos.lmdb", limit, options.epochs, memory)

    heading(f"5. Beside torch's DataLoader: {WORKERS} workers, batch {BATCH}, {options.rounds} interleaved rounds")
    compared = demo_compare.compare(
        "photos", "photos.lmdb", "pixels.lmdb", side=SIDE, batch=BATCH, workers=WORKERS, rounds=options.rounds,
        arena_bytes=limit,
    )  # fmt: skip
    print("\n".join(compared.lines()), flush=True)

    heading("6. Shared memory against the limit")
    print(f"training     arena {human_bytes(memory.arena)}; the whole machine's shared memory rose by at most "
          f"{human_bytes(memory.machine)} (all programs)")  # fmt: skip
    print(f"comparison   largest arena {human_bytes(compared.arena_peak)}")
    peak = max(memory.arena, compared.arena_peak)
    print(f"limit        {human_bytes(limit)} for each; used at most {peak / limit:.0%}")

    heading("7. Detection: a Pascal VOC set with boxes that are known")
    boxes_right = demo_detect.detect("voc", "voc.lmdb", sheet, pictures=options.pictures)

    fell = losses[-1] < losses[0]
    ok = fell and peak <= limit and boxes_right
    print(f"\nloss {losses[0]:.3f} -> {losses[-1]:.3f}: {'it fell' if fell else 'IT DID NOT FALL'}; "
          f"{time.perf_counter() - began:.0f} s in all; {'demo passed' if ok else 'DEMO FAILED'}")  # fmt: skip
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
