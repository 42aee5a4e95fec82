"""Functions that the command line names: ``module:function``, found as by ``python -m``."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any


class BadOption(ValueError):
    """The command line names something that cannot be had."""


def imported(name: str, option: str) -> Any:
    """Return what ``module:attribute`` names; the current folder is searched first, as by ``python -m``.

    ``option`` is where it was named, for messages. Raises BadOption, and whatever importing the module raises.
    """
    module, colon, attribute = name.partition(":")
    if not colon or not module or not attribute:
        raise BadOption(f"{option} {name!r} must name a module and a function in it, as in my_data:make")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise BadOption(f"{option} {name!r}: {error}") from error
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise BadOption(f"{option} {name!r}: {module} has no {attribute}") from None
    return found
