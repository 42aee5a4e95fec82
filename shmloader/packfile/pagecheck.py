"""Does every page of a pack's file have one use, and one only? Reads the tree and the heads of values, not the values.

0, 1 meta │ tree │ values (head: own number, how many pages) │ free list: its tree, and the pages that it names
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from .mapping import OpenPack
from .tree import HEAD_BYTES, BadTree, Meta, Place, read_meta, walk

_PAGE_HEAD = 16
_OVERFLOW = 0x04


def page_problems(pack: OpenPack) -> list[str]:
    """Return what is wrong with the structure of a pack's file, one sentence each; an empty list if nothing is."""
    data = pack.bytes.data
    try:
        meta = _meta(data)
        values, tree = walk(data, meta, meta.root)
        freed, free_tree = walk(data, meta, meta.free_root)
        uses = np.zeros(meta.last_page + 1, np.int64)
        uses[:2] += 1
        uses[[*tree, *free_tree]] += 1
        problems: list[str] = []
        for key, place in (*values.items(), *freed.items()):
            problems += _count(data, meta, key, place, uses)
        for place in freed.values():
            uses[_numbers(data, meta, place)] += 1
    except BadTree as fault:
        return [fault.why]
    except struct.error:
        return ["a part of its tree lies outside of the file"]
    lost, doubled = np.flatnonzero(uses == 0), np.flatnonzero(uses > 1)
    if len(lost):
        problems.append(f"{len(lost)} pages belong to nothing, the first of them page {lost[0]}")
    if len(doubled):
        problems.append(f"{len(doubled)} pages belong to more than one thing, the first of them page {doubled[0]}")
    return problems


def _meta(data: memoryview) -> Meta:
    first = read_meta(bytes(data[:HEAD_BYTES]))
    second = read_meta(bytes(data[first.page_bytes : first.page_bytes + HEAD_BYTES]))
    return max(first, second, key=lambda each: each.transaction)


def _count(data: memoryview, meta: Meta, key: bytes, place: Place, uses: npt.NDArray[np.int64]) -> list[str]:
    """Count the pages of a value; return what is wrong with their head."""
    if not place.own_pages:
        return []
    start = place.start - _PAGE_HEAD
    page, count = start // meta.page_bytes, -(-(_PAGE_HEAD + place.nbytes) // meta.page_bytes)
    number, _, flags, pages = struct.unpack_from("<QHHI", data, start)
    uses[page : page + count] += 1
    if (number, flags, pages) != (page, _OVERFLOW, count):
        return [f"the head of the value {key!r} at page {page} has changed"]
    return []


def _numbers(data: memoryview, meta: Meta, place: Place) -> list[int]:
    """Return the page numbers in one value of the free list."""
    (count,) = struct.unpack_from("<Q", data, place.start)
    if 8 * (count + 1) > place.nbytes:
        raise BadTree("its list of free pages is damaged")
    numbers = list(struct.unpack_from(f"<{count}Q", data, place.start + 8))
    if any(not 2 <= number <= meta.last_page for number in numbers):
        raise BadTree("its list of free pages is damaged")
    return numbers
