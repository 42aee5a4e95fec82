"""What must hold on a GPU, each as a function that returns a sentence about what it saw, or raises AssertionError."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from gpu_bench import Bench, Numbered
from shmloader.errors import CopiedOutWarning, NotPinnedWarning, PinningRefused
from shmloader.segment import Segment

GROUP = 20  # batches that are copied behind one piece of queued work
QUEUED_S = 0.05
ROUNDS = 100


@dataclass(frozen=True)
class Size:
    """How much is done. ``FULL`` on a GPU; the tests do less."""

    batches: int = 2000
    rounds: int = ROUNDS
    workers: int = 4
    elements: int = 4096  # of a sample; 16 samples a batch
    start_methods: tuple[str, ...] = ("fork", "forkserver", "spawn")


FULL = Size()
QUICK = Size(batches=200, rounds=10, workers=2, start_methods=("fork", "spawn"))
ROWS = 16


@contextmanager
def strict() -> Iterator[None]:
    """A batch that is not page-locked though it should be is an error here; copies because of kept batches are not."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotPinnedWarning)
        warnings.simplefilter("ignore", CopiedOutWarning)
        yield


def pinned(bench: Bench, size: Size) -> str:
    """Every tensor of every batch is page-locked, and pinning it again is a no-op."""
    with strict(), bench.loader(Numbered(20, ROWS, size.elements), ROWS, num_workers=size.workers) as loader:
        for batch in loader:
            assert bench.is_pinned(batch), "a batch is not page-locked"
        stats = loader.stats().arena
        del batch
    assert stats.pinned, "stats().arena.pinned is False"
    return f"20 batches, {stats.pinned_bytes / 2**20:.1f} MiB page-locked in {stats.pinned_s * 1e3:.1f} ms"


def numbered(bench: Bench, size: Size, where: str, drain: bool = True) -> tuple[int, int]:
    """Copy batches behind queued work and drop them at once. Return how many are wrong on the device, and copied out.

    ``where``: ``"main"`` stream; ``"side"`` stream, dropped on it; ``"named"`` to ``record_stream``, dropped elsewhere.
    """
    stream = bench.stream() if where != "main" else None
    wrong: list[torch.Tensor] = []
    options = {"num_workers": size.workers, "arena_bytes": "256MiB", "drain": drain}
    with strict(), bench.loader(Numbered(size.batches, ROWS, size.elements), ROWS, **options) as loader:
        if where == "named":
            loader.record_stream(stream)
        batches = iter(loader)
        for number in range(size.batches):  # enumerate would keep each batch until the next one is there
            batch = next(batches)
            with nullcontext() if stream is None else bench.on(stream):
                if number % GROUP == 0:
                    bench.busy(QUEUED_S)
                copied = bench.copy(batch)
                bench.later(look(copied, number, wrong))
                if where == "side":
                    del batch
            if where != "side":
                del batch
        if stream is not None:
            bench.join(stream)
        bench.synchronize()
        assert next(batches, None) is None, "there are more batches than there should be"
        copied_out = loader.stats().copied_out
    return int(torch.stack(wrong).sum()), copied_out


def look(copied: torch.Tensor, number: int, wrong: list[torch.Tensor]) -> Callable[[], None]:
    """Return the work that notes on the device whether any element differs from ``number``."""
    return lambda: wrong.append((copied != number).any())


def right_on_main(bench: Bench, size: Size) -> str:
    """Copied by the main stream."""
    return told(*numbered(bench, size, "main"), size)


def right_on_side(bench: Bench, size: Size) -> str:
    """Copied by a side stream and dropped there."""
    return told(*numbered(bench, size, "side"), size)


def right_when_named(bench: Bench, size: Size) -> str:
    """Copied by a side stream that the loader was told of, dropped elsewhere."""
    return told(*numbered(bench, size, "named"), size)


def told(wrong: int, copied_out: int, size: Size) -> str:
    assert wrong == 0, f"{wrong} of {size.batches} batches hold wrong data on the device"
    return f"{size.batches} batches behind {QUEUED_S * 1e3:.0f} ms of work, 0 wrong, {copied_out} copied out"


def control(bench: Bench, size: Size) -> str:
    """The same without draining: shows that the checks above can fail. Asserts nothing: a race may be won."""
    wrong, _ = numbered(bench, size, "main", drain=False)
    return f"{wrong} of {size.batches} batches wrong with drain=False" + ("" if wrong else ": proves nothing here")


