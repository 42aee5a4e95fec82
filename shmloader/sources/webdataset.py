"""WebDataset: tar files whose members are samples, a few files each that share their name up to the first dot.

    train-0000.tar:  0001.jpg 0001.cls 0002.jpg 0002.cls ...    {"__key__": "0001", "jpg": image, "cls": 7}

One pass over the headers makes an index of places; after that any sample is read directly, from any process.
"""

from __future__ import annotations

import io
import os
import re
from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .. import images
from ..errors import MisuseError, SourceError
from ..images import Fit
from .base import NameTable, Options, Source, StrPath, listed, position
from .scan import is_image_name
from .shards import Member, is_pattern, members, shard_paths, tars_in

KEY = "__key__"
_INTS = frozenset({"cls", "cls2", "class", "count", "index", "inx", "id"})
_TEXTS = frozenset({"txt", "text", "transcript", "json", "jsn", "caption"})
_META = re.compile(r"__[^/]*__($|/)")
"""Names that WebDataset keeps for facts about a shard."""
_LABEL = "cls"
_LEFT_OUT = 5


class _Field:
    """One suffix: for each sample that has it, its number, and the place and size of the file."""

    def __init__(self) -> None:
        self.samples, self.offsets, self.sizes = array("q"), array("q"), array("q")


