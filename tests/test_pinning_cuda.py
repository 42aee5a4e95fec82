"""What can be known of the CUDA side without a GPU: choices, refusals, the calls that the driver gets (B6, B15)."""

import os
import subprocess
import textwrap
from pathlib import Path

import pytest
import torch

from shmloader import DataLoader
from shmloader.errors import DeviceUnavailable
from shmloader.pinning import choose_device, parse_device
from support import run_command, run_file, run_script, write_script


@pytest.mark.parametrize(
    ("current", "in_use", "local_rank", "chosen"),
    [
        (0, [False], None, 0),
        (0, [True, False], "1", 0),  # the user works on 0 already
        (1, [False, True], "0", 1),  # set_device, and used
        (1, [False, False], "0", 1),  # set_device, not used yet
        (0, [False, True], None, 1),  # a helper thread: its current device is 0, the process works on 1
        (0, [False, False], "1", 1),  # a launcher's rank, set_device not called yet
        (0, [False, False], "5", 0),  # each rank sees its own device only
        (0, [False, False], "-1", 0),
        (0, [False, False], "x", 0),
        (0, [False, True, True], "2", 0),  # several in use: no guess
    ],
)
def test_no_context_is_opened_on_a_device_that_nobody_meant(current, in_use, local_rank, chosen):
    """B6: GPU 0 is used only if it is in use, or nothing speaks for another."""
    assert choose_device(current, in_use, local_rank) == chosen


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_host_devices_are_host_batches(device):
    """device="cpu" is what no device is."""
    assert parse_device(device) is None
    assert [batch.tolist() for batch in DataLoader(list(range(6)), 3, device=device)] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:1", 0])
def test_a_named_device_that_is_not_there_is_an_error_at_once(device):
    """When the loader is built, of the kind that torch raises, with what to do."""
    with pytest.raises(DeviceUnavailable, match="pin_memory=True"):
        DataLoader([1, 2], device=device)
    with pytest.raises(RuntimeError):
        DataLoader([1, 2], device=device)


@pytest.mark.parametrize("device", ["mps", "meta", "xpu:0"])
def test_devices_without_an_engine_are_refused(device):
    """Honestly, instead of something slower under the same name."""
    with pytest.raises(DeviceUnavailable, match="CUDA devices only"):
        DataLoader([1, 2], device=device)


def test_a_negative_depth_is_refused():
    """As a mistake of the caller."""
    with pytest.raises(ValueError, match="device_prefetch"):
        DataLoader([1, 2], device_prefetch=-1)


SAME_SCRIPT = """
import torch
from shmloader import DataLoader

def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = torch.utils.data.TensorDataset(torch.arange(64.0), torch.arange(64))
    total = 0.0
    loader = DataLoader(data, 8, num_workers=2, pin_memory=True, drain=True)
    if device == "cuda":
        loader.record_stream(torch.cuda.Stream())
    for _ in range(3):
        for x, y in loader:
            total += float((x.to(device, non_blocking=True) * y.to(device, non_blocking=True)).sum())
    with DataLoader(data, 8, num_workers=2, device=device, device_prefetch=3) as loader:
        for x, y in loader:
            assert x.device.type == device
            total += float((x * y).sum())
    print(total)

if __name__ == "__main__":
    main()
"""


def test_the_same_script_runs_with_and_without_cuda(tmp_path):
    """B15: one warning at most in three epochs, the same sum."""
    path = write_script(tmp_path, SAME_SCRIPT)
    result = run_command([os.sys.executable, str(path)])
    assert result.check().stdout.strip() == str(float(4 * sum(n * n for n in range(64))))
    assert result.stderr.count("Warning") == (0 if torch.cuda.is_available() else 1)


@pytest.mark.slow
def test_without_pinning_cuda_is_not_touched():
    """B6: neither by building a loader nor by an epoch."""
    run_script(
        """
        import torch
        from shmloader import DataLoader
        assert [int(batch.sum()) for batch in DataLoader(list(range(6)), 3)] == [3, 12]
        assert not torch.cuda.is_initialized()
        """
    ).silent()


