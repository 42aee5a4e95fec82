"""An exception on its way from a worker to the main process, whatever it is made of.

torch sends an exception's class and the text of its traceback, and rebuilds ``class(text)``. That loses exceptions
whose constructor wants other arguments, and those that cannot be pickled never arrive. Here both the class and the
object travel, each only if it can; the text always does. ``reraise`` uses the best that arrived:

    class(text)  as torch does, so that ``except`` clauses and messages are the same
    object       if its class refuses the text; the worker's traceback is its cause
    RuntimeError(text)  if neither arrived, or the class is unknown here
"""

from __future__ import annotations

import pickle
import traceback
from typing import Any, NoReturn

from torch._utils import ExceptionWrapper


def _dumps(value: Any) -> bytes | None:
    """Pickle, or None. User code runs in here (``__reduce__``), so any exception means: it cannot travel."""
    try:
        return pickle.dumps(value)
    except Exception:  # noqa: BLE001
        return None


def _loads(blob: bytes | None) -> Any:
    if blob is None:
        return None
    try:
        return pickle.loads(blob)
    except Exception:  # noqa: BLE001 - user code again: an exception that cannot be rebuilt is told by its text
        return None


class WorkerFailure(Exception):
    """What a worker raised, ready to travel."""

    def __init__(self, where: str, text: str, kind: bytes | None, error: bytes | None, kind_name: str) -> None:
        super().__init__(where, text, kind, error, kind_name)
        self.where = where
        """In which worker, at which dataset index."""
        self.text = text
        """The worker's traceback, as Python prints it."""
        self.kind = kind
        """The pickled class, if it pickles."""
        self.error = error
        """The pickled object, if it pickles."""
        self.kind_name = kind_name

    @classmethod
    def of(cls, error: BaseException, where: str) -> WorkerFailure:
        """Wrap an exception that was just caught."""
        kind = type(error)
        wrapped = ExceptionWrapper((kind, error, error.__traceback__), where)
        return cls(where, wrapped.exc_msg, _dumps(kind), _dumps(error), kind.__name__)

    def to_bytes(self) -> bytes:
        """Return what ``from_bytes`` takes."""
        return pickle.dumps(self.args)

    @classmethod
    def from_bytes(cls, blob: bytes) -> WorkerFailure:
        """Rebuild what ``to_bytes`` made."""
        return cls(*pickle.loads(blob))

    def reraise(self) -> NoReturn:
        """Raise the worker's exception in this process."""
        kind, original = _loads(self.kind), _loads(self.error)
        message = f"Caught {self.kind_name} {self.where}.\nOriginal {self.text}"
        if kind is None:
            if isinstance(original, BaseException):
                raise original from RuntimeError(message)
            raise RuntimeError(message)
        wrapper = ExceptionWrapper((kind, None, None), self.where)
        wrapper.exc_type, wrapper.exc_msg = kind, self.text
        try:
            wrapper.reraise()
        except kind:
            raise
        except Exception:  # noqa: BLE001 - the class refused the text, in whatever way
            if isinstance(original, kind):
                raise original from RuntimeError(message)
            raise RuntimeError(message) from None
        raise AssertionError("unreachable")


def clear_frames(error: BaseException | None) -> None:
    """Empty the frames that an exception and those behind it came through.

    A function that keeps an exception in a variable and raises it makes a cycle of exception, traceback and frame,
    and all that these functions were working on would live until some collection.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def find_unpicklable(**arguments: Any) -> str | None:
    """Return the name of the first argument that cannot be pickled, with the attribute of it where one is to blame.

    ``None`` if each can (or only while a process is being started, as locks and queues).
    """
    for name, value in arguments.items():
        if _dumps(value) is None:
            for attribute, part in getattr(value, "__dict__", {}).items():
                if _dumps(part) is None:
                    return f"{name} (its attribute {attribute!r}, a {type(part).__name__})"
            return f"{name} (a {type(value).__name__})"
    return None
