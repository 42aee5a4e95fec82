"""A source made of a list, for tests of packing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shmloader.sources import Options, Problem, Source


class Samples(Source):
    """A source made of a list, with names and problems of its own."""

    kind = "samples"
    looked_for = "nothing"

    def __init__(self, samples: list[Any], problems: dict[int, Problem] | None = None) -> None:
        self.samples, self.found = samples, problems or {}

    @classmethod
    def recognises(cls, path: str) -> bool:
        return False

    @classmethod
    def open(cls, path: str, options: Options) -> Samples:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        if isinstance(self.samples[index], Exception):
            raise self.samples[index]
        return self.samples[index]

    def name_of(self, index: int) -> str:
        return f"thing {index}"

    def describe(self) -> str:
        return "samples"

    @property
    def metadata(self) -> dict[str, Any]:
        return {"kind": self.kind}

    def problems(self, index: int, sample: Any) -> Iterable[Problem]:
        return [self.found[index]] if index in self.found else []
