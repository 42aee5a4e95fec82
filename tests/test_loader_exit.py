"""The end of a program, in every way it can end: soon, clean stderr, the right exit code, nobody left (C3, A6)."""

import contextlib
import os
import signal
import time

import psutil
import pytest

from support import Script, run_file, run_script, shm_names, wait_until, write_script

# Promised are two seconds on a machine of one's own. A machine that runs tests beside others gets more; what this
# must tell apart is a wait per worker (8 x 5 s in torch's loader) or for a sample that takes 1,000 s.
SOON_S = 15.0

PROLOGUE = """
import os, signal, sys, time, warnings
import torch
from torch.utils.data import Dataset
from shmloader import DataLoader

warnings.filterwarnings("ignore", message="This DataLoader will create")

class Data(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        time.sleep({sleep})
        return torch.full((1000,), index)

def ready():
    pids = loader.stats().worker_pids
    print("pids", *pids, "at", time.time(), flush=True)

def closed():
    print("closed", time.time(), flush=True)
"""

MAIN = """
if __name__ == "__main__":
    loader = DataLoader(Data(), {batch_size}, num_workers=8, multiprocessing_context=sys.argv[1])
    {body}
"""

BEGIN = "iterator = iter(loader); next(iterator); ready()"

WAYS = {
    "break": """
    for number, batch in enumerate(loader):
        if number == 3:
            ready()
            break
""",
    "fall off": BEGIN,
    "close": f"{BEGIN}; loader.close(); closed()",
    "with": """
    with loader:
        iterator = iter(loader)
        next(iterator)
        ready()
    closed()
""",
    "del": f"{BEGIN}; del iterator; closed()",
    "kept": """
    kept = []
    for batch in loader:
        kept.append(batch)
        if len(kept) == 3:
            ready()
            break
""",
    "sys.exit": f"{BEGIN}; sys.exit(7)",
    "exception": f"{BEGIN}; raise KeyError('mine')",
    "cycle": """
    iterator = iter(loader)
    next(iterator)
    ready()
    holder = [loader, iterator]
    holder.append(holder)
""",
    "persistent": """
    loader = DataLoader(Data(), 4, num_workers=8, persistent_workers=True)
    next(iter(loader))
    ready()
""",
}
CODES = {"sys.exit": 7, "exception": 1}


def script(way, sleep="0.0", batch_size=4):
    """The source of a program that ends in one way. ``sleep`` is an expression in ``index``: seconds in a sample."""
    return PROLOGUE.format(sleep=sleep) + MAIN.format(body=WAYS[way], batch_size=batch_size)


def told(stdout):
    """The worker pids and the moment that ``ready()`` printed."""
    words = next(line for line in stdout.splitlines() if line.startswith("pids")).split()
    pids = [int(word) for word in words[1:-2]]
    assert len(pids) == 8
    return pids, float(words[-1])


def check_end(result, way):
    """Exit code, silence, nobody left, and soon."""
    ended = time.time()
    assert result.returncode == CODES.get(way, 0), result.stderr
    if way == "exception":
        assert result.stderr.count("Traceback") == 1
        assert result.stderr.rstrip().endswith("KeyError: 'mine'")
    else:
        assert result.stderr == ""
    pids, began = told(result.stdout)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert ended - began < SOON_S


def our_names():
    return {name for name in shm_names() if "shmloader" in name}


QUICK = ("break", "persistent")


@pytest.mark.parametrize("way", [way if way in QUICK else pytest.param(way, marks=pytest.mark.slow) for way in WAYS])
def test_a_program_ends_cleanly_and_soon_with_eight_workers(way):
    """Left in the middle of an epoch by break, exit, exception, ``with``, ``del``: quiet, quick, right code."""
    names = our_names()
    check_end(run_script(script(way), args=["fork"]), way)
    assert our_names() <= names


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
@pytest.mark.parametrize("way", ["break", "close", "exception"])
def test_a_program_ends_cleanly_whatever_the_start_method(tmp_path, start_method, way):
    """No line of a resource tracker, no traceback of a worker (A6)."""
    check_end(run_file(write_script(tmp_path, script(way)), args=[start_method], timeout=120), way)


