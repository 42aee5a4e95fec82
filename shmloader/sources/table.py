"""Tables: CSV, TSV and Parquet files, one row per sample, one field per column.

    species,height,photo              {"species": 1, "height": 0.25, "photo": <image>}
    tulip,0.25,photos/a.jpg           with columns ("species=label", "height", "photo=image")

Types are the file's own; those of CSV are found out by pyarrow from the whole column. All columns are read when the
table is opened, and kept as arrays: small ones in memory, large ones of numbers in a temporary file. A missing value is
an error with its row and column, unless the column holds floats: there it is NaN. Rows count from 0, the header not
counted.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..errors import MisuseError, SourceError
from ..images import Fit
from .base import Array, NameTable, Options, Source, StrPath, position
from .list_lines import names_image
from .pictures import Pictures, find_folder, folder_of, read_file
from .problems import Problem
from .table_columns import Column, read_column
from .table_read import CSV_SUFFIXES, PARQUET_SUFFIXES, TableFile, first_texts, parts_of

ROLES = ("image", "file", "label", "text", "float")
_MEMORY = 64 << 20
_LOOK_AT = 1000  # values from which a column of images is known


class TableRows(Source):
    """The rows of a table as dicts: numbers and lists of numbers as new tensors of the column's dtype, texts as
    ``str``, binary as ``bytes``; dates and times as int64, decimals as float64.

    ``columns`` chooses and orders: names, or ``name=role``. Roles: ``image``, a column of paths, whose files become
    images (``bytes`` with ``encoded``, else uint8 (3, h, w)); ``file``, paths whose files become ``bytes``; ``label``,
    int64, texts as numbers of the sorted ``classes``; ``text``, with missing values empty; ``float``, float64 with
    missing values NaN. A column of texts that name images which are there is an ``image`` unless said otherwise.

    A column of numbers of more than ``memory`` bytes (64 MiB) is kept in an unnamed temporary file instead of memory.
    ``columns()`` gives whole arrays where all columns are numbers of one shape: such a table is packed in bulk.
    Raises SourceError for a damaged file and missing values (row and column), MissingExtra without pyarrow.
    """

    kind = "table"
    looked_for = "a table (.csv, .tsv, .parquet), or a folder of .parquet files"
    uses = frozenset({"fit", "images", "separator", "columns"})

    def __init__(
        self,
        path: StrPath,
        *,
        columns: Sequence[str] | None = None,
        images: StrPath | None = None,
        separator: str | None = None,
        fit: Fit | None = None,
        encoded: bool = False,
        memory: int = _MEMORY,
    ) -> None:
        self.path = os.fspath(path)
        self._pictures = Pictures(fit, encoded)
        file = TableFile(self.path, separator)
        self._length = file.rows
        chosen = dict.fromkeys(file.names, "") if columns is None else _chosen(columns, file.names, self.path)
        self.classes: list[str] | None = None
        self._columns: dict[str, Column] = {}
        self._roles: dict[str, str] = {}
        self._folders: dict[str, str] = {}
        self._notes = file.notes
        for name, role in chosen.items():
            column = read_column(file, name, role, memory)
            self._roles[name] = self._role(name, role, column, images)
            self._columns[name] = self._labels(name, column) if role == "label" else column

    def _role(self, name: str, said: str, column: Column, images: StrPath | None) -> str:
        """Return what a column is, and find the folder of the files that it names."""
        if said in ("image", "file") and not isinstance(column, NameTable):
            raise SourceError(self.path, f"column {name!r} holds no texts: it cannot name files")
        likely = said in ("image", "file") or (
            not said and isinstance(column, NameTable) and all(map(names_image, first_texts(column, _LOOK_AT)))
        )
        if not (likely and isinstance(column, NameTable)):
            return said
        here = folder_of(self.path)
        above = os.path.join(here, os.pardir)
        near = [here, os.path.join(here, "images"), above, os.path.join(above, "images"), os.curdir]
        folders = near if images is None else [os.fspath(images)]
        folder, looked = find_folder(list(first_texts(column, _LOOK_AT)), folders)
        if folder is None and said:
            raise SourceError(self.path, f"the files of column {name!r} are not there: {looked} (--images)")
        if folder is None:
            self._notes.append(f"column {name!r} seems to name images, but stays text: {looked}")
            return said
        if not said:
            self._notes.append(f"column {name!r} names images, which are taken in ({name}=text keeps the names)")
        self._folders[name] = folder
        return said or "image"

    def _labels(self, name: str, column: Column) -> Array:
        if isinstance(column, np.ndarray) and column.dtype.kind in "biu" and column.ndim == 1:
            return column.astype(np.int64)
        if not isinstance(column, NameTable):
            raise SourceError(self.path, f"column {name!r} holds neither whole numbers nor texts: it cannot be a label")
        values = np.array(list(column), dtype=object)
        names, labels = np.unique(values, return_inverse=True)
        self.classes = names.tolist()
        return labels.astype(np.int64)

    @classmethod
    def recognises(cls, path: str) -> bool:
        if os.path.isdir(path):
            return bool(parts_of(path))
        return path.lower().endswith(CSV_SUFFIXES + PARQUET_SUFFIXES)

    @classmethod
    def open(cls, path: str, options: Options) -> TableRows:
        return cls(
            path,
            columns=options.columns,
            images=options.images,
            separator=options.separator,
            fit=options.fit,
            encoded=options.fit is None,
        )

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = position(index, self._length)
        return {name: self._value(name, index) for name in self._columns}

    def _value(self, name: str, index: int) -> Any:
        value = self._columns[name][index]
        role = self._roles[name]
        if role in ("image", "file"):
            told_by = f"{self.name_of(index)}, column {name!r}"
            path = os.path.join(self._folders[name], str(value))
            return self._pictures.read(path, told_by)[0] if role == "image" else read_file(path, told_by)
        if isinstance(value, (str, bytes)):
            return value
        return torch.from_numpy(np.array(value))

    def columns(self) -> Mapping[str, Array] | None:
        arrays = {name: column for name, column in self._columns.items() if isinstance(column, np.ndarray)}
        return arrays if len(arrays) == len(self._columns) else None

    def name_of(self, index: int) -> str:
        return f"{self.path}, row {index}"

    def describe(self) -> str:
        images = [name for name, role in self._roles.items() if role == "image"]
        return f"table of {len(self._columns)} columns" + (f", {self._pictures.describe()}" if images else "")

    @property
    def metadata(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"kind": self.kind, "source": self.path}
        if "image" in self._roles.values():
            facts["images"] = self._pictures.describe()
        label = [name for name, role in self._roles.items() if role == "label"]
        if label:
            facts["label_field"] = label[0]
        return facts if self.classes is None else facts | {"classes": list(self.classes)}

    @property
    def encodings(self) -> dict[str, str]:
        images = [name for name, role in self._roles.items() if role == "image"]
        return dict.fromkeys(images, "encoded-image") if self._pictures.encoded else {}

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self._notes)

    def class_counts(self) -> Mapping[str, int] | None:
        labels = self.classes_of_samples()
        if labels is None:
            return None
        if self.classes is not None:
            return dict(zip(self.classes, np.bincount(labels, minlength=len(self.classes)).tolist(), strict=True))
        values, counts = np.unique(labels, return_counts=True)
        return {str(value): count for value, count in zip(values.tolist(), counts.tolist(), strict=True)}

    def classes_of_samples(self) -> npt.NDArray[np.int64] | None:
        found = [self._columns[name] for name, role in self._roles.items() if role == "label"]
        return found[0] if found and isinstance(found[0], np.ndarray) else None

    def problems(self, index: int, sample: Any) -> Iterable[Problem]:
        for name, role in self._roles.items():
            if role == "label" and int(sample[name]) < 0:
                what = f"its label, column {name!r}, is {int(sample[name])}"
                yield Problem(index, self.name_of(index), "label-out-of-range", what, "error")


def _chosen(words: Sequence[str], names: Sequence[str], path: str) -> dict[str, str]:
    """Return name -> role for the columns that ``words`` choose. Raises MisuseError."""
    chosen: dict[str, str] = {}
    for word in words:
        name, _, role = word.rpartition("=")
        if word in names:
            name, role = word, ""
        elif name not in names:
            raise MisuseError(f"{path} has no column {(name or word)!r}; it has {', '.join(map(repr, names))}")
        elif role not in ROLES:
            raise MisuseError(f"column {name!r} cannot be {role!r}; it can be {', '.join(ROLES)}")
        if name in chosen:
            raise MisuseError(f"column {name!r} is chosen twice")
        chosen[name] = role
    if list(chosen.values()).count("label") > 1:
        raise MisuseError("only one column can be the label")
    return chosen
