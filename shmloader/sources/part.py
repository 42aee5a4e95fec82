"""One pack of a run: its order, its writer, and how samples get from one to the other.

open ──▶ write: by columns, or by blocks from workers ──▶ finish (sealed, synced) ──▶ publish ──▶ result
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import MisuseError
from ..limits import read_limits
from ..loader import DataLoader
from ..packfile import PackedDataset, PackReport, PackWriter
from ..packfile.windows import Windows
from . import blocks
from .base import Source
from .blocks import Columns
from .conversion import cast_column
from .journal import RunJournal, Tally
from .probing import Probe, check_room, probe
from .reading import Batches, Block, Finding, Reading, collate, open_block
from .result import PartRun
from .settings import PackSettings, Part
from .summary import summarise

_COLUMN_BYTES = 16 << 20  # of columns: read and handed over at a time
_MOST_PER_BATCH = 256
_BATCH_S = 0.05
"""Batches of more work than this would make the first block late, and the last one alone."""
_WORTH_WORKERS_S = 1.0
"""Reading that takes less in one process is not worth starting others."""
_NAMED_ODD = 5


class PackingPart:
    """One pack of a run. ``target`` is its path, ``order`` the samples of the source that go into it."""

    def __init__(
        self,
        source: Source,
        settings: PackSettings,
        part: Part | None,
        target: str,
        order: npt.NDArray[np.int64],
        digest: str,
        tally: Tally,
        *,
        stop_at_errors: bool,
    ) -> None:
        self.target, self.order = target, order
        self.journal = RunJournal(tally)
        self.writer: PackWriter | None = None
        self.resumed = 0
        """Samples that an earlier run has packed."""
        self._source, self._settings, self._part = source, settings, part
        self._digest = digest
        self._stop_at_errors = stop_at_errors

    def open(self, *, overwrite: bool, restart: bool) -> PackWriter:
        """Make the partial file, or go on with one. Raises PackExists, PackInUse, ResumeRefused, PackError."""
        self.writer = PackWriter(
            self.target,
            overwrite=overwrite,
            field_names=self._source.field_names,
            chunk_bytes=self._settings.chunk_bytes,
            metadata=self._source.metadata,
            encodings=self._source.encodings,
            fingerprint=self._digest,
            restart=restart,
            notes=self._note,
        )
        self.resumed = self.writer.resumed
        self.journal.restore(self.writer.recovered_notes)
        return self.writer

    def _note(self, rows: int) -> dict[str, Any]:
        return self.journal.note(rows)

    # --- samples ------------------------------------------------------------------------------------------------------

    def write(self, workers: int | None, told: Callable[[], None], *, check_space: bool) -> int:
        """Add all samples; ``told`` is called now and then. Return how many workers there were."""
        assert self.writer is not None
        if not len(self.order):
            return 0
        columns = self._source.columns()
        if columns is not None and not self._settings.store and self._settings.quality is None:
            self._write_columns(self.writer, columns, told, check_space=check_space)
            return 0
        start = self.journal.position
        found = probe(self._source, self.order, self._settings, bad=self._bad, first=start)
        left = len(self.order) - start
        if check_space:
            check_room(self.target, left, found.sample_bytes, found.looks)
        if self.writer.outline is None:
            self.writer.begin(found.stored)
        if workers is None:
            workers = read_limits().cpus.usable if left * found.sample_s > _WORTH_WORKERS_S else 0
        self._write_samples(self.writer, found, workers, told)
        return workers

    def _write_samples(self, writer: PackWriter, found: Probe, workers: int, told: Callable[[], None]) -> None:
        assert writer.outline is not None
        reading = Reading(
            self._source, self.order, found.raw, writer.outline, found.conversion, stop_at_errors=self._stop_at_errors
        )
        start, stop = self.journal.position, len(self.order)
        # Small enough that all workers have some, and that the first ones arrive soon.
        most = min(
            _MOST_PER_BATCH, -(-(stop - start) // max(1, 2 * workers)), int(_BATCH_S / max(found.sample_s, 1e-9))
        )
        batches = Batches(start, stop, found.sample_bytes, most)
        with warnings.catch_warnings(), ExitStack() as stack:
            # How many there are is the user's choice, or that of whoever has looked at the CPUs.
            warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
            loader: DataLoader[Any] = DataLoader(
                reading,
                batch_sampler=batches,
                num_workers=workers,
                collate_fn=collate,
                prefetch_factor=2 if workers else None,
            )
            stack.enter_context(loader)
            for block in _in_order(map(open_block, loader), reading, batches):
                self._add(writer, block)
                batches.learn(block)
                told()
                del block  # its slot is free before the next one is waited for

    def _bad(self, finding: Finding) -> None:
        """Stop at a bad sample before the first good one, if so wanted. Else it comes again, in its turn."""
        if self._stop_at_errors and finding.error is not None and not self.journal.position:
            self.journal.tell(finding)
            raise finding.error

    def _add(self, writer: PackWriter, block: Block) -> None:
        self.journal.take(block)
        writer.add_block(len(block.positions), block.values, block.shapes)
        if self._stop_at_errors:
            for finding in block.findings:
                if finding.error is not None:
                    raise finding.error

    def _write_columns(
        self,
        writer: PackWriter,
        columns: Columns,
        told: Callable[[], None],
        *,
        check_space: bool,
    ) -> None:
        named = blocks.named(columns, self._source.field_names)
        unknown = set(self._settings.dtypes) - set(named)
        if unknown:
            raise MisuseError(f"there are no fields {sorted(unknown)} to get another dtype; there are {list(named)}")
        row_bytes = sum(blocks.row_bytes(column) for column in named.values())
        if check_space:
            check_room(self.target, len(self.order) - writer.samples, row_bytes, len(self.order))
        step = max(1, _COLUMN_BYTES // max(1, row_bytes))
        in_order = bool(np.array_equal(self.order, np.arange(len(self.order))))
        for start in range(writer.samples, len(self.order), step):
            stop = min(start + step, len(self.order))
            rows: Any = slice(start, stop) if in_order else self.order[start:stop]
            made = [self._column(name, blocks.read(column, rows), start) for name, column in named.items()]
            writer.add_columns(blocks.built(columns, made))
            told()

    def _column(self, name: str, rows: Any, start: int) -> Any:
        """Return rows that were read, with the dtype that was asked for."""
        dtype = self._settings.dtypes.get(name)
        if dtype is None:
            return rows
        if isinstance(rows, Windows) or (isinstance(rows, np.ndarray) and rows.dtype.kind in "US"):
            raise MisuseError(f"field {name!r} holds text or windows, which are stored as they are: no dtype applies")
        return cast_column(name, rows, dtype, start)

    # --- the end ------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Seal and sync, under the temporary name."""
        if self.writer is not None:
            self.writer.finish(self._facts())

    def publish(self) -> None:
        """Give the pack its name."""
        if self.writer is not None:
            self.writer.publish()

    def _facts(self) -> dict[str, Any]:
        settings = self._settings
        facts: dict[str, Any] = {}
        if settings.shuffle is not None:
            facts["order"] = f"random, seed {settings.shuffle}"
        if settings.limit is not None:
            facts["limit"] = settings.limit
        if self._part is not None:
            how = ", stratified" if settings.stratify else ""
            facts["part"] = f"{self._part.name}, {self._part.share:g} of all, seed {settings.split_seed}{how}"
        if self.journal.skipped:
            facts["skipped"] = len(self.journal.skipped)
        return {**facts, "run": self._digest}

    def result(self) -> PartRun:
        """Return what became of it; it has been published."""
        fields, labels = summarise(self.target)
        if self.writer is not None:
            report = self.writer.seal()
        else:  # by an earlier run
            packed = PackedDataset(self.target)
            manifest = packed.manifest
            report = PackReport(
                self.target, len(packed), manifest.payload_bytes, packed.file_bytes, 0.0, manifest.fields
            )
            self.resumed = report.samples
        odd = []
        for each in fields:
            for shape in each.odd:
                rows = self.order[self.journal.rows_to_positions(len(self.order))[list(shape.first_rows)]]
                names = ", ".join(self._source.name_of(int(row)) for row in rows[:_NAMED_ODD])
                more = f" and {shape.count - len(rows):,} more" if shape.count > len(rows) else ""
                odd.append(
                    f"field {each.name!r}: {each.shapes[0].count:,} samples have shape {each.shapes[0].shape}, but "
                    f"{shape.count:,} {shape.shape}: {names}{more}"
                )
        return PartRun(report, fields, labels, dict(self.journal.sizes), tuple(odd))


def _in_order(blocks: Iterator[Block], reading: Reading, batches: Batches) -> Iterator[Block]:
    """Yield the blocks, and behind one that ended early the rest of what was asked for, read in this process."""
    for block in blocks:
        asked, stop = batches.asked.pop(0), block.stop
        yield block
        del block
        yield from reading.blocks(stop, asked)