def on_device(bench: Bench, size: Size) -> str:
    """Batches delivered on the device are right and lie there."""
    wrong: list[torch.Tensor] = []
    options = {"num_workers": size.workers, "device": "cuda"}
    with strict(), bench.loader(Numbered(size.batches, ROWS, size.elements), ROWS, **options) as loader:
        batches = iter(loader)
        for number in range(size.batches):
            if number % GROUP == 0:
                bench.busy(QUEUED_S)
            bench.later(look(next(batches), number, wrong))
        bench.synchronize()
    found = int(torch.stack(wrong).sum())
    assert found == 0, f"{found} device batches are wrong"
    return f"{size.batches} device batches, 0 wrong"


def rounds(bench: Bench, size: Size) -> str:
    """Loaders are made and dropped, every second one without close; then one with a larger arena."""
    with strict():
        for number in range(size.rounds + 1):
            elements = size.elements * (8 if number == size.rounds else 1)
            loader = bench.loader(Numbered(3, ROWS, elements), ROWS)
            for batch in loader:
                copied = bench.copy(batch)
            assert loader.stats().arena.pinned, f"round {number} is not page-locked"
            if number % 2:
                loader.close()
            del loader, batch
            gc.collect()
        bench.synchronize()
    assert int(copied.flatten()[0]) == 2
    return f"{size.rounds} loaders, {size.rounds // 2} without close, then a larger one"


def refusal(bench: Bench, size: Size) -> str:
    """Registering a range twice is refused, and the device works as before: no error is left behind for others."""
    segment = Segment.create(1 << 20)
    try:
        segment.commit(0, segment.nbytes)
        segment.populate(0, segment.nbytes)
        said = _refuse_twice(bench, segment)
    finally:
        segment.close()
    return f"refused with {said}, and the device works"


def _refuse_twice(bench: Bench, segment: Segment) -> str:
    engine = bench.engine()
    engine.register(segment.address, segment.nbytes)
    try:
        engine.register(segment.address, segment.nbytes)
    except PinningRefused as error:
        said = f"code {error.code}"
    else:
        raise AssertionError("the second registration was not refused")
    finally:
        engine.unregister(segment.address)
    bench.synchronize()
    total = bench.copy(torch.arange(8))
    bench.synchronize()
    assert int(total.sum()) == 28
    engine.register(segment.address, segment.nbytes)
    engine.unregister(segment.address)
    return said


def start_methods(bench: Bench, size: Size) -> str:
    """CUDA is in use, then workers are started in every way; none of them has CUDA; and a fork of the user's exits."""
    bench.copy(torch.ones(8))
    bench.synchronize()
    for method in size.start_methods:
        options = {"num_workers": 2, "multiprocessing_context": method}
        with strict(), bench.loader(Numbered(8, ROWS, 64), ROWS, **options) as loader:
            batches = iter(loader)
            first = next(batches)
            fork_and_end(first)
            numbers = [int(first[0, 0]), *(int(batch[0, 0]) for batch in batches)]
            assert numbers == list(range(8)), f"{method}: {numbers}"
            del first
    return f"{', '.join(size.start_methods)}: all batches, CUDA in no worker"


def fork_and_end(batch: Any) -> None:
    """Fork a child that drops the batch and ends: its finalisers must not touch the device."""
    pid = os.fork()
    if pid == 0:
        del batch
        gc.collect()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 0, f"a forked child ended with {code}"


CHECKS: dict[str, Callable[[Bench, Size], str]] = {
    "pinned": pinned,
    "right on the main stream": right_on_main,
    "right on a side stream": right_on_side,
    "right on a named stream": right_when_named,
    "device batches": on_device,
    "100 rounds": rounds,
    "refused registration": refusal,
    "CUDA first, then workers": start_methods,
    "control without drain": control,
}


def run(bench: Bench, size: Size) -> dict[str, dict[str, Any]]:
    """Run all checks; return for each whether it passed and what it said. One that fails does not stop the others."""
    results: dict[str, dict[str, Any]] = {}
    for name, check in CHECKS.items():
        try:
            results[name] = {"passed": True, "said": check(bench, size)}
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the result
            results[name] = {"passed": False, "said": f"{type(error).__name__}: {error}"}
        gc.collect()
        print(f"  {'ok  ' if results[name]['passed'] else 'FAIL'} {name}: {results[name]['said']}", flush=True)
    return results
