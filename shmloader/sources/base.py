"""What every source is: a map-style torch Dataset that also says what it is.

    path ──recognise──▶ a Source class ──open──▶ a Source ──pack──▶ one LMDB file
                                                    └─────────────▶ or straight into a DataLoader

A source reads; it never writes, and it keeps nothing about its samples that grows as a Python object per sample:
workers that are forked from it would copy such objects page by page.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from ..images import Fit
from .blocks import Columns, named
from .problems import Problem

Annotated = Literal["auto", "upright", "stored"]
StrPath = str | os.PathLike[str]
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Options:
    """What may be asked of a source when it is opened for packing."""

    fit: Fit | None = None
    """Decode images and bring them to this size. None: keep the bytes of their files."""

    window: int | None = None
    """Of token files: tokens in one sample."""

    stride: int | None = None
    """Of token files: tokens from the start of one window to that of the next. None: as many as in a window."""

    token_dtype: str | None = None
    """Of token files: the dtype of the numbers in the file. None: as its head says, uint16 without a head."""

    tokens_as: str | None = None
    """Of token files: the dtype that samples have. None: int64."""

    vocab_size: int | None = None
    """Of token files: all tokens must be below it. None: that is not checked."""

    keys: tuple[str, ...] | None = None
    """Of one-key-per-sample LMDBs: how the keys of samples look, as in ``"image-%09d"``. None: every key is one."""

    decode: Callable[..., Any] | None = field(default=None, repr=False)
    """Of one-key-per-sample LMDBs: makes a sample of key and value. None: they are the sample."""

    images: str | None = None
    """The folder that names of image files are relative to. None: it is looked for."""

    image_set: str | None = None
    """Which of the lists beside a Pascal VOC set to follow, such as ``"trainval"``. None: all annotations."""

    annotated: Annotated = "auto"
    """How images with an EXIF rotation lay when boxes and points were drawn on them; see ``geometry``."""

    separator: str | None = None
    """What stands between the columns of a text file. None: it is found out."""

    columns: tuple[str, ...] | None = None
    """What the columns are, each as ``role``, ``name`` or ``name=role``. None: it is found out. Of tar shards and
    Hugging Face data: the suffixes or columns to keep; None: all."""

    def given(self) -> tuple[str, ...]:
        """Return the names of the options that differ from their defaults."""
        return tuple([each.name for each in fields(self) if getattr(self, each.name) != each.default])


class Source(Dataset[Any]):
    """Base of the readers of real-world data. ``len()`` and ``[i]`` as for any map-style Dataset."""

    kind: ClassVar[str]
    """The word for ``--as`` and for the manifest, such as ``"image-folder"``."""

    looked_for: ClassVar[str]
    """What ``recognises`` looks for, as a phrase that fits behind "looked for"."""

    uses: ClassVar[frozenset[str]] = frozenset({"fit"})
    """The ``Options`` that mean something here; ``open_source`` refuses the others instead of ignoring them."""

    @classmethod
    @abstractmethod
    def recognises(cls, path: str) -> bool:
        """Say quickly, by names alone, whether ``path`` (which exists) looks like this kind of data."""

    @classmethod
    @abstractmethod
    def open(cls, path: str, options: Options) -> Source:
        """Open ``path`` for packing: images come as the bytes of their files unless ``options.fit`` is set."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def name_of(self, index: int) -> str:
        """Return where sample ``index`` came from, for error messages."""

    @abstractmethod
    def describe(self) -> str:
        """Return one phrase for the head of a report: kind, and how it is stored."""

    @property
    @abstractmethod
    def metadata(self) -> dict[str, Any]:
        """JSON-able facts for the manifest: at least ``kind`` and ``source``; ``classes`` where there are some."""

    @property
    def encodings(self) -> dict[str, str]:
        """Fields whose bytes mean more than bytes, for ``pack(encodings=...)``."""
        return {}

    @property
    def field_names(self) -> tuple[str, ...] | None:
        """Names for the parts of a tuple sample; None where the samples name their fields themselves."""
        return None

    @property
    def notes(self) -> tuple[str, ...]:
        """What was found and left out, one sentence each. Nothing is dropped without a note."""
        return ()

    def class_counts(self) -> Mapping[str, int] | None:
        """Return samples per class in label order, or None where there are no classes."""
        return None

    def classes_of_samples(self) -> npt.NDArray[np.int64] | None:
        """Return one number per sample, (n,): samples of one number are of one class. None where there are none.

        A split that is stratified keeps the share of each.
        """
        return None

    def fingerprint(self) -> str:
        """Return a digest of what there is to read: kind, options, and the name of every sample; no contents.

        A packing run goes on with an unfinished pack only if this is the same.
        """
        digest = hashlib.sha256()
        facts = [self.kind, len(self), self.describe(), self.metadata, self.encodings, self.field_names]
        digest.update(json.dumps(facts, default=str).encode())
        columns = self.columns()
        if columns is not None:
            for name, array in named(columns, self.field_names).items():
                digest.update(f"{name} {array.dtype} {array.shape}\n".encode("utf-8", "surrogatepass"))
        else:
            for index in range(len(self)):
                digest.update(self.name_of(index).encode("utf-8", "surrogatepass") + b"\0")
        for path in self.files():
            status = os.stat(path)
            digest.update(f"{status.st_size} {status.st_mtime_ns}".encode())
        return digest.hexdigest()

    def files(self) -> list[str]:
        """Return the files that hold many samples each: where one of them has changed, a run is not gone on with."""
        source = self.metadata.get("source")
        return [source] if isinstance(source, str) and os.path.isfile(source) else []

    def problems(self, index: int, sample: Any) -> Iterable[Problem]:
        """Return what is wrong with ``sample``, which ``self[index]`` gave: boxes, labels, sizes. Not its reading.

        What cannot be read at all raises SourceError in ``__getitem__``, which counts as a problem of severity "error".
        """
        return ()

    def columns(self) -> Columns | None:
        """Return whole fields as arrays where they exist as such (memory maps, not copies), else None.

        A mapping where samples are dicts, a tuple where they are tuples, one array where samples are its rows: sample i
        is made of the rows i. See blocks.py for what may stand for an array.
        """
        return None


