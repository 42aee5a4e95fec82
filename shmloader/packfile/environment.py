"""The file while it is being written: a temporary name, commits that are whole or not there, one rename at the end.

    OUT.lmdb.partial ──commit, commit, ... ──▶ put, put, ... settle: sealed, synced ──rename──▶ OUT.lmdb
          ▲                                        │
          └── killed, disk full: what is committed is kept; the next run goes on behind it

Only whoever holds the flock of the partial file writes it; a killed packer's lock is gone with it. Everything is
appended: a commit that fails is cut off again, and the file is as before. What comes behind the last commit (the steps
of sealing) is repeated by a run that resumes, so it needs no journal.
"""

from __future__ import annotations

import errno
import fcntl
import os
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..errors import NotAPack, PackError, PackExists, PackInUse, ResumeRefused, human_bytes
from .journal import FIRST_PAGE, UNFINISHED, Commit, Stored, journal_pages, read_commits
from .pages import HEAD_BYTES, PAGE_BYTES, Root, free_list, meta_page, pages_for, tree_pages, value_head

PARTIAL = ".partial"
"""Appended to the target's name while it is being written."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # of file systems that have none: then we trust the user
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Item(NamedTuple):
    """One value to be written: its key, its bytes (anything with a buffer), and their CRC-32."""

    key: bytes
    data: Any
    crc: int

    @classmethod
    def of(cls, key: bytes, data: Any) -> Item:
        """Return an item with its checksum."""
        return cls(key, data, zlib.crc32(data))


class WriteEnvironment:
    """Owns the partial file and its lock. Exactly one of ``publish``, ``discard`` and ``keep`` ends it.

    ``fingerprint``: what the pack is made of. A partial file of the same fingerprint is gone on with: ``recovered`` are
    its commits. One of another is refused with ResumeRefused, unless ``restart``. Without fingerprint nothing is
    recovered, and the file cannot be resumed.
    """

    def __init__(self, target: str, *, overwrite: bool, fingerprint: str | None = None, restart: bool = False) -> None:
        self.target = os.path.abspath(target)
        self.path = self.target + PARTIAL
        self.fingerprint = fingerprint
        self._overwrite = overwrite
        self._check_target()
        self._lock_fd: int | None = self._lock()
        self._places: dict[bytes, Stored] = {}
        self.recovered: list[Commit] = []
        """Commits of an earlier run; the file goes on behind them."""
        self._page = FIRST_PAGE
        try:
            self._begin(self._lock_fd, restart)
        except ResumeRefused:
            self.keep()
            raise
        except BaseException:
            self._unlink()
            raise

    def _begin(self, fd: int, restart: bool) -> None:
        if self.fingerprint is not None and not restart:
            self.recovered = read_commits(fd)
        if self.recovered:
            found = self.recovered[0].record.get("fingerprint")
            if found != self.fingerprint:
                done = int(self.recovered[-1].record["samples"])
                raise ResumeRefused(self.path, done, "the data or the options have changed since")
            for commit in self.recovered:
                self._places.update(commit.values)
            self._page = self.recovered[-1].end_page
        else:
            os.ftruncate(fd, 0)
        start = UNFINISHED.ljust(FIRST_PAGE * PAGE_BYTES, b"\0")
        self._write([start], 0, len(start))
        os.ftruncate(fd, self._page * PAGE_BYTES)

    def _check_target(self) -> None:
        if os.path.isdir(self.target):
            raise NotAPack(self.target, "is a directory; a pack is one file")
        if not self._overwrite and os.path.lexists(self.target):
            raise PackExists(self.target, "exists already")
        folder = os.path.dirname(self.target)
        if not os.path.isdir(folder):
            raise PackError(self.target, f"the folder {folder} does not exist")

    def _lock(self) -> int:
        while True:
            try:
                fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except OSError as error:
                raise PackError(self.path, f"cannot be written: {error.strerror}") from error
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                raise PackInUse(self.path, "another process is packing to this name at this moment") from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    os.close(fd)
                    raise PackError(self.path, f"cannot be locked: {error.strerror}") from error
            try:
                if os.path.samestat(os.fstat(fd), os.stat(self.path)):
                    return fd
            except FileNotFoundError:
                pass
            os.close(fd)  # its owner finished between our open and our lock: this is not the name's file any more

    @property
    def _fd(self) -> int:
        if self._lock_fd is None:
            raise PackError(self.path, "has been closed")
        return self._lock_fd

    @property
    def committed(self) -> bool:
        """Whether there is anything for a later run to go on with."""
        return self._page > FIRST_PAGE

    # --- values in ----------------------------------------------------------------------------------------------------

    def commit(self, items: Sequence[Item], record: dict[str, Any]) -> None:
        """Append ``items`` and the journal page that names them: all of it counts from now on, or nothing does."""
        if not self._places and self.fingerprint is not None:
            record = {"fingerprint": self.fingerprint, **record}
        sizes = [(item.key, memoryview(item.data).nbytes, item.crc) for item in items]
        journal, total = journal_pages(record, sizes, self._page)
        page = self._page + len(journal) // PAGE_BYTES
        stored: dict[bytes, Stored] = {}
        for item, (key, nbytes, crc) in zip(items, sizes, strict=True):
            self._write_value(page, item.data, nbytes)
            stored[key] = Stored(page, nbytes, crc)
            page += pages_for(nbytes)
        self._write([journal], self._page * PAGE_BYTES, total * PAGE_BYTES)
        self._page = page
        self._places.update(stored)

    def put(self, item: Item) -> None:
        """Append one value, or write it anew, behind all commits: a step of sealing, which a resumed run repeats."""
        nbytes = memoryview(item.data).nbytes
        self._write_value(self._page, item.data, nbytes)
        self._places[item.key] = Stored(self._page, nbytes, item.crc)
        self._page += pages_for(nbytes)

    def drop(self, keys: Iterable[bytes]) -> None:
        """Leave values out of the sealed file. Their pages stay where they are."""
        for key in keys:
            del self._places[key]

    def read(self, key: bytes) -> bytes:
        """Return a copy of a value."""
        place = self._places[key]
        parts, at, end = [], place.start, place.start + place.nbytes
        while at < end:
            part = os.pread(self._fd, end - at, at)  # the kernel reads at most 2 GiB at a time
            if not part:
                raise PackError(self.path, f"{end - at} bytes at {at} are gone: something else has cut it")
            parts.append(part)
            at += len(part)
        return b"".join(parts)

    def _write_value(self, page: int, data: Any, nbytes: int) -> None:
        end = pages_for(nbytes) * PAGE_BYTES
        parts = [value_head(page, nbytes), data, bytes(end - nbytes - HEAD_BYTES)]
        self._write(parts, page * PAGE_BYTES, end)

    def _write(self, parts: Sequence[Any], at: int, need: int) -> None:
        left = [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]
        try:
            while left:
                done = os.pwritev(self._fd, left, at)
                at += done
                while left and done >= left[0].nbytes:
                    done -= left.pop(0).nbytes
                if done:
                    left[0] = left[0][done:]
        except OSError as error:  # no space left, a limit on file sizes, a failing disk
            os.ftruncate(self._fd, self._page * PAGE_BYTES)
            raise PackError(self.path, f"cannot be written: {error.strerror}; {self._room(error, need)}") from error

    def _room(self, error: OSError, need: int) -> str:
        there = os.statvfs(os.path.dirname(self.path))
        free = there.f_bavail * there.f_frsize
        text = f"{human_bytes(need)} were to be written, {human_bytes(free)} are free there"
        return f"{text}: free some space" if error.errno in _FULL else text

    # --- the end ------------------------------------------------------------------------------------------------------

    def settle(self) -> int:
        """Write the tree over all values and the meta pages, sync; return the file's bytes. It can be read then."""
        # In the order of their keys, as the tree is; what no value has is LMDB's to use again.
        values = [(key, place.page, place.nbytes) for key, place in sorted(self._places.items())]
        unused = self._unused()
        main, free = self._append_tree(values), self._append_tree([])
        if unused:
            key, pages = free_list(unused)
            self._write_value(self._page, pages, len(pages))
            first, self._page = self._page, self._page + pages_for(len(pages))
            free = self._append_tree([(key, first, len(pages))])
        os.ftruncate(self._fd, self._page * PAGE_BYTES)
        os.fsync(self._fd)  # before the head says that all of it is there
        heads = [meta_page(number, free, main, self._page - 1) for number in (0, 1)]
        self._write(heads, 0, len(heads) * PAGE_BYTES)
        os.fsync(self._fd)
        return self._page * PAGE_BYTES

    def _append_tree(self, values: list[tuple[bytes, int, int]]) -> Root:
        pages, root = tree_pages(values, self._page)
        self._write([b"".join(pages)], self._page * PAGE_BYTES, len(pages) * PAGE_BYTES)
        self._page += len(pages)
        return root

    def _unused(self) -> list[int]:
        """Return the pages so far that belong to no value: journal pages, values given up."""
        unused: list[int] = []
        at = FIRST_PAGE
        for place in sorted(self._places.values(), key=lambda place: place.page):
            unused += range(at, place.page)
            at = place.page + pages_for(place.nbytes)
        return unused + list(range(at, self._page))

    def publish(self) -> None:
        """Give the settled file its name, for good: the directory is synced too."""
        if not self._overwrite and os.path.lexists(self.target):
            raise PackExists(self.target, "has appeared while it was being packed")
        os.replace(self.path, self.target)
        fd, self._lock_fd = self._lock_fd, None
        folder = os.open(os.path.dirname(self.target), os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        except OSError as error:
            if error.errno != errno.EINVAL:  # file systems that cannot sync a directory need not
                raise
        finally:
            os.close(folder)
            if fd is not None:
                os.close(fd)

    def keep(self) -> None:
        """Close the partial file and leave it to a later run. Does nothing after ``publish`` or ``discard``."""
        fd, self._lock_fd = self._lock_fd, None
        if fd is not None:
            os.close(fd)

    def discard(self) -> None:
        """Remove the partial file. Does nothing after ``publish`` or ``keep``."""
        if self._lock_fd is not None:
            self._unlink()

    def _unlink(self) -> None:
        fd, self._lock_fd = self._lock_fd, None
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            pass
        finally:
            if fd is not None:
                os.close(fd)  # gives the lock back last, so that nobody locks a file that is about to go
