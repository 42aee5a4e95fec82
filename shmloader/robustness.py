"""What a loader may be told about things that die, break or hang: the choices, and what is wrong with a choice."""

from __future__ import annotations

from .badsamples import RAISE
from .errors import BadChoice

RESTART = "restart"

WARN_STUCK_S = 60.0
"""Seconds of waiting for one batch after which a loader says where its worker is, unless told otherwise."""


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise BadChoice unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise BadChoice(name, value, "must be " + " or ".join(map(repr, allowed)))


def refuse_iterable(**choices: str) -> None:
    """Raise BadChoice for the first choice that is not "raise": an iterable dataset cannot be asked a second time."""
    for name, value in choices.items():
        if value != RAISE:
            raise BadChoice(
                name,
                value,
                "needs a map-style dataset: a stream that has raised or died cannot be continued in its middle without "
                "losing or repeating samples",
            )
