"""The front of the class: validation, attributes, length, immutability, copies, what trainers look at."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from .compare import OURS, SEED, TORCH, Failed, Loader, freeze, reseed, steps
from .samples import Backwards, Fixed, Growing, Rows, Stream, Unsized

# pytest's own settings make warnings errors; torch warns of more workers than CPUs on small machines
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class EndlessSampler:
    """A sampler without a length."""

    def __iter__(self) -> Any:
        return iter([0, 1])


WRONG: dict[str, Callable[[], dict[str, Any]]] = {
    "negative_workers": lambda: {"num_workers": -1},
    "workers_as_text": lambda: {"num_workers": "2"},
    "negative_timeout": lambda: {"timeout": -1},
    "negative_prefetch": lambda: {"num_workers": 1, "prefetch_factor": -1},
    "prefetch_without_workers": lambda: {"prefetch_factor": 2},
    "persistent_without_workers": lambda: {"persistent_workers": True},
    "sampler_and_shuffle": lambda: {"sampler": [0], "shuffle": True},
    "batch_sampler_and_batch_size": lambda: {"batch_sampler": [[0]], "batch_size": 2},
    "batch_sampler_and_shuffle": lambda: {"batch_sampler": [[0]], "shuffle": True},
    "batch_sampler_and_sampler": lambda: {"batch_sampler": [[0]], "sampler": [0]},
    "batch_sampler_and_drop_last": lambda: {"batch_sampler": [[0]], "drop_last": True},
    "unbatched_and_drop_last": lambda: {"batch_size": None, "drop_last": True},
    "batch_size_zero": lambda: {"batch_size": 0},
    "batch_size_negative": lambda: {"batch_size": -3},
    "batch_size_float": lambda: {"batch_size": 2.0},
    "batch_size_text": lambda: {"batch_size": "2"},
    "batch_size_bool": lambda: {"batch_size": True},
    "drop_last_text": lambda: {"drop_last": "no"},
    "context_unknown": lambda: {"num_workers": 1, "multiprocessing_context": "teleport"},
    "context_wrong_type": lambda: {"num_workers": 1, "multiprocessing_context": 5},
    "context_without_workers": lambda: {"multiprocessing_context": "fork"},
    "stream_shuffled": lambda: {"dataset": Stream(3), "shuffle": True},
    "stream_with_sampler": lambda: {"dataset": Stream(3), "sampler": [0]},
    "stream_with_batch_sampler": lambda: {"dataset": Stream(3), "batch_sampler": [[0]]},
    "unknown_argument": lambda: {"batchsize": 3},
    "dataset_twice": lambda: {"dataset": Rows(0), "shuffle": True},
    "timeout_as_text": lambda: {"timeout": "1"},
}

RIGHT: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": lambda: {},
    "batches": lambda: {"batch_size": 3, "drop_last": True},
    "unbatched": lambda: {"batch_size": None},
    "shuffled": lambda: {"shuffle": True, "generator": torch.Generator()},
    "not_shuffled": lambda: {"shuffle": False},
    "sampler": lambda: {"sampler": Backwards(Rows(10)), "batch_size": 2},
    "batch_sampler": lambda: {"batch_sampler": BatchSampler(SequentialSampler(Rows(10)), 3, False)},
    "workers": lambda: {"num_workers": 2, "prefetch_factor": 5, "timeout": 3, "persistent_workers": True},
    "workers_default": lambda: {"num_workers": 1},
    "context": lambda: {"num_workers": 1, "multiprocessing_context": "spawn"},
    "functions": lambda: {"collate_fn": len, "worker_init_fn": print},
    "pinned": lambda: {"pin_memory": True, "pin_memory_device": "cuda"},
    "any_order": lambda: {"num_workers": 1, "in_order": False},
    "stream": lambda: {"dataset": Stream(10, 10), "batch_size": 4},
    "stream_dropping": lambda: {"dataset": Stream(10, 10), "batch_size": 4, "drop_last": True},
    "stream_unbatched": lambda: {"dataset": Stream(10, 10), "batch_size": None},
    "stream_unsized": lambda: {"dataset": Unsized([1])},
    "no_length": lambda: {"sampler": EndlessSampler()},
}

ATTRIBUTES = (
    *("batch_size", "num_workers", "pin_memory", "drop_last", "timeout", "pin_memory_device", "prefetch_factor"),
    *(
        "collate_fn",
        "worker_init_fn",
        "persistent_workers",
        "in_order",
        "_auto_collation",
        "_dataset_kind",
        "_iterator",
    ),
)


def _make(kind: Loader, arguments: Callable[[], dict[str, Any]]) -> Any:
    reseed()
    return kind(**{"dataset": Rows(10), **arguments()})


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_in_the_same_words(name: str) -> None:
    """Each wrong argument raises torch's class with torch's text, at construction, or is accepted by both."""
    outcomes: list[Any] = []
    for kind in (TORCH, OURS):
        try:
            outcomes.append((None, str(_make(kind, WRONG[name]).batch_size)))
        except (TypeError, ValueError) as error:
            text = str(error).replace(f"{kind.__qualname__}.__init__", "__init__")
            outcomes.append((type(error), text))
    assert outcomes[1] == outcomes[0]


@pytest.mark.parametrize("name", RIGHT)
def test_attributes_are_those_of_torch(name: str) -> None:
    """After construction, every attribute that torch offers is there with the same value or type."""
    theirs, ours = _make(TORCH, RIGHT[name]), _make(OURS, RIGHT[name])
    for attribute in ATTRIBUTES:
        assert getattr(ours, attribute) == getattr(theirs, attribute), attribute
    for attribute in ("dataset", "sampler", "batch_sampler", "generator", "multiprocessing_context", "_index_sampler"):
        assert type(getattr(ours, attribute)) is type(getattr(theirs, attribute)), attribute


@pytest.mark.parametrize("name", RIGHT)
def test_lengths_are_those_of_torch(name: str) -> None:
    """E3: len() gives torch's number or torch's TypeError."""
    outcomes: list[Any] = []
    for kind in (TORCH, OURS):
        try:
            outcomes.append(len(_make(kind, RIGHT[name])))
        except TypeError as error:
            outcomes.append(str(error))
    assert outcomes[1] == outcomes[0]


@pytest.mark.parametrize(
    "attribute", ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"]
)
def test_what_defines_the_batches_cannot_be_changed(attribute: str) -> None:
    """Setting such an attribute afterwards raises torch's ValueError with torch's text."""
    loader = OURS(Rows(4))
    with pytest.raises(ValueError, match=f"{attribute} attribute should not be set after DataLoader is initialized"):
        setattr(loader, attribute, 7)


def test_other_attributes_can_be_changed() -> None:
    """collate_fn, timeout, workers and one's own attributes may be set, and count from the next epoch on."""
    loader = OURS(Rows(4), batch_size=2)
    assert len(list(loader)) == 2
    loader.collate_fn = len
    loader.note = "mine"
    assert list(loader) == [2, 2]
    loader.num_workers, loader.prefetch_factor = 1, 2
    assert list(loader) == [2, 2]
    assert loader.note == "mine"


