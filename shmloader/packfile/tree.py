"""Where the values of an LMDB file lie, found without touching them. Pure: bytes in, places out.

py-lmdb reads every page of each value that it hands out, so asking it where the chunks of a pack lie would read the
whole pack from disk. The tree itself is small and simple, and its format (data version 1) has not changed since 2012:

    page     ┌ number u64 ┬ pad u16 ┬ flags u16 ┬ lower u16, upper u16 | pages u32 ┬ ...                16 bytes of head
    meta     pages 0 and 1; the one with the higher transaction number counts
    branch   slots (u16, one per node) ─▶ nodes: low u16, high u16, flags u16, key length u16, key;  48 bits: child page
    leaf     the same; low and high are the value's size; behind the key its bytes, or the number of its first page
    overflow the value's own pages: one head, then its bytes

Nothing in the file is believed: every number is checked before it is followed, so that a damaged file is an exception.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

MAGIC = 0xBEEFC0DE
DATA_VERSION = 1
HEAD_BYTES = 152
"""Bytes of a meta page that ``read_meta`` looks at."""

_PAGE_HEAD = 16
_BRANCH, _LEAF, _OVERFLOW, _META = 0x01, 0x02, 0x04, 0x08
_BIG = 0x01  # of a leaf's node: the value has pages of its own
_SEVERAL = 0x06  # the value is a database of its own, or several values of one key
_NO_PAGE = 2**64 - 1
_DEEPEST = 32  # LMDB's own limit


class BadTree(Exception):
    """The bytes are no tree. ``why`` is a clause."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


@dataclass(frozen=True)
class Meta:
    """What a meta page says."""

    page_bytes: int
    root: int
    """Page of the main database's root, or None's number if it is empty."""
    free_root: int
    """The same of the list of free pages."""
    last_page: int
    transaction: int


@dataclass(frozen=True)
class Place:
    """One value: ``nbytes`` bytes at ``start`` in the file."""

    start: int
    nbytes: int
    own_pages: bool


def is_meta(head: bytes) -> bool:
    """Say whether the first bytes of a file are those of LMDB."""
    return len(head) >= HEAD_BYTES and bool(struct.unpack_from("<I", head, _PAGE_HEAD)[0] == MAGIC)


def data_version(head: bytes) -> int:
    """Return the version of the format; 0.9's is 1. (The upper half is used for development versions.)"""
    return int(struct.unpack_from("<I", head, 20)[0])


def read_meta(head: bytes) -> Meta:
    """Read a meta page from its first HEAD_BYTES bytes. Raises BadTree."""
    flags = struct.unpack_from("<H", head, 10)[0]
    page_bytes = struct.unpack_from("<I", head, 40)[0]
    root, last_page, transaction = struct.unpack_from("<QQQ", head, 128)
    free_root = struct.unpack_from("<Q", head, 80)[0]
    if not is_meta(head) or data_version(head) != DATA_VERSION or not flags & _META:
        raise BadTree("its meta pages are not LMDB's")
    if not 512 <= page_bytes <= 65536 or page_bytes & (page_bytes - 1):
        raise BadTree(f"its head says that pages have {page_bytes} bytes")
    return Meta(page_bytes, root, free_root, last_page, transaction)


def find_values(data: memoryview, meta: Meta) -> dict[bytes, Place]:
    """Return the place of each value of the main database by its key; see ``walk_values``."""
    return dict(walk_values(data, meta))


def walk_values(data: memoryview, meta: Meta) -> Iterator[tuple[bytes, Place]]:
    """Return an iterator of (key, place of its value) of the main database, in the order of the keys.

    Reads branch and leaf pages only. ``data`` is the file, at least as long as its last page's end. Iterating raises
    BadTree, also for named databases and keys with several values.
    """
    return _walk(data, meta, meta.root, set())


def walk(data: memoryview, meta: Meta, root: int) -> tuple[dict[bytes, Place], set[int]]:
    """Return (the place of each value below ``root``, the pages of the tree). Raises BadTree."""
    seen: set[int] = set()
    return dict(_walk(data, meta, root, seen)), seen


def _walk(data: memoryview, meta: Meta, root: int, seen: set[int]) -> Iterator[tuple[bytes, Place]]:
    waiting = [] if root == _NO_PAGE else [(root, 1)]
    while waiting:
        number, depth = waiting.pop()
        if number > meta.last_page or number < 2 or number in seen or depth > _DEEPEST:
            raise BadTree(f"page {number} of its tree cannot be")
        seen.add(number)
        start = number * meta.page_bytes
        own, _, flags, lower = struct.unpack_from("<QHHH", data, start)
        kind = flags & (_BRANCH | _LEAF | _OVERFLOW | _META)
        if own != number or kind not in (_BRANCH, _LEAF) or not _PAGE_HEAD <= lower <= meta.page_bytes:
            raise BadTree(f"page {number} of its tree is damaged")
        slots = struct.unpack_from(f"<{(lower - _PAGE_HEAD) // 2}H", data, start + _PAGE_HEAD)
        children: list[tuple[int, int]] = []
        for slot in slots:
            if not _PAGE_HEAD <= slot <= meta.page_bytes - 8:
                raise BadTree(f"page {number} of its tree is damaged")
            low, high, node_flags, key_bytes = struct.unpack_from("<HHHH", data, start + slot)
            if flags & _BRANCH:
                children.append((low | high << 16 | node_flags << 32, depth + 1))
                continue
            at = start + slot + 8 + key_bytes
            size = low | high << 16
            inside = size if not node_flags & _BIG else 8
            if at + inside > start + meta.page_bytes:
                raise BadTree(f"page {number} of its tree is damaged")
            key = bytes(data[start + slot + 8 : at])
            if node_flags & _SEVERAL:
                raise BadTree(f"the key {key[:40]!r} has several values, or names a database of its own")
            if node_flags & _BIG:
                first = struct.unpack_from("<Q", data, at)[0]
                place = Place(first * meta.page_bytes + _PAGE_HEAD, size, True)
                if first < 2 or place.start + size > (meta.last_page + 1) * meta.page_bytes:
                    raise BadTree(f"the value of {key!r} lies outside of the file")
            else:
                place = Place(at, size, False)
            yield key, place
        waiting += reversed(children)