def test_workers_that_are_asleep_in_a_sample_do_not_delay_the_end():
    """Eight workers in samples of 1,000 s: close() ends them all the same."""
    source = script("close", sleep="1000 if index > 8 else 0", batch_size=1)
    result = run_script(source, args=["fork"]).silent()
    closed = next(line for line in result.stdout.splitlines() if line.startswith("closed"))
    assert float(closed.split()[1]) - told(result.stdout)[1] < SOON_S


INTERRUPTED = """
if __name__ == "__main__":
    loader = DataLoader(Data(), 4, num_workers=8, multiprocessing_context=sys.argv[1])
    for number, batch in enumerate(loader):
        if number == 3:
            ready()
        if number == 5 and {pausing}:
            while True:
                signal.pause()
"""


def interrupted(sleep="0.0", pausing=True):
    """A program in the middle of an epoch: asleep in its own code, or waiting for a batch."""
    return PROLOGUE.format(sleep=sleep) + INTERRUPTED.format(pausing=pausing)


@pytest.mark.parametrize(
    ("sleep", "pausing"),
    [
        ("0.0", True),
        pytest.param("0.05", True, marks=pytest.mark.slow),
        pytest.param("1000 if index > 60 else 0", False, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ctrl_c_to_the_group_is_one_keyboard_interrupt(sleep, pausing):
    """SIGINT to main process and workers at once: one traceback, ended soon, nobody left (C3)."""
    with Script(interrupted(sleep, pausing), args=["fork"]) as child:
        pids, _ = told(child.read_until("\n"))
        os.killpg(child.pid, signal.SIGINT)
        started = time.monotonic()
        assert child.wait() == -signal.SIGINT
        assert time.monotonic() - started < SOON_S
        output = child.read_until("KeyboardInterrupt\n")
        wait_until("workers are gone", lambda: not any(psutil.pid_exists(pid) for pid in pids))
    assert output.count("Traceback") == 1, output
    assert output.count("KeyboardInterrupt") == 1, output


STARTING = """
# An interrupt between open() and the "with" around it leaves the file to its reference count, which warns in tests.
warnings.simplefilter("ignore", ResourceWarning)

if __name__ == "__main__":
    print("begin", flush=True)
    while True:
        loader = DataLoader(Data(), 4, num_workers=8)
        iterator = iter(loader)
        next(iterator)
        loader.close()
"""


@pytest.mark.parametrize("delay_s", [0.03, *(pytest.param(s, marks=pytest.mark.slow) for s in (0.0, 0.11))])
def test_ctrl_c_during_start_up_ends_everything(delay_s):
    """Workers are being started or ended when SIGINT comes: nobody is left, and no worker prints anything."""
    with Script(PROLOGUE.format(sleep="0.0") + STARTING) as child:
        child.read_until("begin\n")
        time.sleep(delay_s)  # picks the moment; right whatever moment it is
        os.killpg(child.pid, signal.SIGINT)
        assert child.wait() == -signal.SIGINT
        output = child.read_until("KeyboardInterrupt\n")
        wait_until("the group is empty", lambda: not group_members(child.pid))
    assert output.count("Traceback") == 1, output
    assert output.rstrip().endswith("KeyboardInterrupt"), output


def group_members(group):
    """Processes of a group that have not ended."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
    return members


@pytest.mark.slow
def test_sigterm_leaves_no_worker():
    """The polite kill of a job scheduler, to the main process alone."""
    with Script(interrupted(), args=["fork"]) as child:
        pids, _ = told(child.read_until("\n"))
        os.kill(child.pid, signal.SIGTERM)
        assert child.wait() == -signal.SIGTERM
        wait_until("workers are gone", lambda: not any(psutil.pid_exists(pid) for pid in pids))
