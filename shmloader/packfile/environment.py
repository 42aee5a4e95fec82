"""The LMDB file while it is being written: a temporary name, batches committed whole, a map that grows by itself.

    OUT.lmdb.partial ──commit, commit, ... ──▶ sealed, synced ──rename──▶ OUT.lmdb

Only whoever holds the flock of the partial file writes it. A killed packer's lock is gone with it, so that what it left
is recognised and replaced by the next run. Every batch is kept by its caller until it is committed, so running out of
map is a retry, not a loss.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable, Sequence
from typing import Any

import lmdb

from ..errors import NotAPack, PackError, PackExists, human_bytes

PARTIAL = ".partial"
"""Appended to the target's name while it is being written."""

_FIRST_MAP_BYTES = 64 << 20
_PAGE_ROOM = 1 << 20  # what the tree and its copies may need beside the values of one batch

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # of file systems that have none: then we trust the user

Item = tuple[bytes, Any]


class WriteEnvironment:
    """Owns the partial file, its lock, and LMDB's handle on it. Exactly one of ``publish`` and ``discard`` ends it."""

    def __init__(self, target: str, *, overwrite: bool, map_bytes: int = _FIRST_MAP_BYTES) -> None:
        self.target = os.path.abspath(target)
        self.path = self.target + PARTIAL
        self._overwrite = overwrite
        self._check_target()
        self._lock_fd: int | None = self._lock()
        try:
            os.ftruncate(self._lock_fd, 0)  # what a killed packer left
            self._env: lmdb.Environment | None = lmdb.open(
                self.path, map_size=max(map_bytes, 1 << 20), subdir=False, lock=False, sync=False, mode=0o644
            )
        except lmdb.Error as error:
            self._unlink()
            raise PackError(self.path, f"cannot be written: {error}") from error
        except BaseException:
            self._unlink()
            raise
        self.page_bytes = int(self._env.stat()["psize"])

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
                raise PackExists(self.path, "another process is packing to this name at this moment") from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    os.close(fd)
                    raise PackError(self.path, f"cannot be locked: {error.strerror}") from error
            try:
                if os.path.samestat(os.fstat(fd), os.stat(self.path)):
                    return fd
            except FileNotFoundError:
                pass
            os.close(
                fd
            )  # its former owner finished between our open and our lock: this is not the name's file any more

    def commit(self, items: Sequence[Item], deleted: Iterable[bytes] = ()) -> None:
        """Put ``items`` and delete the keys in ``deleted`` in one transaction, growing the map as often as needed."""
        env = self._open_env()
        deleted = list(deleted)
        while True:
            try:
                with env.begin(write=True) as txn:
                    for key in deleted:
                        txn.delete(key)
                    for key, value in items:
                        txn.put(key, value)
                return
            except lmdb.MapFullError:
                # The transaction is gone with all that it had put; the file is as before, so it is simply repeated.
                self._grow(env, sum(len(value) for _, value in items))
            except lmdb.Error as error:  # no space left, a limit on file sizes, a failing disk
                raise PackError(self.path, f"cannot be written: {error}; {self._room(items)}") from error

    def _room(self, items: Sequence[Item]) -> str:
        """LMDB calls a full disk an input/output error: say how it stands, so that nobody looks for a broken one."""
        there = os.statvfs(os.path.dirname(self.path))
        need, free = sum(len(value) for _, value in items), there.f_bavail * there.f_frsize
        return f"{human_bytes(need)} were to be written, {human_bytes(free)} are free there"

    def _grow(self, env: lmdb.Environment, need: int) -> None:
        size = int(env.info()["map_size"])
        least = size + need + _PAGE_ROOM
        for wanted in (max(2 * size, least), least):
            try:
                env.set_mapsize(-(-wanted // self.page_bytes) * self.page_bytes)
                return
            except (lmdb.Error, MemoryError, OverflowError) as error:
                failure = error  # doubling may hit a limit on address space that the smaller step does not
        raise PackError(self.path, f"its memory map cannot grow to {least} bytes: {failure}") from failure

    def read(self, key: bytes) -> bytes | None:
        """Return a copy of a committed value."""
        with self._open_env().begin() as txn:
            found = txn.get(key)
            return None if found is None else bytes(found)

    def _open_env(self) -> lmdb.Environment:
        if self._env is None:
            raise PackError(self.path, "has been closed")
        return self._env

    def settle(self) -> int:
        """Close LMDB, cut what it does not use, sync the file; return its bytes. The partial file can be read then."""
        env, self._env = self._open_env(), None
        used = (int(env.info()["last_pgno"]) + 1) * self.page_bytes
        env.close()
        assert self._lock_fd is not None
        os.truncate(self.path, used)
        os.fsync(self._lock_fd)
        return used

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

    def discard(self) -> None:
        """Remove the partial file. Does nothing after ``publish``."""
        env, self._env = self._env, None
        if env is not None:
            env.close()
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
