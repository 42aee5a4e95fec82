"""The benchmarks run, and would notice wrong data."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from support import run_command, run_script

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
CONTENDERS = ["memcpy", "alone/plain", "torch/plain", "ours/plain", "torch/pack", "ours/pack"]


@pytest.mark.slow
@pytest.mark.parametrize(("script", "rows"), [("transport.py", "table"), ("detection.py", "detection")])
def test_a_quick_run_prints_and_keeps_all_rows(script: str, rows: str, tmp_path: Path) -> None:
    """Every contender has a line, and every round is in the JSON."""
    out = tmp_path / "out.json"
    command = [
        sys.executable,
        str(BENCHMARKS / script),
        "--quick",
        "--rows",
        rows,
        "--workers",
        "1",
        "--json",
        str(out),
    ]
    result = run_command(command, timeout=300).silent()
    for contender in CONTENDERS:
        assert f" {contender} " in result.stdout
    found = json.loads(out.read_text())
    assert [row["contender"] for row in found["rows"]] == CONTENDERS
    assert all(len(row["rounds"]) == 3 for row in found["rows"])
    assert all(turn["wall_s"] > 0 and turn["nbytes"] > 0 for row in found["rows"] for turn in row["rounds"])
    assert {"python", "torch", "cpus"} <= set(found["machine"])


def test_an_unknown_row_is_refused() -> None:
    """Exit code 2 and the names that there are."""
    result = run_command([sys.executable, str(BENCHMARKS / "transport.py"), "--rows", "sounds"])
    assert result.returncode == 2
    assert "unknown: sounds; known: images, tokens, table" in result.stderr


WRONG = """
import sys, tempfile
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import harness, torch, transport

class Wrong(torch.utils.data.DataLoader):
    def __iter__(self):
        for number, batch in enumerate(super().__iter__()):
            if number == 1:
                batch = {damage}
            yield batch

workload = transport.Arrays("tokens", (8,), "int32", 4, 64)
with tempfile.TemporaryDirectory() as folder:
    workload.write(Path(folder), 64)
    plain = workload.load(Path(folder))
    kind = {kind}
    contender = harness.Contender("x", plain, lambda sampler, batches: kind(plain, sampler=sampler, batch_size=4))
    harness.check_whole_pass(workload, plain, contender, 16)
    harness.take_turn(workload, plain, contender, 0, 8, 1, 1)
print("right")
"""


@pytest.mark.parametrize(
    "damage",
    ["batch.flip(0)", "batch.to(torch.int64)", "batch[:3]", "batch ^ 1"],
    ids=["order", "dtype", "short", "bits"],
)
def test_wrong_data_ends_the_benchmark(damage: str) -> None:
    """Samples in another order, of another type, missing or changed: no number is printed."""
    result = run_script(WRONG.format(damage=damage, kind="Wrong"), args=[str(BENCHMARKS)])
    assert result.returncode == 1
    assert "AssertionError: tokens: tensor 0" in result.stderr


def test_right_data_passes() -> None:
    """The same script with torch's own loader."""
    script = WRONG.format(damage="batch", kind="torch.utils.data.DataLoader")
    assert run_script(script, args=[str(BENCHMARKS)]).silent().stdout == "right\n"


@pytest.mark.parametrize(
    ("script", "arguments", "said"),
    [
        ("fuzz_pack.py", ["--count", "120", "--seed", "2"], "0 not as it should be"),
        ("kill_runs.py", ["--count", "6", "--seed", "2"], "0 wrong, leaks: none"),
        pytest.param("kill_runs.py", ["--count", "60", "--seed", "3"], "0 wrong, leaks: none", marks=pytest.mark.slow),
        pytest.param("soak.py", ["--minutes", "0.3", "--seed", "2"], "0 wrong, leaks: none", marks=pytest.mark.slow),
    ],
)
def test_the_scripts_that_look_for_trouble_run_and_find_none(script: str, arguments: list[str], said: str) -> None:
    """A7, D6: a short soak, a few kills at random moments, some damaged packs."""
    result = run_command([sys.executable, str(BENCHMARKS / script), *arguments], timeout=300).check()
    assert said in result.stdout
