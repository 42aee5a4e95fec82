"""What it costs to bring a batch from a dataset to the training loop: ours, torch's, and a plain copy.

Workloads   images  uint8 3x224x224, batch 256: few large rows, bound by memory
            tokens  int32[1024], batch 64: bound by what each batch costs
            table   float32[10] and a label, batch 64: bound by what each sample costs
Contenders  memcpy       the limit: rows of a page-cached file gathered into one reused buffer, one thread, no loader
            alone/plain  the plain dataset and its collate function alone, in one process, with no loader: what one
                         worker cannot be faster than
            torch/plain  torch's DataLoader over a dataset in memory, one tensor row per sample
            ours/plain   shmloader.DataLoader over that dataset
            torch/pack   torch's DataLoader over a pack of the same samples
            ours/pack    shmloader.DataLoader over that pack
Method      see harness.py: turns within one process per group, steady state only, every row's data checked.

    python benchmarks/transport.py [--rows tokens,table] [--workers 0,1,2] [--json FILE] [--quick]

Python 3.11.7, torch 2.13.0+cpu, 2 cores of a Xeon, Linux 6.18, medians of 7 rounds with --workers 1, without the row
torch/pack. The machine was shared with others at the time (its plain copy ran at 3.3 GB/s; it reaches 5.5): read the
ratios. On images our loaders are at the plain copy's speed, so no loader of one worker could do better there.

    workload  contender      us/batch  main CPU us  CPU s/GB  x torch/plain  x memcpy
    images    memcpy            11771        11659     0.300           3.8      1.00
              torch/plain       45109         6585     1.301           1.0      0.26
              ours/plain        11239          441     0.306           4.0      1.05
              ours/pack         10465          412     0.282           4.3      1.12
    tokens    memcpy               46           46     0.176          33.3      1.00
              torch/plain        1514          763     8.284           1.0      0.03
              ours/plain          294           90     1.513           5.2      0.16
              ours/pack           113           66     0.672          13.4      0.40
    table     memcpy                9            9     3.328         255.1      1.00
              torch/plain        2294         1155   967.763           1.0      0.00
              ours/plain          319          106   150.137           7.2      0.03
              ours/pack            60           49    34.654          38.3      0.15

What it does not show: work on the samples (decoding, augmentation), reading from a disk, a training loop that wants the
CPUs too, copies to a GPU, worker start-up, the first pass. A job bound by one of these gains what this table says
about its rest only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

import command
import harness


class ArrayDataset(Dataset[Any]):
    """Samples are rows of one tensor."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


class Arrays(harness.Workload):
    """Rows of one shape; the first four bytes of a row hold its index."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: type, batch_size: int, samples: int) -> None:
        self.name, self.shape, self.dtype = name, shape, np.dtype(dtype)
        self.batch_size, self.samples = batch_size, samples

    def write(self, folder: Path, samples: int) -> None:
        row = int(np.prod(self.shape)) * self.dtype.itemsize
        data = harness.random_bytes(samples * row).reshape(samples, row)
        data[:, :4] = np.arange(samples, dtype=np.int32)[:, None].view(np.uint8)
        np.save(folder / "rows.npy", data.view(self.dtype).reshape(samples, *self.shape))

    def load(self, folder: Path) -> Any:
        return ArrayDataset(torch.from_numpy(np.load(folder / "rows.npy")))

    def flat(self, batch: Any) -> list[torch.Tensor]:
        return [batch]

    def expected(self, dataset: Any, indices: torch.Tensor) -> list[torch.Tensor]:
        return [dataset.rows[indices]]

    def limit(self, folder: Path, batches: harness.Batches) -> Iterator[Any]:
        rows = harness.mapped(folder / "rows.npy")
        buffer = torch.empty((self.batch_size, *rows.shape[1:]), dtype=rows.dtype)
        for indices in batches:
            yield torch.index_select(rows, 0, indices, out=buffer)


class TableDataset(Dataset[Any]):
    """Samples are ``(row, label)``: a tensor and a plain int."""

    def __init__(self, rows: torch.Tensor, labels: list[int]) -> None:
        self.rows, self.labels = rows, labels

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.rows[index], self.labels[index]


class Table(harness.Workload):
    """Ten numbers and a label, which is the sample's index."""

    name, batch_size, samples = "table", 64, 100_000

    def write(self, folder: Path, samples: int) -> None:
        np.save(folder / "rows.npy", np.random.default_rng(1).random((samples, 10), np.float32))
        np.save(folder / "labels.npy", np.arange(samples))

    def load(self, folder: Path) -> Any:
        return TableDataset(torch.from_numpy(np.load(folder / "rows.npy")), np.load(folder / "labels.npy").tolist())

    def flat(self, batch: Any) -> list[torch.Tensor]:
        return list(batch)

    def expected(self, dataset: Any, indices: torch.Tensor) -> list[torch.Tensor]:
        return [dataset.rows[indices], indices]

    def limit(self, folder: Path, batches: harness.Batches) -> Iterator[Any]:
        fields = [harness.mapped(folder / name) for name in ("rows.npy", "labels.npy")]
        buffers = [torch.empty((self.batch_size, *rows.shape[1:]), dtype=rows.dtype) for rows in fields]
        for indices in batches:
            for rows, buffer in zip(fields, buffers, strict=True):
                torch.index_select(rows, 0, indices, out=buffer)
            yield buffers


WORKLOADS = (
    Arrays("images", (3, 224, 224), np.uint8, batch_size=256, samples=2560),
    Arrays("tokens", (1024,), np.int32, batch_size=64, samples=50_000),
    Table(),
)

if __name__ == "__main__":
    sys.exit(command.main(__file__, WORKLOADS))
