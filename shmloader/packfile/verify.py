"""verify(): read all of a pack and compare every checksum."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable

import numpy as np

from ..errors import PackDamaged
from .mapping import open_pack

_PIECE = 4 << 20


def verify(path: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None) -> list[str]:
    """Return what is wrong with the pack, one sentence for each damaged chunk; an empty list if it is whole.

    What prevents opening (a cut file, a changed manifest) is a problem too, not an exception; a file that is missing or
    is no pack raises as PackedDataset does. ``progress`` is called with (bytes read, bytes in all) after each chunk.
    """
    try:
        pack = open_pack(path)
    except PackDamaged as error:
        return [str(error)]
    problems: list[str] = []
    total = sum(int(located.table[:, 3].sum()) for located in pack.fields)
    done = 0
    for field, located in zip(pack.manifest.fields, pack.fields, strict=True):
        parts = [("v", "values", located.table[:, 3], located.table[:, 4])]
        if "o" in located.parts:
            parts.append(("o", "offsets", 4 * (located.table[:, 2] + 1), located.table[:, 5]))
        if "s" in located.parts:
            parts.append(("s", "shapes", 4 * located.table[:, 2] * len(field.shape), located.table[:, 6]))
        for part, what, sizes, crcs in parts:
            places = located.parts[part]
            for i in range(len(places)):
                place, size = int(places[i]), int(sizes[i])
                pack.will_need(place, size)
                if _crc(pack.bytes, place, size) != int(crcs[i]):
                    first, rows = int(located.table[i, 1]), int(located.table[i, 2])
                    problems.append(
                        f"field {field.name!r}: the {what} of chunk {i} (samples {first} to {first + rows - 1}, "
                        f"{size} bytes at {place} in the file) have changed"
                    )
                if part == "v":
                    done += size
                    if progress is not None:
                        progress(done, total)
    return problems


def _crc(data: np.ndarray[tuple[int], np.dtype[np.uint8]], place: int, size: int) -> int:
    crc = 0
    for at in range(place, place + size, _PIECE):
        crc = zlib.crc32(data[at : min(at + _PIECE, place + size)].data, crc)
    return crc
