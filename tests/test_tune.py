"""shmloader-tune as people run it: facts, plan, advice, the line to paste; exit code 0 fits, 2 does not, 1 error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shmloader_tools.tune import main

from shmloader import DataLoader, SharedMemoryFull
from shmloader.facts import ragged_sizes, stackable
from shmloader.packfile import PackedDataset, pack
from shmloader.plan import plan_memory

MIB = 1 << 20


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A pack of 300 images of 3 x 32 x 32 and their labels."""
    path = tmp_path_factory.mktemp("tune") / "images.lmdb"
    pack([(torch.full((3, 32, 32), i % 256, dtype=torch.uint8), i) for i in range(300)], path)
    return str(path)


@pytest.fixture(scope="session")
def boxes(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A pack of 400 samples with 1 to 20 boxes each, and one with 5,000."""
    path = tmp_path_factory.mktemp("tune") / "boxes.lmdb"
    lengths = np.random.default_rng(3).integers(1, 21, 400)
    lengths[123] = 5000
    pack([{"boxes": torch.full((int(n), 4), float(n)), "name": f"sample {n}"} for n in lengths], path)
    return str(path)


def tune(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(args)
    out, err = capsys.readouterr()
    return code, out, err


def document(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    code, out, _ = tune(capsys, *args, "--json")
    found: dict[str, Any] = json.loads(out)
    assert code == (0 if found["fits"] else 2)
    return found


def test_the_command_runs_and_its_line_works(images: str) -> None:
    """The installed command prints facts, plan and a line; the line, pasted, loads the data within its number."""
    command = [sys.executable, "-m", "shmloader_tools.tune", images, "--batch-size", "32", "--ram", "1GiB"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    for title in ("Store", "Batch", "Host", "Plan", "Use", "Ready"):
        assert any(line.startswith(title) for line in done.stdout.splitlines()), done.stdout
    (line,) = [line[9:] for line in done.stdout.splitlines() if line.startswith("Use")]
    with eval(line, {"DataLoader": DataLoader, "PackedDataset": PackedDataset}) as loader:
        seen = torch.cat([labels.clone() for _, labels in loader])  # a view would keep its slot
        stats = loader.stats()
    assert sorted(seen.tolist()) == list(range(300))
    assert stats.copied_out == 0
    assert stats.arena.nbytes <= loader.arena_bytes + 4096 * stats.arena.slots


def test_facts_of_a_pack_are_exact(images: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Fixed images: a batch is its samples and little more, and every batch is alike."""
    found = document(capsys, images, "--batch-size", "64", "--workers", "2")
    stored = {"path": images, "samples": 300, "file_bytes": Path(images).stat().st_size}
    assert found["data"] == stored | {"expression": f"PackedDataset({images!r})"}
    payload = 64 * (3 * 32 * 32 + 8 + 8)  # pixels, label, index
    assert payload <= found["batch"]["batch_bytes"] <= payload + 2 * 4096
    assert found["batch"]["largest_bytes"] == found["batch"]["batch_bytes"]
    assert found["batch"]["source"] == "every batch is alike"
    assert found["slots"] == 6
    assert found["page_cache_bytes"] == found["data"]["file_bytes"]


def test_the_largest_possible_batch_of_a_ragged_pack_is_known(boxes: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One giant sample: the largest batch holds it and the next largest ones (E2), and the advice names both sizes."""
    found = document(capsys, boxes, "--batch-size", "16", "--workers", "1")
    sizes = ragged_sizes(PackedDataset(boxes))
    assert sizes is not None
    largest = int(np.sort(sizes)[-16:].sum())
    assert largest <= found["batch"]["largest_bytes"] <= 1.2 * largest + 4096
    assert found["batch"]["certain"]
    assert any("collate" in text for text in found["advice"])
    assert found["arena_bytes"] >= found["batch"]["largest_bytes"] + (found["slots"] - 1) * found["slot_bytes"]


@pytest.mark.parametrize("how", ["list", "padded"])
def test_ready_collates_have_names(how: str, boxes: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--collate list and padded plan with shmloader's own functions; padding to a giant costs its length each time."""
    code, out, _ = tune(capsys, boxes, "--batch-size", "16", "--workers", "1", "--collate", how)
    assert code == 0
    assert f"collate_fn=collate_{how})" in out
    found = document(capsys, boxes, "--batch-size", "16", "--workers", "1", "--collate", how)
    giant = 5000 * 4 * 4
    most = found["batch"]["batch_bytes"]
    assert (16 * giant <= most < 17 * giant) if how == "padded" else (giant <= most < 2 * giant)


def test_unequal_samples_are_planned_as_lists(boxes: str, images: str) -> None:
    """A pack knows whether the default collate can stack its samples."""
    assert not stackable(PackedDataset(boxes))
    assert stackable(PackedDataset(images))
    assert stackable(PackedDataset(boxes, fields="name"))
    assert ragged_sizes(PackedDataset(images)) is None


def test_what_does_not_fit_ends_with_2(images: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Too little memory: facts all the same, advice, no line to paste, exit code 2."""
    code, out, _ = tune(capsys, images, "--batch-size", "300", "--workers", "4", "--ram", "1MiB")
    assert code == 2
    assert "more than the memory given to this job (ram) has" in out
    assert "Use" not in out
    assert out.endswith("Not ready\n")


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((), "--batch-size"),
        (("--batch-size", "8"), "give a PACK"),
        (("--batch-size", "0", "x.lmdb"), "at least 1"),
        (("--batch-size", "8", "x.lmdb", "--ram", "lots"), "cannot read 'lots' as a size"),
        (("--batch-size", "8", "x.lmdb", "--plot", "out.png"), "--measure"),
        (("--batch-size", "8", "/no/such/file.lmdb"), "/no/such/file.lmdb"),
        (("--batch-size", "8", "--dataset", "nonsense"), "must name a module and a function"),
        (("--batch-size", "8", "--dataset", "no_such_module:make"), "no_such_module"),
        (("--batch-size", "8", "--dataset", "json:no_such_function"), "has no no_such_function"),
        (("--batch-size", "8", "--dataset", "time:monotonic"), "has no length"),
    ],
)
def test_errors_end_with_1_and_a_sentence(args: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong command line, a missing pack, a factory that is none: stderr says what, stdout is empty."""
    code, out, err = tune(capsys, *args)
    assert code == 1
    assert out == ""
    assert text in err
    assert "Traceback" not in err


USER_CODE = """
import torch

class Wrapped(torch.utils.data.Dataset):
    def __init__(self, pack):
        self.pack = pack
    def __len__(self):
        return len(self.pack)
    def __getitem__(self, index):
        image, label = self.pack[index]
        return image.float(), label

def make(pack):
    return Wrapped(pack)

def alone():
    return [torch.zeros(100) for _ in range(50)]

def broken(pack):
    return [None] * 50

def twice(samples):
    both = torch.stack([image for image, _ in samples])
    return torch.cat([both, both])
"""


def test_the_users_dataset_and_collate_are_measured(
    images: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--dataset and --collate name the user's own functions, found in the current folder."""
    (tmp_path / "tune_user_code.py").write_text(USER_CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    base = document(capsys, images, "--batch-size", "32", "--workers", "1")["batch"]["batch_bytes"]
    floats = document(capsys, images, "--batch-size", "32", "--workers", "1", "--dataset", "tune_user_code:make")
    assert floats["batch"]["batch_bytes"] > 3.7 * base
    args = (images, "--batch-size", "32", "--workers", "1", "--dataset", "tune_user_code:make")
    doubled = document(capsys, *args, "--collate", "tune_user_code:twice")
    assert doubled["batch"]["batch_bytes"] > 7.4 * base
    alone = document(capsys, "--dataset", "tune_user_code:alone", "--batch-size", "10", "--workers", "0")
    assert alone["data"] == {"path": None, "samples": 50, "file_bytes": 0, "expression": "alone()"}
    code, out, _ = tune(capsys, *args, "--collate", "tune_user_code:twice")
    assert code == 0
    assert f"DataLoader(make(PackedDataset({images!r})), batch_size=32" in out
    assert "collate_fn=twice)" in out
    code, _, err = tune(capsys, images, "--batch-size", "32", "--dataset", "tune_user_code:broken")
    assert code == 1
    assert "NoneType" in err


def test_ranks_are_added_up(images: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Four ranks take four times one rank's total; the page cache is shared (G1)."""
    one, four = (document(capsys, images, "--batch-size", "32", "--workers", "1", "--ranks", r) for r in ("1", "4"))
    assert four["total_bytes"] == 4 * (four["arena_used_bytes"] + four["private_bytes"])
    assert four["arena_bytes"] == one["arena_bytes"]
    assert four["page_cache_bytes"] == one["page_cache_bytes"]


def test_the_loader_refuses_what_the_plan_calls_too_much(images: str) -> None:
    """The plan and the loader hold the same number against the same host."""
    plan = plan_memory(PackedDataset(images), batch_size=32, num_workers=0)
    too_much = plan.host.binding(mount=False).nbytes_total + (1 << 40)
    loader = DataLoader(PackedDataset(images), batch_size=32, arena_bytes=too_much)
    with pytest.raises(SharedMemoryFull):
        next(iter(loader))
