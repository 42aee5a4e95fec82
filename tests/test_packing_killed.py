"""kill -9 of the packer at any moment, with workers, shuffled or split: the same command ends with the same file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from support import run_script

KILLER = """
    import os, random, signal, sys, time
    from pathlib import Path
    from shmloader_tools import pack as tool

    folder, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    words = sys.argv[4:]
    moments = random.Random(seed)

    def command(out):
        return ["photos", str(out), "--quiet", "--size", "96x96", "--chunk", "256KiB", *words]

    def files(name):
        return {path.name.removeprefix(name): path.read_bytes() for path in sorted(folder.glob(name + ".*"))}

    os.chdir(folder)
    begun = time.monotonic()
    assert tool.main(command("whole.lmdb")) == 0
    takes = time.monotonic() - begun
    whole = files("whole")
    killed = resumed = 0
    old = {}
    while killed < kills:
        child = os.fork()
        if child == 0:
            os.setsid()
            os._exit(tool.main(command("p.lmdb")))
        end = time.monotonic() + moments.uniform(0, 1.2 * takes)
        ended = 0
        while not ended and time.monotonic() < end:
            ended, status = os.waitpid(child, os.WNOHANG)
            time.sleep(0.001)  # the moment is random: nothing depends on this
        if not ended:
            try:
                os.killpg(child, signal.SIGKILL)
            except ProcessLookupError:  # before its setsid
                os.kill(child, signal.SIGKILL)
            ended, status = os.waitpid(child, 0)
            killed += 1
        targets = {name: data for name, data in files("p").items() if not name.endswith(".partial")}
        assert all(whole[name] == data for name, data in targets.items()), (seed, killed, sorted(targets))
        if len(targets) == len(whole):  # all of them have their names: begin again
            assert files("p") == whole, (seed, killed)
            resumed += 1
            for name in files("p"):
                os.unlink(folder / ("p" + name))
        else:
            assert status != 0, (seed, killed)
    print(killed, resumed, f"{takes:.2f}")
"""


def make_photos(root: Path, count: int) -> None:
    rng = np.random.default_rng(0)
    for i in range(count):
        folder = root / f"class {i * 3 // count}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (80, 100, 3), np.uint8)).save(folder / f"{i:03}.jpg")


def kill(tmp_path: Path, kills: int, seed: int, *words: str) -> None:
    make_photos(tmp_path / "photos", 150)
    done = run_script(KILLER, args=[str(tmp_path), str(kills), str(seed), *words], timeout=170)
    assert done.check().stdout.split()[0] == str(kills), done.stderr


def test_a_killed_packer_goes_on(tmp_path: Path) -> None:
    """D6: three kills of a packer with two workers, at random moments."""
    kill(tmp_path, 3, 0, "--workers", "2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "words"),
    [
        (1, ["--workers", "2", "--shuffle", "7"]),
        (2, ["--workers", "1", "--split", "train=0.8,val=0.2", "--stratify"]),
        (3, ["--workers", "0", "--store", "image=encoded", "--quality", "80"]),
    ],
    ids=["shuffled", "split", "encoded"],
)
def test_ten_kills(tmp_path: Path, seed: int, words: list[str]) -> None:
    """D6: ten random moments each: what has a name is whole and bit-equal, what has none is gone on with."""
    kill(tmp_path, 10, seed, *words)
