"""The one number under real limits: small, missing and read-only mounts, and a control group. Needs root (A1, A3, G1).

Every script prints what it saw; a signal, a hang or a wrong value fails the test by the script's exit code.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from realhost import WITHOUT_SHM, in_mounts, memory_group
from shmloader.packfile.writer import PackWriter
from support import MIB, run_file, script_command, write_script

LOADER = """
import json, multiprocessing, os, sys, time, torch, warnings
from torch.utils.data import TensorDataset
from shmloader import CopiedOutWarning, DataLoader

warnings.simplefilter("ignore", CopiedOutWarning)  # whether they are right is the question here
rows = torch.arange(64, dtype=torch.uint8).repeat_interleave(MIB // 4).view(64, -1)
loader = DataLoader(TensorDataset(rows), 4, num_workers=2, **ARGUMENTS)


def run():
    got = []
    for (batch,) in loader:
        assert (batch == batch[:, :1]).all()
        got += batch[:, 0].tolist()
    assert got == list(range(64))
    return loader.stats().arena
"""


def script(body: str, **arguments: object) -> list[str]:
    source = LOADER.replace("MIB", str(MIB)).replace("**ARGUMENTS", f"**{arguments!r}")
    return script_command(source + body)


REFUSED = """
before = set(os.listdir("/dev/shm"))
start = time.monotonic()
try:
    run()
finally:
    status = os.statvfs("/dev/shm")
    print(json.dumps([
        time.monotonic() - start, len(multiprocessing.active_children()), status.f_blocks - status.f_bfree,
        sorted(set(os.listdir("/dev/shm")) - before),
    ]))
"""


def test_more_than_the_mount_has_is_refused_in_one_sentence_before_a_page_is_touched() -> None:
    """2 MiB of /dev/shm and 8 asked for: exit code 1, one sentence with wanted, free, mount and ways out; no worker was
    started, no page touched, no name left (A1)."""
    done = in_mounts(
        "mount -t tmpfs -o size=2m none /dev/shm", script(REFUSED, arena_bytes="8MiB", arena_backing="posix")
    )
    assert done.returncode == 1
    _seconds, workers, blocks, names = json.loads(done.stdout)
    assert (workers, blocks, names) == (0, 0, [])
    sentence = done.stderr.splitlines()[-1]
    assert sentence.startswith("shmloader.errors.host.SharedMemoryFull: ")
    assert "wanted 8.0 MiB (8388608 bytes), free 2.0 MiB (2097152 bytes)" in sentence
    assert "(/dev/shm)" in sentence
    for way_out in ("arena_bytes=", "--shm-size=", "batch"):
        assert way_out in sentence


def test_what_the_plan_needs_is_refused_just_so_if_the_fewest_slots_do_not_fit() -> None:
    """No arena_bytes, batches of 1 MiB, 2 MiB of /dev/shm: three slots are the fewest; told before a worker starts."""
    done = in_mounts("mount -t tmpfs -o size=2m none /dev/shm", script(REFUSED, arena_backing="posix"))
    assert done.returncode == 1
    _seconds, workers, blocks, names = json.loads(done.stdout)
    assert (workers, blocks, names) == (0, 0, [])
    assert "wanted 3.0 MiB" in done.stderr
    assert "SharedMemoryFull" in done.stderr


COUNTED = """
arena = run()
status = os.statvfs("/dev/shm")
print(json.dumps([arena.slots, arena.nbytes, arena.backing, loader.stats().copied_out]))
loader.close()
"""


UNKNOWN = """
class Wrapped(torch.utils.data.Dataset):
    def __len__(self):
        return len(rows)
    def __getitem__(self, index):
        return (rows[index],)
loader = DataLoader(Wrapped(), 4, num_workers=2, arena_backing="posix")
"""


@pytest.mark.parametrize("body", [pytest.param(COUNTED, id="known"), pytest.param(UNKNOWN + COUNTED, id="unknown")])
def test_fewer_slots_are_made_if_not_all_fit(body: str) -> None:
    """9 MiB of /dev/shm: of six slots of 1 MiB, half the mount holds four; right values, none of them a copy, whether
    the batch's size is known before the first one or not."""
    done = in_mounts("mount -t tmpfs -o size=9m none /dev/shm", script(body, arena_backing="posix")).silent()
    slots, nbytes, backing, copied = json.loads(done.stdout)
    assert (slots, backing, copied) == (4, "posix", 0)
    assert nbytes <= 4.5 * MIB


@pytest.mark.parametrize(
    "setup",
    [
        pytest.param("mount -t tmpfs -o size=64m none /dev/shm", id="64 MiB"),
        pytest.param("mount -t tmpfs -o size=64m,ro none /dev/shm", id="read-only", marks=pytest.mark.slow),
        pytest.param("mount -t tmpfs -o size=64m,nr_inodes=1 none /dev/shm", id="no inodes", marks=pytest.mark.slow),
        pytest.param(WITHOUT_SHM, id="missing"),
    ],
)
def test_without_a_usable_mount_memory_is_used_and_the_values_are_right(setup: str) -> None:
    """64 MiB, read-only, without inodes, or no /dev/shm at all, and an arena of 512 MiB: memfd, no signal, no word."""
    body = COUNTED.replace('status = os.statvfs("/dev/shm")\n', "")
    done = in_mounts(setup, script(body, arena_bytes="512MiB")).silent()
    _slots, _nbytes, backing, copied = json.loads(done.stdout)
    assert (backing, copied) == ("memfd", 0)


NEIGHBOUR = """
import subprocess
kept = []
for index, (batch,) in enumerate(loader):
    kept.append(batch)
    if index == 1:
        full = subprocess.run(
            ["dd", "if=/dev/zero", "of=/dev/shm/neighbour", "bs=64k"], stderr=subprocess.DEVNULL, check=False
        )
        assert full.returncode == 1
        assert os.statvfs("/dev/shm").f_bfree == 0
assert [int(row[0]) for batch in kept for row in batch] == list(range(64))
assert all((batch == batch[:, :1]).all() for batch in kept)
print(json.dumps(loader.stats().copied_out))
"""


@pytest.mark.parametrize(
    "arguments",
    [pytest.param({}, id="default"), pytest.param({"arena_bytes": "30MiB"}, id="30 MiB", marks=pytest.mark.slow)],
)
def test_a_neighbour_that_fills_the_mount_in_mid_epoch_hurts_nobody(arguments: dict[str, str]) -> None:
    """What was committed stays, what had not been becomes copies: every batch is right, also those kept, no SIGBUS."""
    setup = "mount -t tmpfs -o size=40m none /dev/shm"
    done = in_mounts(setup, script(NEIGHBOUR, arena_backing="posix", **arguments)).silent()
    assert json.loads(done.stdout) > 0


IN_GROUP = """
import json, os, sys
from pathlib import Path

Path(sys.argv[1]).write_text(str(os.getpid()))
import warnings
import torch
from shmloader import CopiedOutWarning, DataLoader, PackedDataset

warnings.simplefilter("ignore", CopiedOutWarning)
if __name__ == "__main__":
    arguments = json.loads(sys.argv[3])
    keep = arguments.pop("keep_until", 0)
    data = PackedDataset(sys.argv[2])
    loader = DataLoader(data, shuffle=True, num_workers=2, **arguments)
    peak, kept = 0, []
    for epoch in range(2):
        seen = torch.zeros(len(data), dtype=torch.int64)
        for image, label in loader:
            assert (image[:, ::97] == (label % 251)[:, None]).all()
            seen[label] += 1
            peak = max(peak, loader.stats().arena.nbytes)
            if loader.stats().copied_out < keep:
                kept.append((image, label.clone()))
        assert (seen == 1).all()
        assert all((image[:, ::97] == (label % 251)[:, None]).all() for image, label in kept)
    print(json.dumps([peak, loader.stats().arena.slots, loader.stats().copied_out]))
    loader.close()
"""


def write_pack(path: Path, rows: int, nbytes: int) -> None:
    """Row i is full of i % 251. Its pages leave the page cache, so that who reads them is charged."""
    with PackWriter(path, field_names=("image", "label")) as writer:
        for first in range(0, rows, 512):
            labels = np.arange(first, min(first + 512, rows))
            values = (labels % 251).astype(np.uint8)
            writer.add_columns((np.repeat(values, nbytes).reshape(-1, nbytes), labels))
        writer.seal()
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@pytest.mark.slow
def test_two_epochs_of_2_gib_in_a_group_of_400_mib(tmp_path: Path) -> None:
    """A pack five times the group's limit, batches of 37 MiB: right values, nobody killed, the limit kept (A3)."""
    write_pack(tmp_path / "big.lmdb", 14_266, 150_528)
    file = write_script(tmp_path, IN_GROUP)
    with memory_group(400 * MIB) as group:
        arguments = json.dumps({"batch_size": 256})
        args = [str(group.procs), str(tmp_path / "big.lmdb"), arguments]
        done = run_file(file, args=args, timeout=110).silent()
        peak, slots, _copied = json.loads(done.stdout)
        assert slots >= 3
        assert peak <= 200 * MIB
        assert group.kills() == 0
        assert (group.peak() or 0) <= 400 * MIB


@pytest.mark.slow
def test_growth_stops_short_of_what_a_group_would_kill_for(tmp_path: Path) -> None:
    """Batches are kept up to an arena_bytes that the group allowed when it was asked, before there were workers: growth
    looks again, stops below it, and goes on with copies; nobody is killed (A3, G1)."""
    write_pack(tmp_path / "small.lmdb", 1600, 150_528)
    file = write_script(tmp_path, IN_GROUP)
    with memory_group(400 * MIB) as group:
        arguments = json.dumps({"batch_size": 4, "arena_bytes": 235 * MIB, "keep_until": 5})
        args = [str(group.procs), str(tmp_path / "small.lmdb"), arguments]
        done = run_file(file, args=args, timeout=60).silent()
        peak, _slots, copied = json.loads(done.stdout)
        assert 20 * MIB < peak < 230 * MIB
        assert copied >= 5
        assert group.kills() == 0
