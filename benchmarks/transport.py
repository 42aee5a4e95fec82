"""placeholder docstring: replaced below"""

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
