"""What every framework trains here, and what a training tells about itself.

A script trains the same model twice in one process, first with torch's DataLoader and then with ours, and each rank
writes one Report as JSON. The two must agree to the last bit: same seeds, same samples in the same order, same losses.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.utils.data
from torch.utils.data import Dataset

import shmloader
from support import shared_mappings

SAMPLES = 96
BATCH = 8
EPOCHS = 2
WORKERS = 2
FEATURES = 16
SEED = 20
CLASSES: dict[str, type[torch.utils.data.DataLoader[Any]]] = {
    "torch": torch.utils.data.DataLoader,
    "shmloader": shmloader.DataLoader,
}
ARENA_BYTES = 8 << 20
"""Given to our loader alone, so that a framework that builds loaders anew is seen to keep it."""

Batch = dict[str, torch.Tensor]


class Lines(Dataset[dict[str, Any]]):
    """Noisy points on a line in 16 dimensions; each sample knows its index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        x = np.random.default_rng(index).standard_normal(FEATURES).astype(np.float32)
        return {"x": x, "y": x.sum(keepdims=True), "index": index}


DATASETS: dict[str, Callable[[Path], Dataset[dict[str, Any]]]] = {
    "plain": lambda pack: Lines(),
    "pack": shmloader.PackedDataset,
}


def make_loader(
    cls: type[torch.utils.data.DataLoader[Any]], dataset: Dataset[dict[str, Any]], **options: Any
) -> torch.utils.data.DataLoader[Any]:
    """Make a loader of either class with the same arguments, but for ``arena_bytes``, which is ours alone."""
    if issubclass(cls, shmloader.DataLoader):
        options["arena_bytes"] = ARENA_BYTES
    return cls(dataset, BATCH, num_workers=WORKERS, persistent_workers=True, **options)


def make_model() -> torch.nn.Linear:
    """Return the model, with the same weights each time."""
    torch.manual_seed(SEED)
    return torch.nn.Linear(FEATURES, 1)


def loss_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Mean squared error of one batch."""
    return torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])


@dataclass
class Training:
    """What one training with one class of loader saw."""

    iterator: str = ""
    """The class of the iterator that delivered the batches."""
    arena_bytes: int | None = None
    """What the loader that was iterated knows of the cap that was asked for."""
    seen: list[list[int]] = field(default_factory=list)
    """Per epoch, the indices of the samples in the order in which they came."""
    losses: list[float] = field(default_factory=list)
    workers_left: list[int] = field(default_factory=list)
    """Children of this process that were not there before and are still there after the training."""
    mapped_left: int = 0
    """Bytes of shared memory mapped after the training and not before."""

    def begin_epoch(self, loader: Any) -> None:
        """Note which loader is iterated; its iterator exists from the first batch on (persistent workers)."""
        self.seen.append([])
        self.arena_bytes = getattr(loader, "arena_bytes", None)

    def step(self, loader: Any, batch: Batch, loss: torch.Tensor) -> None:
        """Note one batch."""
        self.iterator = type(loader._iterator).__name__
        self.seen[-1] += batch["index"].tolist()
        self.losses.append(float(loss.detach()))


@dataclass
class Report:
    """What one rank tells: one training per class of loader."""

    rank: int
    world: int
    trainings: dict[str, Training]

    def write(self, folder: Path) -> None:
        """Write this rank's file."""
        (folder / f"rank{self.rank}.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Report:
        """Return what ``write`` wrote."""
        data = json.loads(path.read_text())
        data["trainings"] = {name: Training(**training) for name, training in data["trainings"].items()}
        return cls(**data)


TrainOnce = Callable[[type[torch.utils.data.DataLoader[Any]], Dataset[dict[str, Any]], Training], None]


def train_both(train: TrainOnce, dataset: Dataset[dict[str, Any]]) -> dict[str, Training]:
    """Run ``train`` with torch's class and with ours; note what each leaves behind in this process."""
    trainings = {}
    for name, cls in CLASSES.items():
        gc.collect()
        children, mapped = _children(), shared_mappings()
        training = Training()
        train(cls, dataset, training)
        gc.collect()
        training.workers_left = sorted(_children() - children)
        training.mapped_left = max(0, shared_mappings() - mapped)
        trainings[name] = training
    return trainings


def _children() -> set[int]:
    return {child.pid for child in psutil.Process(os.getpid()).children(recursive=True)}


def arguments() -> argparse.Namespace:
    """Return what the test passes to a script: ``dataset`` (a key of DATASETS), ``pack``, ``out``, ``devices``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("dataset", choices=DATASETS)
    parser.add_argument("pack", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--way", default="hook")
    return parser.parse_args()
