"""Batches of many pieces: detection data with ragged boxes, and dicts of 120 small fields.

Workloads   detection   image uint8 3x128x128, 0 to 20 boxes float32[4] and labels each, batch 64, the classic collate
                        function that stacks the images and keeps boxes and labels as lists: 129 tensors a batch
            120 fields  a dict of 120 tensors float32[8], batch 64, default collate
Contenders  as in transport.py. The plain copy gathers all boxes of a batch into one buffer, and the 120 fields as one.
Method      see harness.py: turns within one process per group, steady state only, every row's data checked.

    python benchmarks/detection.py [--rows detection] [--workers 1] [--json FILE] [--quick]

What it does not show: decoding, augmentation, a GPU. On both rows Python itself is the cost, 129 and 120 objects a
batch: compare the CPU columns, and run it on a machine without other work (the command says BUSY otherwise).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

import command
import harness

MOST_BOXES = 20


class Detections(NamedTuple):
    """Images and boxes of many samples; the boxes of sample i are rows ``starts[i]`` to ``starts[i + 1]``."""

    images: torch.Tensor
    boxes: torch.Tensor
    labels: torch.Tensor
    starts: torch.Tensor

    def of(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        first, last = self.starts[index : index + 2].tolist()
        return self.images[index], self.boxes[first:last], self.labels[first:last]


class DetectionDataset(Dataset[Any]):
    """Samples are ``(image, boxes, labels)``, with 0 to 20 boxes."""

    def __init__(self, data: Detections) -> None:
        self.data, self.starts = data, data.starts.tolist()

    def __len__(self) -> int:
        return len(self.data.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        first, last = self.starts[index], self.starts[index + 1]
        return self.data.images[index], self.data.boxes[first:last], self.data.labels[first:last]


def detection_collate(samples: list[Any]) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Stack the images; boxes and labels stay lists, one tensor a sample. What detection code everywhere does."""
    images, boxes, labels = [], [], []
    for image, sample_boxes, sample_labels in samples:
        images.append(image)
        boxes.append(sample_boxes)
        labels.append(sample_labels)
    return torch.stack(images), boxes, labels


class Joined(NamedTuple):
    """What the plain copy yields: the rows of all samples in one buffer a field."""

    images: torch.Tensor
    boxes: torch.Tensor
    labels: torch.Tensor
    counts: list[int]


class DetectionWorkload(harness.Workload):
    """Images uint8 3x128x128 that begin with their index; labels are that index too."""

    name, batch_size, samples = "detection", 64, 4096
    collate_fn = staticmethod(detection_collate)

    def write(self, folder: Path, samples: int) -> None:
        row = 3 * 128 * 128
        images = harness.random_bytes(samples * row).reshape(samples, row)
        images[:, :4] = np.arange(samples, dtype=np.int32)[:, None].view(np.uint8)
        counts = np.random.default_rng(2).integers(0, MOST_BOXES + 1, samples)
        np.save(folder / "images.npy", images.reshape(samples, 3, 128, 128))
        np.save(folder / "starts.npy", np.concatenate(([0], np.cumsum(counts))))
        np.save(folder / "boxes.npy", np.random.default_rng(3).random((int(counts.sum()), 4), np.float32))
        np.save(folder / "labels.npy", np.repeat(np.arange(samples), counts))

    def load(self, folder: Path) -> Any:
        return DetectionDataset(
            Detections(*(torch.from_numpy(np.load(folder / f"{name}.npy")) for name in Detections._fields))
        )

    def flat(self, batch: Any) -> list[torch.Tensor]:
        if isinstance(batch, Joined):
            return [batch.images, *batch.boxes.split(batch.counts), *batch.labels.split(batch.counts)]
        images, boxes, labels = batch
        return [images, *boxes, *labels]

    def expected(self, dataset: Any, indices: torch.Tensor) -> list[torch.Tensor]:
        _, boxes, labels = zip(*(dataset.data.of(index) for index in indices.tolist()), strict=True)
        return [dataset.data.images[indices], *boxes, *labels]

    def limit(self, folder: Path, batches: harness.Batches) -> Iterator[Any]:
        data = Detections(*(harness.mapped(folder / f"{name}.npy") for name in Detections._fields))
        plans = []
        for indices in batches:
            firsts, lasts = data.starts[indices].tolist(), data.starts[indices + 1].tolist()
            spans = [torch.arange(first, last) for first, last in zip(firsts, lasts, strict=True)]
            plans.append((indices, torch.cat(spans), [len(span) for span in spans]))
        images = torch.empty((self.batch_size, *data.images.shape[1:]), dtype=torch.uint8)
        boxes = torch.empty((self.batch_size * MOST_BOXES, 4))
        labels = torch.empty(self.batch_size * MOST_BOXES, dtype=torch.int64)
        for indices, rows, counts in plans:
            torch.index_select(data.images, 0, indices, out=images)
            found = boxes[: len(rows)], labels[: len(rows)]
            torch.index_select(data.boxes, 0, rows, out=found[0])
            torch.index_select(data.labels, 0, rows, out=found[1])
            yield Joined(images, *found, counts)


class ManyFieldsDataset(Dataset[Any]):
    """Samples are dicts of 120 small tensors."""

    def __init__(self, rows: torch.Tensor, names: list[str]) -> None:
        self.rows, self.names = rows, names

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return dict(zip(self.names, self.rows[index].unbind(), strict=True))


class ManyFields(harness.Workload):
    """120 fields float32[8]; the plain copy moves the same bytes as one field."""

    name, batch_size, samples = "120 fields", 64, 25_600
    names: tuple[str, ...] = tuple(f"field{number:03}" for number in range(120))

    def write(self, folder: Path, samples: int) -> None:
        rows = np.random.default_rng(4).random((samples, len(self.names), 8), np.float32)
        rows[:, 0, 0] = np.arange(samples)
        np.save(folder / "rows.npy", rows)

    def load(self, folder: Path) -> Any:
        return ManyFieldsDataset(torch.from_numpy(np.load(folder / "rows.npy")), list(self.names))

    def flat(self, batch: Any) -> list[torch.Tensor]:
        if isinstance(batch, torch.Tensor):
            return list(batch.unbind(1))
        assert tuple(batch) == self.names
        return list(batch.values())

    def expected(self, dataset: Any, indices: torch.Tensor) -> list[torch.Tensor]:
        return list(dataset.rows[indices].unbind(1))

    def limit(self, folder: Path, batches: harness.Batches) -> Iterator[Any]:
        rows = harness.mapped(folder / "rows.npy")
        buffer = torch.empty((self.batch_size, *rows.shape[1:]))
        for indices in batches:
            yield torch.index_select(rows, 0, indices, out=buffer)


WORKLOADS = (DetectionWorkload(), ManyFields())

if __name__ == "__main__":
    sys.exit(command.main(__file__, WORKLOADS))