def test_it_is_a_dataloader_for_everyone_who_asks() -> None:
    """isinstance, issubclass and subscription work as with torch's class."""
    assert isinstance(OURS(Rows(1)), torch.utils.data.DataLoader)
    assert issubclass(OURS, TORCH)
    assert OURS.__name__ == "DataLoader"
    assert OURS[int].__origin__ is OURS
    assert isinstance(OURS[int](Rows(1)), OURS)
    reseed()
    assert isinstance(OURS(Rows(3), shuffle=True).sampler, RandomSampler)


def test_a_subclass_may_extend_init_and_iter() -> None:
    """Trainers subclass the loader: super().__init__ and super().__iter__ are enough."""

    class Mine(OURS):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.seen = 0

        def __iter__(self) -> Any:
            for batch in super().__iter__():
                self.seen += 1
                yield batch

    for workers in (0, 1):
        loader = Mine(Rows(5), 2, num_workers=workers)
        assert [labels.tolist() for _, labels in loader] == [[0, 1], [2, 3], [4]]
        assert loader.seen == 3


def test_positional_arguments_come_in_the_order_of_torch() -> None:
    """All thirteen positional arguments of torch, in its order."""
    arguments = (Rows(4), 2, False, None, None, 0, len, False, True, 0, None, None, None)
    assert list(OURS(*arguments)) == list(TORCH(*arguments)) == [2, 2]