class TarShards(Source):
    """Samples of one tar, a folder of tars, or ``train-{0000..0146}.tar``, as dicts ``{"__key__": key, suffix: ...}``.

    By suffix: images as uint8 tensors (3, h, w), all of one size with ``fit``, or with ``encoded=True`` as the bytes of
    their files, proved to be decodable; ``cls`` and its like an int; ``txt`` a str, ``json`` its text; ``npy`` a
    tensor; all others bytes. Nothing is unpickled. Of ``seg.png`` the last part counts.
    ``suffixes``: the ones to take, in this order; they alone are read. Every sample must have all of them.
    A key that comes again, behind another or in another shard, is another sample, as in WebDataset itself.
    Raises SourceError: for a file that is no tar, or compressed; for a sample that lacks a suffix, with its name.
    """

    kind = "webdataset"
    looked_for = "a .tar file, a folder of them, or a pattern such as train-{0000..0146}.tar"
    uses = frozenset({"fit", "columns"})

    def __init__(
        self,
        path: StrPath,
        *,
        suffixes: tuple[str, ...] | None = None,
        fit: Fit | None = None,
        encoded: bool = False,
    ) -> None:
        if encoded and fit is not None:
            raise ValueError("encoded=True keeps the files as they are: it cannot be combined with fit=")
        self.path = os.fspath(path)
        self.suffixes, self.fit, self.encoded = suffixes, fit, encoded
        self._paths = shard_paths(self.path)
        self._left: list[str] = []
        self._left_out = 0
        self._index()
        if fit is not None and not any(self._is_image(suffix) for suffix in self._fields):
            raise MisuseError(
                f"{self.path} holds no images by its suffixes {list(self._fields)}: --size does not apply"
            )

    def _index(self) -> None:
        fields: dict[str, _Field] = {}
        keys: list[str] = []
        firsts: list[int] = []  # samples before each shard
        for path in self._paths:
            firsts.append(len(keys))
            here: dict[str, Member] = {}
            for member in members(path):
                if not self._wanted(member):
                    continue
                if len(keys) == firsts[-1] or member.key != keys[-1]:
                    keys.append(member.key)
                    here = {}
                if member.suffix in here:
                    raise SourceError(path, f"sample {member.key!r} has two files that end in .{member.suffix}")
                here[member.suffix] = member
                field = fields.setdefault(member.suffix, _Field())
                field.samples.append(len(keys) - 1)
                field.offsets.append(member.offset)
                field.sizes.append(member.size)
        if not keys:
            raise SourceError(self.path, "there is no sample in it: no file named KEY.SUFFIX")
        self._keys = NameTable(keys)
        self._firsts = np.array(firsts, np.int64)
        order = self.suffixes or tuple(fields)
        for suffix in order:
            if suffix != KEY:
                self._check(suffix, fields)
        self._fields = {suffix: fields[suffix] for suffix in order if suffix != KEY}
        self._with_key = self.suffixes is None or KEY in self.suffixes

    def _wanted(self, member: Member) -> bool:
        if member.suffix and not _META.match(member.name):
            return self.suffixes is None or member.suffix in self.suffixes
        self._left_out += 1
        if len(self._left) < _LEFT_OUT:
            self._left.append(member.name)
        return False

    def _check(self, suffix: str, fields: dict[str, _Field]) -> None:
        if suffix not in fields:
            raise SourceError(self.path, f"no sample has a file that ends in .{suffix}; there are {', '.join(fields)}")
        has = np.frombuffer(fields[suffix].samples, np.int64)
        if len(has) < len(self._keys):
            lacks = int(np.setdiff1d(np.arange(len(self._keys)), has, assume_unique=True)[0])
            raise SourceError(
                self._shard(lacks),
                f"sample {self._keys[lacks]!r} has no .{suffix}, which {len(has)} of {len(self._keys)} samples have: "
                "name the suffixes to take, which all have (--columns)",
            )

    def _shard(self, index: int) -> str:
        return self._paths[int(np.searchsorted(self._firsts, index, side="right")) - 1]

    @staticmethod
    def _is_image(suffix: str) -> bool:
        return is_image_name(f"x.{suffix}")

    @classmethod
    def recognises(cls, path: str) -> bool:
        if os.path.isdir(path):
            return bool(tars_in(path))
        return path.endswith(".tar") and (is_pattern(path) or os.path.isfile(path))

    @classmethod
    def open(cls, path: str, options: Options) -> TarShards:
        return cls(path, suffixes=options.columns, fit=options.fit, encoded=options.fit is None)

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = position(index, len(self))
        sample: dict[str, Any] = {KEY: self._keys[index]} if self._with_key else {}
        sample.update(self._read(index, self._fields))
        return sample

    def _read(self, index: int, suffixes: Iterable[str]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        fd = os.open(self._shard(index), os.O_RDONLY | os.O_CLOEXEC)
        try:
            for suffix in suffixes:
                field = self._fields[suffix]
                size = field.sizes[index]
                data = os.pread(fd, size, field.offsets[index])
                if len(data) < size:
                    raise SourceError(
                        self.name_of(index), f"its .{suffix} is cut: {len(data)} of {size} bytes are there"
                    )
                found[suffix] = self._decode(suffix, data, index)
        finally:
            os.close(fd)
        return found

    def _decode(self, suffix: str, data: bytes, index: int) -> Any:
        name = f"{self.name_of(index)}, its .{suffix}"
        last = suffix.rpartition(".")[2]
        if self._is_image(suffix):
            if self.encoded:
                images.check(data, name=name)
                return data
            return torch.from_numpy(images.decode_chw(data, name=name, fit=self.fit))
        try:
            if last in _INTS:
                return int(data)
            if last in _TEXTS:
                return data.decode()
            if last == "npy":
                return torch.from_numpy(_native(np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)))
        except (ValueError, TypeError, EOFError) as fault:
            raise SourceError(name, f"is not what its suffix says: {fault}") from fault
        return data

    def name_of(self, index: int) -> str:
        return f"sample {self._keys[index]!r} of {self._shard(index)}"

    def describe(self) -> str:
        shards = f"{len(self._paths)} tar files" if len(self._paths) > 1 else "tar file"
        stored = "images stored as their files" if self.encoded else "images decoded"
        return f"WebDataset, {shards}, {stored}" + (f", {self.fit.describe()}" if self.fit else "")

    def files(self) -> list[str]:
        return list(self._paths)

    @property
    def metadata(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"kind": self.kind, "source": self.path, "shards": len(self._paths)}
        return {**facts, "label_field": _LABEL} if _LABEL in self._fields else facts

    def classes_of_samples(self) -> npt.NDArray[np.int64] | None:
        """The numbers in the ``cls`` files. Reads all of them."""
        if _LABEL not in self._fields:
            return None
        return np.fromiter((self._read(index, (_LABEL,))[_LABEL] for index in range(len(self))), np.int64, len(self))

    @property
    def encodings(self) -> dict[str, str]:
        return {name: "encoded-image" for name in self._fields if self.encoded and self._is_image(name)}

    @property
    def notes(self) -> tuple[str, ...]:
        if not self._left_out:
            return ()
        return (f"left out, in no sample by their names: {self._left_out} ({listed(self._left, self._left_out)})",)


def _native(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.array(values, dtype=values.dtype.newbyteorder("="), order="C")
