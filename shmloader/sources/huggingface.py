"""What Hugging Face's ``datasets`` wrote: a dict a row, each column as its feature says (hf_features.py)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .. import images
from ..errors import MisuseError, SourceError
from ..images import Fit
from .base import Options, Source, StrPath, position
from .blocks import Columns, Rows
from .hf_features import Unfit, check_columns, fixed_shape, name_of, value
from .hf_rows import MappedRows, ParquetRows, files_in, kind_of, open_rows
from .problems import Problem

_NEAR = 256  # rows that are looked up together: neighbours are most often wanted next


class _LazyColumn:
    """A column of numbers of one shape, read when asked for."""

    def __init__(self, source: HuggingFaceRows, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._source, self._name = source, name
        self.dtype, self.shape = dtype, (len(source), *shape)

    def __getitem__(self, rows: Rows) -> npt.NDArray[Any]:
        return self._source.numbers(self._name, rows, self.dtype, self.shape[1:])


class HuggingFaceRows(Source):
    """Rows of a folder made by ``Dataset.save_to_disk``, or of the Arrow or Parquet files of ``datasets``, as dicts.

    ``columns``: the ones to take, in this order. Images come as uint8 tensors (3, h, w), all of one size with ``fit``,
    or with ``encoded=True`` as the bytes of their files, proved to be decodable. Class labels are ints; where all
    columns are numbers of one shape, they are tensors like the others, and packed in whole columns.
    Raises SourceError for a column that cannot be stored, and, with row and column, for values that are missing.
    """

    kind = "huggingface"
    looked_for = "a folder or an Arrow or Parquet file that Hugging Face's datasets wrote"
    uses = frozenset({"fit", "columns"})

    def __init__(
        self,
        path: StrPath,
        *,
        columns: tuple[str, ...] | None = None,
        fit: Fit | None = None,
        encoded: bool = False,
    ) -> None:
        if encoded and fit is not None:
            raise ValueError("encoded=True keeps the files as they are: it cannot be combined with fit=")
        self.path = os.fspath(path)
        self.names, self.fit, self.encoded = columns, fit, encoded
        self._open()
        self._images = [name for name, feature in self._features.items() if name_of(feature) == "Image"]
        if fit is not None and not self._images:
            raise MisuseError(f"{self.path} has no column of images: --size does not apply")
        labels = [name for name, feature in self._features.items() if name_of(feature) == "ClassLabel"]
        self._label = labels[0] if len(labels) == 1 else None
        shapes = {name: fixed_shape(feature) for name, feature in self._features.items()}
        self._plain = {name: found for name, found in shapes.items() if found is not None}
        self._in_columns = len(self._plain) == len(shapes)

    def _open(self) -> None:
        self._rows: MappedRows | ParquetRows = open_rows(self.path)
        features = self._rows.features
        names = self.names or tuple(features)
        check_columns(self.path, features, names)
        self._features = {name: features[name] for name in names}
        self._near: tuple[int, dict[str, Any]] = (-1, {})
        if not len(self._rows):
            raise SourceError(self.path, "there is no row in it")

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "columns": self.names, "fit": self.fit, "encoded": self.encoded}

    def __setstate__(self, state: dict[str, Any]) -> None:
        HuggingFaceRows.__init__(self, **state)

    @classmethod
    def recognises(cls, path: str) -> bool:
        return bool(kind_of(path))

    @classmethod
    def open(cls, path: str, options: Options) -> HuggingFaceRows:
        return cls(path, columns=options.columns, fit=options.fit, encoded=options.fit is None)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = position(index, len(self))
        start, near = index - index % _NEAR, self._near
        if near[0] != start:
            table = self._rows.table(start, min(start + _NEAR, len(self)))
            near = self._near = start, {name: _one_array(table.column(name)) for name in self._features}
        sample: dict[str, Any] = {}
        for name, feature in self._features.items():
            try:
                found = value(feature, near[1][name], index - start, os.path.dirname(self.path))
            except Unfit as unfit:
                raise SourceError(f"{self.name_of(index)}, column {name!r}", unfit.why) from None
            sample[name] = found
            if name in self._images:
                sample[name] = self._image(found, f"{self.name_of(index)}, column {name!r}")
            elif self._in_columns and isinstance(found, int):
                sample[name] = torch.tensor(found)
        return sample

    def _image(self, data: bytes, name: str) -> bytes | torch.Tensor:
        if self.encoded:
            images.check(data, name=name)
            return data
        return torch.from_numpy(images.decode_chw(data, name=name, fit=self.fit))

    def numbers(self, name: str, rows: Rows, dtype: np.dtype[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """Return rows of a column of numbers of one shape. Raises SourceError if one is missing."""
        table = self._rows.table(*rows.indices(len(self))[:2]) if isinstance(rows, slice) else self._rows.take(rows)
        column = _one_array(table.column(name))
        flat, missing = column, column.null_count
        for _ in shape:
            flat = flat.flatten()
            missing += flat.null_count
        if missing:
            at = "" if not isinstance(rows, slice) else f" from {rows.start} on"
            raise SourceError(self.path, f"column {name!r}: numbers are missing (null) in the {len(column)} rows{at}")
        return np.asarray(flat.to_numpy(zero_copy_only=False), dtype).reshape(len(column), *shape)

    def columns(self) -> Columns | None:
        if not self._in_columns:
            return None
        return {name: _LazyColumn(self, name, *found) for name, found in self._plain.items()}

    def name_of(self, index: int) -> str:
        return f"row {index} of {self.path}"

    def files(self) -> list[str]:
        return files_in(self.path, "parquet" if kind_of(self.path) == "parquet" else "arrow")

    def describe(self) -> str:
        stored = ", images " + ("stored as their files" if self.encoded else "decoded") if self._images else ""
        return "Hugging Face dataset" + stored + (f", {self.fit.describe()}" if self.fit else "")

    @property
    def metadata(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"kind": self.kind, "source": self.path}
        if self._label is None:
            return facts
        return {**facts, "label_field": self._label, "classes": list(self._features[self._label].names)}

    @property
    def encodings(self) -> dict[str, str]:
        return dict.fromkeys(self._images, "encoded-image") if self.encoded else {}

    def classes_of_samples(self) -> npt.NDArray[np.int64] | None:
        if self._label is None:
            return None
        return self.numbers(self._label, slice(0, len(self)), np.dtype(np.int64), ())

    def class_counts(self) -> Mapping[str, int] | None:
        labels = self.classes_of_samples()
        if labels is None or self._label is None:
            return None
        names = self._features[self._label].names
        counts = np.bincount(labels[(labels >= 0) & (labels < len(names))], minlength=len(names))
        return dict(zip(names, counts.tolist(), strict=True))

    def problems(self, index: int, sample: Any) -> Iterable[Problem]:
        if self._label is None:
            return
        label, count = int(sample[self._label]), len(self._features[self._label].names)
        if not 0 <= label < count:  # -1 is what datasets gives where labels are kept secret
            what = f"label {label} is none of the {count} classes"
            yield Problem(index, self.name_of(index), "label-outside", what, "warning")


def _one_array(column: Any) -> Any:
    """Return a column that lies in chunks as one array, without a copy where it is one."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
