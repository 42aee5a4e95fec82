"""A user's own fork in the middle of it all: the child ends as it likes, the parent never notices."""

import itertools
import os
import select
import signal
import traceback

import pytest
import torch
from torch.utils.data import TensorDataset

from shmloader import DataLoader
from support import DEADLINE_S, no_leaks, run_script, wait_until

DATASET = TensorDataset(torch.arange(1, 401).repeat_interleave(500).view(400, 500))


def fork(body):
    """Run ``body`` in a fork that then ends by ``os._exit``, with a traceback and 1 if it raised. Return the pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        body()
        code = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(code)


def reap(pid):
    """Wait for a child and return its exit code; one that is alive at the deadline is killed and gives -9."""
    codes = []

    def ended():
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            codes.append(os.waitstatus_to_exitcode(status))
        return bool(found)

    try:
        wait_until(f"child {pid} has ended", ended)
    finally:
        if not codes:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return codes[0]


def in_child(body):
    """Run ``body`` in a fork and wait for it; it must not raise."""
    assert reap(fork(body)) == 0


CHILDREN = {
    "nothing": lambda loader, iterator: None,
    "close": lambda loader, iterator: loader.close(),
    "shutdown": lambda loader, iterator: iterator._shutdown_workers(),
    "own epoch": lambda loader, iterator: check([batch for (batch,), _ in zip(loader, range(3), strict=False)]),
    "stats": lambda loader, iterator: loader.stats(),
}


def check(batches, first=0):
    """Batches of 4 in order, each row full of its number."""
    for number, batch in enumerate(batches, first):
        assert batch[:, 0].tolist() == list(range(4 * number + 1, 4 * number + 5)), number
        assert (batch == batch[:, :1]).all()


@pytest.mark.parametrize(
    ("what", "num_workers", "persistent_workers"),
    [
        *itertools.product(CHILDREN, (0, 2), (False,)),
        # A persistent iterator belongs to the process that began it: no epochs of the child's own.
        *itertools.product(sorted(set(CHILDREN) - {"own epoch"}), (2,), (True,)),
    ],
)
def test_a_child_forked_in_the_middle_of_an_epoch_harms_nobody(what, num_workers, persistent_workers):
    """Whatever the child does with its copy, the parent's kept batches and the rest of its epoch are right."""

    def run():
        loader = DataLoader(DATASET, 4, num_workers=num_workers, persistent_workers=persistent_workers)
        list(itertools.islice(loader, 2))  # leaves an idle arena behind
        iterator = iter(loader)
        kept = [next(iterator)[0] for _ in range(2)]
        in_child(lambda: CHILDREN[what](loader, iterator))
        check(kept)
        check([batch.clone() for (batch,) in iterator], first=2)
        check(kept)
        loader.close()

    with no_leaks():
        run()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_child_that_closes_what_was_idle_at_its_fork_zeroes_nothing(num_workers):
    """The arena was idle when the child was made and is in use in the parent when the child closes it."""
    loader = DataLoader(DATASET, 4, num_workers=num_workers)
    sum(1 for _ in itertools.islice(loader, 3))
    read_go, write_go = os.pipe()
    read_done, write_done = os.pipe()

    def close_when_told():
        os.read(read_go, 1)
        loader.close()
        os.write(write_done, b"x")

    pid = fork(close_when_told)
    kept = [batch for (batch,), _ in zip(loader, range(2), strict=False)]
    os.write(write_go, b"x")
    assert select.select([read_done], [], [], DEADLINE_S)[0], "the child did not close its loader"
    assert reap(pid) == 0
    check(kept)
    for fd in (read_go, write_go, read_done, write_done):
        os.close(fd)
    loader.close()


NORMAL_END = """
    import os, sys, torch
    from torch.utils.data import TensorDataset
    from shmloader import DataLoader

    dataset = TensorDataset(torch.arange(1, 401).repeat_interleave(500).view(400, 500))
    other = DataLoader(dataset, 4, num_workers=2)
    for _, _ in zip(other, range(2)):
        pass
    loader = DataLoader(dataset, 4, num_workers=2)
    iterator = iter(loader)
    kept = [next(iterator)[0], next(iterator)[0]]
    pid = os.fork()
    if pid == 0:
        sys.exit(5)  # with all of Python's own ways of tidying up
    late = next(iter(other))[0]
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    for number, batch in enumerate(kept):
        assert batch[:, 0].tolist() == list(range(4 * number + 1, 4 * number + 5))
    assert late[:, -1].tolist() == [1, 2, 3, 4]
    rest = [batch[0, 0].item() for batch, in iterator]
    assert rest == list(range(9, 401, 4)), rest
    print("parent is fine", flush=True)
"""


def test_a_child_that_ends_normally_runs_no_teardown_of_its_parents_workers():
    """``sys.exit`` in the child runs finalisers and atexit functions; the parent's workers and batches stay."""
    assert run_script(NORMAL_END).silent().stdout == "parent is fine\n"


def test_a_loader_inside_a_forked_child_is_its_own():
    """A loader that was used in the parent works in a child made later, with workers of the child's own."""
    loader = DataLoader(DATASET, 4, num_workers=2)
    sum(1 for _ in loader)

    def use():
        check([batch.clone() for (batch,) in loader])
        loader.close()

    in_child(use)
    check([batch.clone() for (batch,) in loader])
    loader.close()


def test_workers_end_though_a_users_child_holds_copies_of_all_descriptors():
    """A child that sleeps on cannot keep the parent's workers: close() is done in time, and nobody waits for it."""
    loader = DataLoader(DATASET, 4, num_workers=2)
    iterator = iter(loader)
    next(iterator)
    pids = loader.stats().worker_pids
    assert len(pids) == 2
    pid = fork(signal.pause)
    try:
        loader.close()
        assert loader.stats().worker_pids == ()
        for worker in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(worker, 0)
    finally:
        os.kill(pid, signal.SIGKILL)
        assert reap(pid) == -signal.SIGKILL
