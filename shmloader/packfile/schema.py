"""What a pack says about itself: its fields and its manifest. Plain values and JSON; knows no file.

    keys of the LMDB file, all in its main database
    ─────────────────────────────────────────────────────────────────────────────────────────────────────
    manifest                this module's Manifest as JSON; written last of all, it seals the pack
    seal                    CRC-32 of the manifest's bytes, 4 bytes, little-endian
    table/FFFF              one row of int64 per chunk of field FFFF (see CHUNK_COLUMNS)
    FFFF/v/CCCCCCCCCC       chunk C of field F: its values, row after row, nothing between them
    FFFF/o/CCCCCCCCCC       ragged: rows + 1 offsets (uint32) into this chunk's values, in elements of the first axis;
                            where several axes vary: in single numbers
    FFFF/s/CCCCCCCCCC       where several axes vary: the shape of each row (uint32)

    windows                 rows of a fixed shape that overlap: row i begins ``stride`` elements of the first axis
                            behind row i - 1, and what they share is stored once. A chunk ends with its last row whole
                            v:  0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13        length 6, stride 4: rows 0-5, 4-9, 8-13

F and C are hexadecimal. All numbers are little-endian. Every value has pages of its own, so that its place is 16 bytes
off a page border.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..errors import MisuseError
from .structure import Node, node_from_json, node_to_json

FORMAT = "shmloader-pack"
VERSION = 1

MANIFEST_KEY = b"manifest"
SEAL_KEY = b"seal"

CHUNK_COLUMNS = ("chunk", "first_row", "rows", "value_bytes", "value_crc", "offset_crc", "shape_crc")
"""Columns of a field's table, all int64. ``chunk`` is its number in the keys; the checksum of a missing part is 0."""

ENCODED_IMAGE = "encoded-image"
ZLIB = "zlib"
ENCODINGS = frozenset({ENCODED_IMAGE, ZLIB})

_TORCH_ONLY = ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
_NUMPY_NAMES = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in (*_NUMPY_NAMES, *_TORCH_ONLY) if name in vars(torch)
}
"""Names of dtypes in a manifest -> torch's. Newer torch versions know more of them."""


def table_key(number: int) -> bytes:
    """Return the key of a field's chunk table."""
    return b"table/%04x" % number


def chunk_key(number: int, part: str, chunk: int) -> bytes:
    """Return the key of one part (``"v"``, ``"o"`` or ``"s"``) of a chunk of a field."""
    return b"%04x/%s/%010x" % (number, part.encode(), chunk)


def storage_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype that holds one number of dtype ``name``; unsigned bits for those numpy does not know."""
    if name in _NUMPY_NAMES:
        return np.dtype(name)
    return np.dtype(f"u{TORCH_DTYPES[name].itemsize}")


def require_little_endian() -> None:
    """Refuse machines whose numbers run the other way round: a pack's bytes are used as they lie in the file."""
    if sys.byteorder != "little":
        raise OSError("packs are little-endian and are read without conversion; this machine is big-endian")


