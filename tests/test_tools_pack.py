"""shmloader-pack and shmloader-inspect: what people type, what they read, and the exit code that scripts read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from shmloader_tools import inspect_pack
from shmloader_tools import pack as pack_tool

from shmloader.packfile import PackedDataset
from shmloader.sources import ImageFolder

Captured = pytest.CaptureFixture[str]


def photo(path: Path, seed: int = 0, size: tuple[int, int] = (40, 30), mode: str = "RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Seven images of different sizes and modes in two classes."""
    root = tmp_path / "photos"
    for i in range(4):
        photo(root / "cat" / f"{i}.jpg", i, (40 + i, 30))
    photo(root / "dog" / "grey.jpg", 5, mode="L")
    photo(root / "dog" / "ink.jpg", 6, mode="CMYK")
    photo(root / "dog" / "clear.png", 7, mode="RGBA")
    (root / "dog" / "notes.txt").write_text("x")
    return root


def run(*words: str | Path) -> int:
    return pack_tool.main([str(word) for word in words])


def damage(pack: Path, value: bytes) -> None:
    """Change one byte inside of ``value``, wherever it lies in the file."""
    data = bytearray(pack.read_bytes())
    at = bytes(data).index(value) + len(value) // 2
    data[at] ^= 0xFF
    pack.chmod(0o644)
    pack.write_bytes(data)


