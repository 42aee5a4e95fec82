"""Token files: one flat run of token ids, as language models are trained on, cut into windows.

    train.bin            uint16 or uint32 numbers and nothing else      (nanoGPT and many after it)
    fineweb_train.bin    the same behind a head of 1024 bytes           (llm.c: the head tells dtype and number)

Windows may overlap. A pack of them holds the tokens once (packfile/windows.py), whatever the stride.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from ..errors import MisuseError, SourceError
from ..packfile.windows import Windows
from .base import Options, Source, StrPath, position
from .problems import Problem

STORED = ("uint16", "uint32", "uint8", "int32", "int64")
"""Dtypes of token files."""
GIVEN = ("int64", "int32", "uint16", "uint32", "uint8")
"""Dtypes that samples may have."""

_HEAD_INTS = 256  # of llm.c: magic, version, tokens; the rest is zero
_MAGICS = {20240520: "uint16", 20240801: "uint32"}
_PIECE = 1 << 23  # tokens looked at at a time
_SHOWN = 5


def _head(path: str) -> tuple[str, int, int] | None:
    """Return (dtype, offset, tokens) as the head of an llm.c file tells them; None without such a head."""
    with open(path, "rb") as file:
        start = file.read(4 * _HEAD_INTS)
    if len(start) < 4 * _HEAD_INTS:
        return None
    head = np.frombuffer(start, "<i4")
    if int(head[0]) not in _MAGICS:
        return None
    return _MAGICS[int(head[0])], head.nbytes, int(head[2])


class TokenWindows(Source):
    """Windows of ``window`` tokens, one every ``stride``: each sample a new tensor (window,) of dtype ``given``.

    ``stride`` defaults to ``window``: every token in one sample. For next-token pairs of n tokens take windows of n + 1
    with a stride of n (or 1, and a random sampler): ``batch[:, :-1]`` and ``batch[:, 1:]`` are views. Tokens at the end
    that fill no window are left out, and noted.
    ``dtype``: of the numbers in the file, little-endian; None: what the file's head says, uint16 without a head.
    ``given``: int64 by default, which embeddings take. A pack holds the file's own dtype and converts while reading.
    ``vocab_size``: tokens must be below it; see ``check``.
    Raises SourceError for a file that is no whole number of tokens, or too short for one window.
    """

    kind = "tokens"
    looked_for = "a .bin file of tokens (with --window)"
    uses = frozenset({"window", "stride", "token_dtype", "tokens_as", "vocab_size"})

    def __init__(
        self,
        path: StrPath,
        window: int,
        stride: int | None = None,
        *,
        dtype: str | None = None,
        given: str = "int64",
        vocab_size: int | None = None,
    ) -> None:
        if window < 1 or (stride is not None and stride < 1):
            raise MisuseError(f"windows of {window} tokens, one every {stride}: both must be at least 1")
        if (dtype or "uint16") not in STORED or given not in GIVEN:
            raise MisuseError(
                f"tokens of {dtype} cannot be read as {given}: files hold {', '.join(STORED)}, "
                f"samples {', '.join(GIVEN)}"
            )
        self.path = os.fspath(path)
        self.window, self.stride = window, window if stride is None else stride
        self.vocab_size = vocab_size
        self._asked, self._given = dtype, given
        self._open()

    def _open(self) -> None:
        size = os.stat(self.path).st_size
        head = _head(self.path)
        dtype, offset, count = head or (self._asked or "uint16", 0, -1)
        if head is not None and self._asked not in (None, dtype):
            raise SourceError(self.path, f"its head says that it holds {dtype}, not {self._asked}")
        kind = np.dtype(dtype).newbyteorder("<")
        if self._given != "int64" and not np.can_cast(kind, self._given):
            raise MisuseError(f"{self.path} holds {dtype}: {self._given} has no room for all of them")
        if (size - offset) % kind.itemsize:
            raise SourceError(self.path, f"its {size} bytes are no whole number of {dtype} tokens")
        if head is not None and size - offset != count * kind.itemsize:
            raise SourceError(
                self.path,
                f"its head announces {count} tokens, {(size - offset) // kind.itemsize} are there: it is no whole file",
            )
        count = (size - offset) // kind.itemsize
        if count < self.window:
            raise SourceError(self.path, f"{count} tokens are not enough for one window of {self.window}")
        self.tokens = np.memmap(self.path, kind, "r", offset, (count,))
        """All tokens, memory-mapped, read-only."""
        self._windows = Windows(self.tokens, self.window, self.stride, self._given)
        self._dtype = getattr(torch, self._given)

    def __getstate__(self) -> dict[str, Any]:
        # A memory map would be pickled as all of its bytes.
        return {key: value for key, value in vars(self).items() if key not in ("tokens", "_windows", "_dtype")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open()

    @classmethod
    def recognises(cls, path: str) -> bool:
        return path.endswith(".bin") and os.path.isfile(path)

    @classmethod
    def open(cls, path: str, options: Options) -> TokenWindows:
        """As the constructor. With a ``vocab_size`` all tokens are checked, once."""
        if options.window is None:
            raise MisuseError(
                f"{path}: a run of tokens must be cut into windows: say how long they are, as in --window 1025 "
                "--stride 1024 for pairs of 1024 tokens and the next ones"
            )
        source = cls(
            path,
            options.window,
            options.stride,
            dtype=options.token_dtype,
            given=options.tokens_as or "int64",
            vocab_size=options.vocab_size,
        )
        source.check()
        return source

    def check(self) -> None:
        """Look at all tokens: raise SourceError, with the first place, if one is not below ``vocab_size``."""
        if self.vocab_size is None:
            return
        wrong, first = 0, -1
        for at in range(0, len(self.tokens), _PIECE):
            piece = np.asarray(self.tokens[at : at + _PIECE])
            if int(piece.max()) >= self.vocab_size or int(piece.min()) < 0:
                outside = np.flatnonzero((piece < 0) | (piece >= self.vocab_size))
                first = at + int(outside[0]) if first < 0 else first
                wrong += len(outside)
        if wrong:
            raise SourceError(
                self.path,
                f"{wrong} of {len(self.tokens)} tokens are outside of the vocabulary of {self.vocab_size}; the first "
                f"is number {first}, {int(self.tokens[first])}: is the file's dtype really {self.tokens.dtype.name}?",
            )

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> torch.Tensor:
        row = self._windows[position(index, len(self))]
        return torch.from_numpy(row.astype(row.dtype.newbyteorder("="))).to(self._dtype)

    def problems(self, index: int, sample: Any) -> Iterable[Problem]:
        if self.vocab_size is None:
            return
        outside = torch.nonzero((sample.long() < 0) | (sample.long() >= self.vocab_size)).flatten().tolist()
        if outside:
            shown = ", ".join(f"{int(sample[place])} at {place}" for place in outside[:_SHOWN])
            what = f"{len(outside)} tokens are outside of the vocabulary of {self.vocab_size}: {shown}"
            yield Problem(index, self.name_of(index), "token-outside", what)

    def columns(self) -> Windows:
        return self._windows

    def name_of(self, index: int) -> str:
        start = index * self.stride
        return f"tokens {start} to {start + self.window - 1} of {self.path}"

    def describe(self) -> str:
        return f"{len(self.tokens):,} tokens of {self.tokens.dtype.name}, windows of {self.window} every {self.stride}"

    @property
    def metadata(self) -> dict[str, Any]:
        facts = {"kind": self.kind, "source": self.path, "tokens": len(self.tokens)}
        return facts if self.vocab_size is None else {**facts, "vocab_size": self.vocab_size}

    @property
    def field_names(self) -> tuple[str, ...]:
        return ("tokens",)

    @property
    def notes(self) -> tuple[str, ...]:
        used = (len(self) - 1) * self.stride + self.window
        left = len(self.tokens) - used
        return (f"left out at the end, too few for a window: {left} tokens",) if left else ()