@dataclass(frozen=True)
class Field:
    """One named array of every sample."""

    name: str
    """Dict keys and tuple positions on the way to it, joined by dots; or what ``field_names`` said."""
    kind: str
    """What a sample holds: ``"array"``, a Python ``"int"``, ``"float"`` or ``"bool"``, ``"str"`` or ``"bytes"``."""
    dtype: str
    """torch's name of the dtype, such as ``"uint8"``; ``"str"`` and ``"bytes"`` for these."""
    shape: tuple[int | None, ...]
    """Shape in every sample; None for an axis whose length varies. Of a decoded image: (3, None, None)."""
    encoding: str | None = None
    """``"encoded-image"``: the bytes of an image file, decoded when read. ``"zlib"``: each row compressed
    (compressed.py), and expanded when read. None: stored as it is."""
    stride: int | None = None
    """Of windows: elements of the first axis from the start of one row to that of the next. None: no windows."""
    stored: str | None = None
    """Of windows: the dtype that they are stored with; they are converted to ``dtype`` when read."""

    @property
    def ragged(self) -> bool:
        """Whether the stored size differs from sample to sample."""
        return self.encoding is not None or self.kind in ("str", "bytes") or None in self.shape

    @property
    def is_plain(self) -> bool:
        """Whether batches of it can be gathered in one call: a number, or an array of one fixed shape."""
        return not self.ragged

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the tensor; ``TypeError`` for strings and bytes."""
        if self.dtype not in TORCH_DTYPES:
            raise TypeError(f"field {self.name!r} holds {self.dtype}, which is no tensor")
        return TORCH_DTYPES[self.dtype]

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype of one stored number: unsigned bits where numpy lacks it, uint8 for str, bytes and images."""
        return np.dtype(np.uint8) if self.stores_bytes else storage_dtype(self.stored or self.dtype)

    @property
    def stores_bytes(self) -> bool:
        """Whether a stored row is a run of bytes: str, bytes, encoded images."""
        return self.encoding is not None or self.kind in ("str", "bytes")

    @property
    def trailing(self) -> tuple[int, ...] | None:
        """The fixed axes behind the first one; None if others than the first vary (then rows are stored flat)."""
        if self.stores_bytes:
            return ()
        fixed = [length for length in self.shape[1:] if length is not None]
        return tuple(fixed) if len(fixed) == len(self.shape[1:]) else None

    def __str__(self) -> str:
        inside = ",".join("?" if length is None else str(length) for length in self.shape)
        text = f"{self.name} {self.kind if self.kind in ('int', 'float', 'str', 'bytes') else self.dtype}"
        if self.kind == "array":
            text += f"[{inside}]"
        if self.stride is not None:
            return f"{text} (windows of {self.stored}, one every {self.stride})"
        return f"{text} ({self.encoding})" if self.encoding else text

    def to_json(self) -> dict[str, Any]:
        """Return the field as JSON values."""
        windows = {} if self.stride is None else {"stride": self.stride, "stored": self.stored}
        return {
            "name": self.name,
            "kind": self.kind,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "ragged": self.ragged,
            "encoding": self.encoding,
            **windows,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Field:
        """Make a field from ``to_json``'s values; KeyError, TypeError or ValueError if they are not."""
        made = cls(
            str(data["name"]),
            str(data["kind"]),
            str(data["dtype"]),
            tuple(data["shape"]),
            data["encoding"],
            data.get("stride"),
            data.get("stored"),
        )
        if made.kind not in ("array", "int", "float", "bool", "str", "bytes"):
            raise ValueError(f"unknown kind {made.kind!r}")
        if made.kind not in ("str", "bytes") and made.dtype not in TORCH_DTYPES:
            raise ValueError(f"unknown dtype {made.dtype!r}")
        if made.encoding is not None and made.encoding not in ENCODINGS:
            raise ValueError(f"unknown encoding {made.encoding!r}")
        if made.stride is not None and (
            made.stored not in TORCH_DTYPES or not made.is_plain or not 0 < made.stride <= made.shape[0]  # type: ignore[operator]
        ):
            raise ValueError(f"windows of {made.stored!r} and shape {made.shape}, one every {made.stride}")
        return made


@dataclass(frozen=True)
class Manifest:
    """The head of a pack: all that is known without looking at a sample."""

    count: int
    """Samples."""
    fields: tuple[Field, ...]
    structure: Node | None
    """How a sample is put together from its fields; None in a pack without samples."""
    chunk_bytes: int
    """Size that chunks were cut to."""
    payload_bytes: int
    """Bytes of all values, without offsets, padding and the tree."""
    table_crcs: tuple[int, ...]
    """CRC-32 of each field's table. The tables hold the checksums of the chunks, so these cover everything."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """What the packer was given: classes, source, kind, ..."""

    def to_bytes(self) -> bytes:
        """Return the JSON text that is stored."""
        return json.dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "count": self.count,
                "fields": [each.to_json() for each in self.fields],
                "structure": None if self.structure is None else node_to_json(self.structure),
                "chunking": {"chunk_bytes": self.chunk_bytes, "columns": list(CHUNK_COLUMNS)},
                "payload_bytes": self.payload_bytes,
                "checksums": {"algorithm": "crc32", "tables": list(self.table_crcs)},
                "metadata": self.metadata,
            },
            ensure_ascii=False,
            separators=(",", ":"),
        ).encode("utf-8", "surrogatepass")

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest:
        """Make a manifest from its JSON; KeyError, TypeError or ValueError if it is none."""
        structure = data["structure"]
        return cls(
            count=int(data["count"]),
            fields=tuple([Field.from_json(each) for each in data["fields"]]),
            structure=None if structure is None else node_from_json(structure),
            chunk_bytes=int(data["chunking"]["chunk_bytes"]),
            payload_bytes=int(data["payload_bytes"]),
            table_crcs=tuple([int(crc) for crc in data["checksums"]["tables"]]),
            metadata=dict(data["metadata"]),
        )

    @property
    def digest(self) -> str:
        """A fingerprint of the content: equal for packs of the same samples, cut in the same way."""
        return hashlib.sha256(self.to_bytes()).hexdigest()


ChunkTable = npt.NDArray[np.int64]
"""Shape (chunks, len(CHUNK_COLUMNS))."""


def json_copy(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy as JSON would give it back. Raises MisuseError for what JSON does not know."""
    try:
        copy: dict[str, Any] = json.loads(json.dumps(dict(metadata)))
    except (TypeError, ValueError) as fault:
        raise MisuseError(f"metadata must be made of what JSON knows: {fault}") from fault
    return copy
