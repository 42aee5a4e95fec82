"""The pages of a finished LMDB file: heads of values, the tree above them, the meta pages. Pure: numbers in, bytes out.

    0, 1     meta pages, equal but for their transaction number        written last
    2 ...    values, each with pages of its own, in the order in which they were packed
    n ...    leaf pages: key ─▶ first page and size of a value, sorted by key
    m ...    branch pages, level by level, up to one root
    o ...    the list of pages that nothing refers to, if there are some, and the tree over that one value

A pack is written front to back and never changed, so LMDB's own writer, which copies and recycles pages, is not used:
its pages depend on the history of a file (reopening one after a crash included), and these on the values alone. What a
page looks like is LMDB's data version 1, drawn in tree.py; the tests read the result with LMDB itself.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .tree import DATA_VERSION, MAGIC

PAGE_BYTES = 4096
"""Also where the system's own pages are larger: a pack is the same file on every machine."""

HEAD_BYTES = 16
_LEAF, _BRANCH, _OVERFLOW, _META = 0x02, 0x01, 0x04, 0x08
_BIG = 0x01
_NO_PAGE = 2**64 - 1
_FREE_FLAGS = 0x4008  # of the tree of free pages: integer keys; and that the file has no folder of its own
LONGEST_KEY = 511


@dataclass(frozen=True)
class Root:
    """Where a tree begins, and how large it is. An empty one has depth 0."""

    page: int
    depth: int
    branches: int
    leaves: int
    entries: int
    value_pages: int
    """Pages of its values together."""

    def pack(self, pad: int, flags: int) -> bytes:
        """Return it as a meta page holds it."""
        numbers = (self.branches, self.leaves, self.value_pages, self.entries, self.page)
        return struct.pack("<IHHQQQQQ", pad, flags, self.depth, *numbers)


def pages_for(nbytes: int) -> int:
    """Return how many pages a value of ``nbytes`` takes, its head included."""
    return -(-(HEAD_BYTES + nbytes) // PAGE_BYTES)


def value_head(page: int, nbytes: int) -> bytes:
    """Return what stands before a value that begins on ``page``."""
    return struct.pack("<QHHI", page, 0, _OVERFLOW, pages_for(nbytes))


def free_list(pages: Iterable[int]) -> tuple[bytes, bytes]:
    """Return (key, value) that stand for pages that nothing refers to, in LMDB's second tree."""
    numbers = sorted(pages, reverse=True)
    return struct.pack("<Q", 1), struct.pack(f"<{len(numbers) + 1}Q", len(numbers), *numbers)


def tree_pages(values: Sequence[tuple[bytes, int, int]], first_page: int) -> tuple[list[bytes], Root]:
    """Return the pages of the tree over ``values`` (key, first page, bytes), which begin at ``first_page``; its root.

    ``values`` are sorted by key, each key once.
    """
    nodes = [
        (key, struct.pack("<HHHH", size & 0xFFFF, size >> 16, _BIG, len(key)) + key + struct.pack("<Q", page))
        for key, page, size in values
    ]
    made: list[bytes] = []
    depth = leaves = branches = 0
    kind = _LEAF
    while nodes and (depth == 0 or len(nodes) > 1):
        above: list[tuple[bytes, bytes]] = []
        for group in _groups(nodes):
            number = first_page + len(made)
            made.append(_page(number, kind, [node for _, node in group]))
            above.append((group[0][0], _child(number, group[0][0])))
        if kind == _LEAF:
            leaves = len(made)
        else:
            branches = len(made) - leaves
        nodes, kind, depth = above, _BRANCH, depth + 1
    value_pages = sum(pages_for(size) for _, _, size in values)
    root = first_page + len(made) - 1 if made else _NO_PAGE
    return made, Root(root, depth, branches, leaves, len(values), value_pages)


def _child(number: int, key: bytes) -> bytes:
    return struct.pack("<HHHH", number & 0xFFFF, number >> 16 & 0xFFFF, number >> 32, len(key)) + key


def _size(node: bytes) -> int:
    return len(node) + len(node) % 2 + 2  # nodes begin at even places; and a slot


def _groups(nodes: list[tuple[bytes, bytes]]) -> list[list[tuple[bytes, bytes]]]:
    groups: list[list[tuple[bytes, bytes]]] = []
    room = 0
    for key, node in nodes:
        if _size(node) > room:
            groups.append([])
            room = PAGE_BYTES - HEAD_BYTES
        groups[-1].append((key, node))
        room -= _size(node)
    if len(groups) > 1 and len(groups[-1]) == 1:  # LMDB wants two nodes on a branch page
        groups[-1].insert(0, groups[-2].pop())
    return groups


def _page(number: int, kind: int, nodes: list[bytes]) -> bytes:
    if kind == _BRANCH:  # its first node stands for everything below the second, and has no key
        nodes = [nodes[0][:6] + b"\0\0", *nodes[1:]]
    page = bytearray(PAGE_BYTES)
    upper = PAGE_BYTES
    for i, node in enumerate(nodes):
        upper -= len(node) + len(node) % 2
        page[upper : upper + len(node)] = node
        struct.pack_into("<H", page, HEAD_BYTES + 2 * i, upper)
    struct.pack_into("<QHHHH", page, 0, number, 0, kind, HEAD_BYTES + 2 * len(nodes), upper)
    return bytes(page)


def meta_page(number: int, free: Root, main: Root, last_page: int) -> bytes:
    """Return meta page 0 or 1 of a file whose last page is ``last_page``; the trees of free pages and of values."""
    page = struct.pack("<QHHI", number, 0, _META, 0)
    page += struct.pack("<IIQQ", MAGIC, DATA_VERSION, 0, (last_page + 1) * PAGE_BYTES)
    page += free.pack(PAGE_BYTES, _FREE_FLAGS) + main.pack(0, 0)
    page += struct.pack("<QQ", last_page, number)  # the number of the transaction: of two pages, the second counts
    return page.ljust(PAGE_BYTES, b"\0")
