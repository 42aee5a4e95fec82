"""Run one case on both loaders and judge the two runs.

    Case ──build()──▶ dataset, arguments ──▶ loader ──▶ Run(length, epochs of steps, warnings, random states)
                                                                        │
                          torch's Run ── judge(case, theirs, ours) ── ours

A *step* is what one ``next()`` gave: a frozen batch or an error. Batches are frozen (types, dtypes, shapes, bytes) as
soon as they arrive, so that the comparison holds no view; whoever wants live batches keeps them himself.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import random
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

SELF = os.environ.get("PARITY_SELF") == "1"
"""True: torch's loader plays both parts, and what only ours promises is not asked."""

Loader = type[DataLoader[Any]]

TORCH: Loader = DataLoader
OURS: Any = TORCH
if not SELF:
    import shmloader

    OURS = shmloader.DataLoader

SEED = 20_240_229
NOT_THE_LOADERS = (
    "use of fork() may lead",
    "prototype",
    "beta state",
    "experimental",
    "TypedStorage",
    "torch.ao",
    "invariant",
)
"""Parts of warnings that torch or Python gives once per process about something else than loading."""

MOST_STEPS = 2_000
"""An epoch that has not ended by then never will: an iterator that raises for ever, for example."""


# --- freezing ---------------------------------------------------------------------------------------------------------


def freeze(value: Any) -> Any:
    """Return a picture of ``value`` in plain tuples: exact types, dtypes, shapes and bytes. Copies everything."""
    if isinstance(value, torch.Tensor):
        return _freeze_tensor(value)
    if isinstance(value, np.ndarray):
        facts = (type(value), value.dtype.str, value.dtype.names, value.shape)
        return (*facts, freeze(value.tolist()) if value.dtype.hasobject else value.tobytes())
    if isinstance(value, np.generic):
        return type(value), value.dtype.str, value.tobytes()
    if isinstance(value, Mapping):
        items = tuple((freeze(key), freeze(item)) for key, item in value.items())
        factory = value.default_factory if isinstance(value, defaultdict) else None
        return type(value), factory, items, _attributes(value)
    if isinstance(value, list | tuple):
        return type(value), tuple(freeze(item) for item in value), _attributes(value)
    if isinstance(value, set | frozenset):
        return type(value), tuple(sorted(repr(freeze(item)) for item in value))
    if isinstance(value, BaseException):
        return type(value), freeze(list(value.args))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value)]
        return type(value), tuple((name, freeze(getattr(value, name))) for name in names)
    attributes = _attributes(value)
    return (type(value), attributes) if attributes and not isinstance(value, type) else (type(value), repr(value))


def _attributes(value: Any) -> Any:
    own = vars(value) if hasattr(value, "__dict__") and not isinstance(value, type) else {}
    return tuple((name, freeze(own[name])) for name in sorted(own))


def _freeze_tensor(tensor: torch.Tensor) -> Any:
    facts = (type(tensor), tensor.dtype, tensor.layout, tensor.device.type, tensor.requires_grad)
    if tensor.is_nested:
        return (*facts, "nested", tuple(freeze(part) for part in tensor.unbind()))
    if tensor.layout is torch.sparse_coo:
        pair = (tensor._indices(), tensor._values())
        return (*facts, tuple(tensor.shape), tensor.is_coalesced(), tuple(_bytes(part) for part in pair))
    if tensor.layout is torch.sparse_csr:
        parts = (tensor.crow_indices(), tensor.col_indices(), tensor.values())
        return (*facts, tuple(tensor.shape), tuple(_bytes(part) for part in parts))
    if tensor.is_quantized:
        if tensor.qscheme() in (torch.per_channel_affine, torch.per_channel_symmetric):
            axis = tensor.q_per_channel_axis()
            scale: Any = (_bytes(tensor.q_per_channel_scales()), _bytes(tensor.q_per_channel_zero_points()), axis)
        else:
            scale = (tensor.q_scale(), tensor.q_zero_point())
        return (*facts, tuple(tensor.shape), tensor.qscheme(), scale, _bytes(tensor.int_repr()))
    preview = repr(tensor.tolist())[:60] if tensor.dtype.itemsize > 1 or not tensor.is_floating_point() else ""
    return (*facts, tuple(tensor.shape), preview, _bytes(tensor))


def _bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes()


