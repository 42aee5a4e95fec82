"""The random states of a worker survive its death at any instruction: what was told of is behind, the rest is ahead."""

import random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from shmloader.mailbox import label_of
from shmloader.randomstates import STATES_BYTES, RandomStates, current_states, set_states


def draw():
    """Numbers from all three generators."""
    return random.random(), float(np.random.normal()), torch.rand(()).item()


def keep_own_states(test):
    """Give the process its generators back afterwards."""

    def wrapped():
        before = current_states()
        try:
            test()
        finally:
            set_states(before)

    wrapped.__name__, wrapped.__doc__ = test.__name__, test.__doc__
    return wrapped


@keep_own_states
@given(
    batches=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    dies_at=st.integers(0, 11),
    torn=st.sampled_from(["before saving", "head gone", "half written", "saved, not told"]),
)
def test_what_is_made_again_draws_what_it_drew(batches, dies_at, torn):
    """A worker draws so many numbers per batch and dies in one: the successor's numbers are an undisturbed run's."""
    memory = np.zeros(STATES_BYTES, np.uint8)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    start = current_states()
    calm = [[draw() for _ in range(count)] for count in batches]
    set_states(start)
    dies_at = min(dies_at, len(batches) - 1)
    first = RandomStates(memory)
    for batch, count in enumerate(batches[: dies_at + 1]):
        assert [draw() for _ in range(count)] == calm[batch]
        if batch < dies_at:
            first.save(label_of(0, batch))
    if torn != "before saving":
        before = memory.copy()
        first.save(label_of(0, dies_at))
        changed = np.flatnonzero(before != memory)
        if torn == "head gone" and len(changed):
            memory[(changed[0] // 16384) * 16384 :][:8] = 0
        elif torn == "half written" and len(changed):
            half = changed[len(changed) // 2 :]
            memory[half] = before[half]
    set_states(start)  # as a successor is seeded
    second = RandomStates(memory)
    second.restore(before=label_of(0, dies_at))
    for batch in range(dies_at, len(batches)):
        assert [draw() for _ in range(batches[batch])] == calm[batch], (batch, torn)
        second.save(label_of(0, batch))


def test_labels_rise_over_epochs():
    """A persistent worker's tickets are numbered through."""
    labels = [label_of(epoch, batch) for epoch in range(3) for batch in (0, 1, 1 << 30)]
    assert labels == sorted(labels)
    assert labels[0] == 1
