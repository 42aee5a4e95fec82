"""The README keeps its word: its code runs, its commands print what it shows, and the names and options in it exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import shmloader
from shmloader.arenas import SMALL_MOUNT
from shmloader.budget import slots_minimum, slots_wanted

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OURS = ("shmloader-pack", "shmloader-inspect", "shmloader-tune", "python")
"""First words of the commands that are run here. ``python`` with a benchmark is not: it takes minutes."""


def blocks(language: str) -> list[str]:
    return [found[2] for found in BLOCK.finditer(README) if found[1] == language]


@dataclass(frozen=True)
class Shown:
    """A command of the README, and the lines that it is shown to print."""

    words: tuple[str, ...]
    lines: tuple[str, ...]

    @property
    def is_quick(self) -> bool:
        return self.words[0] in OURS and not any(word.startswith("benchmarks/") for word in self.words)


def shown_commands() -> list[Shown]:
    """Return all commands in the README's console blocks, in order."""
    commands: list[Shown] = []
    for block in blocks("console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            first, *lines = part.rstrip("\n").split("\n")
            commands.append(Shown(tuple(shlex.split(first, comments=True)), tuple(lines)))
    return commands


QUICK = [command for command in shown_commands() if command.is_quick]


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in ``folder`` with a home directory of its own."""
    done = subprocess.run(
        words,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder / "home"), "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"
    return done


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[Shown, str]]]:
    """Run the README's quick commands in their order; yield the folder with what they made, and what each printed."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "home").mkdir()
    outputs = {}
    for command in QUICK:
        program = Path(sys.executable).parent / command.words[0]
        done = run([str(program), *command.words[1:]], folder)
        assert done.stderr == "", command
        outputs[command] = done.stdout.replace(f"{folder}/", "")
    yield folder, outputs
    assert list((folder / "home").iterdir()) == [], "a command has written into the home directory"


def plain(text: str) -> list[str]:
    """Return the lines of an output without what depends on the host: where its shared memory comes from."""
    return [re.sub(r" \((posix shared memory|memfd)\)$", "", line) for line in text.splitlines()]


@pytest.mark.slow  # each runs programs that import torch
@pytest.mark.parametrize("command", QUICK, ids=lambda command: shlex.join(command.words))
def test_commands_print_what_is_shown(command: Shown, printed: tuple[Path, dict[Shown, str]]) -> None:
    """Each line that the README shows is printed, in the order shown; more may be printed between them."""
    lines = iter(plain(printed[1][command]))
    for shown in plain("\n".join(command.lines)):
        assert shown in lines, f"{shown!r} is not printed (there):\n{printed[1][command]}"


@pytest.mark.slow  # each runs programs that import torch
@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.strip().splitlines()[-1].strip()[:40])
def test_python_blocks_run(code: str, printed: tuple[Path, dict[Shown, str]], tmp_path: Path) -> None:
    """Each block is a program of its own, runs without a warning, and what it asserts holds."""
    folder, _ = printed
    script = tmp_path / "block.py"
    # The README says that programs need the line with __main__ where workers are not forked, and leaves it out.
    prelude = "" if "__main__" in code else "import multiprocessing\nmultiprocessing.set_start_method('fork')\n"
    script.write_text(prelude + code, encoding="utf-8")
    fork_below_threads = "ignore:This process:DeprecationWarning"  # what Python >= 3.12 says for every such fork
    done = run([sys.executable, "-W", "error", "-W", fork_below_threads, str(script)], folder)
    # What torch logs about itself (of nested tensors, for example) is not ours to promise.
    assert [line for line in done.stderr.splitlines() if not re.match(r"W\d{4} .* torch/", line)] == []


def test_there_is_something_to_run() -> None:
    """The patterns above find the README's blocks."""
    assert len(blocks("python")) >= 5
    assert len(QUICK) >= 5
    assert README.count("```") == 2 * len(BLOCK.findall(README))


