"""on_worker_death="restart": a new worker takes over, and the epoch is that of an undisturbed run (C1, A7)."""

import os
import random
import signal
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from shmloader import BadSampleWarning, DataLoader, PackedDataset, WorkerDied, pack
from support import no_leaks, run_file, start_methods, write_script


class Noisy(Dataset):
    """Samples with numbers from all three global generators; each index in ``deadly`` kills its worker so often."""

    def __init__(self, folder, deadly=None, length=96, how=signal.SIGKILL):
        self.folder = str(folder)
        self.deadly = deadly or {}
        self.length = length
        self.how = how

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        noise = random.random(), float(np.random.normal()), torch.rand(3)
        if index in self.deadly:
            with open(os.path.join(self.folder, str(index)), "a") as file:
                file.write("x")
                file.flush()
                if file.tell() <= self.deadly[index]:
                    os.kill(os.getpid(), self.how)
        return index, *noise


class NoisyInBulk(Noisy):
    """The same, asked for a batch at a time."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def epochs(dataset, count=1, **arguments):
    """All batches of some epochs as lists, and the statistics."""
    arguments = {"batch_size": 4, "num_workers": 2, "shuffle": True, **arguments}
    torch.manual_seed(7)
    loader = DataLoader(dataset, on_worker_death="restart", **arguments)
    found = [[[field.tolist() for field in batch] for batch in loader] for _ in range(count)]
    stats = loader.stats()
    loader.close()
    return found, stats


@pytest.mark.parametrize("persistent_workers", [False, True])
@pytest.mark.parametrize("kind", [Noisy, NoisyInBulk])
def test_epochs_with_deaths_are_those_without(tmp_path, persistent_workers, kind):
    """Order, samples and random numbers of all three generators; in the first batch, in the middle, twice at one
    place."""
    with no_leaks():
        calm, before = epochs(kind(tmp_path), 2, persistent_workers=persistent_workers)
        deadly = {3: 1, 40: 2, 41: 1, 77: 1}
        wild, after = epochs(kind(tmp_path, deadly), 2, persistent_workers=persistent_workers)
    assert wild == calm
    assert (before.worker_restarts, after.worker_restarts) == (0, 5)


@pytest.mark.parametrize(
    "arguments", [{"in_order": False, "shuffle": False}, {"prefetch_factor": 5}, {"batch_size": 1}]
)
def test_other_ways_of_iterating_survive_too(tmp_path, arguments):
    """Unordered, the same batches in some order; with many tickets under way; with one sample a batch."""
    calm, _ = epochs(Noisy(tmp_path), **arguments)
    wild, stats = epochs(Noisy(tmp_path, {5: 1, 50: 1, 95: 2}), **arguments)
    assert stats.worker_restarts == 4
    indices = sorted(index for batch in wild[0] for index in batch[0])
    assert indices == list(range(96))
    if arguments.get("in_order", True):
        assert wild == calm


def test_kept_batches_outlive_the_worker_that_made_them(tmp_path):
    """Slots that are lent are not given to the successor."""
    loader = DataLoader(Noisy(tmp_path, {30: 1, 70: 1}), 4, num_workers=2, on_worker_death="restart")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kept = list(loader)
    assert [batch[0].tolist() for batch in kept] == [list(range(i, i + 4)) for i in range(0, 96, 4)]
    assert loader.stats().worker_restarts == 2
    loader.close()


@pytest.mark.parametrize("kind", [Noisy, NoisyInBulk])
def test_a_sample_that_always_kills_is_named(tmp_path, kind):
    """Three deaths in a row at one sample: WorkerDied names the one index, not the batch, and how often."""

    def check():
        loader = DataLoader(kind(tmp_path, {42: 99}), 4, num_workers=2, on_worker_death="restart")
        found = []
        with pytest.raises(WorkerDied) as caught:
            found.extend(batch[0].tolist() for batch in loader)
        assert caught.value.indices == (42,)
        assert caught.value.deaths == 3
        assert "3 workers in a row" in str(caught.value)
        assert found == [list(range(i, i + 4)) for i in range(0, 4 * len(found), 4)]
        loader.close()

    with no_leaks():
        check()


@pytest.mark.parametrize("policy", ["skip", "replace"])
@pytest.mark.parametrize("kind", [Noisy, NoisyInBulk])
def test_a_sample_that_always_kills_is_avoided_if_the_user_said_so(tmp_path, policy, kind):
    """Two such samples, in one batch and in another: left out or replaced, listed with the signal."""
    dataset = kind(tmp_path, {41: 99, 42: 99, 60: 99})
    with pytest.warns(BadSampleWarning, match="SIGKILL"):
        found, stats = epochs(dataset, shuffle=False, on_bad_sample=policy)
    labels = [batch[0] for batch in found[0]]
    expected = [list(range(i, i + 4)) for i in range(0, 96, 4)]
    expected[10], expected[15] = ([40, 43], [61, 62, 63]) if policy == "skip" else ([40, 43, 43, 43], [61, 61, 62, 63])
    assert labels == expected
    assert [bad.index for bad in stats.bad_samples] == [41, 42, 60]
    assert all("3 workers in a row" in bad.error for bad in stats.bad_samples)


def test_workers_that_cannot_even_start_are_told_after_eight(tmp_path):
    """A worker_init_fn that ends its process does not start processes for ever."""
    loader = DataLoader(
        Noisy(tmp_path), 4, num_workers=2, on_worker_death="restart", worker_init_fn=lambda worker: os._exit(9)
    )
    with pytest.raises(WorkerDied) as caught:
        next(iter(loader))
    assert (caught.value.exitcode, caught.value.deaths) == (9, 8)
    loader.close()


def test_idle_persistent_workers_that_died_between_epochs_have_successors(tmp_path):
    """All of them, and the next epoch is that of an undisturbed run."""

    def run(kill):
        torch.manual_seed(3)
        loader = DataLoader(
            Noisy(tmp_path), 4, shuffle=True, num_workers=2, persistent_workers=True, on_worker_death="restart"
        )
        found = []
        for _ in range(4):
            found.append([[field.tolist() for field in batch] for batch in loader])
            if kill:
                for pid in loader.stats().worker_pids:
                    os.kill(pid, signal.SIGKILL)
        restarts = loader.stats().worker_restarts
        loader.close()
        return found, restarts

    calm, none = run(kill=False)
    wild, some = run(kill=True)
    assert wild == calm
    assert (none, some) == (0, 6)


def test_packs_are_gathered_on_by_the_successor(tmp_path):
    """No Python per sample, no random numbers: killed from outside in the middle of an epoch."""
    report = pack([np.full(1000, i) for i in range(600)], tmp_path / "p.lmdb")
    loader = DataLoader(PackedDataset(report.path), 4, num_workers=2, on_worker_death="restart")
    for _ in range(2):
        for number, batch in enumerate(loader):
            assert batch[:, 0].tolist() == list(range(4 * number, 4 * number + 4))
            if number in (20, 70, 71):
                os.kill(loader.stats().worker_pids[number % 2], signal.SIGKILL)
        assert number == 149
    loader.close()


SPAWNED = """
    import os, signal, sys
    import torch
    from torch.utils.data import Dataset
    from shmloader import DataLoader

    class Rand(Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            noise = torch.rand(2)
            if index == 17 and not os.path.exists(sys.argv[2]):
                open(sys.argv[2], "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            return index, noise

    def epoch(method):
        torch.manual_seed(1)
        loader = DataLoader(Rand(), 4, num_workers=2, multiprocessing_context=method, on_worker_death="restart")
        found = [[field.tolist() for field in batch] for batch in loader]
        restarts = loader.stats().worker_restarts
        loader.close()
        return found, restarts

    if __name__ == "__main__":
        wild, once = epoch(sys.argv[1])
        calm, never = epoch("fork")
        assert wild == calm
        print(once, never)
"""


@pytest.mark.slow
@start_methods
def test_successors_of_every_start_method(tmp_path, start_method):
    """Forked, spawned or from a fork server; silent."""
    result = run_file(write_script(tmp_path, SPAWNED), args=[start_method, str(tmp_path / "once")])
    assert result.silent().stdout == "1 0\n"