def difference(theirs: Any, ours: Any, path: str = "") -> str | None:
    """Return where two frozen values first differ and how, or None if they are equal."""
    if theirs == ours:
        return None
    if isinstance(theirs, tuple) and isinstance(ours, tuple) and len(theirs) == len(ours):
        for place, (left, right) in enumerate(zip(theirs, ours, strict=True)):
            found = difference(left, right, f"{path}[{place}]")
            if found:
                return found
    return f"at {path or 'the top'}: torch has {theirs!r:.600}, ours has {ours!r:.600}"


# --- cases ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One declared situation. ``build`` makes the dataset and the loader's arguments anew for each run."""

    name: str
    claim: str
    """One line: what must hold; cites the known trouble that it guards against."""
    build: Callable[[], tuple[Any, dict[str, Any]]]
    workers: tuple[int, ...] = (0, 2)
    epochs: int = 1
    bag: bool = False
    """True: the order of batches is not promised by torch either; compare them as a multiset."""
    ask_length: bool = True
    first_only: bool = False
    """True: judge nothing after the first error of an epoch (torch's own iterator is broken after it)."""
    error: type[BaseException] | None = None
    """The class raised by the dataset: with workers, ours may raise this one where torch falls back to another."""
    texts: tuple[str, ...] = ()
    """Must be in what each error tells (text, notes and cause), torch's and ours."""
    our_texts: tuple[str, ...] = ()
    """Must be in what each of our errors from workers tells, whatever torch says."""
    main_texts: tuple[str, ...] = ()
    """The same for our errors without workers."""
    torch_garbles: bool = False
    """True: torch's loader destroys such batches on their way from a worker; its run without workers is the truth."""
    free_warnings: bool = False
    """True: each loader may warn in its own way and number."""


@dataclass
class Cases:
    """The cases of one module, in order. ``case`` is the decorator that adds one."""

    all: list[Case] = field(default_factory=list)

    def case(self, **options: Any) -> Callable[[Callable[[], tuple[Any, dict[str, Any]]]], Case]:
        def add(build: Callable[[], tuple[Any, dict[str, Any]]]) -> Case:
            return self.add(build.__name__, (build.__doc__ or "").strip(), build, **options)

        return add

    def add(self, name: str, claim: str, build: Callable[[], tuple[Any, dict[str, Any]]], **options: Any) -> Case:
        assert claim, f"case {name} claims nothing"
        assert name not in {known.name for known in self.all}, f"two cases are called {name}"
        self.all.append(Case(name, claim, build, **options))
        return self.all[-1]

    def parameters(self) -> list[Any]:
        """Return one pytest parameter set (case, workers) for each case and number of workers."""
        return [pytest.param(c, w, id=f"{c.name}-w{w}") for c in self.all for w in c.workers]


# --- running ----------------------------------------------------------------------------------------------------------


@dataclass
class Failed:
    """A step that raised. Kept without the traceback, which would keep the iterator and its workers alive."""

    error: Exception

    def __post_init__(self) -> None:
        self.error.__traceback__ = None


@dataclass
class Run:
    """All that one loader showed: nothing in here is a view into a batch."""

    length: Any = None
    epochs: list[list[Any]] = field(default_factory=list)
    warned: list[tuple[type[Warning], str]] = field(default_factory=list)
    randomness: str = ""
    """Digest of the states of torch's, Python's and numpy's global generators afterwards."""


