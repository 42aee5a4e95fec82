"""A file is unfinished, damaged, foreign or too new."""

from __future__ import annotations

from .base import ShmLoaderError


class PackError(ShmLoaderError):
    """A pack cannot be read or written; ``path`` is the file, ``why`` the reason in one clause."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(path, why)
        self.path, self.why = path, why

    def _sentence(self) -> str:
        return f"{self.path}: {self.why}"


class PackNotFound(PackError, FileNotFoundError):
    """There is no file at ``path``."""

    hint = "make it with shmloader-pack SOURCE OUT.lmdb"


class PackUnfinished(PackError, ValueError):
    """The file was never sealed: its packer was killed or is still at work."""

    hint = "run the same shmloader-pack command again"


class PackDamaged(PackError, ValueError):
    """The file was a pack once: it is cut, or bytes have changed."""

    hint = "copy or pack it again; shmloader-inspect --verify lists every damaged chunk"


class NotAPack(PackError, ValueError):
    """The file is something else: a foreign LMDB, a directory, an image, an empty file."""

    hint = "make a pack with shmloader-pack SOURCE OUT.lmdb"


class PackVersionError(PackError, ValueError):
    """The pack was written by a newer format than this library reads."""

    hint = "upgrade shmloader"


class PackExists(PackError, FileExistsError):
    """The target of a packing run exists already and ``overwrite`` was not asked for."""

    hint = "choose another name, or ask for it to be replaced (--overwrite, overwrite=True)"


class PackInUse(PackExists):
    """Another process is writing a pack of this name at this moment."""

    hint = "wait for it to end, or choose another name"


class ResumeRefused(PackError, ValueError):
    """An unfinished pack of this name was begun from other data or with other options; ``samples`` are in it."""

    hint = "give the former data and options to finish it, or begin anew (--restart, restart=True)"

    def __init__(self, path: str, samples: int, why: str) -> None:
        ShmLoaderError.__init__(self, path, samples, why)
        self.path, self.samples, self.why = path, samples, why

    def _sentence(self) -> str:
        return f"{self.path}: holds an unfinished pack with {self.samples} samples, but {self.why}"
