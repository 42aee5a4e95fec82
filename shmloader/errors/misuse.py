"""The caller asked for something that cannot be."""

from __future__ import annotations

from .base import ShmLoaderError


class MisuseError(ShmLoaderError, RuntimeError):
    """The library was used in a way that can never work."""


class SlotMisuse(MisuseError):
    """A slot was asked to make a move that its state does not allow."""

    def __init__(self, slot: int, state: str, event: str, legal: tuple[str, ...], taken_at: str = "") -> None:
        super().__init__(slot, state, event, legal, taken_at)
        self.slot, self.state, self.event, self.legal = slot, state, event, legal
        self.taken_at = taken_at
        """Where its batch was taken, in debug mode."""

    def _sentence(self) -> str:
        what = f"cannot {self.event} slot {self.slot}, which is {self.state}; legal here: {', '.join(self.legal)}"
        return f"{what}; its batch was taken at\n{self.taken_at}" if self.taken_at else what


class StaleSlot(MisuseError):
    """Debug mode found that the memory of a batch was used after the last tensor of that batch was gone."""

    def __init__(self, slot: int, generation: int, what: str, taken_at: str) -> None:
        super().__init__(slot, generation, what, taken_at)
        self.slot = slot
        self.generation = generation
        """How often the slot had been handed out."""
        self.what = what
        self.taken_at = taken_at
        """Where that batch was taken."""

    def _sentence(self) -> str:
        return f"slot {self.slot} (use {self.generation}) {self.what}; that batch was taken at\n{self.taken_at}"


class MissingExtra(MisuseError, ImportError):
    """Something was asked for that needs an optional package."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(package, extra, purpose)
        self.package, self.extra, self.purpose = package, extra, purpose

    def _sentence(self) -> str:
        return f"{self.package} is needed to {self.purpose}: pip install 'shmloader[{self.extra}]'"


class IteratorClosed(MisuseError):
    """The iterator was closed, or a newer one took over its workers."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why

    def _sentence(self) -> str:
        return f"this iterator has ended: {self.why}"

    hint = "start a new one with iter(loader)"


class BadChoice(MisuseError, ValueError):
    """An argument has a value that it cannot have here."""

    def __init__(self, name: str, value: object, why: str) -> None:
        super().__init__(name, value, why)
        self.name, self.value, self.why = name, value, why

    def _sentence(self) -> str:
        return f"{self.name}={self.value!r} {self.why}"