# A libcuda of a few lines: what the driver is asked, and in which context, is checked in there.
DRIVER = """
#include <stdio.h>
#include <stdint.h>
#include <stdlib.h>
static int context_made = -1, depth = 0;
static uintptr_t known = 0;
#define SAY(...) do { printf(__VA_ARGS__); fflush(stdout); } while (0)
int cuInit(unsigned flags) { return flags ? 1 : 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 100 + ordinal; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) {
    context_made = device; *context = (void *)(intptr_t)(0x7000000000 + device); SAY("retain %d\\n", device); return 0;
}
int cuCtxPushCurrent_v2(void *context) {
    if ((intptr_t)context != 0x7000000000 + context_made) return 201;
    depth++; return 0;
}
int cuCtxPopCurrent_v2(void **context) { depth--; *context = 0; return 0; }
int cuMemHostRegister_v2(void *at, size_t nbytes, unsigned flags) {
    if (depth != 1) return 201;
    if (flags != 1) return 1;
    if (nbytes > 8192) return 2;
    if (known) return 712;
    known = (uintptr_t)at; SAY("register %#lx %zu\\n", (unsigned long)known, nbytes); return 0;
}
int cuMemHostUnregister(void *at) {
    if (depth != 1) return 201;
    if ((uintptr_t)at != known) return 713;
    known = 0; SAY("unregister %#lx\\n", (unsigned long)at); return 0;
}
int cuGetErrorName(int code, const char **text) { *text = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : 0; return 0; }
int cuGetErrorString(int code, const char **text) { *text = code == 2 ? "out of memory" : 0; return code == 2 ? 0 : 1; }
"""

CALLS = """
import sys
from shmloader.errors import PinningRefused
from shmloader.pinning.driver import DriverRegistrar
registrar = DriverRegistrar(3)
high = 0x7F0123456000
registrar.register(high, 8192)
try:
    registrar.register(high + 8192, 4096)
except PinningRefused as error:
    assert (error.code, error.address, error.nbytes) == (712, high + 8192, 4096), error
    assert "close earlier loaders" in str(error)
assert registrar.unregister(high + 4096) == 713
assert registrar.unregister(high) == 0
try:
    registrar.register(high, 1 << 40)
except PinningRefused as error:
    assert error.code == 2
    assert "CUDA_ERROR_OUT_OF_MEMORY: out of memory" in str(error)
    assert "arena_bytes=" in str(error)
else:
    raise AssertionError("not refused")
"""


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libcuda.so.1 that checks its arguments."""
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(textwrap.dedent(DRIVER))
    command = ["cc", "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), str(folder / "driver.c")]
    try:
        subprocess.run(command, check=True, timeout=60, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no C compiler here")
    return folder


def test_the_driver_is_called_in_the_chosen_context_with_whole_numbers(driver, tmp_path):
    """64-bit addresses and sizes arrive whole, the context is pushed and popped around every call, codes get words."""
    result = run_file(write_script(tmp_path, CALLS), env={"LD_LIBRARY_PATH": str(driver)}).silent()
    high = hex(0x7F0123456000)
    assert result.stdout.splitlines() == ["retain 103", f"register {high} 8192", f"unregister {high}"]


@pytest.mark.slow
def test_a_missing_driver_is_a_refusal_not_a_crash(tmp_path):
    """A CUDA build of torch on a machine without the driver."""
    source = """
    from shmloader.errors import PinningRefused
    from shmloader.pinning.driver import DriverRegistrar
    try:
        DriverRegistrar(0)
    except PinningRefused as error:
        print(error)
    """
    result = run_file(write_script(tmp_path, source))
    assert result.returncode == 0
    assert "CUDA driver cannot be loaded" in result.stdout or torch.cuda.is_available()
