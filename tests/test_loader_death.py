"""Workers that die and parents that die: told at once, with numbers, and nobody is left (C1, A5, A6)."""

import faulthandler
import os
import random
import signal
import subprocess
import sys
import time
import warnings

import psutil
import pytest
import torch
from torch.utils.data import Dataset

from shmloader import CopiedOutWarning, DataLoader, WorkerDied
from support import MIB, Script, no_leaks, run_file, shm_names, shmem_bytes, wait_until, write_script

ENDS = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: (faulthandler.disable(), os.kill(os.getpid(), signal.SIGSEGV)),
    "exit 3": lambda: os._exit(3),
}


@pytest.fixture(autouse=True)
def copies_are_expected(recwarn):
    """Tests that keep batches do not care which of them are copies."""
    warnings.simplefilter("ignore", CopiedOutWarning)


class Deadly(Dataset):
    """Ends its process at index 37."""

    def __init__(self, how):
        self.how = how

    def __len__(self):
        return 80

    def __getitem__(self, index):
        if index == 37:
            ENDS[self.how]()
        return torch.full((100,), index)


class Fine(Deadly):
    """Ends nobody."""

    def __getitem__(self, index):
        return torch.full((100,), index)


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("how", ENDS)
def test_a_dead_worker_is_told_at_once_with_its_indices(how, in_order):
    """WorkerDied within 5 s names 37, pid, signal or exit code; others' loaders go on; nothing leaks (C1)."""

    def check():
        other = DataLoader(Fine(""), 4, num_workers=2)
        others = iter(other)
        next(others)
        loader = DataLoader(Deadly(how), 4, num_workers=2, in_order=in_order)
        started = time.monotonic()
        iterator = iter(loader)
        pids = loader.stats().worker_pids
        with pytest.raises(WorkerDied) as caught:
            for _batch in iterator:
                pass
        assert time.monotonic() - started < 5
        error = caught.value
        assert 37 in error.indices
        assert error.pid in pids
        assert "37" in str(error)
        assert str(error.pid) in str(error)
        if how == "exit 3":
            assert (error.exitcode, error.signal) == (3, None)
        else:
            assert error.signal == signal.Signals[how]
            assert how in str(error)
        assert sum(1 for _ in others) == 19
        loader.close()
        other.close()

    with no_leaks():
        check()


def test_batches_before_the_death_are_delivered_and_stay_right():
    """What was published is read before the death is judged, and kept batches outlive it."""
    loader = DataLoader(Deadly("SIGKILL"), 4, num_workers=2)
    kept = []

    def keep_all():
        for batch in loader:
            kept.append(batch)

    with pytest.raises(WorkerDied):
        keep_all()
    assert [batch[0, 0].item() for batch in kept] == list(range(0, 36, 4))
    loader.close()
    assert [batch[3, 99].item() for batch in kept] == list(range(3, 36, 4))


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_a_loader_whose_worker_died_can_begin_again(persistent_workers):
    """The error says "start a new one with iter(loader)"; that must work."""
    loader = DataLoader(Fine(""), 4, num_workers=2, persistent_workers=persistent_workers)
    iterator = iter(loader)
    next(iterator)
    os.kill(loader.stats().worker_pids[0], signal.SIGKILL)
    with pytest.raises(WorkerDied):
        list(iterator)
    assert [batch[0, 0].item() for batch in loader] == list(range(0, 80, 4))
    loader.close()


