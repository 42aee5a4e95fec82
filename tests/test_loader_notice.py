"""Who waits is told: of any worker's death within a second, of a stuck worker once (C1, C10, C2)."""

import os
import signal
import subprocess
import threading
import time
import warnings

import psutil
import pytest
import torch
from torch.utils.data import Dataset

from shmloader import DataLoader, WorkerDied, WorkerStuckWarning
from shmloader.oom import oom_kills_since, read_oom_kills
from support import kill_group, no_leaks, run_script, script_command, wait_until

# Promised is one second on a machine of one's own; what this must tell apart is a wait for the sleeping worker.
SOON_S = 10.0


class Nap(Dataset):
    """Worker 0 (even samples) sleeps in sample 4 for as long as it is let; the others are quick."""

    def __init__(self, at=4, seconds=1000.0, fork=False):
        self.at, self.seconds, self.fork = at, seconds, fork

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if self.fork and index == 1 and os.fork() == 0:
            signal.pause()  # a child of the worker, with copies of all its descriptors, that lives on
        if index == self.at:
            time.sleep(self.seconds)
        return torch.full((10,), index)


def killed_while_waiting(dataset):
    """Worker 1 dies while the main process waits for worker 0's batch: what is raised, and how soon."""
    loader = DataLoader(dataset, 1, num_workers=2)
    iterator = iter(loader)
    found = [next(iterator)[0, 0].item() for _ in range(4)]
    assert found == [0, 1, 2, 3]
    pids = loader.stats().worker_pids
    children = psutil.Process(pids[1]).children()
    moment = []

    def kill():
        moment.append(time.monotonic())
        os.kill(pids[1], signal.SIGKILL)

    timer = threading.Timer(0.2, kill)
    timer.start()
    try:
        with pytest.raises(WorkerDied) as caught:
            next(iterator)
        seconds = time.monotonic() - moment[0]
    finally:
        timer.join()
        for child in children:
            child.kill()
    loader.close()
    return caught.value.worker, caught.value.pid == pids[1], seconds


@pytest.mark.parametrize("fork", [False, True])
def test_the_death_of_another_worker_ends_the_wait_for_a_slow_one(fork):
    """C1: not when its batch is next, but at once; a child of the dead that lives on hides nothing."""
    with no_leaks():
        worker, right_pid, seconds = killed_while_waiting(Nap(fork=fork))
    assert (worker, right_pid) == (1, True)
    assert seconds < SOON_S


def test_a_batch_that_comes_soon_after_a_death_is_delivered_before_it_is_told():
    """In order: the others' batches that come before those of the dead still count, if they are quick."""
    loader = DataLoader(Nap(seconds=0.15), 1, num_workers=2)
    iterator = iter(loader)
    assert [next(iterator)[0, 0].item() for _ in range(4)] == [0, 1, 2, 3]
    pid = loader.stats().worker_pids[1]
    wait_until("worker 1 has nothing to do", lambda: psutil.Process(pid).status() == psutil.STATUS_SLEEPING)
    os.kill(pid, signal.SIGKILL)
    assert next(iterator)[0, 0].item() == 4
    with pytest.raises(WorkerDied):
        list(iterator)
    loader.close()


def test_a_worker_whose_stream_has_ended_may_die_unnoticed():
    """Nobody waits for it any more: the rest of the epoch comes."""

    class Streams(torch.utils.data.IterableDataset):
        def __iter__(self):
            worker = torch.utils.data.get_worker_info().id
            return iter(range(2)) if worker else iter(range(100, 130))

    loader = DataLoader(Streams(), 1, num_workers=2)
    iterator = iter(loader)
    found = [next(iterator).item() for _ in range(12)]
    os.kill(loader.stats().worker_pids[1], signal.SIGKILL)
    found += [batch.item() for batch in iterator]
    assert sorted(found) == [0, 1, *range(100, 130)]
    loader.close()


@pytest.mark.parametrize("in_order", [True, False])
def test_a_stuck_worker_is_told_once_with_indices_and_stack(in_order):
    """C10: after warn_stuck_s one warning: worker, pid, index, the line it sleeps in; then the wait goes on."""
    loader = DataLoader(Nap(seconds=1.0), 1, num_workers=1, in_order=in_order, warn_stuck_s=0.3)
    with pytest.warns(WorkerStuckWarning) as caught:
        found = [batch[0, 0].item() for batch in loader]
    assert found == list(range(40))
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "worker 0 (pid" in text
    assert "indices [4]" in text
    assert "in __getitem__" in text
    loader.close()