class NameTable:
    """Many names in two arrays: a few bytes per name, and no Python object for each of them.

    Any string comes back as it was: also the name of a file that is no UTF-8.
    """

    def __init__(self, names: Iterable[str]) -> None:
        encoded = [name.encode("utf-8", "surrogatepass") for name in names]
        self._bytes: Array = np.frombuffer(b"".join(encoded), np.uint8)
        self._ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)

    @classmethod
    def of_bytes(cls, joined: Array, lengths: Array) -> NameTable:
        """Return the table of names whose UTF-8 bytes (uint8) lie one after another in ``joined``; shares it."""
        table = cls(())
        table._bytes, table._ends = joined, np.cumsum(lengths, dtype=np.int64)
        return table

    def __len__(self) -> int:
        return len(self._ends)

    def first_of(self) -> Array:
        """For each name the position of the first one equal to it, int64 (n,): its own, unless it is a repetition."""
        seen: dict[str, int] = {}
        return np.fromiter((seen.setdefault(name, i) for i, name in enumerate(self)), np.int64, len(self))

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self._ends):
            raise IndexError(f"index {index} is out of range for {len(self._ends)} names")
        start = int(self._ends[index - 1]) if index else 0
        return self._bytes[start : int(self._ends[index])].tobytes().decode("utf-8", "surrogatepass")


def position(index: int, length: int) -> int:
    """Return ``index`` as one from 0 to ``length`` - 1, counting negative ones from the end; else IndexError."""
    if not -length <= index < length:
        raise IndexError(f"index {index} is out of range for {length} samples")
    return index + length if index < 0 else index


def listed(names: list[str], total: int, show: int = 5) -> str:
    """Return the first few names and how many more there are: ``"a, b, ... and 7 more"``."""
    shown = ", ".join(names[:show])
    more = total - min(len(names), show)
    return f"{shown} and {more} more" if more else shown
