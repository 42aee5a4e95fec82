"""Rows of what Hugging Face's ``datasets`` wrote: some at a time, as Arrow tables, from wherever they lie.

saved/dataset_info.json, state.json, data-*.arrow     Dataset.save_to_disk     memory-mapped
data.arrow, or a folder of such files                 the cache's own form     memory-mapped
data.parquet, or a folder of such files               to_parquet, the Hub      one row group at a time
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import MissingExtra, SourceError

_MARK = b"huggingface"  # how datasets calls what it adds to a file's schema
_LOOKED_AT = 1 << 20  # bytes of a file's schema


def library() -> Any:
    """Return the module ``datasets``. Raises MissingExtra."""
    try:
        import datasets
    except ImportError:
        raise MissingExtra("datasets", "huggingface", "read what it wrote") from None
    return datasets


def kind_of(path: str) -> str:
    """Say how ``path`` was written: ``"saved"``, ``"splits"``, ``"arrow"``, ``"parquet"``; empty: not by datasets."""
    if os.path.isdir(path):
        if os.path.isfile(os.path.join(path, "dataset_dict.json")):
            return "splits"
        if os.path.isfile(os.path.join(path, "state.json")) and os.path.isfile(os.path.join(path, "dataset_info.json")):
            return "saved"
        return next(
            (kind for kind in ("arrow", "parquet") if (found := files_in(path, kind)) and _marked(found[0])), ""
        )
    return path.rpartition(".")[2] if path.endswith((".arrow", ".parquet")) and _marked(path) else ""


def files_in(path: str, kind: str) -> list[str]:
    """Return the files of this kind in a folder, sorted; of a file, itself."""
    if not os.path.isdir(path):
        return [path]
    return sorted(
        entry.path for entry in os.scandir(path) if entry.name.endswith("." + kind) and not entry.name.startswith(".")
    )


def _marked(path: str) -> bool:
    with open(path, "rb") as file:
        if path.endswith(".arrow"):
            return _MARK in file.read(_LOOKED_AT)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _LOOKED_AT))
        return _MARK in file.read()


class MappedRows:
    """The rows of a Dataset, which maps its Arrow files."""

    def __init__(self, path: str, kind: str) -> None:
        datasets = library()
        if kind == "saved":
            dataset = datasets.load_from_disk(path)
        else:
            dataset = datasets.concatenate_datasets([datasets.Dataset.from_file(each) for each in files_in(path, kind)])
        self.features: dict[str, Any] = dict(dataset.features)
        self._dataset = dataset.with_format("arrow")

    def __len__(self) -> int:
        return len(self._dataset)

    def table(self, start: int, stop: int) -> Any:
        """Return rows as a ``pyarrow.Table``. Views of the file."""
        return self._dataset[start:stop]

    def take(self, rows: npt.NDArray[np.int64]) -> Any:
        """Return these rows, in this order; a copy."""
        return self._dataset[rows]


class ParquetRows:
    """The rows of Parquet files. The row group that was read last is kept."""

    def __init__(self, paths: Sequence[str]) -> None:
        from pyarrow import parquet

        self._paths = list(paths)
        self._files = [parquet.ParquetFile(path, memory_map=True) for path in paths]
        schema = self._files[0].schema_arrow
        for path, file in zip(paths, self._files, strict=True):
            if not file.schema_arrow.equals(schema):
                raise SourceError(path, f"has other columns, or of other types, than {paths[0]}")
        self.features: dict[str, Any] = dict(library().Features.from_arrow_schema(schema))
        self._groups = [(file, group) for file in self._files for group in range(file.num_row_groups)]
        self._ends = np.cumsum([file.metadata.row_group(group).num_rows for file, group in self._groups])
        self._kept: tuple[int, Any] = (-1, None)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def _group(self, number: int) -> tuple[int, Any]:
        """Return (the first row, the rows) of a row group. Raises SourceError for one that is damaged."""
        from pyarrow import ArrowException

        if self._kept[0] != number:
            file, group = self._groups[number]
            try:
                self._kept = number, file.read_row_group(group, use_threads=False)
            except (ArrowException, OSError) as fault:
                raise SourceError(
                    self._paths[self._files.index(file)], f"cannot be read: {_one_line(fault)}"
                ) from fault
        return int(self._ends[number - 1]) if number else 0, self._kept[1]

    def table(self, start: int, stop: int) -> Any:
        """Return rows as a ``pyarrow.Table``."""
        from pyarrow import concat_tables

        found = []
        number = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            first, group = self._group(number)
            until = min(stop, int(self._ends[number]))
            found.append(group.slice(start - first, until - start))
            start, number = until, number + 1
        return concat_tables(found) if found else self._files[0].schema_arrow.empty_table()

    def take(self, rows: npt.NDArray[np.int64]) -> Any:
        """Return these rows, in this order. Reads each row group once."""
        from pyarrow import concat_tables

        order = np.argsort(rows, kind="stable")
        ordered = rows[order]
        of = np.searchsorted(self._ends, ordered, side="right")
        found = []
        for number in np.unique(of).tolist():
            first, group = self._group(number)
            found.append(group.take(ordered[of == number] - first))
        back = np.empty(len(rows), np.int64)
        back[order] = np.arange(len(rows))
        return concat_tables(found).take(back)


def open_rows(path: str) -> MappedRows | ParquetRows:
    """Open what lies at ``path``. Raises SourceError for what datasets did not write, and MissingExtra."""
    library()
    from pyarrow import ArrowException

    kind = kind_of(path)
    if kind == "splits":
        names = ", ".join(sorted(entry.name for entry in os.scandir(path) if entry.is_dir()))
        raise SourceError(path, f"holds several splits: pack one of its folders: {names}")
    if not kind:
        raise SourceError(path, "is nothing that datasets wrote")
    try:
        return ParquetRows(files_in(path, kind)) if kind == "parquet" else MappedRows(path, kind)
    except IndexError as fault:  # datasets puts the tables of no file together
        raise SourceError(path, "there is no row in it") from fault
    except (ArrowException, OSError, ValueError, KeyError) as fault:
        raise SourceError(path, f"cannot be read: {_one_line(fault)}") from fault


def _one_line(fault: BaseException) -> str:
    return " ".join(str(fault).split())
