"""A walk through a folder tree: the files that are wanted, in order, and what was left out, counted.

Hidden entries are left out. Links are followed; one that leads back to a folder above it is left out, and a dangling
link to a wanted file is an error.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

from .. import images
from ..errors import SourceError
from .base import listed

_KEPT_NAMES = 5  # of each kind of left-out file: enough to see what they are


def is_image_name(name: str) -> bool:
    """Say whether a file name ends like that of an image."""
    return os.path.splitext(name)[1].lower() in images.SUFFIXES


class Scan:
    """One walk through a folder tree: its images in order, and what was left out."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._prefix = len(os.path.join(root, ""))
        self.left_out: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = {}

    def leave_out(self, why: str, path: str) -> None:
        self.left_out[why] += 1
        kept = self.examples.setdefault(why, [])
        if len(kept) < _KEPT_NAMES:
            kept.append(self.inside(path))

    def inside(self, path: str) -> str:
        """Return a path that was found, relative to the root. (``os.path.relpath`` takes longer than finding it.)"""
        return path[self._prefix :]

    def entries(self, folder: str) -> list[os.DirEntry[str]]:
        """Return the visible entries of a folder, sorted by name."""
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        for entry in entries:
            if entry.name.startswith("."):
                self.leave_out("hidden", entry.path)
        return [entry for entry in entries if not entry.name.startswith(".")]

    def files_below(self, folder: str, wanted: Callable[[str], bool], otherwise: str) -> list[str]:
        """Return the paths of all files in ``folder`` and below whose names are ``wanted``, relative to the root.

        Folder by folder in the order of their paths, files in the order of their names. Files of other names are left
        out for the reason ``otherwise``. Raises SourceError for a dangling link.
        """
        found: list[tuple[str, list[str]]] = []
        top = os.stat(folder)
        waiting = [(folder, frozenset({(top.st_dev, top.st_ino)}))]
        while waiting:
            here, above = waiting.pop()
            names = []
            for entry in self.entries(here):
                if entry.is_dir():
                    status = entry.stat()
                    place = (status.st_dev, status.st_ino)
                    if place in above:
                        self.leave_out("links that lead back to a folder above them", entry.path)
                    else:
                        waiting.append((entry.path, above | {place}))
                elif not wanted(entry.name):
                    self.leave_out(otherwise, entry.path)
                elif entry.is_file():
                    names.append(entry.path)
                elif entry.is_symlink():
                    raise SourceError(entry.path, f"a symbolic link to {os.readlink(entry.path)}, which does not exist")
                else:
                    self.leave_out("named like files that are wanted, but no files", entry.path)
            found.append((here, names))
        return [self.inside(path) for _, names in sorted(found) for path in names]

    def notes(self) -> list[str]:
        """Return one sentence for each reason to leave something out."""
        return [f"left out, {why}: {n} ({listed(self.examples[why], n)})" for why, n in self.left_out.items()]
