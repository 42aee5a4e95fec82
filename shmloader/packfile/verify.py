"""verify(): read all of a pack, compare every checksum, and account for every page of the file."""

from __future__ import annotations

import os
from collections.abc import Callable

from ..errors import PackDamaged
from .checks import chunk_problems
from .mapping import open_pack
from .pagecheck import page_problems


def verify(path: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None) -> list[str]:
    """Return what is wrong with the pack, one sentence for each damage; an empty list if it is whole.

    What prevents opening (a cut file, a changed manifest) is a problem too, not an exception; a file that is missing or
    is no pack raises as PackedDataset does. ``progress`` is called with (bytes read, bytes in all) after each chunk.
    """
    try:
        pack = open_pack(path)
    except PackDamaged as error:
        return [str(error)]
    problems = page_problems(pack)
    total = sum(int(located.table[:, 3].sum()) for located in pack.fields)
    done = 0
    for number, located in enumerate(pack.fields):
        for i, size in enumerate(located.table[:, 3].tolist()):
            problems.extend(chunk_problems(pack, number, i))
            done += size
            if progress is not None:
                progress(done, total)
    return problems
