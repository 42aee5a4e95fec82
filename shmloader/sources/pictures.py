"""How a source delivers its images: as the bytes of their files, as pixels, or as pixels of one size."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from .. import images
from ..errors import SourceError
from ..images import Fit, Seen

_PROBES = 20  # files looked for in each folder that may hold them


def read_file(path: str, told_by: str) -> bytes:
    """Return the bytes of a file. Raises SourceError for one that is not there; ``told_by`` says who names it.

    Where there is no such file but its name has backslashes, these are taken for a Windows path's.
    """
    try:
        try:
            with open(path, "rb") as file:
                return file.read()
        except FileNotFoundError:
            if "\\" not in path:
                raise
            with open(path.replace("\\", "/"), "rb") as file:
                return file.read()
    except (FileNotFoundError, NotADirectoryError):
        raise SourceError(told_by, f"the file {path} is not there") from None
    except IsADirectoryError:
        raise SourceError(told_by, f"{path} is a folder, not a file") from None


def find_folder(names: Sequence[str], folders: Sequence[str]) -> tuple[str | None, str]:
    """Return the first of ``folders`` that has one of the first few files, or None; and what was looked for where."""
    folders = list(dict.fromkeys(map(os.path.normpath, folders)))
    for folder in folders:
        for name in names[:_PROBES]:
            path = os.path.join(folder, name)
            if os.path.isfile(path) or os.path.isfile(path.replace("\\", "/")):
                return folder, ""
    return None, f"looked for {names[0]} in {', '.join(folders)}"


def folder_with(told_by: str, names: Sequence[str], folders: Sequence[str]) -> str:
    """Return the first of ``folders`` that has one of the first few images. Raises SourceError with all of them."""
    folder, looked = find_folder(names, folders)
    if folder is None:
        raise SourceError(told_by, f"the images are not there: {looked}; give their folder (--images)")
    return folder


class Pictures:
    """The images of one source. ``encoded=True`` keeps the bytes of the files, and cannot be combined with ``fit``."""

    def __init__(self, fit: Fit | None, encoded: bool) -> None:
        if encoded and fit is not None:
            raise ValueError("encoded=True keeps the files as they are: it cannot be combined with fit=")
        self.fit = fit
        self.encoded = encoded

    def read(self, path: str, told_by: str) -> tuple[bytes | torch.Tensor, Seen]:
        """Return an image and how it is seen: ``bytes`` that were proved decodable, or a new uint8 (3, h, w) tensor.

        Raises SourceError if there is no file, BrokenImage with its path if it cannot be decoded.
        """
        data = read_file(path, told_by)
        if self.encoded:
            return data, images.examine(data, name=path)
        pixels, seen = images.decode_seen(data, name=path, fit=self.fit)
        return torch.from_numpy(pixels), seen

    def describe(self) -> str:
        """Return one phrase for a report or a manifest."""
        if self.encoded:
            return "images stored as their files"
        return "images decoded, " + (self.fit.describe() if self.fit else "as large as they are")


def folder_of(path: str) -> str:
    """Return the folder that a file lies in, ``.`` for a bare name."""
    return os.path.dirname(path) or os.curdir
