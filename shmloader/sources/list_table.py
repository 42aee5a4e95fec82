"""The columns of a list as whole arrays, filled one line after another."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .base import Array, NameTable
from .list_lines import is_number, is_whole
from .list_roles import GROUPS, Column, Layout
from .ragged import Ragged
from .voc_table import Names


class ListTable:
    """Collects the rows of a list; ``finish`` turns each column into one array."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._spans: dict[int, list[slice]] = {}
        self.lines = array("q")
        self.names: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self._fillers = [_Filler(column) for column in layout.columns if column.role not in ("path", "skip")]
        self._path = layout.path
        self._places = [i for i, column in enumerate(layout.columns) if column.role not in ("path", "skip")]

    def add(self, number: int, row: Sequence[str]) -> None:
        """Add the columns of line ``number``. Raises ValueError if they do not fit, or are no numbers."""
        spans = self._spans.get(len(row))
        if spans is None:
            spans = self._spans[len(row)] = self.layout.spread(len(row))
        for filler, place in zip(self._fillers, self._places, strict=True):
            filler.add(row[spans[place]])
        self.names.append(row[spans[self._path].start])
        self.lines.append(number)

    def finish(self) -> tuple[dict[str, Array | Ragged | NameTable], list[str] | None]:
        """Return (fields by name, in the order of the columns; names of the classes if labels are names)."""
        fields = {filler.column.name: filler.finish() for filler in self._fillers}
        classes = [filler.classes for filler in self._fillers if filler.classes is not None]
        return fields, classes[0] if classes else None


class _Filler:
    """One column as it grows."""

    def __init__(self, column: Column) -> None:
        self.column = column
        self.classes: list[str] | None = None
        self._group = GROUPS.get(column.role, 1)
        self._numbers = array("d")
        self._counts = array("q")
        self._names, self._tokens = Names(), array("q")
        self._texts: list[str] = []
        self._whole = True

    def add(self, values: Sequence[str]) -> None:
        role = self.column.role
        if role == "label":
            self._tokens.append(self._names.number(values[0]))
        elif role == "text":
            self._texts.append(values[0])
        else:
            numbers = self._floats(values)
            self._numbers.extend(numbers)
            if role == "number":
                self._whole = self._whole and is_whole(values[0])
            else:
                self._counts.append(len(values) // self._group)

    def _floats(self, values: Sequence[str]) -> list[float]:
        try:
            numbers = list(map(float, values))
            if math.isfinite(sum(numbers)):
                return numbers
        except ValueError:
            pass
        wrong = next((value for value in values if not is_number(value)), values[0])
        raise ValueError(f"{wrong!r} is no number, and column {self.column.name!r} holds numbers")

    def finish(self) -> Array | Ragged | NameTable:
        role = self.column.role
        if role == "text":
            return NameTable(self._texts)
        if role == "label":
            return self._labels()
        if role == "number":
            return np.asarray(self._numbers, np.int64 if self._whole else np.float64)
        values = np.asarray(self._numbers, np.float32)
        shaped = values if self._group == 1 else values.reshape(-1, self._group)
        return Ragged(shaped, np.asarray(self._counts, np.int64))

    def _labels(self) -> npt.NDArray[np.int64]:
        names, numbers = self._names.sort(self._tokens)
        if all(map(is_whole, names)):
            return np.array([int(name) for name in names], np.int64)[numbers]
        self.classes = names
        return numbers
