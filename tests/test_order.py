"""The order of an epoch: torch's, to the last index and to the last random number drawn."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler

from shmloader import order
from shmloader.order import index_batches


def as_lists(batches):
    """Batches of ints, however they come."""
    return [batch.tolist() if isinstance(batch, np.ndarray) else list(batch) for batch in batches]


def both(make_sampler, seed):
    """Run torch's iteration and ours from the same state; return both results and both states afterwards."""
    results = []
    for iterate in (iter, index_batches):
        torch.manual_seed(seed)
        sampler, generator = make_sampler()
        batches = as_lists(iterate(sampler))
        states = [torch.get_rng_state(), *([generator.get_state()] if generator is not None else [])]
        results.append((batches, states))
    return results


def assert_same(results):
    """Same batches, same random state."""
    (expected, their_states), (found, our_states) = results
    assert found == expected
    assert all(torch.equal(a, b) for a, b in zip(their_states, our_states, strict=True))


@given(
    n=st.integers(1, 50),
    batch_size=st.integers(1, 17),
    drop_last=st.booleans(),
    num_samples=st.none() | st.integers(1, 130),
    given_generator=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=200, deadline=None)
def test_shuffled_batches_and_random_state_are_torchs(n, batch_size, drop_last, num_samples, given_generator, seed):
    """For any length, batch size, drop_last, num_samples and generator: same batches, and as many numbers drawn."""

    def make():
        generator = torch.Generator() if given_generator else None
        if generator is not None:
            generator.manual_seed(seed + 1)
        sampler = RandomSampler(range(n), num_samples=num_samples, generator=generator)
        return BatchSampler(sampler, batch_size, drop_last), generator

    assert_same(both(make, seed))


@given(n=st.integers(0, 60), batch_size=st.integers(1, 17), drop_last=st.booleans())
@settings(max_examples=100, deadline=None)
def test_sequential_batches_are_torchs(n, batch_size, drop_last):
    """Nothing is drawn, nothing is left out."""
    assert_same(both(lambda: (BatchSampler(SequentialSampler(range(n)), batch_size, drop_last), None), 3))


@pytest.mark.parametrize("run", [1, 2, 3, 7, 8, 9])
@pytest.mark.parametrize(
    ("n", "batch_size", "drop_last"), [*itertools.product((1, 7, 23, 24), (1, 5, 8), (True, False))]
)
def test_batches_that_span_runs_are_torchs(monkeypatch, run, n, batch_size, drop_last):
    """Where one piece of the sequence ends and the next begins cannot be seen in the batches."""
    monkeypatch.setattr(order, "_RUN", run)
    sampler = BatchSampler(SequentialSampler(range(n)), batch_size, drop_last)
    assert as_lists(index_batches(sampler)) == list(sampler)


@given(n=st.integers(1, 20), batch_size=st.integers(1, 9), num_samples=st.integers(1, 90), stop=st.integers(0, 12))
@settings(max_examples=60, deadline=None)
def test_an_epoch_left_early_has_drawn_what_torch_had_drawn(n, batch_size, num_samples, stop):
    """Random numbers are drawn at the same moments, never ahead of time: a break leaves the generator as torch does."""
    states = []
    for iterate in (iter, index_batches):
        generator = torch.Generator()
        generator.manual_seed(5)
        sampler = RandomSampler(range(n), num_samples=num_samples, generator=generator)
        for _ in itertools.islice(iterate(BatchSampler(sampler, batch_size, False)), stop):
            pass
        states.append(generator.get_state())
    assert torch.equal(*states)


def test_nothing_is_drawn_before_the_first_batch():
    """Making the iterator alone leaves the random state as it is, as torch's does."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    index_batches(BatchSampler(RandomSampler(range(10)), 2, False))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    "sampler",
    [
        [[3, 1], [0]],
        [["a", "b"], ("c",)],
        BatchSampler(SubsetRandomSampler([4, 5, 6]), 2, False),
        RandomSampler(range(6), replacement=True, num_samples=9),
        BatchSampler(RandomSampler(range(6), replacement=True, num_samples=9), 2, False),
        SequentialSampler(range(4)),
    ],
)
def test_all_other_samplers_are_iterated_as_they_are(sampler):
    """Lists, strings, replacement, no batches: what comes out is the very thing that torch's loader would get."""
    torch.manual_seed(4)
    expected = list(sampler)
    torch.manual_seed(4)
    found = list(index_batches(sampler))
    assert found == expected
    assert [type(a) for a in found] == [type(b) for b in expected]


def test_a_subclass_of_a_sampler_is_asked_itself():
    """A user's ``__iter__`` is never bypassed."""

    class Backwards(SequentialSampler):
        def __iter__(self):
            return iter(range(len(self) - 1, -1, -1))

    class Twice(BatchSampler):
        def __iter__(self):
            for batch in super().__iter__():
                yield batch
                yield batch

    assert as_lists(index_batches(BatchSampler(Backwards(range(4)), 3, False))) == [[3, 2, 1], [0]]
    assert as_lists(index_batches(Twice(SequentialSampler(range(3)), 2, False))) == [[0, 1], [0, 1], [2], [2]]


def test_an_epoch_of_a_hundred_million_samples_begins_at_once():
    """The first batch costs a piece of the order, not the whole: far less memory than 8 bytes a sample (C7)."""
    batches = index_batches(BatchSampler(SequentialSampler(range(100_000_000)), 256, False))
    first = next(batches)
    assert first.tolist() == list(range(256))
    assert first.dtype == np.int64
    assert first.base is not None
    assert first.base.nbytes <= 16 << 20


def test_the_draws_of_torch_are_not_disturbed_by_a_sampler_of_length_zero():
    """An empty sequential order has no batch."""
    assert list(index_batches(BatchSampler(SequentialSampler(range(0)), 4, False))) == []
