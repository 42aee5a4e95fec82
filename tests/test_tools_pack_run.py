"""shmloader-pack's options for the run, and what shmloader-inspect shows of samples: as people type it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from shmloader_tools import inspect_pack
from shmloader_tools import pack as pack_tool

from shmloader.packfile import PackedDataset, pack
from support import Script

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve images in two unequal classes."""
    rng = np.random.default_rng(0)
    for i in range(12):
        path = tmp_path / "photos" / ("cat" if i < 9 else "dog") / f"{i:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (30, 40, 3), np.uint8)).save(path)
    return tmp_path / "photos"


def run(*words: str | Path) -> int:
    return pack_tool.main([str(word) for word in words])


def test_the_report_tells_what_the_data_is_like(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    """Sizes of images, the balance of classes, and the two lines that even it out, which run as they are printed."""
    assert run(folder, tmp_path / "a.lmdb", "--workers", "1") == 0
    out = capsys.readouterr().out
    for words in ("all 40x30", "3.0 x the samples of the smallest", "1 workers", "12 in 2 classes"):
        assert words in out, out
    names = {"train": PackedDataset(tmp_path / "a.lmdb"), "numpy": np, "torch": torch}
    lines = [line.strip() for line in out.splitlines() if line.startswith("            ") and " = " in line]
    exec("\n".join(lines), names)
    weights = names["sampler"].weights  # type: ignore[attr-defined]
    assert weights[:9].sum() == pytest.approx(float(weights[9:].sum()))


def test_bad_images_can_be_left_out(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    """E7: --on-error skip goes on, says so even when quiet, and --report lists each with its file."""
    for name in ("03.jpg", "07.jpg"):
        (folder / "cat" / name).write_bytes((folder / "cat" / name).read_bytes()[:200])
    words = [folder, tmp_path / "a.lmdb", "--on-error", "skip", "--report", tmp_path / "r.jsonl"]
    assert run(*words, "--quiet") == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "shmloader-pack: 2 of 12 samples were left out: 2 unreadable-image\n"
    listed = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert [Path(line["where"]).name for line in listed] == ["03.jpg", "07.jpg"]
    assert len(PackedDataset(tmp_path / "a.lmdb")) == 10
    assert run(*words, "--overwrite") == 0
    out = capsys.readouterr().out
    assert "Skipped   2 unreadable-image (left out)" in out
    assert str(folder / "cat" / "03.jpg") in out
    assert str(tmp_path / "r.jsonl") in out


def test_splits_have_names_of_their_own(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    """--split names the parts, --stratify keeps the classes' shares; bare numbers are numbered."""
    assert run(folder, tmp_path / "a.lmdb", "--split", "train=0.67,val=0.33", "--stratify", "--shuffle") == 0
    assert capsys.readouterr().out.count("Samples") == 2
    assert len(PackedDataset(tmp_path / "a.train.lmdb")) == 8
    assert sorted(PackedDataset(tmp_path / "a.val.lmdb").column("label")) == [0, 0, 0, 1]
    assert run(folder, tmp_path / "b.lmdb", "--split", "0.5,0.5", "--quiet") == 0
    assert len(PackedDataset(tmp_path / "b.0.lmdb")) == len(PackedDataset(tmp_path / "b.1.lmdb")) == 6


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--shuffle", "x"], "put --shuffle at the end"),
        (["--split", "a,b"], "not like 0.9,0.1"),
        (["--split", "0.9,0.9"], "1 together at most"),
        (["--stratify"], "give the shares too"),
        (["--store", "image"], "is not FIELD=VALUE"),
        (["--store", "image=fast"], "known are encoded, raw, zlib"),
        (["--dtype", "x=int3"], "no dtype 'int3'"),
        (["--quality", "101"], "1 to 100"),
        (["--chunk", "1k"], "4 KiB to 1 GiB"),
        (["--chunk", "huge"], "cannot read 'huge'"),
        (["--workers", "-1"], "cannot be"),
        (["--limit", "0"], "nothing to pack"),
    ],
)
def test_wrong_options_are_exit_code_2(words: list[str], said: str, capsys: Captured) -> None:
    """Each says what is wrong with it."""
    assert run("a", "b.lmdb", *words) == 2
    assert said in capsys.readouterr().err


def test_a_read_only_folder_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    """D9: as another user, who may not write there: exit code 1, the file and the reason."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    target = tmp_path / "shut"
    target.mkdir(mode=0o555)
    script = (
        "import os, sys; from shmloader_tools import pack; os.setgid(65534); os.setuid(65534); "
        "sys.exit(pack.main(sys.argv[1:]))"
    )
    for path in (*tmp_path.parents, tmp_path):
        if path.stat().st_uid == 0 and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o055)
    words = [sys.executable, "-c", script, str(folder), str(target / "a.lmdb")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr == f"shmloader-pack: error: {target}/a.lmdb.partial: cannot be written: Permission denied\n"


def test_a_pack_in_use_can_be_replaced(folder: Path, tmp_path: Path) -> None:
    """A training run that reads the old pack keeps reading it, right to its end; new readers get the new one."""
    target = tmp_path / "a.lmdb"
    assert run(folder, target, "--quiet") == 0
    training = PackedDataset(target)
    expected = [training[i][0].clone() for i in range(12)]
    assert run(folder, target, "--overwrite", "--size", "8x8", "--quiet") == 0
    assert all(torch.equal(training[i][0], expected[i]) for i in range(12))
    assert PackedDataset(target)[0][0].shape == (3, 8, 8)


@pytest.mark.parametrize("end", ["head", "closed"])
def test_nobody_has_to_read_what_is_printed(folder: Path, tmp_path: Path, end: str) -> None:
    """A reader that has left (``| head -1``), or no stdout at all: no word, exit code 0, and the work is done."""
    for tool, words in (
        ("pack", [str(folder), str(tmp_path / "p.lmdb")]),
        ("inspect_pack", [str(tmp_path / "p.lmdb")]),
        ("inspect_pack", [str(tmp_path / "p.lmdb"), "--json"]),
        ("tune", [str(tmp_path / "p.lmdb"), "--batch-size", "2", "--sample-bytes", "1MiB"]),
    ):
        command = [sys.executable, "-W", "error", "-m", f"shmloader_tools.{tool}", *words]
        read, write = os.pipe()
        os.close(read)
        try:
            if end == "closed":
                command = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
            done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
        finally:
            os.close(write)
        assert (done.returncode, done.stderr) == (0, "")
    assert len(PackedDataset(tmp_path / "p.lmdb")) == 12


def test_ctrl_c_keeps_what_is_packed(tmp_path: Path) -> None:
    """Exit code 130, one sentence, no traceback; the same command goes on where it was."""
    script = """
        import signal, sys, numpy as np
        from shmloader_tools import pack
        from listed import Samples

        class Slow(Samples):
            def __getitem__(self, index):
                if index == 40:
                    print("now", flush=True)
                    signal.pause()
                return super().__getitem__(index)

        kind = Slow if sys.argv[2] == "slow" else Samples
        data = kind([np.full(100_000, i) for i in range(60)])
        pack.open_source = lambda *args: data
        sys.exit(pack.main(["x", sys.argv[1], "--chunk", "1MiB", "--workers", "0"]))
    """
    env = {"PYTHONPATH": str(Path(__file__).parent)}
    with Script(script, args=[str(tmp_path / "a.lmdb"), "slow"], env=env) as child:
        child.read_until("now")
        os.kill(child.pid, signal.SIGINT)
        assert child.wait() == 130
        said = child.read_until("goes on")
    assert "Traceback" not in said
    assert (tmp_path / "a.lmdb.partial").exists()
    with Script(script, args=[str(tmp_path / "a.lmdb"), "fast"], env=env) as child:
        assert child.wait() == 0
        assert "of an earlier run" in child.read_until("Look at")
    assert len(PackedDataset(tmp_path / "a.lmdb")) == 60


# --- inspect ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def detection(tmp_path: Path) -> Path:
    """A pack of white images, each with one box, one point, and more."""
    samples = [
        {
            "image": torch.full((3, 100, 200), 255, dtype=torch.uint8),
            "boxes": torch.tensor([[20.0, 10.0, 120.0, 60.0]]),
            "labels": torch.tensor([i % 2]),
            "points": torch.tensor([[150.0, 80.0]]),
            "text": "é" * 300,
            "raw": bytes(range(100)),
            "nan": float("nan"),
            "long": torch.arange(100),
        }
        for i in range(20)
    ]
    pack(samples, tmp_path / "d.lmdb", metadata={"classes": ["cat", "dög"]})
    return tmp_path / "d.lmdb"


def test_a_sample_can_be_looked_at(detection: Path, capsys: Captured) -> None:
    """Short values whole, long ones by size and range; JSON too; a sample that is not there is exit code 1."""
    assert inspect_pack.main([str(detection), "--sample", "-3"]) == 0
    out = capsys.readouterr().out
    for words in (
        "Sample    17",
        "boxes: float32 1x4: [[20.0, 10.0, 120.0, 60.0]]",
        "(300 characters)",
        "100 bytes: 00 01",
    ):
        assert words in out, out
    assert "long: int64 100, 0 to 99, mean 49.5" in out
    assert inspect_pack.main([str(detection), "--sample", "17", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sample"]["fields"]["nan"] == "nan"
    assert inspect_pack.main([str(detection), "--sample", "20"]) == 1
    assert "has 20 samples: there is no sample 20" in capsys.readouterr().err


def test_a_contact_sheet_has_boxes_and_points_where_they_belong(detection: Path, tmp_path: Path) -> None:
    """The scaled box's edge has its colour, its middle has not; the point is there; a sheet of all has 16 tiles."""
    sheet = tmp_path / "one.png"
    assert inspect_pack.main([str(detection), "--sample", "0", "--image", str(sheet)]) == 0
    scale = 256 / 200
    with Image.open(sheet) as image:
        at = [
            image.getpixel((4 + round(x * scale), 4 + round(y * scale))) for x, y in ((20.5, 50), (70, 40), (150, 80))
        ]
    assert at[0] == (0xE6, 0x19, 0x4B)
    assert at[1] == (255, 255, 255)
    assert at[2] == (0x42, 0xD4, 0xF4)
    assert inspect_pack.main([str(detection), "--image", str(sheet)]) == 0
    with Image.open(sheet) as image:
        assert image.size == (4 * 260 + 4, 4 * 276 + 4)


def test_a_sheet_that_cannot_be_is_one_sentence(detection: Path, tmp_path: Path, capsys: Captured) -> None:
    """No images in the pack, an ending that no format has, a folder that is not there: exit code 1."""
    pack([1, 2], tmp_path / "n.lmdb")
    for words in (
        [tmp_path / "n.lmdb", "--image", "x.png"],
        [detection, "--image", tmp_path / "x.nothing"],
        [detection, "--image", tmp_path / "no" / "x.png"],
    ):
        assert inspect_pack.main([str(word) for word in words]) == 1
        err = capsys.readouterr().err
        assert err.startswith("shmloader-inspect: error: ")
        assert err.count("\n") == 1
