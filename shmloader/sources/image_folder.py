"""An image folder: one subfolder per class, image files anywhere below it.

    photos/cat/001.jpg          class "cat", label 0
    photos/cat/more/002.png     class "cat", label 0
    photos/dog/001.jpg          class "dog", label 1

Rules, the order being that of torchvision's ``ImageFolder`` (so are the labels, where there is nothing hidden):

- Every visible subfolder is a class, also one without images: leaving it out would renumber the classes behind it.
  Its count of 0 is noted. Labels follow the sorted names.
- Within a class: folder by folder in the order of their paths, files in the order of their names.
- Hidden files and folders (names that begin with a dot), files whose names do not end like an image's, and images that
  lie outside of any class folder are left out, counted and noted.
- Symbolic links are followed, to files and to folders. A dangling link to an image is an error. A link that leads back
  to a folder above it is left out and noted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .. import images
from ..errors import SourceError
from ..images import Fit
from .base import NameTable, Options, Source, StrPath, listed, position
from .scan import Scan, is_image_name


class ImageFolder(Source):
    """Images in class subfolders, as ``(image, label)``: ``label`` an int, ``image`` a new tensor, uint8 (3, h, w).

    With ``fit`` all images have one size. With ``encoded=True`` an image is the ``bytes`` of its file instead, proved
    to be decodable: that is how images are packed unless a size is asked for. See this module's head for what counts as
    an image. Raises SourceError if there is none, BrokenImage with the path of a file that cannot be decoded.
    """

    kind = "image-folder"
    looked_for = "a folder with one subfolder of images per class"

    def __init__(self, path: StrPath, *, fit: Fit | None = None, encoded: bool = False) -> None:
        if encoded and fit is not None:
            raise ValueError("encoded=True keeps the files as they are: it cannot be combined with fit=")
        self.path = os.fspath(path)
        self.fit = fit
        self.encoded = encoded
        scan = Scan(self.path)
        self.classes: list[str] = []
        names: list[str] = []
        counts: list[int] = []
        for entry in scan.entries(self.path):
            if entry.is_dir():
                below = scan.files_below(entry.path, is_image_name, "not images by their names")
                self.classes.append(entry.name)
                counts.append(len(below))
                names += below
            elif is_image_name(entry.name):
                scan.leave_out("images outside of any class folder", entry.path)
            else:
                scan.leave_out("not images by their names", entry.path)
        if not names:
            raise SourceError(
                self.path, "there is no image in any of its subfolders" if counts else "it has no subfolders"
            )
        self._names = NameTable(names)
        self.labels = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        """The label of each sample, int64 (n,)."""
        self._notes = scan.notes()
        empty = [name for name, count in zip(self.classes, counts, strict=True) if not count]
        if empty:
            self._notes.append(f"classes without an image, which keep their labels: {listed(empty, len(empty))}")

    @classmethod
    def recognises(cls, path: str) -> bool:
        """True for a folder that holds an image in a subfolder, at any depth; stops at the first one."""
        if not os.path.isdir(path):
            return False
        with os.scandir(path) as entries:
            folders = [entry.path for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
        return any(
            is_image_name(name) and not name.startswith(".")
            for folder in folders
            for _, _, names in os.walk(folder)
            for name in names
        )

    @classmethod
    def open(cls, path: str, options: Options) -> ImageFolder:
        return cls(path, fit=options.fit, encoded=options.fit is None)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> tuple[bytes | torch.Tensor, int]:
        index = position(index, len(self))
        path = self.name_of(index)
        with open(path, "rb") as file:
            data = file.read()
        label = int(self.labels[index])
        if self.encoded:
            images.check(data, name=path)
            return data, label
        return torch.from_numpy(images.decode_chw(data, name=path, fit=self.fit)), label

    def name_of(self, index: int) -> str:
        return os.path.join(self.path, self._names[index])

    def describe(self) -> str:
        stored = "images stored as their files" if self.encoded else "images decoded"
        return f"image folder, {stored}" + (f", {self.fit.describe()}" if self.fit else "")

    @property
    def metadata(self) -> dict[str, Any]:
        stored = (
            "encoded" if self.encoded else f"decoded, {self.fit.describe() if self.fit else 'as large as they are'}"
        )
        return {"kind": self.kind, "source": self.path, "classes": list(self.classes), "images": stored}

    @property
    def encodings(self) -> dict[str, str]:
        return {"image": "encoded-image"} if self.encoded else {}

    @property
    def field_names(self) -> tuple[str, ...]:
        return ("image", "label")

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self._notes)

    def classes_of_samples(self) -> npt.NDArray[np.int64]:
        return self.labels

    def class_counts(self) -> Mapping[str, int]:
        counts = np.bincount(self.labels, minlength=len(self.classes))
        return dict(zip(self.classes, counts.tolist(), strict=True))
