"""A finished pack in memory: checked, mapped once per process, and safe to carry across a fork.

    the tree:     manifest, tables, where each chunk lies       read once, when opened
    the mapping:  ┌──────┬─────────────┬─────────┬───── ─ ─     read-only, shared, the whole file
                  │ tree │ chunk 0 (v) │ c. 0 (o)│ ...

The file is mapped by us, not by LMDB. LMDB's handle must not cross a fork, cannot be opened twice in a process, and
takes its memory with it when it is closed; a read-only file mapping has none of these problems. It lives as long as any
array or tensor that looks into it.

Reading creates no file, takes no lock, and needs no right but to read. What may be wrong with a file is found before
its pages are touched: a cut file is refused here, because reading it would end the process with SIGBUS.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import stat
import threading
import weakref
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import NotAPack, PackDamaged, PackError, PackNotFound, PackUnfinished, PackVersionError
from .environment import PARTIAL
from .journal import UNFINISHED
from .schema import (
    CHUNK_COLUMNS,
    FORMAT,
    MANIFEST_KEY,
    SEAL_KEY,
    VERSION,
    ChunkTable,
    Manifest,
    chunk_key,
    require_little_endian,
    table_key,
)
from .tree import DATA_VERSION, HEAD_BYTES, BadTree, Meta, Place, data_version, find_values, is_meta, read_meta
from .watch import FileWatch


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
            meta = _check_head(path, fd, status.st_size)
            self._memory = mmap.mmap(fd, status.st_size, mmap.MAP_SHARED, mmap.PROT_READ)
            self._memory.madvise(mmap.MADV_RANDOM)  # else one row may cost megabytes; see ahead.py
            self.bytes = np.frombuffer(self._memory, np.uint8)
            """The whole file, read-only. As long as it or a view of it exists, the mapping cannot go."""
            self.manifest, self.digest, self.fields = self._look_up(meta)
            self.watch = FileWatch(path, fd, self._memory, [len(located.table) for located in self.fields])
        finally:
            os.close(fd)

    def look_again(self) -> None:
        """The file was touched: raise PackDamaged unless its head and tables are what they were."""
        try:
            meta = _check_head(self.path, self.watch.fd, os.fstat(self.watch.fd).st_size)
            _, digest, fields = self._look_up(meta)
        except PackError as fault:
            raise PackDamaged(self.path, f"was changed while it was being read: {fault.why}") from fault
        same = digest == self.digest and all(
            np.array_equal(new.table, old.table) and all(np.array_equal(new.parts[p], old.parts[p]) for p in old.parts)
            for new, old in zip(fields, self.fields, strict=True)
        )
        if not same:
            raise PackDamaged(self.path, "was changed while it was being read: it holds another pack now")

    def will_need(self, place: int, nbytes: int) -> None:
        """Let the kernel read these bytes ahead, without waiting for them."""
        if not nbytes:
            return
        start = place - place % mmap.PAGESIZE
        self._memory.madvise(mmap.MADV_WILLNEED, start, place + nbytes - start)

    def raw(self) -> Any:
        """Return the mapping as a ctypes array that torch takes without a warning, and that keeps the mapping alive.

        Its memory is read-only, whatever ctypes thinks: writing to it ends the process. For our own reading code only.
        """
        array = (ctypes.c_uint8 * len(self.bytes)).from_address(self.bytes.ctypes.data)
        array.keeps_alive = self.bytes  # type: ignore[attr-defined]
        return array

    # --- what the tree says -------------------------------------------------------------------------------------------

    def _look_up(self, meta: Meta) -> tuple[Manifest, str, list[Located]]:
        try:
            values = find_values(memoryview(self._memory), meta)
        except BadTree as fault:
            raise PackDamaged(self.path, fault.why) from fault
        manifest, digest = self._manifest(values)
        return manifest, digest, self._locate(values, manifest)

    def _value(self, values: dict[bytes, Place], key: bytes) -> bytes | None:
        place = values.get(key)
        return None if place is None else self._memory[place.start : place.start + place.nbytes]

    def _manifest(self, values: dict[bytes, Place]) -> tuple[Manifest, str]:
        text, seal = self._value(values, MANIFEST_KEY), self._value(values, SEAL_KEY)
        if text is None or seal is None:
            raise NotAPack(self.path, "is an LMDB file, but not a pack: it has no manifest")
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
        if zlib.crc32(text).to_bytes(4, "little") != seal:
            raise PackDamaged(self.path, "its manifest has changed since it was sealed (checksum)")
        try:
            manifest = Manifest.from_json(data)
        except (ValueError, KeyError, TypeError) as fault:
            raise PackVersionError(
                self.path, f"its manifest holds something unknown to this library: {fault}"
            ) from fault
        return manifest, manifest.digest

    def _locate(self, values: dict[bytes, Place], manifest: Manifest) -> list[Located]:
        found: list[Located] = []
        for number, field in enumerate(manifest.fields):
            stored = self._value(values, table_key(number))
            if stored is None:
                raise PackDamaged(self.path, f"the table of field {field.name!r} is missing")
            table = self._table(stored, manifest, number)
            sizes = {"v": table[:, 3]}
            if field.ragged:
                sizes["o"] = 4 * (table[:, 2] + 1)
            if field.trailing is None:
                sizes["s"] = 4 * table[:, 2] * len(field.shape)
            parts: dict[str, npt.NDArray[np.int64]] = {}
            for part, nbytes in sizes.items():
                places = np.empty(len(table), np.int64)
                for i, (chunk, length) in enumerate(zip(table[:, 0].tolist(), nbytes.tolist(), strict=True)):
                    place = values.get(chunk_key(number, part, chunk))
                    if place is None or place.nbytes < length or not place.own_pages:
                        raise PackDamaged(self.path, f"field {field.name!r}: chunk {chunk} is missing or too short")
                    places[i] = place.start
                parts[part] = places
            found.append(Located(table, parts))
        return found

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


def _check_head(path: str, fd: int, size: int) -> Meta:
    """Read the meta pages, before anything is mapped; return the one that counts."""
    if stat.S_ISDIR(os.fstat(fd).st_mode):
        raise NotAPack(path, "is a directory; a pack is one file")
    if size == 0:
        raise NotAPack(path, "is empty")
    head = os.pread(fd, HEAD_BYTES, 0)
    if head.startswith(UNFINISHED[: len(head)]):
        raise PackUnfinished(path, "was never sealed: its packer was killed, or is still at work")
    if not is_meta(head):
        raise NotAPack(path, "is no LMDB file")
    if data_version(head) != DATA_VERSION:
        raise PackVersionError(
            path, f"is an LMDB file of data version {data_version(head)}; this library reads version {DATA_VERSION}"
        )
    try:
        metas = [read_meta(head)]
        if size >= 2 * metas[0].page_bytes:
            metas.append(read_meta(os.pread(fd, HEAD_BYTES, metas[0].page_bytes)))
    except BadTree as fault:
        raise PackDamaged(path, fault.why) from fault
    meta = max(metas, key=lambda each: each.transaction)
    need = (meta.last_page + 1) * meta.page_bytes
    if len(metas) < 2 or size < need:
        raise PackDamaged(path, f"is cut: {size} bytes are there, {need} were written")
    return meta


_lock = threading.Lock()
_open: weakref.WeakValueDictionary[tuple[int, ...], OpenPack] = weakref.WeakValueDictionary()
# A fork waits until no thread is inside of ``open_pack``: in the child, nobody would ever give the lock back.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def _open_new(path: str) -> OpenPack:
    try:
        return OpenPack(path)
    except (NotAPack, PackDamaged) as fault:
        if path.endswith(PARTIAL):  # it may have been looked at while it was being written
            raise PackUnfinished(path, "was never sealed: its packer was killed, or is still at work") from fault
        raise


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
            known = _open_new(real)
            _open[known.identity] = known
    if digest is not None and known.digest != digest:
        raise PackDamaged(real, "has been replaced by another pack since this dataset was made")
    return known
