"""LMDB files of others: one sample a key, or a few keys that share a number.

    b"0001" ─▶ b"\\xff\\xd8..."              {"key": "0001", "value": b"..."}
    b"image-000000001" ─▶ b"\\xff\\xd8..."   with keys=("image-%09d", "label-%09d"):
    b"label-000000001" ─▶ b"hello"          {"key": "1", "image": b"...", "label": b"hello"}
    b"num-samples" ─▶ b"1"                  is none of them, and left out

The file is mapped and its tree read by packfile/tree.py, so there is no LMDB handle that must not cross a fork, and no
lock file. Values are bytes: nothing is unpickled unless the user's own ``decode`` does so.
"""

from __future__ import annotations

import mmap
import os
import re
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from .. import images
from ..errors import MisuseError, PackError, SourceError
from ..images import Fit
from ..packfile.mapping import open_pack
from ..packfile.tree import DATA_VERSION, HEAD_BYTES, BadTree, Meta, data_version, is_meta, read_meta, walk_values
from .base import Options, Source, StrPath, listed, position

_NUMBER = re.compile(rb"%(0?)(\d*)d")
_LEFT_OUT = 5
_IMAGE_HEADS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF", b"GIF8", b"BM", b"II*\0", b"MM\0*")

Decode = Callable[..., Any]
"""Called with a key and its value (with patterns: a dict of values by field), both bytes; returns a sample."""


class _Pattern:
    """How the keys of one field look: text, a number as ``%d`` or ``%09d``, text."""

    def __init__(self, text: str) -> None:
        self.text = text
        parts = _NUMBER.split(text.encode())
        if len(parts) != 4:
            raise MisuseError(f"the key pattern {text!r} must have one number in it, as in image-%09d")
        before, zeros, width, after = parts
        self._format = text.encode()
        digits = rb"(\d{%d,})" % int(width) if zeros and width else rb"(\d+)"
        self._regex = re.compile(re.escape(before) + digits + re.escape(after), re.DOTALL)
        self.name = (before + after).decode().strip("-_./: ") or "value"

    def number(self, key: bytes) -> int | None:
        """Return the number in a key of this kind; None for others."""
        found = self._regex.fullmatch(key)
        return None if found is None or self.key(int(found[1])) != key else int(found[1])

    def key(self, number: int) -> bytes:
        return self._format % number


class _Values:
    """Where some values lie: two arrays, so that there is no Python object a sample."""

    def __init__(self) -> None:
        self.starts, self.sizes = array("q"), array("q")

    def add(self, start: int, nbytes: int) -> None:
        self.starts.append(start)
        self.sizes.append(nbytes)


