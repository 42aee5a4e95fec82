"""What a packing run remembers about samples: findings, skipped ones, image sizes. Goes into the pack's own journal.

worker ──Block──▶ take(block) ──▶ waiting ──commit of n rows──▶ note(n): what belongs to these rows, as JSON
                                     │                                        │ after a kill
                                     └──▶ tallies, report file ◀──restore─────┘
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, TextIO

import numpy as np

from ..errors import PackError
from .problems import Problem
from .reading import Block, Finding

_EXAMPLES = 5
_SIZES = 4096


class Tally:
    """Findings of all parts of a run, counted by kind, with the first few of each.

    Written to the file ``report`` as they come, one JSON object a line. Raises PackError if it cannot be made.
    """

    def __init__(self, report: str | None) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        """(severity, kind) to how many."""
        self.examples: dict[str, list[str]] = {}
        """Kind to the first few findings."""
        self.report = report
        self._file: TextIO | None = None
        if report is not None:
            try:
                self._file = open(report, "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115 - see close
            except OSError as error:
                raise PackError(report, f"the report cannot be written: {error.strerror}") from error

    def add(self, problem: Problem, *, skipped: bool) -> None:
        """Count one finding."""
        self.counts[problem.severity, problem.kind] += 1
        examples = self.examples.setdefault(problem.kind, [])
        if len(examples) < _EXAMPLES:
            examples.append(str(problem))
        if self._file is not None:
            line = json.dumps({**asdict(problem), "skipped": skipped}, ensure_ascii=False)
            self._file.write(line + "\n")

    def close(self) -> None:
        """Finish the report file."""
        if self._file is not None:
            self._file.close()


class RunJournal:
    """The memory of one part of a run."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._rows: list[np.ndarray[Any, Any]] = []  # positions of rows that are not committed yet
        self._findings: list[Finding] = []  # not committed yet
        self._waiting_sizes: list[tuple[int, int]] = []
        self._per_row = 0
        self.skipped: list[int] = []
        """Positions of the order that are not in the pack, ascending."""
        self.position = 0
        """Behind the last position whose fate is known to the pack's journal."""
        self.sizes: Counter[tuple[int, int]] = Counter()
        """(height, width) of encoded images; beyond SIZES different ones, all others are (0, 0)."""

    def restore(self, notes: Iterable[Mapping[str, Any]]) -> None:
        """Take up what earlier commits have noted."""
        for note in notes:
            self.position = int(note["position"])
            for place, problem in note["findings"]:
                self.tell(Finding(place, Problem(**problem)))
            for height, width, count in note["sizes"]:
                self._size((height, width), count)

    def take(self, block: Block) -> None:
        """Remember a block that is about to be added to the pack."""
        self._rows.append(block.positions)
        self._waiting_sizes += block.sizes
        if len(block.positions):
            self._per_row = len(block.sizes) // len(block.positions)
        for finding in block.findings:
            self._findings.append(finding)
            self.tell(finding)

    def note(self, rows: int) -> dict[str, Any]:
        """Return what belongs to the next ``rows`` rows, which are being committed."""
        if not self._rows:  # rows of columns: none is left out, nothing is found
            self.position += rows
            return {"position": self.position, "findings": [], "sizes": []}
        positions = np.concatenate(self._rows)
        self._rows = [positions[rows:]]
        self.position = int(positions[rows - 1]) + 1
        here = [each for each in self._findings if each.position < self.position]
        self._findings = [each for each in self._findings if each.position >= self.position]
        sizes = self._waiting_sizes[: rows * self._per_row]
        del self._waiting_sizes[: rows * self._per_row]
        for size, count in Counter(sizes).items():
            self._size(size, count)
        return {
            "position": self.position,
            "findings": [[each.position, asdict(each.problem)] for each in here],
            "sizes": [[*size, count] for size, count in Counter(sizes).items()],
        }

    def tell(self, finding: Finding) -> None:
        """Count a finding, and whether it costs a sample."""
        skipped = finding.problem.severity == "error"
        self._tally.add(finding.problem, skipped=skipped)
        if skipped and (not self.skipped or self.skipped[-1] != finding.position):
            self.skipped.append(finding.position)

    def _size(self, size: tuple[int, int], count: int) -> None:
        self.sizes[size if size in self.sizes or len(self.sizes) < _SIZES else (0, 0)] += count

    def rows_to_positions(self, count: int) -> np.ndarray[Any, Any]:
        """Return the position in the order of each row of the pack, of ``count`` positions in all."""
        return np.delete(np.arange(count, dtype=np.int64), self.skipped)


def free_bytes(path: str) -> int:
    """Return how much may be written to the file system that holds the (new) file ``path``."""
    there = os.statvfs(os.path.dirname(os.path.abspath(path)))
    return there.f_bavail * there.f_frsize
