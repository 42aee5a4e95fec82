"""Tar files: which ones are meant, and where in them each member lies. Headers are read once, contents when wanted."""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Iterator
from typing import NamedTuple

from ..errors import SourceError

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_KEY = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)", re.DOTALL)
_MOST_PATHS = 1_000_000


class Member(NamedTuple):
    """A file in a tar."""

    key: str
    """What the files of one sample have in common: the name up to the first dot behind the last slash."""
    suffix: str
    """The rest, in small letters; empty for a name without a dot or that begins with one: in no sample."""
    name: str
    offset: int
    """Where its contents begin in the tar."""
    size: int


def is_pattern(path: str) -> bool:
    """Say whether ``path`` names many files by braces: ``train-{0000..0146}.tar``."""
    return not os.path.exists(path) and _BRACES.search(path) is not None


def expand(pattern: str) -> list[str]:
    """Return what a pattern stands for: ``{0..9}``, ``{000..146}`` (with its zeros), ``{a,b}``, several of them."""
    found = _BRACES.search(pattern)
    if found is None:
        return [pattern]
    before, inside, after = pattern[: found.start()], found[1], pattern[found.end() :]
    numbers = _RANGE.fullmatch(inside)
    if numbers is None:
        choices = inside.split(",")
    else:
        first, last = int(numbers[1]), int(numbers[2])
        width = len(numbers[1]) if numbers[1].startswith("0") or len(numbers[1]) == len(numbers[2]) else 0
        if abs(last - first) >= _MOST_PATHS:
            raise SourceError(pattern, f"stands for more than {_MOST_PATHS} files")
        step = 1 if last >= first else -1
        choices = [f"{number:0{width}d}" for number in range(first, last + step, step)]
    return [path for choice in choices for path in expand(before + choice + after)]


def tars_in(folder: str) -> list[str]:
    """Return the names of the .tar files of a folder, sorted."""
    with os.scandir(folder) as entries:
        return sorted(e.name for e in entries if e.name.endswith(".tar") and not e.name.startswith(".") and e.is_file())


def shard_paths(path: str) -> list[str]:
    """Return the tar files that ``path`` names: itself, those of a folder, or those of a pattern; in order.

    Raises SourceError for one that is not there.
    """
    if os.path.isdir(path):
        return [os.path.join(path, name) for name in tars_in(path)]
    paths = expand(path) if is_pattern(path) else [path]
    for each in paths:
        if not os.path.isfile(each):
            raise SourceError(each, "there is no such file" + (f", which {path} names" if each != path else ""))
    return paths


def members(path: str) -> Iterator[Member]:
    """Yield the files of a tar in their order. Long names of GNU and pax are understood. Raises SourceError."""
    try:
        with tarfile.open(path, "r:") as archive:
            for info in archive:
                archive.members = []  # type: ignore[attr-defined]  # else it would keep an object for each of them
                if info.issparse():
                    raise SourceError(path, f"its member {info.name!r} is sparse: its bytes do not lie in one piece")
                if not info.isreg():
                    continue
                split = _KEY.fullmatch(info.name)
                key, suffix = (split[1], split[2].lower()) if split else (info.name, "")
                yield Member(key, suffix, info.name, info.offset_data, info.size)
            behind = os.path.getsize(path) - archive.offset
            if behind < 0 or 0 < behind < tarfile.BLOCKSIZE:
                raise SourceError(path, "is cut: it does not end where its last member ends")
    except tarfile.ReadError as fault:
        with open(path, "rb") as file:
            packed = file.read(3) in (b"\x1f\x8b\x08", b"BZh", b"\xfd7z", b"\x28\xb5\x2f")
        why = (
            "is compressed, so there is no way to single samples: decompress it first"
            if packed
            else f"is no tar: {fault}"
        )
        raise SourceError(path, why) from fault
