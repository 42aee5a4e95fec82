"""What the commands print alike."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from tqdm import tqdm

SHOWN_CLASSES = 20


def class_lines(counts: Mapping[str, int]) -> list[str]:
    """Return the table of classes: label, name, samples. Of many classes the first ones, and the extremes."""
    width = max(len(name) for name in list(counts)[:SHOWN_CLASSES])
    lines = [
        f"{'Classes' if label == 0 else '':9} {label:>4}  {name:{width}}  {count:>9,}"
        for label, (name, count) in enumerate(list(counts.items())[:SHOWN_CLASSES])
    ]
    if len(counts) > SHOWN_CLASSES:
        low, high = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
        lines.append(
            f"{'':9} ... and {len(counts) - SHOWN_CLASSES:,} more; fewest {counts[low]:,} ({low}), "
            f"most {counts[high]:,} ({high})"
        )
    return lines


def one_line(error: BaseException | str) -> str:
    """Return an error's text without line breaks: file names and other libraries' messages may hold some."""
    return " ".join(str(error).split())


def show(lines: Iterable[str]) -> None:
    """Print lines to stdout. A file name may hold bytes that no terminal can show: they are printed as escapes.

    Where nobody reads on (stdout was closed, or ``| head`` has left), the rest goes nowhere: what was done is done.
    """
    if sys.stdout is None:
        return
    encoding = sys.stdout.encoding or "utf-8"
    text = "\n".join(lines)
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # Python writes what is left when it exits
        os.close(nowhere)


def progress_bar(*, quiet: bool = False, **options: Any) -> tqdm:
    """Return a progress bar on stderr; a silent one if ``quiet``, or if stderr is no terminal. Gone when closed."""
    # A terminal may not know its size (containers): tqdm would then draw nothing, this falls back to 80 x 24.
    columns, rows = shutil.get_terminal_size()
    return tqdm(unit_scale=True, leave=False, ncols=columns, nrows=rows, disable=True if quiet else None, **options)
