"""Every exception survives pickling with its fields, says what and how much, and is caught by old except clauses."""

from __future__ import annotations

import copy
import inspect
import pickle
import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch._utils import ExceptionWrapper

from shmloader import errors
from shmloader.errors import ShmLoaderError, WorkerDied, WorkerTimeout, human_bytes

MIB = 1 << 20

# class → arguments, words of its sentence, built-in bases of old except clauses
PACK: tuple[dict[str, Any], tuple[str, ...]] = ({"path": "/data/a.lmdb", "why": "cut"}, ("/data/a.lmdb", "cut"))
CASES: dict[type[ShmLoaderError], tuple[dict[str, Any], tuple[str, ...], tuple[type[Exception], ...]]] = {
    errors.SharedMemoryFull: (
        {"wanted": 80 * MIB, "free": 5 * MIB, "where": "/dev/shm"},
        ("80.0 MiB", str(80 * MIB), "5.0 MiB", str(5 * MIB), "/dev/shm", "--shm-size"),
        (RuntimeError, MemoryError),
    ),
    errors.ArenaTooSmall: (
        {"arena_bytes": MIB, "minimum": 3 * MIB, "slots": 3, "slot_bytes": MIB},
        (f"arena_bytes={MIB}", "3 slots", str(3 * MIB), "raise arena_bytes="),
        (RuntimeError, ValueError),
    ),
    errors.BatchTooLarge: (
        {"need": 9 * MIB, "available": 2 * MIB, "limit": 4 * MIB},
        (str(9 * MIB), str(2 * MIB), str(4 * MIB), "raise arena_bytes="),
        (RuntimeError, ValueError),
    ),
    errors.NoSlotLeft: (
        {"slots": 3, "lent": 1, "kept": 2, "limit": 4 * MIB},
        ("3 slots", "1 hold batches", "2 hold tensors", "4.0 MiB", "arena_bytes=", "clone()"),
        (RuntimeError, MemoryError),
    ),
    errors.PackError: (*PACK, ()),
    errors.PackNotFound: (PACK[0], (*PACK[1], "shmloader-pack"), (FileNotFoundError,)),
    errors.PackUnfinished: (PACK[0], (*PACK[1], "again"), (ValueError,)),
    errors.PackDamaged: (PACK[0], (*PACK[1], "--verify"), (ValueError,)),
    errors.NotAPack: (PACK[0], (*PACK[1], "shmloader-pack"), (ValueError,)),
    errors.PackVersionError: (PACK[0], (*PACK[1], "upgrade"), (ValueError,)),
    errors.PackExists: (PACK[0], (*PACK[1], "overwrite"), (FileExistsError,)),
    errors.PackInUse: (PACK[0], (*PACK[1], "another name"), (FileExistsError,)),
    errors.ResumeRefused: (
        {"path": "/data/a.lmdb.partial", "samples": 500, "why": "the options differ"},
        ("/data/a.lmdb.partial", "500 samples", "the options differ", "--restart"),
        (ValueError,),
    ),
    errors.SampleMismatch: (
        {
            "index": 7,
            "field": "image",
            "expected": "uint8 (3, 8, 8)",
            "found": "uint8 (1, 8, 8)",
            "source": "cat/7.jpg",
        },
        ("sample 7", "cat/7.jpg", "'image'", "(3, 8, 8)", "(1, 8, 8)"),
        (ValueError,),
    ),
    errors.UnsupportedField: (
        {"index": 7, "field": "1.name", "found": "a Path"},
        ("sample 7", "'1.name'", "a Path", "can be packed"),
        (ValueError, TypeError),
    ),
    errors.BrokenImage: (
        {"name": "cat/7.jpg", "nbytes": 12, "why": "it ends early"},
        ("cat/7.jpg", "12 bytes", "it ends early", "replace"),
        (ValueError,),
    ),
    errors.SourceError: ({"path": "photos", "why": "no images"}, ("photos", "no images"), (ValueError,)),
    errors.UnknownSource: (
        {"path": "photos", "why": "nothing known", "looked_for": ("an image folder", "arrays")},
        ("photos", "nothing known", "an image folder, or arrays"),
        (ValueError,),
    ),
    errors.UnequalSamples: (
        {
            "reason": "stack expects each tensor to be equal size",
            "field": "batch[0]",
            "index": 7,
            "shape": (1, 8, 8),
            "other_index": 3,
            "other_shape": (3, 8, 8),
            "are_dataset_indices": True,
        },
        ("equal size", "batch[0]", "[1, 8, 8] at dataset index 7", "[3, 8, 8] at dataset index 3", "collate_padded"),
        (ValueError, RuntimeError),
    ),
    errors.DeviceTensor: ({"device": "cuda:0", "shape": "(2, 3)"}, ("cuda:0", "(2, 3)", "CPU"), (RuntimeError,)),
    errors.AllSamplesBad: (
        {"indices": (4, 5), "error": "OSError: gone"},
        ("[4, 5]", "OSError: gone", "on_bad_sample='skip'"),
        (ValueError, RuntimeError),
    ),
    errors.BadChoice: (
        {"name": "on_bad_sample", "value": "jump", "why": "must be 'raise'"},
        ("on_bad_sample='jump' must be",),
        (ValueError,),
    ),
    errors.WorkerDied: (
        {
            "worker": 1,
            "pid": 4242,
            "exitcode": -9,
            "indices": (3, "key"),
            "oom_kills": (errors.OomKills("memory.events oom_kill", 2, 3),),
            "deaths": 3,
        },
        (
            "DataLoader worker (pid 4242) is killed by signal: Killed",
            "SIGKILL",
            "worker 1",
            "[3, 'key']",
            "memory.events oom_kill 2 -> 3",
            "3 workers in a row",
            "shmloader-tune",
        ),
        (RuntimeError,),
    ),
    errors.WorkerTimeout: (
        {"timeout_s": 5.0, "worker": 1, "pid": 4242, "indices": (3, 4), "stack": "File x.py, line 3"},
        ("DataLoader timed out after 5 seconds", "worker 1", "pid 4242", "[3, 4]", "x.py", "raise timeout="),
        (RuntimeError,),
    ),
    errors.SlotMisuse: (
        {"slot": 3, "state": "FREE", "event": "lend", "legal": ("grant",)},
        ("cannot lend slot 3", "FREE", "legal here: grant"),
        (RuntimeError,),
    ),
    errors.StaleSlot: (
        {"slot": 3, "generation": 7, "what": "was written", "taken_at": 'File "train.py", line 9'},
        ("slot 3", "use 7", "was written", "train.py"),
        (RuntimeError,),
    ),
    errors.PinningRefused: (
        {"nbytes": 4096, "address": 0x7F0000, "code": 2, "meaning": "out of memory", "cure": "lower arena_bytes="},
        ("4096", "0x7f0000", "0x7f1000", "error 2", "out of memory", "lower arena_bytes="),
        (RuntimeError,),
    ),
    errors.DeviceUnavailable: (
        {"device": "cuda:9", "why": "torch sees 2 CUDA devices"},
        ("'cuda:9'", "2 CUDA devices", "pin_memory=True"),
        (RuntimeError,),
    ),
    errors.MissingExtra: (
        {"package": "Pillow", "extra": "images", "purpose": "decode images"},
        ("Pillow", "decode images", "shmloader[images]"),
        (ImportError,),
    ),
    errors.IteratorClosed: (
        {"why": "the loader was closed"},
        ("the loader was closed", "iter(loader)"),
        (RuntimeError,),
    ),
}
ABSTRACT = {errors.ShmLoaderError, errors.ResourceError, errors.DataError, errors.WorkerError, errors.MisuseError}


