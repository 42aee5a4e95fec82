"""What the user sees when the dataset, the collate function, the sampler or worker_init_fn raises."""

from __future__ import annotations

import subprocess
from typing import Any
from urllib.error import HTTPError

import torch

from .compare import Cases
from .samples import (
    BrokenSampler,
    Custom,
    Draws,
    Fixed,
    Flaky,
    FlakyStream,
    HoldsLambda,
    Rows,
    Stream,
    TwoArguments,
)

CASES = Cases()

TRACEBACK = ("Traceback", "__getitem__", "worker")
"""What our text has for each error of a worker: where it happened, and in whom."""


def _flaky(name: str, claim: str, kind: type[BaseException], *arguments: Any, **options: Any) -> None:
    """Declare a case whose samples 4 and 5 of 12 raise; the batches are (0, 1, 2), (3, 4, 5), ..."""

    def build() -> Any:
        return Flaky(12, {4: (kind, arguments), 5: (kind, arguments)}), {"batch_size": 3}

    CASES.add(name, claim, build, error=kind, our_texts=(kind.__name__, *TRACEBACK), **options)


_flaky("value_error", "C4: one error for the bad batch, then the epoch goes on.", ValueError, "bad sample",
       texts=("bad sample",))  # fmt: skip
_flaky("no_text", "C4: an error without text.", ValueError)
_flaky("several_arguments", "C4: an error with several arguments.", ValueError, "bad", 4, {"a": 1}, texts=("bad",))
_flaky("unicode", "C4: text beyond ASCII.", RuntimeError, "schön ☃", texts=("schön ☃",))
_flaky("key_error", "C4: KeyError shows its key.", KeyError, "no such key", texts=("no such key",))
_flaky("key_error_lines", "C4: KeyError keeps line breaks.", KeyError, "line one\nline two", texts=("line",))
_flaky("index_error", "C4: IndexError stays one.", IndexError, "beyond", texts=("beyond",))
_flaky("stop_iteration", "StopIteration in a map-style dataset does what it does in torch.", StopIteration,
       workers=(2,))  # fmt: skip
_flaky("os_error", "C4: OSError with errno and file.", FileNotFoundError, 2, "No such file", "/data/x.jpg",
       texts=("No such file", "/data/x.jpg"))  # fmt: skip
_flaky("custom", "C4: a class of the user.", Custom, "my own", texts=("my own",))
_flaky("two_arguments", "C4: a constructor that needs two arguments.", TwoArguments, 404, "gone", texts=("404: gone",))
_flaky("unpicklable", "C4: an exception that cannot be pickled.", HoldsLambda, "holds a lambda",
       texts=("holds a lambda",))  # fmt: skip
_flaky("called_process", "C4: CalledProcessError.", subprocess.CalledProcessError, 3, "ffmpeg", texts=("ffmpeg",))
_flaky("http", "C4: HTTPError.", HTTPError, "http://x/y", 503, "busy", None, None, texts=("busy",))
_flaky("unicode_decode", "C4: UnicodeDecodeError: five arguments.", UnicodeDecodeError, "utf-8", b"\xff", 0, 1, "bad",
       texts=("utf-8",))  # fmt: skip
_flaky("memory", "C4: MemoryError.", MemoryError, "too much", texts=("too much",))
_flaky("timeout", "C4: a TimeoutError of the dataset is no timeout of the loader.", TimeoutError, "slow disk",
       texts=("slow disk",))  # fmt: skip
_flaky("assertion", "C4: AssertionError.", AssertionError, "assert me", texts=("assert me",))
_flaky("not_implemented", "C4: NotImplementedError.", NotImplementedError)
_flaky("zero_division", "C4: ZeroDivisionError.", ZeroDivisionError, "by zero", texts=("by zero",))
_flaky("eof", "C4: EOFError of the dataset is no dead worker.", EOFError, "short file", texts=("short file",))
_flaky("connection", "C4: ConnectionResetError of the dataset is no dead worker.", ConnectionResetError, "reset",
       texts=("reset",))  # fmt: skip
_flaky("blocking", "C4: BlockingIOError of the dataset.", BlockingIOError, 11, "try again", texts=("try again",))
_flaky("broken_pipe", "C4: BrokenPipeError of the dataset.", BrokenPipeError, "pipe", texts=("pipe",))
_flaky("buffer", "C4: BufferError of the dataset.", BufferError, "exported", texts=("exported",))
_flaky("long_text", "C4: a text of 100 kB.", RuntimeError, "a" * 100_000, texts=("a" * 100,))


@CASES.case(error=ValueError, texts=("bad",), our_texts=("4242",))
def the_index_is_named() -> Any:
    """C4: our error names the index of the sample."""
    return Flaky(5000, {4242: (ValueError, ("bad",))}), {"batch_sampler": [[1, 2], [4241, 4242, 4243], [3]]}


@CASES.case(error=KeyError, texts=("nokey",))
def a_missing_key() -> Any:
    """C4: KeyError by a key that the dataset lacks."""
    return {"a": 1, "b": 2}, {"batch_sampler": [["a", "b"], ["a", "nokey"], ["b"]]}


@CASES.case(error=ValueError, texts=("bad",))
def every_sample_is_bad() -> Any:
    """C4: as many errors as batches."""
    return Flaky(7, {i: (ValueError, (f"bad {i}",)) for i in range(7)}), {"batch_size": 2}


