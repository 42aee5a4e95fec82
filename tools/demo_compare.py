"""The demo's comparison: the same photographs through torch's DataLoader and through ours.

Method: five ways to read, each with persistent workers that are warm before the clock starts, take turns round by round
in one run, so that a busy moment of the machine hits all of them. Reported are the median samples per second, and the
CPU seconds of main process and workers together per thousand samples. Each way must deliver the same data, or the
demo stops: a fast wrong loader is not a result. Only rows of one kind of data can be compared: the folder's images are
scaled by Pillow, those of the pack of files by torch. What it does not show: a GPU, and a data set larger than RAM.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from torch.nn import functional
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

from shmloader import DataLoader, PackedDataset
from shmloader.images import Fit
from shmloader.sources import ImageFolder


def resize(image: torch.Tensor, side: int) -> torch.Tensor:
    """Scale uint8 (3, h, w) to (3, side, side), antialiased; a new uint8 tensor."""
    return functional.interpolate(image[None], size=(side, side), mode="bilinear", antialias=True)[0]


@dataclass
class Row:
    """One way to read, and what was measured."""

    source: str
    loader_name: str
    loader: Any
    epochs: int
    """Passes per round: quick ways make more of them, for the clock's sake."""
    rates: list[float] = field(default_factory=list)
    """Samples per second, one per round."""
    cpu_s: float = 0.0
    samples: int = 0
    """Delivered while the clock ran."""
    per_epoch: int = 0
    label_sum: int = 0
    brightness: float = 0.0
    """Mean over all pixels of all images: with the two above, what every way must agree on."""


class Resized:
    """A transform that scales the image of an (image, label) sample. A class, so that spawned workers can have it."""

    def __init__(self, side: int) -> None:
        self.side = side

    def __call__(self, sample: tuple[torch.Tensor, int]) -> tuple[torch.Tensor, int]:
        image, label = sample
        return resize(image, self.side), label


@dataclass(frozen=True)
class Comparison:
    """The finished rows."""

    rows: tuple[Row, ...]
    arena_peak: int
    """The most bytes that any of our arenas had committed."""

    def lines(self) -> list[str]:
        """Return the table; each of our rows also says how it stands to torch's row above it."""
        lines = [f"{'data':34} {'loader':10} {'samples/s':>10} {'CPU s per 1,000':>16} {'':>8}"]
        torch_rate = 0.0
        for row in self.rows:
            rate = statistics.median(row.rates)
            if row.loader_name == "torch":
                torch_rate, ratio = rate, ""
            else:
                ratio = f"{rate / torch_rate:.2f} x"
            lines.append(
                f"{row.source:34} {row.loader_name:10} {rate:10,.0f} {row.cpu_s / row.samples * 1000:16.3f} {ratio:>8}"
            )
        return lines


def _tree_cpu_s() -> float:
    """CPU seconds used so far by this process and its living children."""
    total = 0.0
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        times = process.cpu_times()
        total += times.user + times.system
    return total


def _warm_up(row: Row) -> None:
    """One untimed pass, which starts the workers and adds up what is delivered."""
    pixels = brightness = 0
    for images, labels in row.loader:
        row.per_epoch += len(labels)
        row.label_sum += int(labels.sum())
        brightness += int(images.sum(dtype=torch.int64))
        pixels += images.numel()
    row.brightness = brightness / pixels


def _check(rows: list[Row]) -> None:
    """Stop the demo if two ways deliver different data; scaling by two libraries may round differently."""
    first = rows[0]
    for row in rows[1:]:
        same_labels = (row.per_epoch, row.label_sum) == (first.per_epoch, first.label_sum)
        if not same_labels or abs(row.brightness - first.brightness) > 0.5:
            raise SystemExit(f"different data: {first} against {row}")


def _one_round(row: Row) -> None:
    samples = 0
    cpu = _tree_cpu_s()
    began = time.perf_counter()
    for _ in range(row.epochs):
        for _images, labels in row.loader:
            samples += len(labels)
    row.rates.append(samples / (time.perf_counter() - began))
    row.cpu_s += _tree_cpu_s() - cpu
    row.samples += samples


def compare(
    folder: str, encoded: str, pixels: str, *, side: int, batch: int, workers: int, rounds: int, arena_bytes: int
) -> Comparison:
    """Read the same photographs in five ways and return what it cost.

    ``folder`` holds the files, ``encoded`` is their pack, ``pixels`` their pack at ``side`` x ``side``.
    """
    files: Dataset[Any] = ImageFolder(folder, fit=Fit(side, side))
    decoded: Dataset[Any] = PackedDataset(encoded, transform=Resized(side))
    stored: Dataset[Any] = PackedDataset(pixels)
    common: dict[str, Any] = {"batch_size": batch, "num_workers": workers, "persistent_workers": True}

    def ours(dataset: Dataset[Any]) -> DataLoader[Any]:
        return DataLoader(dataset, arena_bytes=arena_bytes, **common)

    ways: list[tuple[str, str, Callable[[Dataset[Any]], Any], Dataset[Any], int]] = [
        ("JPEG files, decoded each time", "torch", lambda data: TorchLoader(data, **common), files, 1),
        ("JPEG files, decoded each time", "shmloader", ours, files, 1),
        ("pack of the files, decoded", "shmloader", ours, decoded, 1),
        (f"pack of pixels, {side}x{side}", "torch", lambda data: TorchLoader(data, **common), stored, 5),
        (f"pack of pixels, {side}x{side}", "shmloader", ours, stored, 20),
    ]
    with ExitStack() as stack:
        rows = []
        for source, name, make, dataset, epochs in ways:
            row = Row(source, name, make(dataset), epochs)
            rows.append(row)
            if isinstance(row.loader, DataLoader):
                stack.enter_context(row.loader)
            _warm_up(row)
        _check(rows)
        for _ in range(rounds):
            for row in rows:
                _one_round(row)
        arenas = [row.loader.stats().arena for row in rows if isinstance(row.loader, DataLoader)]
        peak = max(arena.nbytes for arena in arenas if arena is not None)
    return Comparison(tuple(rows), peak)
