"""Readers of real-world data, for packing or for use as they are.

``recognise(path)`` finds the reader for a path; ``open_source(path)`` opens it. Each reader is a map-style torch
Dataset of its own: ``ImageFolder("photos")``, ``ArrayFiles("data.npz")``.
"""

from __future__ import annotations

import os
from collections import Counter

from ..errors import MisuseError, SourceError, UnknownSource
from .arrays import ArrayFiles
from .base import Options, Source, StrPath
from .coco import CocoJson, segmentation
from .huggingface import HuggingFaceRows
from .image_folder import ImageFolder
from .key_value import KeyValueLmdb
from .list_file import ListFile
from .packing import pack_parts, pack_source
from .problems import Problem
from .python_dataset import PythonDataset
from .result import PackRun, PartRun
from .settings import PackSettings, Part
from .shards import is_pattern
from .table import TableRows
from .tokens import TokenWindows
from .voc import PascalVoc
from .webdataset import TarShards

SOURCES: tuple[type[Source], ...] = (
    ArrayFiles,
    TarShards,
    HuggingFaceRows,
    KeyValueLmdb,
    TokenWindows,
    PascalVoc,
    CocoJson,
    ListFile,
    TableRows,
    ImageFolder,
)
"""Every reader, in the order in which they are asked: the ones that look for something rarer come first."""

__all__ = [
    "SOURCES",
    "ArrayFiles",
    "CocoJson",
    "HuggingFaceRows",
    "ImageFolder",
    "KeyValueLmdb",
    "ListFile",
    "Options",
    "PackRun",
    "PackSettings",
    "Part",
    "PartRun",
    "PascalVoc",
    "Problem",
    "PythonDataset",
    "Source",
    "TableRows",
    "TarShards",
    "TokenWindows",
    "kinds",
    "open_source",
    "pack_parts",
    "pack_source",
    "recognise",
    "segmentation",
]


def kinds() -> dict[str, type[Source]]:
    """Return every reader by the word that names it on the command line."""
    return {source.kind: source for source in SOURCES}


def recognise(path: StrPath) -> type[Source]:
    """Return the reader for what lies at ``path``.

    Raises SourceError if nothing is there, UnknownSource if no reader knows it: the error says what is there and what
    was looked for.
    """
    path = os.fspath(path)
    if not os.path.exists(path) and not is_pattern(path):
        raise SourceError(path, "there is no such file or folder")
    for source in SOURCES:
        if source.recognises(path):
            return source
    raise UnknownSource(path, _what_is_there(path), tuple(source.looked_for for source in SOURCES))


def open_source(path: StrPath, kind: str | None = None, options: Options | None = None) -> Source:
    """Open ``path`` for packing, as ``kind`` if given, else as what it is recognised to be."""
    path = os.fspath(path)
    if kind is None:
        source = recognise(path)
    else:
        source = kinds()[kind]
        if not os.path.exists(path) and not is_pattern(path):
            raise SourceError(path, "there is no such file or folder")
    options = options or Options()
    for name in options.given():
        if name not in source.uses:
            raise MisuseError(f"{path}: the option {name!r} means nothing for {source.kind} data")
    return source.open(path, options)


def _what_is_there(path: str) -> str:
    if not os.path.isdir(path):
        suffix = os.path.splitext(path)[1]
        return f"nothing packs a file that ends in {suffix!r}" if suffix else "nothing packs a file of this name"
    with os.scandir(path) as entries:
        visible = [entry for entry in entries if not entry.name.startswith(".")]
    folders = sum(entry.is_dir() for entry in visible)
    suffixes = Counter(os.path.splitext(entry.name)[1] or "no suffix" for entry in visible if not entry.is_dir())
    if not visible:
        return "the folder is empty"
    files = ", ".join(f"{count} {suffix}" for suffix, count in suffixes.most_common(4))
    return f"nothing packs a folder with {folders} subfolders and these files: {files or 'none'}"
