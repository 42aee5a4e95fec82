"""Say which samples do not fit together, where torch's default collate only says that two do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from .errors import UnequalSamples


def _leaves(value: Any, path: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the path and shape of each dense tensor or array in a sample; others may have no shape to ask for."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and not value.is_nested:
            yield path, tuple(value.shape)
    elif isinstance(value, np.ndarray):
        yield path, value.shape
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        names = getattr(value, "_fields", None)  # of a namedtuple
        for place, item in enumerate(value):
            yield from _leaves(item, f"{path}.{names[place]}" if names else f"{path}[{place}]")


def explain_unequal(error: RuntimeError, samples: list[Any], indices: list[Any] | None) -> UnequalSamples | None:
    """Return an error that names both samples, both shapes and the field, or None if shapes are not what is wrong.

    ``indices`` are the samples' dataset indices; None: unknown, places in the batch are named.
    """
    names = indices if indices is not None else list(range(len(samples)))
    first = dict(_leaves(samples[0], "sample"))
    for name, sample in zip(names[1:], samples[1:], strict=True):
        for path, shape in _leaves(sample, "sample"):
            expected = first.get(path)
            if expected is not None and expected != shape:
                return UnequalSamples(str(error), path, names[0], expected, name, shape, indices is not None)
    return None
