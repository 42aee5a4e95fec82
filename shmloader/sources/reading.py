"""Samples for packing, read and checked in the workers of this library's own loader.

    positions ──▶ source[...] ──▶ problems, conversion ──▶ block: values and shapes, laid out in the slot ──▶ the writer

A worker answers with as many samples as fit into BLOCK_BYTES; of what it was given the rest is read by whoever asked.
So a slot holds one block, or one giant sample, whatever the data, and slots stay few. What went wrong with a sample
comes along as data, in its place in the order; nothing is raised in a worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from .. import images
from ..errors import BrokenImage, DataError, SampleMismatch, SourceError, UnsupportedField
from ..packfile.block import fill
from ..packfile.outline import Outline
from ..packfile.schema import ENCODED_IMAGE
from ..packfile.values import Value
from .base import Source
from .conversion import Conversion
from .problems import Problem

BLOCK_BYTES = 4 << 20
"""A block ends with the sample that reaches this size."""

_KINDS: tuple[tuple[type[Exception], str], ...] = (
    (BrokenImage, "unreadable-image"),
    (SampleMismatch, "mismatch"),
    (UnsupportedField, "unsupported"),
    (FileNotFoundError, "missing-file"),
    (OSError, "unreadable-file"),
    (DataError, "unreadable"),
)


@dataclass(frozen=True)
class Finding:
    """A problem, and the place of its sample in the order of packing."""

    position: int
    problem: Problem
    error: Exception | None = None
    """What is raised if packing is to stop here; None for warnings."""


@dataclass(frozen=True)
class Block:
    """What became of some positions of the order, in one piece."""

    first: int
    """The first position."""
    stop: int
    """Behind the last one that was read: fewer than asked for if the block was full, or a sample was bad."""
    positions: npt.NDArray[np.int64]
    """Of the samples that are in it."""
    values: npt.NDArray[np.uint8]
    shapes: npt.NDArray[np.int64]
    sizes: list[tuple[int, int]]
    """(height, width) of the encoded images, of all such fields of all samples."""
    findings: list[Finding] = field(default_factory=list)


class Reading(Dataset[Any]):
    """Reads positions of an order of a source. Its items are for ``collate`` alone."""

    def __init__(
        self,
        source: Source,
        order: npt.NDArray[np.int64],
        raw: Outline,
        stored: Outline,
        conversion: Conversion,
        *,
        stop_at_errors: bool,
    ) -> None:
        self.source, self.order = source, order
        self.raw, self.stored, self._conversion = raw, stored, conversion
        self._stop_at_errors = stop_at_errors
        self._encoded = [number for number, each in enumerate(stored.fields) if each.encoding == ENCODED_IMAGE]

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, position: int) -> Any:
        return self.__getitems__([position])[0]

    def __getitems__(self, positions: list[int]) -> list[Any]:
        """Return [everything about these positions], for ``collate``."""
        rows: list[list[Value]] = []
        kept: list[int] = []
        findings: list[Finding] = []
        nbytes, stop = 0, positions[0]
        for position in positions:
            stop = position + 1
            values, found = self.sample(position)
            findings += found
            if values is not None:
                rows.append(values)
                kept.append(position)
                nbytes += sum([value.array.nbytes for value in values])
            if nbytes >= BLOCK_BYTES or (self._stop_at_errors and any(each.error for each in found)):
                break
        sizes = [images.size_of(row[number].array.data) for row in rows for number in self._encoded]
        return [(positions[0], stop, kept, rows, len(self.stored.fields), sizes, findings)]

    def sample(self, position: int) -> tuple[list[Value] | None, list[Finding]]:
        """Return (what is to be stored of one sample, or None if it cannot be; what was found about it)."""
        index = int(self.order[position])
        try:
            sample = self.source[index]
            findings = [
                Finding(position, each, None if each.severity == "warning" else SourceError(each.where, each.what))
                for each in self.source.problems(index, sample)
            ]
            if any(each.error for each in findings):
                return None, findings
            values = self.raw.values(index, sample)
            if self._conversion.changes:
                values = self._conversion.apply(self.raw, index, values, self.source.name_of(index))
            return values, findings
        except (DataError, OSError) as error:
            return None, [Finding(position, *problem_of(error, index, self.source))]

    def blocks(self, first: int, stop: int) -> Iterator[Block]:
        """Read positions in this process."""
        while first < stop:
            block = open_block(collate(self.__getitems__(list(range(first, stop)))))
            yield block
            first = block.stop


def problem_of(error: Exception, index: int, source: Source) -> tuple[Problem, Exception]:
    """Return (the problem that an exception is, the exception that names the sample)."""
    where = source.name_of(index)
    if isinstance(error, SampleMismatch):
        error = SampleMismatch(index, error.field, error.expected, error.found, where)
    kind = next(kind for cls, kind in _KINDS if isinstance(error, cls))
    return Problem(index, where, kind, " ".join(str(error).split())), error


def collate(samples: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Lay out what ``Reading`` gave; the values are born in the loader's slot, where there is one."""
    first, stop, kept, rows, fields, sizes, findings = samples[0]
    memory = torch.empty(0, dtype=torch.uint8)

    def allocate(nbytes: int) -> npt.NDArray[np.uint8]:
        nonlocal memory
        memory = torch.empty(nbytes, dtype=torch.uint8)
        return memory.numpy()

    _, shapes = fill(rows, fields, allocate)
    return memory, torch.from_numpy(shapes), (first, stop, kept, sizes, findings)


def open_block(batch: Any) -> Block:
    """Return the block that ``collate`` made: views of the batch."""
    values, shapes, (first, stop, kept, sizes, findings) = batch
    return Block(first, stop, np.array(kept, np.int64), values.numpy(), shapes.numpy(), sizes, findings)


class Batches:
    """The positions from ``first`` on, cut so that a batch is about ``target`` bytes; what arrives corrects that.

    An iterable of lists for the loader, which asks in the main process. ``asked`` are the ends of those that are under
    way.
    """

    def __init__(self, first: int, stop: int, sample_bytes: float, most: int, target: int = BLOCK_BYTES // 2) -> None:
        self._first, self._stop = first, stop
        self._mean = max(1.0, sample_bytes)
        self._most, self._target = max(1, most), target
        self.asked: list[int] = []

    def __iter__(self) -> Iterator[list[int]]:
        while self._first < self._stop:
            count = max(1, min(self._most, int(self._target / self._mean)))
            end = min(self._stop, self._first + count)
            self.asked.append(end)
            yield list(range(self._first, end))
            self._first = end

    def learn(self, block: Block) -> None:
        """Take the size of the newest samples into account: fully where they grew, slowly where they shrank."""
        if len(block.positions):
            mean = len(block.values) / len(block.positions)
            self._mean = max(mean, self._mean + (mean - self._mean) / 8)
