"""Is what is read still what was packed? Checksums of chunks, each compared once, and a look at the file each time.

    before each batch or sample:   the file's length     shorter than mapped: refused, where reading would be a SIGBUS
    and where checksums are on:    its time of change    another one: all that was compared counts no more
    at its first use (or at open): CRC-32 of each chunk  ──▶ mark: "whole, in the file as it was at that time"

The marks lie in memory that forked processes share, so of all workers of a loader, in all its epochs, one compares a
chunk. A mark holds the file's time of change, so marks need not be taken back, and none outlives a change.

What remains: between the look and the reading the file can still be cut, by somebody who writes over a pack in place;
reading then ends the process with SIGBUS. A pack that is replaced as files should be, by renaming a new one over it, is
never in danger: what was mapped stays.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ..errors import PackDamaged
from .mapping import OpenPack
from .rows import ChunkMap, Indices

_PIECE = 4 << 20

OPEN, FIRST_TOUCH, OFF = "open", "first-touch", "off"
VERIFY = (OPEN, FIRST_TOUCH, OFF)


def chunk_problems(pack: OpenPack, number: int, i: int) -> Iterator[str]:
    """Yield what is wrong with chunk ``i`` of field ``number``, one clause a part. Reads all of it."""
    field, located = pack.manifest.fields[number], pack.fields[number]
    _, first, rows, value_bytes, value_crc, offset_crc, shape_crc = located.table[i].tolist()
    parts = {
        "v": ("values", value_bytes, value_crc),
        "o": ("offsets", 4 * (rows + 1), offset_crc),
        "s": ("shapes", 4 * rows * len(field.shape), shape_crc),
    }
    for part, places in located.parts.items():
        what, size, crc = parts[part]
        place = int(places[i])
        pack.will_need(place, size)
        if _crc(pack.bytes, place, size) != crc:
            yield (
                f"field {field.name!r}: the {what} of chunk {i} (samples {first} to {first + rows - 1}, {size} bytes "
                f"at {place} in the file) have changed"
            )


def _crc(data: npt.NDArray[np.uint8], place: int, size: int) -> int:
    crc = 0
    for at in range(place, place + size, _PIECE):
        crc = zlib.crc32(data[at : min(at + _PIECE, place + size)].data, crc)
    return crc


class Checks:
    """What one dataset has compared of its pack. ``numbers`` are the fields that it reads."""

    def __init__(self, pack: OpenPack, numbers: list[int], verify: str) -> None:
        self._pack = pack
        self._watch = pack.watch
        self._numbers = numbers
        self._chunk_maps = [ChunkMap(located.table) for located in pack.fields]
        self._off = verify == OFF
        self._seen = pack.identity[3]  # the time of change when it was opened
        self._whole_at = -1
        """Time of change at which all chunks of all fields are known to be whole."""

    def before(self, rows: Indices) -> None:
        """Look at the file before these rows are read, and compare their chunks if that was not done. Once a batch.

        Raises PackDamaged, and IndexError for rows that are not there.
        """
        if self._off:
            self._watch.look_at_length()
        elif self._watch.look() != self._whole_at:
            self._compare(rows)

    def before_one(self, row: int) -> None:
        """As ``before`` for one row that is there."""
        if self._off:
            self._watch.look_at_length()
        elif self._watch.look() != self._whole_at:
            self._compare(np.array([row], np.int64))

    def whole(self, number: int) -> None:
        """Compare all of a field. Raises PackDamaged."""
        if self._off:
            self._watch.look_at_length()
        else:
            now = self._notice()
            self._compare_chunks(number, np.flatnonzero(self._watch.marks[number] != now), now)

    def everything(self) -> None:
        """Compare all of all fields. Raises PackDamaged."""
        for number in self._numbers:
            self.whole(number)

    def trust(self, seen: int) -> None:
        """Take it that everything was compared when the file's time of change was ``seen``."""
        if seen == self._watch.look():
            for number in self._numbers:
                self._watch.marks[number][:] = seen

    @property
    def seen(self) -> int:
        """The file's time of change, as it was noticed last."""
        return self._seen

    def _notice(self) -> int:
        """Look, and if the file has changed see whether it still is this pack."""
        now = self._watch.look()
        if now != self._seen:
            self._pack.look_again()
            self._seen = now
        return now

    def _compare(self, rows: Indices) -> None:
        now = self._notice()
        for number in self._numbers:
            self._chunk_maps[number].check(rows)
            chunks = self._chunk_maps[number].of(rows)
            new = self._watch.marks[number].take(chunks) != now
            if new.any():
                self._compare_chunks(number, np.unique(chunks[new]), now)
        if all(bool((self._watch.marks[number] == now).all()) for number in self._numbers):
            self._whole_at = now

    def _compare_chunks(self, number: int, chunks: npt.NDArray[np.int64], now: int) -> None:
        for i in chunks.tolist():
            for problem in chunk_problems(self._pack, number, i):
                raise PackDamaged(self._pack.path, problem)
            self._watch.marks[number][i] = now
