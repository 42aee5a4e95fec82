"""Workers that die or hang: the texts that people search for are in our messages, too. Scripts in child processes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .compare import SELF

OURS = "torch.utils.data" if SELF else "shmloader"
KINDS = (pytest.param("torch.utils.data", id="torch", marks=pytest.mark.slow), pytest.param(OURS, id="ours"))

SCRIPT = """
import os, signal, sys, threading, warnings
from {module} import DataLoader

class Data:
    def __len__(self):
        return 12
    def __getitem__(self, index):
        if index == 5:
            {action}
        return index

def take_first(samples):  # a number travels without a descriptor, which torch would fetch from a worker that is dying
    return samples[0]

if __name__ == "__main__":
    seen = []
    loader = DataLoader(Data(), batch_size=1, num_workers=2, collate_fn=take_first, {arguments})
    try:
        for batch in loader:
            seen.append(int(batch))
    except Exception as error:
        print(isinstance(error, RuntimeError), type(error).__name__)
        print(error)
    print("seen", seen)
"""


def script(tmp_path: Path, module: str, action: str, arguments: str = "") -> str:
    """Run the script in a child and return what it printed; it must end by itself, with exit code 0."""
    path = tmp_path / "dies.py"
    path.write_text(SCRIPT.format(module=module, action=action, arguments=arguments))
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def delivered_before(out: str) -> None:
    """What came before the death is a beginning of the right order, and nothing of the lost batch."""
    match = re.search(r"seen \[(.*)\]", out)
    assert match, out
    seen = [int(number) for number in match[1].split(", ") if number]
    assert seen == list(range(len(seen)))
    assert len(seen) <= 5


@pytest.mark.parametrize("module", KINDS)
@pytest.mark.parametrize(
    ("signal", "words"), [("SIGKILL", "Killed"), ("SIGSEGV", "Segmentation fault"), ("SIGTERM", "Terminated")]
)
def test_a_killed_worker_is_reported_in_torchs_words(tmp_path: Path, module: str, signal: str, words: str) -> None:
    """A worker killed by a signal: RuntimeError 'DataLoader worker (pid N) is killed by signal: ...', at once."""
    out = script(tmp_path, module, f"os.kill(os.getpid(), signal.{signal})")
    assert out.startswith("True")
    killed = rf"DataLoader worker \(pid \d+\) is killed by signal: {words}"
    # torch finds out on two ways, whichever is first, and its handler changes how some signals end
    unexpected = r"DataLoader worker \(pid\(s\) [\d, ]+\) exited unexpectedly|DataLoader worker \(pid \d+\)"
    assert re.search(killed if module == "shmloader" else f"{killed}|{unexpected}", out), out
    if module == "shmloader":
        assert re.search(r"indices \[.*5.*\]", out), out
    delivered_before(out)


@pytest.mark.parametrize("module", KINDS)
def test_a_worker_that_exits_is_reported_in_torchs_words(tmp_path: Path, module: str) -> None:
    """A worker that calls os._exit(3): RuntimeError '... exited unexpectedly with exit code 3'."""
    out = script(tmp_path, module, "os._exit(3)")
    assert out.startswith("True")
    assert re.search(r"exited unexpectedly( with exit code 3)?", out), out
    assert module != "shmloader" or "with exit code 3" in out
    delivered_before(out)


@pytest.mark.parametrize("module", KINDS)
def test_a_stuck_worker_is_reported_in_torchs_words(tmp_path: Path, module: str) -> None:
    """timeout=1 and a sample that never comes: RuntimeError 'DataLoader timed out after 1 seconds'."""
    out = script(tmp_path, module, "threading.Event().wait(600)", "timeout=1")
    assert out.startswith("True")
    assert "DataLoader timed out after 1 seconds" in out
    if module == "shmloader":
        assert re.search(r"pid \d+.*indices \[5", out), out
        assert "__getitem__" in out, "the Python stack of the stuck worker is missing"
    delivered_before(out)


@pytest.mark.skipif(SELF, reason="torch's loader fails in several ways here, by chance")
def test_a_sys_exit_in_a_worker_is_an_error(tmp_path: Path) -> None:
    """sys.exit() in a dataset ends the worker; the user gets a RuntimeError, not an early end of the epoch."""
    out = script(tmp_path, OURS, "sys.exit(7)")
    assert out.startswith("True"), out
    delivered_before(out)


@pytest.mark.skipif(SELF, reason="torch warns in each epoch")
def test_pinning_without_accelerator_is_one_warning(tmp_path: Path) -> None:
    """B7: pin_memory=True without an accelerator: one warning per process, in torch's words; right data."""
    path = tmp_path / "pins.py"
    path.write_text(
        "import warnings, torch, shmloader\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    for workers in (0, 0, 1):\n"
        "        loader = shmloader.DataLoader(range(5), 2, num_workers=workers, pin_memory=True)\n"
        "        for _ in range(2):\n"
        "            assert [b.tolist() for b in loader] == [[0, 1], [2, 3], [4]]\n"
        "assert torch.accelerator.is_available() or len(caught) == 1, [str(w.message) for w in caught]\n"
        "assert all('pin_memory' in str(w.message) for w in caught)\n"
    )
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