def all_exceptions() -> set[type[ShmLoaderError]]:
    defined = vars(errors).values()
    return {found for found in defined if inspect.isclass(found) and issubclass(found, ShmLoaderError)}


def test_no_exception_is_forgotten() -> None:
    """Every class of errors.py is in the table of this file."""
    assert all_exceptions() - ABSTRACT == set(CASES)


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_an_exception_crosses_processes_whole(kind: type[ShmLoaderError]) -> None:
    """Fields, text, class and notes are the same after pickling, with every protocol, and after copying (B8)."""
    fields, *_ = CASES[kind]
    error = kind(**fields)
    error.__dict__["remark"] = "kept too"
    others = [pickle.loads(pickle.dumps(error, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    for other in (*others, copy.copy(error)):
        assert type(other) is kind
        assert str(other) == str(error)
        assert {name: getattr(other, name) for name in fields} == fields
        assert other.__dict__["remark"] == "kept too"


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_an_exception_says_what_and_how_much(kind: type[ShmLoaderError]) -> None:
    """The sentence holds every number and name that it was given, and the next step."""
    fields, words, _ = CASES[kind]
    text = str(kind(**fields))
    assert [word for word in words if word not in text] == []
    assert "None" not in text
    assert not text.endswith(("; ", ": ", " "))


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_an_exception_is_caught_by_old_clauses(kind: type[ShmLoaderError]) -> None:
    """It derives from what Python or torch would raise in its place, and can be raised and caught as that."""
    fields, _, bases = CASES[kind]
    for base in (*bases, ShmLoaderError):
        with pytest.raises(base) as caught:
            raise kind(**fields)
        assert type(caught.value) is kind


def test_each_exception_has_one_fault() -> None:
    """Resources, packs, data, workers and misuse do not overlap."""
    faults = (errors.ResourceError, errors.PackError, errors.DataError, errors.WorkerError, errors.MisuseError)
    for kind in all_exceptions() - {ShmLoaderError}:
        assert sum(issubclass(kind, fault) for fault in faults) == 1, kind


@pytest.mark.parametrize(
    "number", [signal.SIGSEGV, signal.SIGBUS, signal.SIGKILL, signal.SIGTERM, signal.SIGRTMIN + 3, 99]
)
def test_a_death_by_any_signal_has_a_sentence(number: int) -> None:
    """Known, real-time and impossible signal numbers alike; torch's words are in it."""
    text = str(WorkerDied(0, 7, -number, ()))
    assert text.startswith("DataLoader worker (pid 7) is killed by signal: ")
    assert "had no batch to work on" in text


def test_an_exit_is_no_signal() -> None:
    """A worker that called exit, and one whose exit code nobody knows."""
    assert "exited unexpectedly with exit code 3" in str(WorkerDied(0, 7, 3, (1,)))
    assert WorkerDied(0, 7, 3).signal is None
    assert WorkerDied(0, 7, None).signal is None


@pytest.mark.parametrize("kind", [WorkerDied, WorkerTimeout])
def test_a_large_batch_does_not_flood_the_screen(kind: type[ShmLoaderError]) -> None:
    """Sixteen indices are shown; the field holds all."""
    error = kind(1, 2, 3, tuple(range(100_000)))
    assert "15, ...]" in str(error)
    assert len(str(error)) < 600
    assert len(error.indices) == 100_000  # type: ignore[attr-defined]


@given(st.integers(0, 1 << 60))
def test_sizes_in_words_are_close(nbytes: int) -> None:
    """A size in words is within half of its last digit of the number, and never has more than four before the point."""
    number, unit = human_bytes(nbytes).split(" ")
    scale = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}[unit]
    assert abs(float(number) * scale - nbytes) <= 0.0501 * scale
    assert len(number.split(".")[0]) <= 4 or unit == "TiB"


@pytest.mark.parametrize("kind", [WorkerDied, WorkerTimeout])
def test_a_workers_end_can_be_told_again_by_its_text(kind: type[errors.WorkerError]) -> None:
    """C4: torch rebuilds an exception of another process from its class and text alone: class, text and pickle hold."""
    first = kind(1, 2, 3, (4,))
    told = kind(f"Caught in a process.\n{first}")
    assert str(told) == f"Caught in a process.\n{first}"
    assert (told.worker, told.pid, told.indices) == (-1, -1, ())
    assert str(pickle.loads(pickle.dumps(told))) == str(told)
    with pytest.raises(kind, match="in background"):
        ExceptionWrapper((kind, first, None)).reraise()