def test_a_packed_folder_yields_what_the_folder_yields(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    """Stored as files, decoded on reading: the same pixels and labels, in the same order; and the report says so."""
    assert run(folder, tmp_path / "a.lmdb") == 0
    packed, source = PackedDataset(tmp_path / "a.lmdb"), ImageFolder(folder)
    assert len(packed) == len(source) == 7
    assert packed.classes == ["cat", "dog"]
    for i in range(7):
        assert torch.equal(packed[i][0], source[i][0]), source.name_of(i)
        assert packed[i][1] == source[i][1]
    out, err = capsys.readouterr()
    assert err == ""  # not a terminal: no progress bar
    for words in ("7 in 2 classes", "x payload", "samples/s", "cat", "left out, not images", "notes.txt"):
        assert words in out
    assert "image folder, images stored as their files" in out


def test_a_size_packs_pixels(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    """--size gives one shape to all; the pixels are those of the same Fit on the folder."""
    assert run(folder, tmp_path / "a.lmdb", "--size", "24x16") == 0
    packed = PackedDataset(tmp_path / "a.lmdb")
    assert packed.fields[0].shape == (3, 16, 24)
    from shmloader.images import Fit

    source = ImageFolder(folder, fit=Fit(16, 24))
    assert all(torch.equal(packed[i][0], source[i][0]) for i in range(7))
    assert "stretched to 24x16" in capsys.readouterr().out


def test_resize_and_crop_are_passed_on(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    """The words of the command line end up in the report and in the pixels."""
    assert run(folder, tmp_path / "a.lmdb", "--size", "20x20", "--resize", "short:26", "--crop", "center") == 0
    assert "shorter side 26, centre crop 20x20" in capsys.readouterr().out
    assert PackedDataset(tmp_path / "a.lmdb")[3][0].shape == (3, 20, 20)


def test_arrays_are_packed_with_names_and_dtypes(tmp_path: Path, capsys: Captured) -> None:
    """An .npz comes back as dict samples of equal tensors."""
    x = np.random.default_rng(0).random((50, 3, 2)).astype(np.float32)
    y = np.arange(50, dtype=np.int16)
    np.savez(tmp_path / "d.npz", x=x, y=y)
    assert run(tmp_path / "d.npz", tmp_path / "d.lmdb") == 0
    packed = PackedDataset(tmp_path / "d.lmdb")
    sample = packed[17]
    assert list(sample) == ["x", "y"]
    assert torch.equal(sample["x"], torch.from_numpy(x[17]))
    assert int(sample["y"]) == 17
    np.testing.assert_array_equal(packed.column("x"), x)
    np.testing.assert_array_equal(packed.column("y"), y)
    assert packed.column("y").dtype == np.int16
    assert "2 arrays" in capsys.readouterr().out


def test_a_single_array_is_packed_as_its_rows(tmp_path: Path) -> None:
    """An .npy needs no names."""
    x = np.arange(30, dtype=np.uint8).reshape(10, 3)
    np.save(tmp_path / "x.npy", x)
    assert run(tmp_path / "x.npy", tmp_path / "x.lmdb", "--quiet") == 0
    packed = PackedDataset(tmp_path / "x.lmdb")
    assert torch.equal(packed[4], torch.from_numpy(x[4]))


def test_quiet_prints_nothing(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    """For scripts: silence is success."""
    assert run(folder, tmp_path / "a.lmdb", "--quiet") == 0
    assert capsys.readouterr() == ("", "")


def test_a_broken_image_ends_in_one_sentence_with_its_name(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    """E7: exit code 1, no traceback, no half pack, no leftovers."""
    bad = folder / "cat" / "2.jpg"
    bad.write_bytes(bad.read_bytes()[:300])
    before = sorted(p.name for p in tmp_path.iterdir())
    for more in ([], ["--size", "16x16"]):
        assert run(folder, tmp_path / "a.lmdb", *more) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert str(bad) in err
        assert err.count("\n") == 1
        assert err.startswith("shmloader-pack: error: ")
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_an_existing_target_is_kept_unless_told(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    """D6: nothing is replaced by accident, and a failing replacement leaves the old file."""
    target = tmp_path / "a.lmdb"
    assert run(folder, target) == 0
    before = target.read_bytes()
    capsys.readouterr()
    assert run(folder, target) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert target.read_bytes() == before
    bad = folder / "dog" / "zz.jpg"
    bad.write_bytes(b"no image")
    assert run(folder, target, "--overwrite") == 1
    assert target.read_bytes() == before
    bad.unlink()
    assert run(folder, target, "--overwrite", "--size", "8x8") == 0
    assert PackedDataset(target)[0][0].shape == (3, 8, 8)


def test_what_is_not_there_or_not_known_is_one_sentence(tmp_path: Path, capsys: Captured) -> None:
    """The source's own errors reach the terminal whole."""
    assert run(tmp_path / "nothing", tmp_path / "a.lmdb") == 1
    assert "there is no such file or folder" in capsys.readouterr().err
    assert run(tmp_path, tmp_path / "a.lmdb") == 1
    assert "looked for" in capsys.readouterr().err
    np.save(tmp_path / "x.npy", np.zeros(3))
    assert run(tmp_path / "x.npy", tmp_path / "a.lmdb", "--size", "8x8") == 1
    assert "not image files" in capsys.readouterr().err
    assert not (tmp_path / "a.lmdb").exists()


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["a"],
        ["a", "b.lmdb", "--size", "huge"],
        ["a", "b.lmdb", "--crop", "center"],
        ["a", "b.lmdb", "--size", "224x224", "--resize", "short:256"],
        ["a", "b.lmdb", "--as", "nonsense"],
    ],
)
def test_wrong_usage_is_exit_code_2(words: list[str], capsys: Captured) -> None:
    """Scripts can tell a typo from bad data."""
    assert run(*words) == 2
    assert "usage: shmloader-pack" in capsys.readouterr().err


def test_help_lists_what_is_recognised(capsys: Captured) -> None:
    """--help names every kind and the exit codes."""
    assert run("--help") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "image-folder" in out
    assert "one row per sample" in out
    assert "Exit code 0" in out


def test_the_installed_commands_run(folder: Path, tmp_path: Path) -> None:
    """Both entry points, as real processes, with a target that is a plain name."""
    bin_dir = Path(sys.executable).parent
    for words in (["shmloader-pack", "photos", "a.lmdb"], ["shmloader-inspect", "a.lmdb", "--verify"]):
        done = subprocess.run(
            [str(bin_dir / words[0]), *words[1:]],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, ""), done


def test_a_terminal_gets_a_progress_bar(folder: Path, tmp_path: Path) -> None:
    """On a terminal: samples done of all, rate, time left; the report stays clean on stdout."""
    ours, terminal = os.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "shmloader_tools.pack", str(folder), str(tmp_path / "a.lmdb")],
        stdout=subprocess.PIPE,
        stderr=terminal,
        timeout=120,
        check=True,
    )
    os.set_blocking(ours, False)
    shown = os.read(ours, 65536).decode()
    os.close(terminal)
    os.close(ours)
    assert "/7.00 [" in shown
    assert "samples/s" in shown
    assert b"\r" not in done.stdout


# --- inspect ----------------------------------------------------------------------------------------------------------


def test_inspect_shows_fields_sizes_and_classes(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    """One look tells what is in a pack and where it came from."""
    run(folder, tmp_path / "a.lmdb", "--size", "24x16", "--quiet")
    assert inspect_pack.main([str(tmp_path / "a.lmdb")]) == 0
    out = capsys.readouterr().out
    for words in ("Samples   7", "image", "uint8", "label", "cat", "dog", str(folder), "stretched to 24x16"):
        assert words in out, out


def test_inspect_json_is_for_programs(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    """The same facts as JSON, and nothing else on stdout."""
    run(folder, tmp_path / "a.lmdb", "--quiet")
    assert inspect_pack.main([str(tmp_path / "a.lmdb"), "--json", "--verify"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["samples"] == 7
    assert [field["name"] for field in facts["fields"]] == ["image", "label"]
    assert facts["class_counts"] == {"cat": 4, "dog": 3}
    assert facts["problems"] == []
    assert facts["file_bytes"] == os.path.getsize(tmp_path / "a.lmdb")


def test_verify_lists_the_damage(tmp_path: Path, capsys: Captured) -> None:
    """D6: one changed byte is found, named with its field, and is exit code 1."""
    x = np.random.default_rng(0).integers(0, 255, (64, 4096), np.uint8)
    np.savez(tmp_path / "d.npz", x=x, y=np.arange(64))
    run(tmp_path / "d.npz", tmp_path / "d.lmdb", "--quiet")
    damage(tmp_path / "d.lmdb", x[33].tobytes())
    assert inspect_pack.main([str(tmp_path / "d.lmdb")]) == 0  # a look at the head does not read all of it
    capsys.readouterr()
    assert inspect_pack.main([str(tmp_path / "d.lmdb"), "--verify"]) == 1
    out = capsys.readouterr().out
    assert "DAMAGED" in out
    assert "'x'" in out or " x" in out
    assert inspect_pack.main([str(tmp_path / "d.lmdb"), "--verify", "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["problems"]) == 1


def test_inspect_refuses_what_is_no_pack_in_one_sentence(tmp_path: Path, capsys: Captured) -> None:
    """Missing, foreign and empty files: exit code 1 and no traceback; no argument at all: 2."""
    (tmp_path / "text.lmdb").write_text("hello " * 2000)
    (tmp_path / "empty.lmdb").write_bytes(b"")
    for name in ("gone.lmdb", "text.lmdb", "empty.lmdb", "."):
        assert inspect_pack.main([str(tmp_path / name)]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("shmloader-inspect: error: ")
        assert err.count("\n") == 1
    assert inspect_pack.main([]) == 2