class KeyValueLmdb(Source):
    """The values of a foreign LMDB, as dicts with ``key`` (str) and ``value`` (bytes), in the order of the keys.

    ``keys``: patterns with a number, ``("image-%09d", "label-%09d")``: a sample is what has the same number, with one
    field a pattern, named by its text, in the order of the numbers; ``key`` is the number. Other keys are left out and
    noted. Values that are image files by their first bytes come as tensors, uint8 (3, h, w), all of one size with
    ``fit``; with ``encoded=True`` as the bytes of the file, proved to be decodable.
    ``decode``: called with key and value (with ``keys``: a dict of values), gives the sample instead; it may unpickle.
    Keys that are no UTF-8 come back with ``key.encode("utf-8", "surrogateescape")``.
    Nobody may write to the file meanwhile: LMDB uses pages again that this still reads.
    Raises SourceError for what is no LMDB, or damaged, and for a sample that ``decode`` fails on, with what it raised.
    """

    kind = "lmdb"
    looked_for = "an LMDB file, or a folder with data.mdb, of one sample a key"
    uses = frozenset({"fit", "keys", "decode"})

    def __init__(
        self,
        path: StrPath,
        *,
        keys: tuple[str, ...] | None = None,
        decode: Decode | None = None,
        fit: Fit | None = None,
        encoded: bool = False,
    ) -> None:
        self.path = os.fspath(path)
        self.file = _file_of(self.path)
        self.decode, self.fit, self.encoded = decode, fit, encoded
        self._patterns = [_Pattern(text) for text in keys or ()]
        names = [pattern.name for pattern in self._patterns] or ["value"]
        if len(set(names)) != len(names) or "key" in names:
            raise MisuseError(
                f"the key patterns {list(keys or ())} name the fields {names}: all must differ, and from 'key'"
            )
        meta = self._open()
        self._left_out: list[str] = []
        self._left = 0
        try:
            walked = walk_values(memoryview(self._memory), meta)
            self._columns = self._numbered(walked) if self._patterns else self._all(walked)
        except BadTree as fault:
            raise SourceError(self.file, f"not readable as an LMDB of one value a key: {fault.why}") from fault
        if not len(self):
            raise SourceError(
                self.file, "there is no sample in it" + (f"; keys are like {self._left_out}" if self._left else "")
            )
        self._images = {name for name in names if decode is None and self._is_image(name)}
        if fit is not None and not self._images:
            raise MisuseError(f"{self.path} holds no image files by its first sample: --size does not apply")

    def _open(self) -> Meta:
        with open(self.file, "rb") as file:
            head = file.read(HEAD_BYTES)
            if not is_meta(head):
                raise SourceError(self.file, "is no LMDB file")
            if data_version(head) != DATA_VERSION:
                raise SourceError(self.file, f"is an LMDB file of data version {data_version(head)}; 1 can be read")
            try:
                first = read_meta(head)
                file.seek(first.page_bytes)
                meta = max((first, read_meta(file.read(HEAD_BYTES))), key=lambda each: each.transaction)
            except BadTree as fault:
                raise SourceError(self.file, fault.why) from fault
            need = (meta.last_page + 1) * meta.page_bytes
            there = os.fstat(file.fileno()).st_size
            if there < need:
                raise SourceError(self.file, f"is cut: {there} bytes are there, {need} were written")
            self._memory = mmap.mmap(file.fileno(), need, mmap.MAP_SHARED, mmap.PROT_READ)
        return meta

    def _all(self, walked: Iterator[tuple[bytes, Any]]) -> dict[str, _Values]:
        values = _Values()
        self._keys = bytearray()
        ends = array("q")
        for key, place in walked:
            values.add(place.start, place.nbytes)
            self._keys += key
            ends.append(len(self._keys))
        self._ends = np.frombuffer(ends, np.int64)
        return {"value": values}

    def _numbered(self, walked: Iterator[tuple[bytes, Any]]) -> dict[str, _Values]:
        found = [(pattern, array("q"), _Values()) for pattern in self._patterns]
        for key, place in walked:
            for pattern, numbers, values in found:
                number = pattern.number(key)
                if number is not None:
                    numbers.append(number)
                    values.add(place.start, place.nbytes)
                    break
            else:
                self._left += 1
                if len(self._left_out) < _LEFT_OUT:
                    self._left_out.append(_text(key))
        columns: dict[str, _Values] = {}
        for pattern, numbers, values in found:
            order = np.argsort(np.frombuffer(numbers, np.int64), kind="stable")
            here = np.frombuffer(numbers, np.int64)[order]
            if not columns:
                self._numbers = here
            elif not np.array_equal(self._numbers, here):
                odd = int(np.setxor1d(self._numbers, here)[0])
                raise SourceError(
                    self.file,
                    f"sample {odd} is not whole: it has "
                    + " and ".join(f"{'a' if odd in one else 'no'} key {p.key(odd).decode()!r}" for p, one, _ in found),
                )
            ordered = _Values()
            ordered.starts = array("q", np.frombuffer(values.starts, np.int64)[order].tobytes())
            ordered.sizes = array("q", np.frombuffer(values.sizes, np.int64)[order].tobytes())
            columns[pattern.name] = ordered
        return columns

    def _is_image(self, name: str) -> bool:
        return self._value(name, 0).startswith(_IMAGE_HEADS)

    def _value(self, name: str, index: int) -> bytes:
        values = self._columns[name]
        start = values.starts[index]
        return self._memory[start : start + values.sizes[index]]

    def __getstate__(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "keys": tuple(pattern.text for pattern in self._patterns) or None,
            "decode": self.decode,
            "fit": self.fit,
            "encoded": self.encoded,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        KeyValueLmdb.__init__(self, **state)

    @classmethod
    def recognises(cls, path: str) -> bool:
        file = _file_of(path)
        if not os.path.isfile(file):
            return False
        with open(file, "rb") as opened:
            return is_meta(opened.read(HEAD_BYTES))

    @classmethod
    def open(cls, path: str, options: Options) -> KeyValueLmdb:
        try:
            open_pack(_file_of(path))
        except PackError:
            return cls(path, keys=options.keys, decode=options.decode, fit=options.fit, encoded=options.fit is None)
        raise SourceError(
            path,
            "is a pack already: use it with PackedDataset, look at it with shmloader-inspect; to make another "
            "pack of it, use --dataset with a function that returns PackedDataset(...)",
        )

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())).starts)

    def key(self, index: int) -> bytes:
        """Return the key of a sample; with patterns, that of its first field."""
        if self._patterns:
            return self._patterns[0].key(int(self._numbers[index]))
        return bytes(self._keys[int(self._ends[index - 1]) if index else 0 : int(self._ends[index])])

    def __getitem__(self, index: int) -> Any:
        index = position(index, len(self))
        values = {name: self._value(name, index) for name in self._columns}
        if self.decode is not None:
            try:
                return self.decode(self.key(index), values if self._patterns else values["value"])
            except Exception as fault:  # the user's code may raise anything: it is this sample that cannot be had
                why = f"{_name(self.decode)} raised {type(fault).__name__}: {fault}"
                raise SourceError(self.name_of(index), why) from fault
        sample: dict[str, Any] = {"key": str(self._numbers[index]) if self._patterns else _text(self.key(index))}
        for name, value in values.items():
            sample[name] = self._image(value, index) if name in self._images else value
        return sample

    def _image(self, data: bytes, index: int) -> bytes | torch.Tensor:
        if self.encoded:
            images.check(data, name=self.name_of(index))
            return data
        return torch.from_numpy(images.decode_chw(data, name=self.name_of(index), fit=self.fit))

    def name_of(self, index: int) -> str:
        return f"key {_text(self.key(index))!r} of {self.file}"

    def describe(self) -> str:
        how = "decoded by " + _name(self.decode) if self.decode is not None else "values as they are"
        if self._images:
            how = "images " + ("stored as their files" if self.encoded else "decoded")
        return f"LMDB of one sample a key, {how}"

    def files(self) -> list[str]:
        return [self.file]

    @property
    def metadata(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"kind": self.kind, "source": self.path}
        if self._patterns:
            facts["keys"] = [pattern.text for pattern in self._patterns]
        if self.decode is not None:
            facts["decode"] = _name(self.decode)
        return facts

    @property
    def encodings(self) -> dict[str, str]:
        return {name: "encoded-image" for name in self._columns if name in self._images and self.encoded}

    @property
    def notes(self) -> tuple[str, ...]:
        if not self._left:
            return ()
        return (f"left out, keys of no pattern: {self._left} ({listed(self._left_out, self._left)})",)


def _file_of(path: str) -> str:
    return os.path.join(path, "data.mdb") if os.path.isdir(path) else path


def _text(key: bytes) -> str:
    return key.decode("utf-8", "surrogateescape")


def _name(function: Decode) -> str:
    return f"{function.__module__}:{function.__qualname__}"
