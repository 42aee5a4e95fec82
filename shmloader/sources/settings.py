"""What may be asked of a packing run, beside what the source itself is asked: plain data, checked when it is made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import MisuseError
from ..packfile.schema import TORCH_DTYPES
from ..packfile.writer import CHUNK_BYTES

STORES = ("encoded", "raw", "zlib")


@dataclass(frozen=True)
class Part:
    """One pack of a split."""

    name: str
    """Stands before the target's suffix: ``data.lmdb`` becomes ``data.NAME.lmdb``."""
    share: float
    """Of all samples, 0 to 1."""


@dataclass(frozen=True)
class PackSettings:
    """How samples are stored, and which go where. All of it shows in the pack, so a resumed run must have the same."""

    store: Mapping[str, str] = field(default_factory=dict)
    """Field to ``"encoded"`` (an image file; of pixels: made now, JPEG with ``quality``, else PNG) ``"raw"``
    (pixels), or ``"zlib"`` (each row of an array, of text or bytes compressed; for what gets much smaller: masks)."""
    quality: int | None = None
    """JPEG quality, 1 to 100, for all encoded images: they are decoded, and encoded anew."""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """Field to torch's name of the dtype that it is stored with."""
    chunk_bytes: int = CHUNK_BYTES
    """Bytes that are collected, committed and checksummed together."""
    shuffle: int | None = None
    """Seed of a random order. None: the input's order."""
    limit: int | None = None
    """Only so many samples: the first ones, or with ``shuffle`` the first of the random order."""
    split: tuple[Part, ...] = ()
    """Several packs instead of one. Which sample goes where is drawn with ``split_seed``."""
    split_seed: int = 0
    stratify: bool = False
    """Give every part the same share of each class."""

    def __post_init__(self) -> None:
        for name, store in self.store.items():
            if store not in STORES:
                raise MisuseError(f"field {name!r} is to be stored as {store!r}; known are {', '.join(STORES)}")
        for name, dtype in self.dtypes.items():
            if dtype not in TORCH_DTYPES:
                raise MisuseError(f"field {name!r}: there is no dtype {dtype!r}; known are {', '.join(TORCH_DTYPES)}")
            if name in self.store:
                raise MisuseError(f"field {name!r} cannot have both a store and a dtype")
        if self.quality is not None and not 1 <= self.quality <= 100:
            raise MisuseError(f"a JPEG quality of {self.quality} cannot be: 1 to 100")
        if self.limit is not None and self.limit < 1:
            raise MisuseError(f"a limit of {self.limit} samples leaves nothing to pack")
        if self.stratify and not self.split:
            raise MisuseError("to stratify says how to split: give the shares too")
        names = [part.name for part in self.split]
        if len(set(names)) != len(names) or not all(names):
            raise MisuseError(f"the parts {names} must have different names")
        if any(os.sep in name or "\0" in name for name in names):
            raise MisuseError(f"the parts' names become part of file names: {names} cannot")
        if self.split and (any(part.share <= 0 for part in self.split) or sum(p.share for p in self.split) > 1 + 1e-9):
            raise MisuseError("the shares of a split must be above 0, and 1 together at most")

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values, for fingerprints."""
        return {
            "store": dict(sorted(self.store.items())),
            "quality": self.quality,
            "dtypes": dict(sorted(self.dtypes.items())),
            "chunk_bytes": self.chunk_bytes,
            "shuffle": self.shuffle,
            "limit": self.limit,
            "split": [[part.name, part.share] for part in self.split],
            "split_seed": self.split_seed,
            "stratify": self.stratify,
        }

    def target(self, path: str, part: Part | None) -> str:
        """Return the file of a part of the pack at ``path``."""
        if part is None:
            return path
        stem, suffix = os.path.splitext(path)
        return f"{stem}.{part.name}{suffix}"
