"""Fields that are stored otherwise than the source gives them: decoded, encoded (anew), or with another dtype.

bytes of an image file ──raw──▶ pixels          pixels ──encoded──▶ PNG, or JPEG of a quality
                       ──quality──▶ JPEG        numbers ──dtype──▶ numbers; none may change but by rounding
array, text, bytes ──zlib──▶ compressed, row by row
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .. import images
from ..errors import MisuseError, SampleMismatch
from ..packfile.compressed import Inner, deflate
from ..packfile.outline import FieldOutline, Outline
from ..packfile.schema import ENCODED_IMAGE, TORCH_DTYPES, ZLIB
from ..packfile.values import Value, value_of
from .settings import PackSettings

Convert = Callable[[Value, str], Value]
"""Called with a value, and the name of the sample for errors."""


class DoesNotFit(Exception):
    """A number cannot be had in the dtype that was asked for. Internal: the reader adds sample and field."""

    def __init__(self, expected: str, found: str) -> None:
        super().__init__(expected, found)
        self.expected, self.found = expected, found


@dataclass(frozen=True)
class ToPixels:
    """An image file becomes its pixels, uint8 (3, height, width)."""

    encoding: str | None = None

    def __call__(self, value: Value, name: str) -> Value:
        return Value("array", "uint8", images.decode_chw(value.array.data, name=name))


@dataclass(frozen=True)
class ToImageFile:
    """Pixels, uint8 (3, height, width), or an image file, become an image file: JPEG with a quality, else PNG."""

    quality: int | None
    encoding: str | None = ENCODED_IMAGE

    def __call__(self, value: Value, name: str) -> Value:
        pixels = value.array
        if value.kind == "bytes":
            pixels = images.decode_chw(pixels.data, name=name)
        if pixels.shape[0] != 3:
            raise DoesNotFit("pixels of shape (3, height, width), to be encoded", value.describe())
        return Value("bytes", "bytes", np.frombuffer(images.encode_chw(pixels, self.quality), np.uint8))


@dataclass(frozen=True)
class ToDtype:
    """Numbers become those of another dtype. Between floats they are rounded, but none becomes infinite."""

    dtype: str
    encoding: str | None = None

    def __call__(self, value: Value, name: str) -> Value:
        if value.dtype == self.dtype and value.kind == "array":
            return value
        return value_of(self.cast(_tensor(value)))

    def cast(self, before: torch.Tensor) -> torch.Tensor:
        """Return ``before`` with this dtype. Raises DoesNotFit, with the first number that does not."""
        after = before.to(TORCH_DTYPES[self.dtype])
        if before.is_floating_point() and after.is_floating_point():
            wrong = after.isinf() & ~before.isinf()
        else:
            wrong = (after.to(before.dtype) != before) & ~before.isnan()
            if not after.is_floating_point():
                wrong |= before.isnan()  # no integer stands for it
        if bool(wrong.any()):
            raise DoesNotFit(f"numbers that {self.dtype} holds", f"{before[wrong].flatten()[0].item()}")
        return after


@dataclass(frozen=True)
class ToCompressed:
    """Arrays, text and bytes are compressed, each row by itself."""

    encoding: str | None = ZLIB

    def __call__(self, value: Value, name: str) -> Value:
        return deflate(value)


Step = ToPixels | ToImageFile | ToDtype | ToCompressed


def _tensor(value: Value) -> torch.Tensor:
    tensor = torch.from_numpy(np.array(value.array))
    wanted = TORCH_DTYPES[value.dtype]
    return tensor if tensor.dtype == wanted else tensor.view(wanted)


@dataclass(frozen=True)
class Conversion:
    """What becomes of each field of a source; None: it is stored as it comes."""

    steps: tuple[Step | None, ...] = field(default=())

    @classmethod
    def of(cls, outline: Outline, settings: PackSettings) -> Conversion:
        """Return what ``settings`` ask for. Raises MisuseError for fields that are not there or hold something else."""
        known = {each.name: each for each in outline.fields}
        for name in (*settings.store, *settings.dtypes):
            if name not in known:
                raise MisuseError(f"there is no field {name!r} to be stored otherwise; there are {', '.join(known)}")
        steps = tuple(_step(each, settings) for each in outline.fields)
        if settings.quality is not None and not any(isinstance(step, ToImageFile) for step in steps):
            raise MisuseError(
                "quality is for image files, and no field holds such: to encode pixels, ask for them to be stored "
                "encoded (--store FIELD=encoded)"
            )
        return cls(steps)

    @property
    def changes(self) -> bool:
        """Whether any field is stored otherwise than it comes."""
        return any(step is not None for step in self.steps)

    def apply(self, outline: Outline, index: int, values: list[Value], name: str) -> list[Value]:
        """Return the values as they are to be stored. Raises BrokenImage, and SampleMismatch for unfit numbers."""
        made: list[Value] = []
        for each, step, value in zip(outline.fields, self.steps, values, strict=True):
            try:
                made.append(value if step is None else step(value, name))
            except DoesNotFit as fault:
                raise SampleMismatch(index, each.name, fault.expected, fault.found, name) from None
        return made

    def outline(self, outline: Outline, values: list[Value]) -> Outline:
        """Return what the stored samples have in common, from the converted ``values`` of the first one."""
        fields = []
        for each, step, value in zip(outline.fields, self.steps, values, strict=True):
            if isinstance(step, ToCompressed):
                inner = Inner(each.kind, each.dtype, len(each.shape))
                fields.append(FieldOutline(each.name, value.kind, value.dtype, value.array.shape, ZLIB, None, inner))
                continue
            encoding = step.encoding if step else each.encoding
            fields.append(FieldOutline(each.name, value.kind, value.dtype, value.array.shape, encoding))
        return Outline(outline.structure, tuple(fields))


def _step(each: FieldOutline, settings: PackSettings) -> Step | None:
    is_file = each.encoding == ENCODED_IMAGE
    is_pixels = each.kind == "array" and each.dtype == "uint8" and len(each.shape) == 3 and each.shape[0] == 3
    store, dtype = settings.store.get(each.name), settings.dtypes.get(each.name)
    if dtype is not None:
        if each.kind in ("str", "bytes"):
            raise MisuseError(f"field {each.name!r} holds {each.kind}, which have no dtype")
        return ToDtype(dtype)
    if store == "zlib":
        if is_file:
            raise MisuseError(f"field {each.name!r} holds image files, which zlib does not make smaller")
        if each.kind not in ("array", "str", "bytes") or not each.shape:
            raise MisuseError(f"field {each.name!r} holds {each.describe()}, which zlib does not make smaller")
        return ToCompressed()
    if store is not None and not is_file and not is_pixels:
        raise MisuseError(f"field {each.name!r} holds {each.describe()}, no image: it is stored as it is")
    if is_file and store == "raw":
        return ToPixels()
    if (is_pixels and store == "encoded") or (is_file and settings.quality is not None):
        return ToImageFile(settings.quality)
    return None


def cast_column(name: str, rows: np.ndarray[Any, Any], dtype: str, first_index: int) -> torch.Tensor:
    """Return rows of a column with another dtype, as ToDtype gives them. Raises SampleMismatch."""
    try:
        return ToDtype(dtype).cast(_tensor(value_of(rows)))
    except DoesNotFit as fault:
        where = f"one of {len(rows)} rows from this one on"
        raise SampleMismatch(first_index, name, fault.expected, fault.found, where) from None