def test_no_warning_where_nothing_is_stuck_or_none_is_wanted():
    """Quick batches, and warn_stuck_s=None."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for arguments in ({}, {"warn_stuck_s": None}, {"warn_stuck_s": 0}):
            loader = DataLoader(Nap(seconds=0.3), 1, num_workers=1, **arguments)
            assert sum(1 for _ in loader) == 40
            loader.close()


def test_a_workers_death_tells_the_counters_of_kills_for_want_of_memory():
    """C1: before and after, of every control group above and of the host."""
    loader = DataLoader(Nap(at=-1), 1, num_workers=1)
    iterator = iter(loader)
    next(iterator)
    os.kill(loader.stats().worker_pids[0], signal.SIGKILL)
    with pytest.raises(WorkerDied) as caught:
        list(iterator)
    counters = {kills.source for kills in caught.value.oom_kills}
    assert counters == set(read_oom_kills())
    assert all(kills.after >= kills.before for kills in caught.value.oom_kills)
    if counters:
        assert "kills for want of memory: " in str(caught.value)
    loader.close()


def test_counters_are_read_from_both_versions_of_control_groups(tmp_path):
    """A made-up host: own group and the ones above, version 2 and version 1, and /proc/vmstat."""
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (root / "unified" / "pod" / "job").mkdir(parents=True)
    (root / "memory" / "job").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("5:memory:/job\n0::/pod/job\n")
    (proc / "vmstat").write_text("nr_free_pages 5\noom_kill 7\n")
    for folder, count in ((root / "unified" / "pod" / "job", 1), (root / "unified" / "pod", 2)):
        (folder / "memory.events").write_text(f"low 0\noom 3\noom_kill {count}\n")
    (root / "memory" / "job" / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 4\n")
    found = read_oom_kills(str(proc), str(root))
    assert sorted(found.values()) == [1, 2, 4, 7]
    assert all(source.endswith(" oom_kill") for source in found)
    gone = oom_kills_since({"/nowhere oom_kill": 3})
    assert (gone[0].before, gone[0].after) == (3, 3)


ORPHANS = """
    import os, signal, sys, time, torch
    from torch.utils.data import Dataset
    from shmloader import DataLoader

    class Nap(Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            if index > 8:
                time.sleep(1000)
            return index

    iterator = iter(DataLoader(Nap(), 1, num_workers=2))
    next(iterator)
    child = os.fork()
    if child == 0:
        time.sleep(1000)  # a child of the user's, which outlives its parent
    print(child, *[process.pid for process in iterator._workers], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_of_a_killed_parent_are_gone_though_a_child_of_it_lives_on():
    """A5: the child has copies of everything, but not of the life lines."""
    seen = []

    def gone(pid):
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    with subprocess.Popen(
        script_command(ORPHANS), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    ) as parent:
        try:
            assert parent.stdout is not None
            child, *workers = map(int, parent.stdout.readline().split())
            parent.wait(SOON_S)
            wait_until("the workers are gone", lambda: all(map(gone, workers)), SOON_S)
            seen.append(gone(child))
        finally:
            kill_group(parent.pid)
    assert seen == [False], "the child was to live on"


EXITING = """
    import os, sys, torch
    from torch.utils.data import Dataset
    from shmloader import DataLoader

    class Leaves(Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            return torch.full((10,), index)

    iterator = iter(DataLoader(Leaves(), 1, num_workers=2))
    next(iterator)
    print(*[process.pid for process in iterator._workers], flush=True)
    os._exit(5)
"""


def test_os_exit_of_the_main_process_leaves_no_worker_and_no_word():
    """C3: no finaliser runs; the kernel ends the life lines."""
    result = run_script(EXITING)
    assert (result.returncode, result.stderr) == (5, "")
    pids = [int(word) for word in result.stdout.split()]
    wait_until("workers are gone", lambda: not any(psutil.pid_exists(pid) for pid in pids), SOON_S)
