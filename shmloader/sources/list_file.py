"""A text file that lists images, one a line, with what belongs to each: labels, landmarks, boxes, numbers.

    photos/a.jpg 3                       path,label
    a.jpg 31 40 62.5 41 48 60 cat        path,points,label
    "a, b.jpg";0.25;outdoors             path,number,label

What stands between the columns and what they are is found out from the first lines, said in the notes, and can be
given: see ``list_lines`` and ``list_roles``. All lines must then fit: one that does not is an error with its number.

Names are relative to the folder of the list, or to one near it that has the images, or to the one that is given.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..errors import MisuseError, SourceError
from ..images import Fit
from .base import Annotated, NameTable, Options, Source, StrPath, listed, position
from .detection import box_findings
from .geometry import Placing
from .list_lines import NAMES, SEPARATORS, BadLine, cut, data_lines, find_separator, names_image
from .list_roles import Layout, found, said
from .list_table import ListTable
from .pictures import Pictures, folder_of, folder_with
from .problems import Problem, Severity
from .ragged import Ragged

_LOOK_AT = 1000  # lines from which the columns are found out
_HEADERS = 3  # leading lines at most that may be something else
_SUFFIXES = (".txt", ".lst", ".list", ".csv", ".tsv")


class ListFile(Source):
    """The images of a list, as ``(image, label)`` where the columns are these two, else as dicts of the fields.

    ``image`` is ``bytes`` with ``encoded``, else uint8 (3, h, w). ``label`` is an int: the number in the list, or the
    place of the name in the sorted ``classes``. ``points`` float32 (k, 2) and ``boxes`` float32 (k, 4) are in pixels
    and go with the image when it is turned, scaled or cropped (a crop takes out boxes that lie outside of it, points
    stay); ``numbers`` float32 (k,), ``number`` int or float, ``text`` str. A dict also has ``name``, as in the list.

    Raises SourceError with the line: columns that do not fit, no numbers where there were some, a file that is missing.
    """

    kind = "list"
    looked_for = "a text file (.txt, .lst, .list, .csv) whose lines begin with the name of an image"
    uses = frozenset({"fit", "images", "annotated", "separator", "columns"})

    def __init__(
        self,
        path: StrPath,
        *,
        images: StrPath | None = None,
        separator: str | None = None,
        columns: Sequence[str] | None = None,
        fit: Fit | None = None,
        encoded: bool = False,
        annotated: Annotated = "auto",
    ) -> None:
        self.path = os.fspath(path)
        if separator is not None and separator not in SEPARATORS:
            raise MisuseError(f"columns are separated by {', '.join(NAMES.values())}, not by {separator!r}")
        self._pictures = Pictures(fit, encoded)
        self._annotated: Annotated = annotated
        self._notes: list[str] = []
        table = self._read(separator, None if columns is None else said(columns))
        self._names = NameTable(table.names)
        self._lines = np.asarray(table.lines, np.int64)
        self._first = self._names.first_of()
        self._folder = self._folder_of_images(table.names, images)
        self._roles = {column.name: column.role for column in table.layout.columns if column.role != "skip"}
        self._fields, self.classes = table.finish()
        self._pair = list(self._roles) == ["image", "label"]

    # --- reading ------------------------------------------------------------------------------------------------------

    def _read(self, separator: str | None, layout: Layout | None) -> ListTable:
        with _opened(self.path) as lines:
            first = list(islice(data_lines(lines), _LOOK_AT))
        if not first:
            raise SourceError(self.path, "it has no lines, or comments only")
        separator, headers = self._separator(first, separator, layout)
        path_first = layout is None or layout.columns[0].role == "path"
        if layout is None:
            try:
                layout = found([cut(line, separator, path_first) for _, line in first[headers:]])
            except (ValueError, BadLine) as fault:
                raise SourceError(self.path, f"{fault}; say what they are with columns (--columns)") from fault
            self._notes.append(f"columns found: {layout.describe()}, separated by {NAMES[separator]}")
        if headers:
            self._notes.append(
                f"left out, lines before the first image: {listed([t for _, t in first[:headers]], headers)}"
            )
        table = ListTable(layout)
        with _opened(self.path) as lines:
            for number, line in islice(data_lines(lines), headers, None):
                try:
                    table.add(number, cut(line, separator, path_first))
                except ValueError as fault:
                    raise SourceError(f"{self.path}, line {number}", str(fault)) from fault
        return table

    def _separator(self, first: list[tuple[int, str]], separator: str | None, layout: Layout | None) -> tuple[str, int]:
        """Return (separator, how many of the first lines come before the first image)."""
        path_first = layout is None or layout.columns[0].role == "path"

        def fits(row: list[str]) -> bool:
            if path_first or layout is None:
                return names_image(row[0])
            try:
                spans = layout.spread(len(row))
            except ValueError:
                return False
            return names_image(row[spans[layout.path].start])

        tried = SEPARATORS if separator is None else (separator,)
        good = find_separator([line for _, line in first], tried, fits, path_first)
        if good is not None and good[1] <= _HEADERS:
            return good
        if separator is not None and layout is not None:
            return separator, 0  # both are said: names need not look like those of images
        number, line = first[0]
        raise SourceError(
            f"{self.path}, line {number}",
            f"{line[:80]!r}: no column of these lines names images throughout; say what they are with separator and "
            "columns (--separator, --columns)",
        )

    def _folder_of_images(self, names: list[str], given: StrPath | None) -> str:
        if given is not None:
            return os.fspath(given)
        here = folder_of(self.path)
        above = os.path.join(here, os.pardir)
        folders = [here, os.path.join(here, "images"), above, os.path.join(above, "images"), os.curdir]
        return folder_with(self.path, names, folders)

    @classmethod
    def recognises(cls, path: str) -> bool:
        """True for a text file whose first lines begin with the names of images. A table with a header is none."""
        if not (os.path.isfile(path) and path.lower().endswith(_SUFFIXES)):
            return False
        with _opened(path) as lines:
            first = [line for _, line in islice(data_lines(lines), 20)]
        headers = 0 if path.lower().endswith((".csv", ".tsv")) else _HEADERS
        good = find_separator(first, SEPARATORS, lambda row: names_image(row[0]))
        return good is not None and good[1] <= headers

    @classmethod
    def open(cls, path: str, options: Options) -> ListFile:
        return cls(
            path,
            images=options.images,
            separator=options.separator,
            columns=options.columns,
            fit=options.fit,
            encoded=options.fit is None,
            annotated=options.annotated,
        )

    # --- samples ------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> Any:
        index = position(index, len(self))
        name = self._names[index]
        image, seen = self._pictures.read(os.path.join(self._folder, name), self.name_of(index))
        if self._pair:
            return image, self._value("label", index)
        placing = Placing.of(seen, (0, 0), self._annotated, self._pictures.fit)
        sample: dict[str, Any] = {}
        for field, role in self._roles.items():
            value: Any = image if role == "path" else self._value(field, index)
            if role == "points":
                value = torch.from_numpy(placing.points(value.numpy()))
            elif role == "boxes":
                value = torch.from_numpy(placing.boxes(value.numpy())[0])
            sample[field] = value
        sample["size"] = torch.tensor([seen.height, seen.width])
        sample["name"] = name
        return sample

    def _value(self, field: str, index: int) -> Any:
        column = self._fields[field]
        if isinstance(column, Ragged):
            return torch.from_numpy(column[index].copy())
        return column[index] if isinstance(column, NameTable) else column[index].item()

    def name_of(self, index: int) -> str:
        return f"{self.path}, line {int(self._lines[index])} ({self._names[index]})"

    def describe(self) -> str:
        return f"list of images, {self._pictures.describe()}"

    @property
    def metadata(self) -> dict[str, Any]:
        facts = {"kind": self.kind, "source": self.path, "images": self._pictures.describe()}
        label = self._label_field()
        if label is not None:
            facts["label_field"] = label
        return facts | ({"classes": list(self.classes)} if self.classes is not None else {})

    @property
    def encodings(self) -> dict[str, str]:
        image = next(name for name, role in self._roles.items() if role == "path")
        return {image: "encoded-image"} if self._pictures.encoded else {}

    @property
    def field_names(self) -> tuple[str, ...] | None:
        return ("image", "label") if self._pair else None

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self._notes)

    def classes_of_samples(self) -> npt.NDArray[np.int64] | None:
        """Return the label of each sample, (n,), or None where no column is the label."""
        field = self._label_field()
        labels = None if field is None else self._fields[field]
        return labels if isinstance(labels, np.ndarray) else None

    def _label_field(self) -> str | None:
        return next((name for name, role in self._roles.items() if role == "label"), None)

    def class_counts(self) -> Mapping[str, int] | None:
        """Return samples per class. Of numbers: for all from 0, or those that occur if one is negative."""
        labels = self.classes_of_samples()
        if labels is None:
            return None
        if self.classes is not None:
            return dict(zip(self.classes, np.bincount(labels, minlength=len(self.classes)).tolist(), strict=True))
        values, counts = np.unique(labels, return_counts=True)
        there = dict(zip(values.tolist(), counts.tolist(), strict=True))
        if int(values[0]) < 0 or int(values[-1]) > 10 * len(self):
            return {str(value): count for value, count in there.items()}
        return {str(value): there.get(value, 0) for value in range(int(values[-1]) + 1)}

    def problems(self, index: int, sample: Any) -> Iterable[Problem]:
        where = self.name_of(index)
        for kind, what, severity in self._findings(index, {"label": sample[1]} if self._pair else sample):
            yield Problem(index, where, kind, what, severity)

    def _findings(self, index: int, sample: Mapping[str, Any]) -> Iterator[tuple[str, str, Severity]]:
        if self._first[index] != index:
            line = int(self._lines[self._first[index]])
            yield "duplicate-image", f"line {line} lists the same image", "warning"
        for field, role in self._roles.items():
            if role == "label" and sample[field] < 0:
                yield "label-out-of-range", f"its label is {sample[field]}", "error"
            if role in ("points", "boxes"):
                height, width = sample["size"].tolist()
                if self._pictures.fit is not None:
                    height, width = self._pictures.fit.height, self._pictures.fit.width
                values = sample[field].numpy()
                if role == "boxes":
                    yield from box_findings(values, np.zeros(len(values), np.int64), height, width, 1)
                else:
                    outside = np.flatnonzero(((values < 0) | (values > (width, height))).any(axis=1)).tolist()
                    if outside:
                        which = listed([str(number) for number in outside], len(outside))
                        yield "point-outside", f"points {which} lie outside of {width} x {height} pixels", "warning"


def _opened(path: str) -> Any:
    # Names may hold any bytes.
    return open(path, encoding="utf-8-sig", errors="surrogateescape", newline=None)