@CASES.case(error=ValueError, texts=("bad",), epochs=2)
def bad_first_and_last() -> Any:
    """C4: the first and the last batch are bad, in both epochs."""
    return Flaky(7, {0: (ValueError, ("bad",)), 6: (ValueError, ("bad",))}), {"batch_size": 2}


@CASES.case(error=ValueError, texts=("bad",), epochs=2, workers=(2,))
def bad_with_persistent_workers() -> Any:
    """C4: persistent workers survive errors."""
    return Flaky(9, {4: (ValueError, ("bad",))}), {"batch_size": 2, "persistent_workers": True}


@CASES.case(error=ValueError, texts=("bad",))
def bad_unbatched() -> Any:
    """C4: batch_size=None: one error per bad sample."""
    return Flaky(5, {2: (ValueError, ("bad",))}), {"batch_size": None}


@CASES.case(error=RuntimeError, texts=("Batches of nested tensors are not currently supported",))
def nested_tensors_are_not_stacked() -> Any:
    """The default collate refuses nested tensors, and looks for no other reason."""
    return Fixed([torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]) for _ in range(4)]), {"batch_size": 2}


def broken_collate(samples: list[Any]) -> Any:
    """Raise for one batch."""
    if any(index == 3 for _, index in samples):
        raise Custom("collate broke")
    return len(samples)


def tensor_error_collate(samples: list[Any]) -> Any:
    """Fail inside torch, after something was stacked."""
    rows = torch.stack([row for row, _ in samples])
    return rows.view(5, 7, 11)


def bad_init(worker: int) -> None:
    """Raise in each worker."""
    raise Custom(f"init broke in {worker}")


@CASES.case(error=Custom, texts=("collate broke",), our_texts=("broken_collate", "worker"))
def collate_raises() -> Any:
    """C4: an error in collate_fn is one error; the epoch goes on."""
    return Rows(9), {"batch_size": 2, "collate_fn": broken_collate}


@CASES.case(texts=("shape '[5, 7, 11]' is invalid",), our_texts=("tensor_error_collate", "worker"))
def torch_fails_in_collate() -> Any:
    """C4: an error of torch itself inside collate_fn."""
    return Rows(4), {"batch_size": 2, "collate_fn": tensor_error_collate}


@CASES.case(error=Custom, texts=("init broke in",), our_texts=("bad_init", "worker"), workers=(1,), first_only=True)
def init_raises() -> Any:
    """C4: an error in worker_init_fn comes with the first batch."""
    return Rows(4), {"batch_size": 2, "worker_init_fn": bad_init}


@CASES.case(error=OSError, texts=("the sampler's file is gone",), workers=(0,))
def sampler_raises() -> Any:
    """A sampler that raises: its own error comes through."""
    return Rows(9), {"batch_size": 2, "sampler": BrokenSampler(Rows(9))}


@CASES.case(error=OSError, texts=("the sampler's file is gone",), workers=(2,), first_only=True)
def sampler_raises_with_workers() -> Any:
    """A sampler that raises while workers are fed: its own error comes through."""
    return Rows(9), {"batch_size": 2, "sampler": BrokenSampler(Rows(9))}


@CASES.case(texts=("unhashable",), workers=(0, 2), error=TypeError)
def an_index_of_no_use() -> Any:
    """An index that the dataset cannot use."""
    return {"a": 1}, {"batch_sampler": [["a"], [[1]]]}


@CASES.case(error=ValueError, texts=("the stream broke at 5",), our_texts=("worker",), bag=False, workers=(0, 1))
def stream_raises() -> Any:
    """C4: an iterable that raises: the error, then the end, as in torch."""
    return FlakyStream(9), {"batch_size": 2}


@CASES.case(first_only=True, error=Custom, texts=("no iterator today",))
def iterator_raises_at_once() -> Any:
    """C4: an iterable whose __iter__ raises at once."""

    class NoIter(Stream):
        def __iter__(self) -> Any:
            raise Custom("no iterator today")

    return NoIter(4), {"batch_size": 2}


@CASES.case(error=TypeError)
def dataset_without_getitem() -> Any:
    """A dataset that cannot be indexed."""

    class Bare:
        def __len__(self) -> int:
            return 3

    return Bare(), {"batch_size": 2}


@CASES.case(error=NotImplementedError)
def dataset_without_implementation() -> Any:
    """torch's Dataset itself."""

    class Bare(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 3

    return Bare(), {"batch_size": 2}


@CASES.case()
def dataset_without_length() -> Any:
    """A map-style dataset without a length fails where it fails in torch."""

    class Endless:
        def __getitem__(self, index: int) -> int:
            return index

    return Endless(), {"batch_size": 2, "sampler": [5, 6, 7]}


@CASES.case(workers=(2,), error=Custom, texts=("late",), epochs=2)
def draws_continue_after_an_error() -> Any:
    """F1, C4: after an error the workers' random states are where torch's are."""

    class Late(Draws):
        def __getitem__(self, index: int) -> Any:
            drawn = super().__getitem__(index)
            if index == 3:
                raise Custom("late")
            return drawn

    return Late(), {"batch_size": 2}


@CASES.case(error=RuntimeError, our_texts=("[3, 8, 8]", "[1, 8, 8]", "worker"), main_texts=("[3, 8, 8]", "[1, 8, 8]"))
def ragged_in_one_batch_only() -> Any:
    """E1: one grey image among colours: one error, the other batches arrive."""
    images = [torch.zeros(3, 8, 8) for _ in range(9)]
    images[4] = torch.zeros(1, 8, 8)
    return Fixed(images), {"batch_size": 3}