def _repickle(loader: Any) -> Any:
    return pickle.loads(pickle.dumps(loader))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_fresh_loader_can_be_pickled_and_copied(workers: int) -> None:
    """pickle, copy and deepcopy of a loader give a loader with the same batches, as with torch."""
    for clone in (_repickle, copy.copy, copy.deepcopy):
        results = []
        for kind in (TORCH, OURS):
            generator = None if clone is copy.copy else torch.Generator().manual_seed(3)
            reseed()
            loader = clone(kind(Rows(7), batch_size=2, shuffle=True, num_workers=workers, generator=generator))
            assert type(loader) is kind
            results.append(list(steps(loader)))
        assert results[1] == results[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_used_loader_can_be_copied(workers: int) -> None:
    """copy.copy and pickle after an epoch behave as in torch, and the copy works on its own."""
    loader = OURS(Rows(7), batch_size=2, num_workers=workers)
    first = [freeze(batch) for batch in loader]
    for clone in (copy.copy(loader), pickle.loads(pickle.dumps(loader))):
        assert [freeze(batch) for batch in clone] == first
    assert [freeze(batch) for batch in loader] == first


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterator_cannot_be_pickled(workers: int) -> None:
    """As in torch, pickling an iterator is an error, not a second set of workers."""
    iterator = iter(OURS(Rows(7), num_workers=workers))
    with pytest.raises((NotImplementedError, TypeError, pickle.PicklingError)):
        pickle.dumps(iterator)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_length_follows_a_growing_dataset(workers: int) -> None:
    """E3: a dataset that grows between epochs gives more batches, and len() knows it."""
    for kind in (TORCH, OURS):
        dataset = Growing(5)
        loader = kind(dataset, batch_size=2, num_workers=workers)
        assert (len(loader), sum(1 for _ in loader)) == (3, 3)
        dataset.grow(6)
        assert (len(loader), sum(1 for _ in loader)) == (6, 6)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_of_small_batches_may_be_kept(workers: int) -> None:
    """list(loader) of fifteen small batches gives torch's batches and, like torch, warns of nothing."""
    for kind in (TORCH, OURS):
        assert [batch.tolist() for batch in list(kind(Fixed(range(30)), 2, num_workers=workers))][14] == [28, 29]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_iterator_has_the_length_of_torch_s(workers: int) -> None:
    """len(iter(loader)) is the number of batches of the epoch, before and after some were taken."""
    for kind in (TORCH, OURS):
        iterator = iter(kind(Rows(7), batch_size=2, num_workers=workers))
        assert len(iterator) == 4
        next(iterator)
        assert len(iterator) == 4
        assert iter(iterator) is iterator


def test_an_ended_iterator_stays_ended() -> None:
    """next() after the end raises StopIteration again and again."""
    for workers in (0, 2):
        iterator = iter(OURS(Rows(2), num_workers=workers))
        assert len(list(iterator)) == 2
        for _ in range(3):
            with pytest.raises(StopIteration):
                next(iterator)


def test_timeout_without_workers_is_refused_where_torch_refuses_it() -> None:
    """A timeout with num_workers=0 is an AssertionError when iteration begins."""
    outcomes = [list(steps(kind(Rows(2), timeout=1))) for kind in (TORCH, OURS)]
    theirs, ours = (step for (step,) in outcomes)
    assert isinstance(theirs, Failed)
    assert isinstance(ours, Failed)
    assert type(ours.error) is type(theirs.error)


def test_importing_the_library_changes_nothing_in_torch() -> None:
    """C6: importing shmloader leaves torch's class, its workers and the start method alone, and starts nothing."""
    script = (
        "import multiprocessing, threading, torch, torch.utils.data as d\n"
        "before = (d.DataLoader, d.DataLoader.__iter__, d._utils.worker._worker_loop, d.get_worker_info)\n"
        "import shmloader\n"
        "assert before == (d.DataLoader, d.DataLoader.__iter__, d._utils.worker._worker_loop, d.get_worker_info)\n"
        "assert multiprocessing.get_start_method(allow_none=True) is None\n"
        "assert threading.active_count() == 1 and not multiprocessing.active_children()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_suite_reseeds() -> None:
    """The comparison begins from one known state of torch's generator."""
    reseed()
    first = torch.initial_seed()
    assert first == SEED
