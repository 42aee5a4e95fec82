"""A finished pack in memory: checked, mapped once per process, and safe to carry across a fork.

    LMDB, for a moment:  manifest, tables, where each chunk lies      then closed
    our own mapping:     ┌──────┬─────────────┬───────┬───── ─ ─     read-only, shared, the whole file
                         │ tree │ chunk 0 (v) │ c 0 (o)│ ...

LMDB is asked where the chunks lie, and everything is read through a mapping of our own. A handle of LMDB must not
cross a fork, cannot be opened twice in a process, and takes its memory with it when it is closed; a read-only file
mapping has none of these problems. It lives as long as any array or tensor that looks into it.

Reading creates no file, takes no lock, and needs no right but to read. What may be wrong with a file is found before
its pages are touched: a cut file is refused here, because reading it would end the process with SIGBUS.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import struct
import threading
import weakref
import zlib
from typing import Any

import lmdb
import numpy as np
import numpy.typing as npt

from ..errors import NotAPack, PackDamaged, PackError, PackNotFound, PackUnfinished, PackVersionError
from .environment import PARTIAL
from .schema import (
    CHUNK_COLUMNS,
    FORMAT,
    MANIFEST_KEY,
    PROGRESS_KEY,
    SEAL_KEY,
    VERSION,
    ChunkTable,
    Manifest,
    chunk_key,
    require_little_endian,
    table_key,
)

_LMDB_MAGIC = 0xBEEFC0DE
_PAGE_HEADER = 16  # bytes in front of a value that has pages of its own
_BIG_ROW = 64 << 10
"""From this mean row on, the kernel may read around a page fault; below it would read much more than is asked for."""


class Located:
    """One field's table, and the place of each of its chunks in the file."""

    def __init__(self, table: ChunkTable, parts: dict[str, npt.NDArray[np.int64]]) -> None:
        self.table = table
        self.parts = parts
        """``"v"``, and where they exist ``"o"`` and ``"s"``: for each chunk its offset in the file, in bytes."""


