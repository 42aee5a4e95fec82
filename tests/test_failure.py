"""A worker's exception on its way: class, message, traceback and index arrive, whatever the class is like (C4)."""

import pickle
import threading

import pytest

from shmloader.failure import WorkerFailure, find_unpicklable

WHERE = "in DataLoader worker process 1, at dataset index 37"


class TwoArguments(Exception):
    """Cannot be rebuilt from one text."""

    def __init__(self, code, reason):
        super().__init__(code, reason)
        self.code, self.reason = code, reason


class KeywordOnly(ValueError):
    """Refuses any positional argument."""

    def __init__(self, *, path):
        super().__init__(path)
        self.path = path


class Unpicklable(RuntimeError):
    """Carries what cannot travel."""

    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()


class ExplodesOnLoad(OSError):
    """Pickles, and raises when it is loaded."""

    def __reduce__(self):
        return _explode, ()


class ExplodesOnDump(LookupError):
    """Raises while it is pickled."""

    def __reduce__(self):
        raise RuntimeError("do not pickle me")


def _explode():
    raise RuntimeError("cannot be loaded")


class Mute(Exception):
    """Its text cannot be had."""

    def __str__(self):
        raise ValueError("no text")


def send(error):
    """Raise, wrap, send, receive; returns what is raised on the other side."""
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001 - any class is the point
        blob = WorkerFailure.of(caught, WHERE).to_bytes()
    with pytest.raises(BaseException) as found:  # noqa: PT011
        WorkerFailure.from_bytes(blob).reraise()
    return found.value


def told(error):
    """All that a user sees: the exception and its causes."""
    text = []
    while error is not None:
        text.append(" ".join(map(str, error.args)))
        error = error.__cause__
    return "\n".join(text)


ERRORS = [
    ValueError("bad value"),
    KeyError("missing"),
    IndexError(),
    OSError(2, "No such file", "img.jpg"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
    StopIteration("done"),
    TwoArguments(7, "disk on fire"),
    Unpicklable("locked"),
    ExplodesOnDump("dump"),
    AssertionError(),
    RecursionError("deep"),
    MemoryError(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_the_class_the_place_and_the_traceback_arrive(error):
    """``except`` clauses match, and the text has worker, index, and the line that raised."""
    found = send(error)
    assert isinstance(found, type(error))
    text = told(found)
    assert "index 37" in text
    assert "worker process 1" in text
    assert "raise error" in text
    assert type(error).__name__ in text


def test_fields_of_an_exception_that_needs_more_than_a_text_survive():
    """The object itself travels where its class refuses the text."""
    found = send(TwoArguments(7, "disk on fire"))
    assert (found.code, found.reason) == (7, "disk on fire")


def test_a_class_that_the_receiver_cannot_find_is_told_by_its_text():
    """Defined inside a function: RuntimeError with name, message and traceback."""

    class Local(Exception):
        pass

    found = send(Local("only here"))
    assert type(found) is RuntimeError
    assert "Local" in str(found)
    assert "only here" in str(found)
    assert "index 37" in str(found)


@pytest.mark.parametrize(
    "error",
    [ExplodesOnLoad(5, "load"), Mute("x"), KeywordOnly(path="x.png")],
    ids=["on load", "mute", "keyword only"],
)
def test_exceptions_that_fight_back_still_arrive_as_something_that_says_where(error):
    """Code of the exception's class that raises on the way loses neither place nor traceback."""
    text = told(send(error))
    assert "index 37" in text
    assert "raise error" in text


def test_the_cause_of_an_exception_is_told():
    """``raise ... from`` in a dataset: both messages are in the text."""
    error = ValueError("outer")
    error.__cause__ = KeyError("inner")
    text = told(send(error))
    assert "outer" in text
    assert "inner" in text


def test_a_failure_survives_pickling_itself():
    """All fields, as every exception of the library."""
    failure = WorkerFailure.of(ValueError("x"), WHERE)
    assert pickle.loads(pickle.dumps(failure)).args == failure.args


class Holder:
    """A dataset with one field that cannot be pickled."""

    def __init__(self):
        self.fine = 1
        self.handle = threading.Lock()


def test_what_cannot_be_pickled_is_named_with_its_attribute():
    """The first such argument, and the attribute that is to blame; None where all can."""
    assert find_unpicklable(dataset=[1], collate_fn=len) is None
    found = find_unpicklable(dataset=[1], collate_fn=lambda batch: batch)
    assert found is not None
    assert found.startswith("collate_fn")
    found = find_unpicklable(dataset=Holder(), collate_fn=len)
    assert found is not None
    assert "dataset" in found
    assert "'handle'" in found