def test_commands_of_the_repository_exist() -> None:
    """What is shown as a program in the repository is there, and the first two can be executed."""
    programs = [
        word for command in shown_commands() for word in command.words if re.match(r"(tools|benchmarks)/", word)
    ]
    assert {"tools/demo", "tools/test"} < set(programs)
    for program in programs:
        path = ROOT / program
        assert path.is_file()
        assert path.suffix == ".py" or os.access(path, os.X_OK)


def test_links_lead_somewhere() -> None:
    """Links to files and headings of the repository."""
    headings = {
        re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-")
        for line in README.splitlines()
        if line[:1] == "#"
    }
    for target in re.findall(r"\]\(([^)]+)\)", README):
        if target.startswith("#"):
            assert target[1:] in headings
        elif "://" not in target:
            assert (ROOT / target).is_file()


def test_options_exist() -> None:
    """Every --option in the text is one of ours (docker's and pytest's aside)."""
    sources = "".join(
        path.read_text(encoding="utf-8") for folder in ("tools", "benchmarks") for path in (ROOT / folder).glob("*.py")
    )
    for option in set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", README)) - {"--shm-size", "--help"}:
        assert f'"{option}"' in sources, option


def test_names_exist() -> None:
    """Every CamelCase name in backticks is public here, or torch's or Python's."""
    theirs = {"DataLoader", "KeyboardInterrupt", "RuntimeError"}
    names = set(re.findall(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)+)\b", README)) - theirs
    assert {"UnequalSamples", "WorkerDied"} < names
    for name in names:
        assert name in shmloader.__all__, name


def test_numbers_of_slots() -> None:
    """The arithmetic of the section on memory."""
    assert slots_wanted(8, 2) == 8 * 2 + 2 == 18
    assert slots_minimum(8) == 8 + 1
    assert 256 * 3 * 224 * 224 // 2**20 == 36  # 36.75, shown as 37
    assert SMALL_MOUNT == 256 << 20


def test_batches_are_not_torch_shared_but_can_be_sent() -> None:
    """is_shared() is False, as the README says, and sharing a tensor of a batch copies it."""
    with shmloader.DataLoader(TensorDataset(torch.arange(8)), batch_size=8, num_workers=1) as loader:
        (batch,) = next(iter(loader))
        assert not batch.is_shared()
        before = batch.data_ptr()
        assert batch.share_memory_().is_shared()
        assert batch.data_ptr() != before
        assert batch.tolist() == list(range(8))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_unequal_dtypes_become_the_one_that_holds_them_all(num_workers: int) -> None:
    """With any number of workers."""
    samples: Any = [torch.tensor(1.0), torch.tensor(2.5, dtype=torch.float64)]
    with shmloader.DataLoader(samples, batch_size=2, num_workers=num_workers) as loader:
        batch = next(iter(loader))
    assert batch.dtype == torch.float64
    assert batch.tolist() == [1, 2.5]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_unequal_samples_are_told_in_torchs_words_and_more(num_workers: int) -> None:
    """The message of the default collate, then the two dataset indices."""
    samples: Any = [torch.zeros(3), torch.zeros(4)]
    with pytest.raises(RuntimeError) as torchs:
        torch.utils.data.default_collate(samples)
    with (
        shmloader.DataLoader(samples, batch_size=2, num_workers=num_workers) as loader,
        pytest.raises(shmloader.UnequalSamples) as ours,
    ):
        next(iter(loader))
    assert str(ours.value).startswith(str(torchs.value))
    assert "[3] at dataset index 0 but [4] at dataset index 1" in str(ours.value)


def test_a_small_piece_keeps_its_slot_and_a_clone_does_not() -> None:
    """One element of a batch holds the slot until it is gone."""
    with shmloader.DataLoader(TensorDataset(torch.arange(64)), batch_size=8, num_workers=0) as loader:
        iterator = iter(loader)
        piece = next(iterator)[0][3:4].numpy()
        arena = loader.stats().arena
        assert arena is not None
        assert arena.lent == 1
        copy = piece.copy()
        del piece
        arena = loader.stats().arena
        assert arena is not None
        assert arena.lent == 0
        assert copy.tolist() == [3]
