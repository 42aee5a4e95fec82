"""The benchmarks' command line: one fresh process per group of rows, a table on stdout, every round as JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import shmloader
from harness import CONTENDERS, Round, Row, Workload, measure


def machine() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "shmloader": shmloader.__version__,
        "kernel": platform.release(),
        "cpus": len(os.sched_getaffinity(0)),
    }


HEAD = (
    "workload",
    "workers",
    "contender",
    "us/batch",
    "GB/s",
    "main us",
    "CPU s/GB",
    "Shmem MiB",
    "x torch",
    "of memcpy",
)


def print_rows(rows: list[Row]) -> None:
    """Print the table of one group: times, and ratios to torch on the plain dataset and to the memcpy limit."""
    print("{:<10} {:>7} {:<12} {:>10} {:>6} {:>8} {:>9} {:>9} {:>8} {:>9}".format(*HEAD))
    times = {row.contender: row.us_per_batch for row in rows}
    for row in rows:
        ratios = [
            f"{times[base] / row.us_per_batch:.2f}" if base in times else "-" for base in ("torch/plain", "memcpy")
        ]
        print(
            f"{row.workload:<10} {row.workers:>7} {row.contender:<12} {row.us_per_batch:>10.1f} {row.gb_per_s:>6.2f} "
            f"{row.main_us_per_batch:>8.1f} {row.cpu_s_per_gb:>9.3f} {row.shmem / 2**20:>9.1f} "
            f"{ratios[0]:>8} {ratios[1]:>9}",
            flush=True,
        )
    for row in rows:
        if row.contender == "memcpy" and row.main_us_per_batch < 0.9 * row.us_per_batch:
            share = row.main_us_per_batch / row.us_per_batch
            print(f"BUSY       the plain copy had a CPU for {share:.0%} of its time: other programs run; repeat this")


def main(script: str, workloads: Sequence[Workload], argv: list[str] | None = None) -> int:
    """Run a benchmark's command line. ``script`` is the file that calls this: it is started again for each group."""
    names = [workload.name for workload in workloads]
    parser = argparse.ArgumentParser(description="Compare loaders on the same samples; see the docstring of this file.")
    parser.add_argument("--rows", default=",".join(names), help="workloads, by comma (default: %(default)s)")
    parser.add_argument("--workers", default="0,1,2", help="numbers of workers, by comma (default: %(default)s)")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="by comma (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contender (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a quarter of the data, 3 rounds: shows that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round of every row to FILE")
    parser.add_argument("--group", nargs=3, metavar=("WORKLOAD", "WORKERS", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    wanted, by_name = options.contenders.split(","), dict(zip(names, workloads, strict=True))
    rounds = 3 if options.quick else options.rounds
    for given, known in ((wanted, CONTENDERS), (options.rows.split(","), names)):
        if unknown := set(given) - set(known):
            parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}")

    if options.group:
        name, workers, folder = options.group
        rows = measure(by_name[name], Path(folder), int(workers), wanted, rounds)
        print(json.dumps([asdict(row) for row in rows]))
        return 0

    rows = []
    facts = machine()
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    for name in options.rows.split(","):
        with tempfile.TemporaryDirectory(prefix="shmloader-benchmark-") as text:
            folder, workload = Path(text), by_name[name]
            workload.write(folder, workload.samples // 4 if options.quick else workload.samples)
            if any("pack" in contender for contender in wanted):
                shmloader.pack(workload.load(folder), str(folder / "pack.lmdb"))
            for workers in options.workers.split(","):
                command = [sys.executable, script, "--rounds", str(rounds), "--contenders", options.contenders]
                command += ["--group", name, workers, text]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
                if done.returncode:  # its traceback is above: wrong data, or a loader that failed
                    print(f"{name} with {workers} workers: failed (exit code {done.returncode})", file=sys.stderr)
                    return 1
                group = [
                    Row(**{**row, "rounds": [Round(**turn) for turn in row["rounds"]]})
                    for row in json.loads(done.stdout)
                ]
                print_rows(group)
                rows += group
    if options.json:
        options.json.write_text(json.dumps({"machine": facts, "rows": [asdict(row) for row in rows]}, indent=1))
    return 0