class OpenPack:
    """A mapped pack. Shared by all datasets on it in this process; valid in forked children as it is."""

    def __init__(self, path: str) -> None:
        fd = _open_file(path)
        try:
            status = os.fstat(fd)
            self.identity = identity_of(status)
            self.path = path
            self.file_bytes = status.st_size
            page_bytes = _check_head(path, fd, status.st_size)
            self._memory = mmap.mmap(fd, status.st_size, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(fd)
        self.bytes = np.frombuffer(self._memory, np.uint8)
        """The whole file, read-only. As long as it or a view of it exists, the mapping cannot go."""
        self.manifest, self.digest, self.fields = self._look_up(page_bytes)
        big = self.manifest.count and self.manifest.payload_bytes // self.manifest.count >= _BIG_ROW
        self._memory.madvise(mmap.MADV_NORMAL if big else mmap.MADV_RANDOM)

    def raw(self) -> Any:
        """Return the mapping as a ctypes array that torch takes without a warning, and that keeps the mapping alive.

        Its memory is read-only, whatever ctypes thinks: writing to it ends the process. For our own reading code only.
        """
        array = (ctypes.c_uint8 * len(self.bytes)).from_address(self.bytes.ctypes.data)
        array.keeps_alive = self.bytes  # type: ignore[attr-defined]
        return array

    # --- what the tree says -------------------------------------------------------------------------------------------

    def _look_up(self, page_bytes: int) -> tuple[Manifest, str, list[Located]]:
        try:
            env = lmdb.open(
                self.path, subdir=False, readonly=True, lock=False, readahead=False, create=False, max_spare_txns=0
            )
        except (lmdb.InvalidError, lmdb.CorruptedError, lmdb.VersionMismatchError) as error:
            raise PackDamaged(self.path, f"LMDB cannot open it: {error}") from error
        except lmdb.Error as error:  # such as: this process has it open through LMDB itself
            raise PackError(self.path, f"LMDB cannot open it: {error}") from error
        try:
            last_page = int(env.info()["last_pgno"])
            if (last_page + 1) * page_bytes > self.file_bytes:
                raise PackDamaged(
                    self.path, f"is cut: {self.file_bytes} bytes are there, {(last_page + 1) * page_bytes} were written"
                )
            with env.begin(buffers=True) as txn:
                manifest, digest = self._manifest(txn)
                return manifest, digest, self._locate(txn, manifest, page_bytes)
        except lmdb.Error as error:
            raise PackDamaged(self.path, f"LMDB cannot read it: {error}") from error
        finally:
            env.close()

    def _manifest(self, txn: Any) -> tuple[Manifest, str]:
        found, seal = txn.get(MANIFEST_KEY), txn.get(SEAL_KEY)
        if found is None or seal is None:
            if txn.get(PROGRESS_KEY) is not None or self.path.endswith(PARTIAL):
                raise PackUnfinished(self.path, "was never sealed: its packer was killed, or is still at work")
            raise NotAPack(self.path, "is an LMDB file, but not a pack: it has no manifest")
        text = bytes(found)
        try:
            data = json.loads(text.decode("utf-8", "surrogatepass"))
            ours = data["format"] == FORMAT
            version = int(data["version"]) if ours else 0
        except (ValueError, KeyError, TypeError) as fault:
            raise NotAPack(self.path, "is an LMDB file, but its manifest is not that of a pack") from fault
        if not ours:
            raise NotAPack(self.path, f"is an LMDB file of the format {str(data['format'])[:40]!r}")
        if version > VERSION:
            raise PackVersionError(self.path, f"has format version {version}; this library reads up to {VERSION}")
        if zlib.crc32(text).to_bytes(4, "little") != bytes(seal):
            raise PackDamaged(self.path, "its manifest has changed since it was sealed (checksum)")
        try:
            manifest = Manifest.from_json(data)
        except (ValueError, KeyError, TypeError) as fault:
            raise PackVersionError(
                self.path, f"its manifest holds something unknown to this library: {fault}"
            ) from fault
        return manifest, manifest.digest

    def _locate(self, txn: Any, manifest: Manifest, page_bytes: int) -> list[Located]:
        base: int | None = None
        found: list[Located] = []
        for number, field in enumerate(manifest.fields):
            stored = txn.get(table_key(number))
            if stored is None:
                raise PackDamaged(self.path, f"the table of field {field.name!r} is missing")
            table = self._table(bytes(stored), manifest, number)
            sizes = {"v": table[:, 3]}
            if field.ragged:
                sizes["o"] = 4 * (table[:, 2] + 1)
            if field.trailing is None:
                sizes["s"] = 4 * table[:, 2] * len(field.shape)
            parts: dict[str, npt.NDArray[np.int64]] = {}
            for part, nbytes in sizes.items():
                places = np.empty(len(table), np.int64)
                for i, (chunk, length) in enumerate(zip(table[:, 0].tolist(), nbytes.tolist(), strict=True)):
                    value = txn.get(chunk_key(number, part, chunk))
                    if value is None or len(value) < length:
                        raise PackDamaged(self.path, f"field {field.name!r}: chunk {chunk} is missing or too short")
                    address = int(np.frombuffer(value, np.uint8).__array_interface__["data"][0])
                    if base is None:
                        base = self._base(address, page_bytes)
                    places[i] = address - base
                if len(places) and (places.min() < 0 or (places + nbytes).max() > self.file_bytes):
                    raise PackDamaged(self.path, f"field {field.name!r}: a chunk lies outside of the file")
                parts[part] = places
            found.append(Located(table, parts))
        return found

    def _base(self, address: int, page_bytes: int) -> int:
        """Return where LMDB mapped the file, from one value's address: the value's page begins with its number."""
        page = address - _PAGE_HEADER
        number = int.from_bytes(ctypes.string_at(page, 8), "little")
        base = page - number * page_bytes
        there = self.bytes[address - base : address - base + 64] if 0 <= address - base < self.file_bytes else b""
        if bytes(there) != ctypes.string_at(address, len(there)) or not len(there):
            raise PackDamaged(self.path, "a chunk does not lie where its page says")
        return base

    def _table(self, stored: bytes, manifest: Manifest, number: int) -> ChunkTable:
        """Return a table that is known to be whole: rows follow each other from 0 to the last sample."""
        width = len(CHUNK_COLUMNS) * 8
        name = manifest.fields[number].name
        # What was stored may have been padded: the checksum is over the chunks that hold all samples.
        table = np.frombuffer(stored[: len(stored) // width * width], np.int64).reshape(-1, len(CHUNK_COLUMNS))
        last = np.flatnonzero(table[:, 1] + table[:, 2] == manifest.count)
        table = table[: int(last[0]) + 1] if manifest.count and len(last) else table[:0]
        if zlib.crc32(table.tobytes()) != manifest.table_crcs[number]:
            raise PackDamaged(self.path, f"the table of field {name!r} has changed since it was sealed (checksum)")
        return table


def identity_of(status: os.stat_result) -> tuple[int, ...]:
    """Return what tells one file from another that later has the same name."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _open_file(path: str) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        if os.path.exists(path + PARTIAL):
            raise PackUnfinished(
                path, f"does not exist, only {os.path.basename(path) + PARTIAL}: never sealed"
            ) from None
        raise PackNotFound(path, "there is no such file") from None
    except NotADirectoryError:
        raise PackNotFound(path, "a part of this path is no directory") from None
    except OSError as error:
        raise PackError(path, f"cannot be read: {error.strerror}") from error
    return fd


def _check_head(path: str, fd: int, size: int) -> int:
    """Look at the first page before LMDB does; return the page size."""
    if os.path.isdir(path):
        raise NotAPack(path, "is a directory; a pack is one file")
    if size == 0:
        raise NotAPack(path, "is empty")
    head = os.pread(fd, 64, 0)
    # page header (16), then magic, version, address (8), map size (8), and the first tree's head, which begins with
    # the page size
    if len(head) < 64 or struct.unpack_from("<I", head, 16)[0] != _LMDB_MAGIC:
        raise NotAPack(path, "is no LMDB file")
    version, page_bytes = struct.unpack_from("<I", head, 20)[0], struct.unpack_from("<I", head, 40)[0]
    if version != 1:
        raise PackVersionError(path, f"is an LMDB file of data version {version}; this library reads version 1")
    if not 512 <= page_bytes <= 65536 or page_bytes & (page_bytes - 1):
        raise PackDamaged(path, f"its head says that pages have {page_bytes} bytes")
    if size < 2 * page_bytes:
        raise PackDamaged(path, f"is cut: {size} bytes are left")
    return int(page_bytes)


_lock = threading.RLock()
_open: weakref.WeakValueDictionary[tuple[int, ...], OpenPack] = weakref.WeakValueDictionary()
# LMDB refuses to open a file that it thinks is open. If a thread forked while another is inside of ``open_pack``, the
# child would inherit that belief for ever; so forks wait for the lock.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def open_pack(path: str | os.PathLike[str], digest: str | None = None) -> OpenPack:
    """Return the pack at ``path``, mapped: the one that this process has already, or a new one.

    ``digest``: raise PackDamaged if the file has been replaced by another pack since that was taken.
    Raises PackNotFound, NotAPack, PackUnfinished, PackDamaged, PackVersionError.
    """
    require_little_endian()
    real = os.path.realpath(path)
    with _lock:
        try:
            known = _open.get(identity_of(os.stat(real)))
        except OSError:
            known = None
        if known is None:
            known = OpenPack(real)
            _open[known.identity] = known
    if digest is not None and known.digest != digest:
        raise PackDamaged(real, "has been replaced by another pack since this dataset was made")
    return known