def test_an_idle_persistent_worker_that_died_between_epochs_is_told():
    """Nobody waits when it dies; the next epoch says so, or has a new worker, and is never stuck."""
    loader = DataLoader(Fine(""), 4, num_workers=2, persistent_workers=True)
    list(loader)
    pid = loader.stats().worker_pids[1]
    os.kill(pid, signal.SIGKILL)
    wait_until("the worker is dead", lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    started = time.monotonic()
    try:
        firsts = [batch[0, 0].item() for batch in loader]
    except WorkerDied as error:
        assert error.pid == pid  # noqa: PT017 - either is fine, see the docstring
    else:
        assert firsts == list(range(0, 80, 4))
    assert time.monotonic() - started < 5
    loader.close()


BUSY = """
    import hashlib, sys, time
    from torch.utils.data import Dataset
    from shmloader import DataLoader

    class Busy(Dataset):
        def __len__(self):
            return 1000

        def __getitem__(self, index):
            if sys.argv[1] == "sleep":
                time.sleep(1000)
            if sys.argv[1] == "regex":  # holds the GIL for years
                import re
                re.match("(a+)+$", "a" * 60 + "b")
            if sys.argv[1] == "hash":
                hashlib.pbkdf2_hmac("sha256", b"x", b"y", 1 << 31)
            return index

    if __name__ == "__main__":
        iterator = iter(DataLoader(Busy(), 4, num_workers=2, multiprocessing_context=sys.argv[2]))
        if sys.argv[1] == "idle":
            next(iterator)
        print("pids", *[process.pid for process in iterator._workers], flush=True)
        if sys.argv[3] == "wait":
            time.sleep(1000)
"""


def assert_gone(pids, timeout=3.0):
    """No process of these is left (a zombie that init has not reaped yet is none)."""

    def gone():
        for pid in pids:
            try:
                if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    return False
            except psutil.NoSuchProcess:
                continue
        return True

    wait_until(f"workers {pids} are gone", gone, timeout)


@pytest.mark.parametrize(
    "what", ["idle", "regex", *(pytest.param(what, marks=pytest.mark.slow) for what in ("sleep", "hash"))]
)
def test_workers_of_a_killed_parent_are_gone_within_three_seconds(what):
    """Idle, asleep, or in C code that holds the GIL: no orphan goes on (A5)."""
    with Script(BUSY, args=[what, "fork", "wait"]) as script:
        script.read_until("\n")
        pids = [int(pid) for pid in script.output.split()[1:3]]
        wait_until("workers are at work", lambda: all(psutil.Process(pid).status() != "zombie" for pid in pids))
        os.kill(script.pid, signal.SIGKILL)
        assert_gone(pids)


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["fork", "forkserver", "spawn"])
def test_workers_that_still_start_when_their_parent_dies_leave_too(tmp_path, start_method):
    """The parent is killed right after ``iter``; workers that only then begin find that out at once."""
    path = write_script(tmp_path, BUSY)
    with subprocess.Popen(
        [sys.executable, str(path), "sleep", start_method, "wait"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as child:
        assert child.stdout is not None
        pids = [int(pid) for pid in child.stdout.readline().split()[1:3]]
        child.kill()
        child.wait()
        assert_gone(pids, timeout=20.0)  # importing torch comes first
        child.stdout.close()


FULL_SPEED = """
    import torch
    from torch.utils.data import TensorDataset
    from shmloader import DataLoader

    dataset = TensorDataset(torch.zeros(4096, 4096), torch.arange(4096))
    print("begin", flush=True)
    for round in range(1000):
        kept = [batch for batch, _ in zip(DataLoader(dataset, 64, num_workers=2), range(round % 7 + 1))]
"""


def kill_at_random_moments(count, seed):
    """Kill the whole group of a busy script after a random time, so often."""
    rng = random.Random(seed)
    names, shmem = shm_names(), shmem_bytes()
    for _ in range(count):
        with Script(FULL_SPEED) as script:
            if rng.random() < 0.8:
                script.read_until("begin")
            time.sleep(rng.random() * 0.4)  # the random moment itself, nothing is synchronised by it
            group = [child.pid for child in psutil.Process(script.pid).children(recursive=True)]
            script.kill()
        assert_gone(group)
    left = {name for name in shm_names() - names if "shmloader" in name}
    assert left == set(), f"seed {seed}"
    wait_until(f"Shmem as before (seed {seed})", lambda: shmem_bytes() - shmem < 24 * MIB, 10.0)


@pytest.mark.alone
def test_a_killed_group_leaves_nothing_at_two_random_moments():
    """No name in /dev/shm, no shared memory, no process (A5)."""
    kill_at_random_moments(2, random.randrange(1 << 30))


@pytest.mark.alone
@pytest.mark.slow
def test_a_killed_group_leaves_nothing_at_twenty_random_moments():
    """The same, start-up included, 20 times."""
    kill_at_random_moments(20, random.randrange(1 << 30))


QUIET = """
    import os, signal, sys, torch
    from torch.utils.data import TensorDataset
    from shmloader import DataLoader, WorkerDied

    if __name__ == "__main__":
        loader = DataLoader(TensorDataset(torch.arange(400)), 4, num_workers=2, multiprocessing_context=sys.argv[1])
        kept = next(iter(loader))
        iterator = iter(loader)
        for batch, _ in zip(iterator, range(3)):
            pass
        os.kill(loader.stats().worker_pids[0], signal.SIGKILL)
        try:
            list(iterator)
        except WorkerDied:
            print("died", kept[0].tolist(), batch[0].tolist())
"""


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["fork", "forkserver", "spawn"])
def test_a_worker_that_died_takes_nothing_away_and_nothing_is_printed(tmp_path, start_method):
    """Kept batches are still there, and no resource tracker complains (A6)."""
    result = run_file(write_script(tmp_path, QUIET), args=[start_method]).silent()
    assert result.stdout == "died [0, 1, 2, 3] [8, 9, 10, 11]\n"