def reseed(seed: int = SEED) -> None:
    """Put torch's, Python's and numpy's global generators of this process into a known state."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def random_states() -> str:
    """Return a digest of the three global generators of this process."""
    _, keys, *rest = np.random.get_state(legacy=True)
    parts = (torch.get_rng_state().tolist(), random.getstate(), np.asarray(keys).tolist(), rest)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def steps(loader: Any, *, freezer: Callable[[Any], Any] = freeze) -> Iterator[Any]:
    """Yield what each ``next()`` of a new iterator gives: a frozen batch, or ``Failed``. Goes on after errors."""
    try:
        iterator = iter(loader)
    except Exception as error:  # noqa: BLE001 - whatever is raised here is what gets compared
        yield Failed(error)
        return
    for _ in range(MOST_STEPS):
        try:
            batch = next(iterator)
        except StopIteration:
            return
        except Exception as error:  # noqa: BLE001 - as above
            yield Failed(error)
        else:
            yield freezer(batch)
    pytest.fail(f"the iterator has not ended after {MOST_STEPS} steps")


def run(kind: Loader, case: Case, workers: int, **extra: Any) -> Run:
    """Build ``case`` and iterate it on the loader class ``kind`` with ``workers`` workers."""
    seen = Run()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reseed()
        dataset, arguments = case.build()
        caught.clear()
        try:
            loader = kind(dataset, **{"num_workers": workers, **arguments, **extra})
        except (TypeError, ValueError) as error:
            seen.epochs.append([Failed(error)])
        else:
            _iterate(loader, case, seen)
            del loader
    seen.randomness = random_states()
    warned = [(w.category, str(w.message)) for w in caught]
    seen.warned = [(kind, text) for kind, text in warned if not any(part in text for part in NOT_THE_LOADERS)]
    return seen


def _iterate(loader: DataLoader[Any], case: Case, seen: Run) -> None:
    if case.ask_length:
        seen.length = _length(loader)
    for _ in range(case.epochs):
        seen.epochs.append([])
        for step in steps(loader):
            seen.epochs[-1].append(step)
            if case.first_only and isinstance(step, Failed):
                break


def _length(loader: Any) -> Any:
    try:
        return len(loader)
    except (TypeError, NotImplementedError) as error:
        return type(error), str(error)


# --- judging ----------------------------------------------------------------------------------------------------------


def judge(case: Case, workers: int, theirs: Run, ours: Run) -> None:
    """Fail unless ours shows what torch's shows."""
    assert ours.length == theirs.length, f"len(): torch {theirs.length}, ours {ours.length}"
    for epoch, (left, right) in enumerate(zip(theirs.epochs, ours.epochs, strict=True)):
        where = f"epoch {epoch}"
        if case.bag:
            _judge_bags(where, left, right)
            continue
        shape = [["batch", "error"][isinstance(s, Failed)] for s in left]
        our_shape = [["batch", "error"][isinstance(s, Failed)] for s in right]
        for place, (a, b) in enumerate(zip(left, right, strict=False)):
            _judge_step(case, workers, f"{where} step {place}", a, b)
        assert our_shape == shape, f"{where}: torch gave {len(shape)} steps {shape}, ours {len(our_shape)} {our_shape}"
    if not case.free_warnings:
        assert ours.warned == theirs.warned, "the warnings differ"
    assert ours.randomness == theirs.randomness, "the parent's random states differ after iterating"


def _judge_bags(where: str, left: list[Any], right: list[Any]) -> None:
    bags = [Counter(map(repr, side)) for side in (left, right)]
    lost, extra = list(bags[0] - bags[1]), list(bags[1] - bags[0])
    assert (lost, extra) == ([], []), f"{where}: ours lacks {lost[:3]!r:.600}, has besides {extra[:3]!r:.600}"


def _judge_step(case: Case, workers: int, where: str, theirs: Any, ours: Any) -> None:
    if isinstance(theirs, Failed) and isinstance(ours, Failed):
        _judge_error(case, workers, where, theirs.error, ours.error)
        return
    for who, one, other in (("torch", theirs, ours), ("ours", ours, theirs)):
        if isinstance(one, Failed):
            raise AssertionError(f"{where}: only {who} raised; the other gave {other!r:.300}") from one.error
    found = difference(theirs, ours)
    assert not found, f"{where} {found}"


def _judge_error(case: Case, workers: int, where: str, theirs: Exception, ours: Exception) -> None:
    for text in case.texts:
        assert text in told(theirs), f"{where}: the case is wrong, torch does not say {text!r}: {theirs}"
        assert text in told(ours), f"{where}: {text!r} is missing in {type(ours).__name__}: {ours}"
    for text in () if SELF else case.our_texts if workers else case.main_texts:
        assert text in told(ours), f"{where}: {text!r} is missing in {type(ours).__name__}: {ours}"
    if workers == 0:
        same = type(ours) is type(theirs) if case.error is None else isinstance(ours, type(theirs) | case.error)
        assert same, f"{where}: torch raises {theirs!r}, ours {ours!r}"
        assert case.main_texts or str(ours) == str(theirs), f"{where}: torch says {theirs}, ours {ours}"
        return
    allowed = (type(theirs),) if case.error is None else (type(theirs), case.error)
    assert isinstance(ours, allowed), f"{where}: torch raises {theirs!r}, ours {ours!r}"


def told(error: BaseException) -> str:
    """Return all that a user reads of an error: class, text, notes and causes."""
    return "".join(traceback.format_exception(type(error), error, None)) + str(error)


def compare(case: Case, workers: int, **extra: Any) -> None:
    """Run ``case`` on both loaders and judge."""
    if case.torch_garbles and workers > 0 and SELF:
        pytest.skip("torch's loader cannot do this with workers")
    theirs = run(TORCH, case, 0 if case.torch_garbles else workers, **extra)
    judge(case, workers, theirs, run(OURS, case, workers, **extra))
