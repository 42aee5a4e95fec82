"""benchmarks/gpu.py without a GPU: its checks run against a device of paper, and fail where they should."""

import ctypes
import json
import os
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import gpu  # noqa: E402
import gpu_checks  # noqa: E402
import gpu_figures  # noqa: E402
from recorder import Recorded, Recorder  # noqa: E402
from shmloader.errors import PinningRefused  # noqa: E402
from support import run_command  # noqa: E402

SMALL = gpu_checks.Size(batches=60, rounds=4, workers=2, elements=256, start_methods=("fork",))


class Strict(Recorder):
    """Refuses a range that is registered already, as the driver does."""

    def register(self, address, nbytes):
        if any(address < stop and start < address + nbytes for start, stop in self._ranges()):
            raise PinningRefused(nbytes, address, 712, "already registered", "")
        super().register(address, nbytes)


class PaperBench:
    """A device of paper that does its work when the next piece of work is queued, and at the end."""

    def __init__(self, recorder=None):
        self.recorder = recorder or Strict(pace=0)

    def loader(self, dataset, batch_size, device=None, **options):
        options = {"pin_memory": True, **options}
        return Recorded(dataset, batch_size, recorder=self.recorder, on_device=device is not None, **options)

    def engine(self):
        return self.recorder

    def is_pinned(self, tensor):
        return self.recorder.is_pinned(tensor)

    def copy(self, tensor):
        return self.recorder.copy(tensor)

    def later(self, work):
        self.recorder.current.work.append(work)

    def busy(self, seconds):
        self.recorder.run()

    def stream(self):
        return self.recorder.open_stream()

    def on(self, stream):
        return self.recorder.on(stream)

    def join(self, stream):
        stream.run()

    def synchronize(self):
        self.recorder.run()


@pytest.mark.parametrize("name", gpu_checks.CHECKS)
def test_every_check_passes_on_a_device_that_keeps_its_word(name):
    """Late copies, dropped batches, real loaders with real workers."""
    bench = PaperBench()
    said = gpu_checks.CHECKS[name](bench, SMALL)
    assert said
    bench.synchronize()


def test_the_numbered_check_finds_batches_that_were_overwritten():
    """Without draining, copies that are late read what was written later: the control shows it."""
    wrong, _ = gpu_checks.numbered(PaperBench(), SMALL, "main", drain=False)
    assert wrong > 0
    with pytest.raises(AssertionError, match="hold wrong data"):
        gpu_checks.told(wrong, 0, SMALL)


def test_checks_fail_where_memory_is_not_page_locked(capsys):
    """And one that fails does not stop the others; the exit code tells."""
    bench = PaperBench(Strict(pace=0, refuse=lambda number, nbytes: True))
    size = gpu_checks.Size(batches=10, rounds=2, workers=1, elements=64, start_methods=())
    results = gpu_checks.run(bench, size)
    assert set(results) == set(gpu_checks.CHECKS)
    assert not results["pinned"]["passed"]
    assert "NotPinnedWarning" in results["pinned"]["said"]
    assert "FAIL pinned" in capsys.readouterr().out
    lines, code = gpu.verdict(results, {})
    assert code == 1
    assert any("pinned" in line for line in lines)


GOOD = {"passed": True, "said": "fine"}


@pytest.mark.parametrize(
    ("checks", "figures", "code"),
    [
        ({"a": GOOD}, {}, 0),
        ({}, {"bandwidth": {"slot_to_torch_pinned": 0.98}}, 0),
        ({}, {"bandwidth": {"slot_to_torch_pinned": 0.96}}, 1),
        ({}, {"registration": {"prefaulted_s_per_gib": 0.6}}, 1),
        ({}, {"training": {"cpu_to_torch": 0.51}}, 1),
        ({}, {"training": {"cpu_to_torch": 0.2}, "overlap": {"hidden": 0.1}}, 0),
        ({}, {"overlap": {"error": "RuntimeError: no"}}, 1),
        ({"a": GOOD, "b": {"passed": False, "said": "no"}}, {}, 1),
    ],
)
def test_the_exit_code_is_the_verdict(checks, figures, code):
    """0 only if nothing failed, was missed, or could not be measured."""
    assert gpu.verdict(checks, figures)[1] == code
    assert all(isinstance(line, str) for line in gpu.lines_of("x", figures))
    json.dumps(figures)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_it_says_so_in_one_sentence():
    """Exit code 2, nothing on stdout."""
    result = run_command([sys.executable, str(BENCHMARKS / "gpu.py"), "--quick"])
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert "no CUDA device" in result.stderr


def test_arguments_that_make_no_sense_are_refused(capsys):
    """With argparse's own exit code."""
    for argv in (["--workers", "0"], ["--checks", "--figures"]):
        with pytest.raises(SystemExit) as caught:
            gpu.options_of(argv)
        assert caught.value.code == 2
    capsys.readouterr()
    assert gpu.options_of(["--quick", "--workers", "3"]).workers == 3


def test_page_locking_is_timed_cold_and_mapped():
    """The recorder would refuse pages that are not there: the cold one is what the driver does itself."""

    class Mapping(Strict):
        def register(self, address, nbytes):
            torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8).sum()
            super().register(address, nbytes)

    recorder = Mapping()
    numbers = gpu_figures.registration(recorder, 1 / 1024)
    assert all(value > 0 for value in numbers.values())
    assert len(numbers) == 5
    assert not recorder.registered


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'pin_memory':UserWarning")
def test_the_small_training_runs_on_the_host_too(tmp_path):
    """All four contenders, from samples and from a pack; the ratios are of their numbers."""
    numbers = gpu_figures.training(tmp_path, images=24, batch_size=8, workers=1, warm=2, batches=4, device="cpu")
    assert set(numbers) == {"torch", "ours", "ours_device", "ours_pack_device", "cpu_to_torch", "speed_to_torch"}
    assert all(numbers[name]["images_per_s"] > 0 for name in ("torch", "ours", "ours_device", "ours_pack_device"))
    assert numbers["speed_to_torch"] == numbers["ours"]["images_per_s"] / numbers["torch"]["images_per_s"]


def test_cpu_seconds_of_processes_are_read():
    """Of this one: more than none, and growing."""
    before = gpu_figures.cpu_s([os.getpid()])
    while gpu_figures.cpu_s([os.getpid()]) <= before:
        sum(range(100_000))
    assert before > 0
