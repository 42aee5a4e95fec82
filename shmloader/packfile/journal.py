"""The journal of a pack that is being written: which of its bytes are whole, and what they are.

    page 0, 1     UNFINISHED, until the pack is sealed
    page 2 ...    ┌ journal page: what follows, as JSON, with a checksum ┬ value ┬ value ┬ ... ┐   one commit
                  ┌ journal page                                         ┬ value ┬ ...         ┐   the next
                  ...                                                    the end: no journal page stands here

The values of a commit are written before its journal page, so what a journal page names is there, as long as the
machine ran on; after a loss of power the values' own checksums tell. Whatever lies behind the last whole commit is
written anew. In the sealed pack, journal pages are pages that nothing refers to: one for each commit.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .pages import HEAD_BYTES, PAGE_BYTES, pages_for, value_head

UNFINISHED = b"shmloader-pack: unfinished, not sealed yet\n"
"""What a pack that is being written begins with."""

FIRST_PAGE = 2
_MARK = b"shmloader commit"
_HEAD = struct.Struct("<16sQQII")  # mark, own page, pages of the commit, length of the text, its checksum
_PIECE = 4 << 20


@dataclass(frozen=True)
class Stored:
    """One value in the file."""

    page: int
    nbytes: int
    crc: int

    @property
    def start(self) -> int:
        """The offset of its first byte in the file."""
        return self.page * PAGE_BYTES + HEAD_BYTES


@dataclass(frozen=True)
class Commit:
    """What one journal page says."""

    record: dict[str, Any]
    """What the writer wanted to know again."""
    values: dict[bytes, Stored]
    end_page: int
    """The first page behind it."""


def journal_pages(record: dict[str, Any], values: list[tuple[bytes, int, int]], page: int) -> tuple[bytes, int]:
    """Return (the journal page or pages of a commit at ``page``, zeros up to their end included; pages of the commit).

    ``values``: (key, bytes, checksum) of each value, in the order in which they follow.
    """
    text = json.dumps(
        {"record": record, "values": [[key.decode(), nbytes, crc] for key, nbytes, crc in values]},
        separators=(",", ":"),
    ).encode()
    own = -(-(_HEAD.size + len(text)) // PAGE_BYTES)
    total = own + sum(pages_for(nbytes) for _, nbytes, _ in values)
    head = _HEAD.pack(_MARK, page, total, len(text), zlib.crc32(text))
    return (head + text).ljust(own * PAGE_BYTES, b"\0"), total


def read_commits(fd: int, *, look: Callable[[int], None] | None = None) -> list[Commit]:
    """Return the whole commits of a partial file, in order; an empty list for any other file.

    Reads all of it, to compare the checksums; ``look`` is called with the bytes read so far.
    """
    commits: list[Commit] = []
    page, size = FIRST_PAGE, os.fstat(fd).st_size
    while True:
        commit = _read_commit(fd, page, size)
        if commit is None:
            return commits
        commits.append(commit)
        page = commit.end_page
        if look is not None:
            look(page * PAGE_BYTES)


def _read_commit(fd: int, page: int, size: int) -> Commit | None:
    start = page * PAGE_BYTES
    head = os.pread(fd, _HEAD.size, start)
    if len(head) < _HEAD.size:
        return None
    mark, own_page, total, length, crc = _HEAD.unpack(head)
    if mark != _MARK or own_page != page or start + total * PAGE_BYTES > size:
        return None
    text = os.pread(fd, length, start + _HEAD.size)
    if zlib.crc32(text) != crc:
        return None
    said = json.loads(text)
    values: dict[bytes, Stored] = {}
    at = page + -(-(_HEAD.size + length) // PAGE_BYTES)
    for key, nbytes, value_crc in said["values"]:
        stored = Stored(at, nbytes, value_crc)
        if not _is_whole(fd, stored):
            return None
        values[key.encode()] = stored
        at += pages_for(nbytes)
    return Commit(said["record"], values, at)


def _is_whole(fd: int, stored: Stored) -> bool:
    if os.pread(fd, HEAD_BYTES, stored.page * PAGE_BYTES) != value_head(stored.page, stored.nbytes):
        return False
    crc = 0
    for at in range(stored.start, stored.start + stored.nbytes, _PIECE):
        crc = zlib.crc32(os.pread(fd, min(_PIECE, stored.start + stored.nbytes - at), at), crc)
    return crc == stored.crc
