"""C6: the same batches with fork, forkserver and spawn. Spawned workers import torch anew, so most of this is slow."""

from __future__ import annotations

import functools
import multiprocessing
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from .cases_carried import identity
from .cases_collate import CallableCollate, detection_collate, detections, mixed_collate
from .compare import OURS, SELF, Case, compare
from .samples import ByKey, Custom, DrawingStream, Draws, Fixed, Flaky, Rows, Stream, WhoAmI, plain_mapping, widen

SLOW = [pytest.param("forkserver", marks=pytest.mark.slow), pytest.param("spawn", marks=pytest.mark.slow)]
METHODS = ["fork", *SLOW]


@pytest.fixture(autouse=True, scope="module")
def preloaded_forkserver() -> None:
    """The fork server imports torch once, so that its workers start quickly."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["numpy", "torch", "torch.utils.data"])


def case(dataset: Any, arguments: dict[str, Any], **options: Any) -> Case:
    """Return an anonymous case."""
    return Case("start", "the start method makes no difference", lambda: (dataset(), dict(arguments)), **options)


def everything() -> Fixed:
    """Samples of many kinds."""
    items = [plain_mapping(1), None, torch.arange(3), np.arange(2), "text", Custom("data"), (1, [2.5], {"k": b"v"})]
    return Fixed(items)


def seeded(dataset: Any) -> dict[str, Any]:
    """Arguments of a shuffled loader with an own generator."""
    return {"batch_size": 2, "shuffle": True, "generator": torch.Generator().manual_seed(5)}


SCENES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "draws": (Draws, {"batch_size": 2, "shuffle": True}, {"epochs": 2}),
    "who_am_i": (WhoAmI, {"batch_size": 1, "persistent_workers": True}, {"epochs": 2}),
    "everything": (everything, {"batch_size": 2, "collate_fn": identity}, {}),
    "detection": (detections, {"batch_size": 4, "collate_fn": detection_collate}, {}),
    "mixed": (functools.partial(Rows, 8), {"batch_size": 3, "collate_fn": mixed_collate, "worker_init_fn": widen}, {}),
    "stream": (functools.partial(Stream, 9, 4), {"batch_size": 2}, {}),
    "errors": (
        functools.partial(Flaky, 9, {4: (Custom, ("bad sample",)), 8: (KeyError, ("no\nkey",))}),
        {"batch_size": 2},
        {"our_texts": ("Traceback", "__getitem__")},
    ),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scene", SCENES)
def test_the_start_method_makes_no_difference(scene: str, method: str) -> None:
    """C6, F1: batches, draws, worker info, errors and warnings are torch's with each start method."""
    dataset, arguments, options = SCENES[scene]
    compare(case(dataset, arguments, **options), 2, multiprocessing_context=method)


@pytest.mark.parametrize("method", METHODS)
def test_a_context_object_is_accepted(method: str) -> None:
    """multiprocessing_context= takes a context as well as its name."""
    context = multiprocessing.get_context(method)
    compare(case(DrawingStream, {"batch_size": None}), 1, multiprocessing_context=context)


@pytest.mark.filterwarnings("ignore:Got pickle error")
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("what", ["collate_fn", "worker_init_fn", "dataset"])
def test_what_cannot_be_pickled_is_refused_before_any_start(method: str, what: str) -> None:
    """C6: a lambda, where pickling is needed, is an error in the parent at once; ours names the argument."""
    arguments: dict[str, Any] = {"dataset": Rows(4), what: Fixed([lambda: 1]) if what == "dataset" else lambda _: None}
    loader = OURS(num_workers=1, multiprocessing_context=method, **arguments)
    before = multiprocessing.active_children()
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)) as caught:
        iter(loader)
    assert SELF or what in str(caught.value)
    assert [child for child in multiprocessing.active_children() if child not in before] == []


def test_a_lambda_is_fine_under_fork() -> None:
    """C6: fork needs no pickle: lambdas and local classes work."""

    class Local(Rows):
        pass

    scene = case(lambda: Local(6), {"batch_size": 2, "collate_fn": lambda samples: [index for _, index in samples]})
    compare(scene, 2, multiprocessing_context="fork")


@pytest.mark.parametrize("method", SLOW)
def test_state_of_functions_travels(method: str) -> None:
    """C6: callable objects with state, and keys of any type, reach spawned workers."""
    compare(case(ByKey, {"batch_sampler": [["a", ("x", 1)], ["ccc"]], "collate_fn": CallableCollate()}), 1,
            multiprocessing_context=method)  # fmt: skip
