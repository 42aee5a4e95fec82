"""Does it hold on a GPU, and what does it cost there? Needs torch with CUDA, lmdb, posix-ipc and numpy, nothing else.

    python benchmarks/gpu.py [--quick] [--checks | --figures] [--workers 4] [--json FILE]

Checks     page-locked batches; 2,000 numbered batches, each copied non_blocking behind up to 50 ms of queued work and
           dropped at once, on the main stream, on a side stream, and on a stream named to the loader; device batches;
           100 loaders made and dropped; a refused registration; workers of every start method after CUDA; a control
           without draining, which shows whether the checks can fail.
Figures    host to device from slots, from torch's pinned memory, from pageable memory; page-locking cold and
           pre-faulted; a small training fed by torch's loader with pin_memory and by ours; overlap of copies with
           computing.
Exit code  0: all checks passed and all targets are met; 1: not so; 2: there is no CUDA device here.

Takes less than 4 minutes. Not run on a GPU yet: there is no table to show.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import gpu_checks
import gpu_figures
import shmloader
from gpu_bench import CudaBench

NO_CUDA = "There is no CUDA device here (torch {version}), so nothing was checked or measured."


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description="Check and measure the way to the GPU; see the docstring.")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--checks", action="store_true", help="only check")
    only.add_argument("--figures", action="store_true", help="only measure")
    parser.add_argument("--quick", action="store_true", help="a tenth of the work: shows that it runs")
    parser.add_argument("--workers", type=int, default=min(8, max(1, len(os.sched_getaffinity(0)) - 2)), metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to FILE")
    options = parser.parse_args(argv)
    if options.workers < 1:
        parser.error(f"--workers must be at least 1, not {options.workers}")
    return options


def machine() -> dict[str, Any]:
    """Return what the numbers were measured on."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or f"ROCm {torch.version.hip}",
        "python": platform.python_version(),
        "shmloader": shmloader.__version__,
        "kernel": platform.release(),
        "cpus": len(os.sched_getaffinity(0)),
    }


def measure(quick: bool, workers: int) -> dict[str, Any]:
    """Return all figures. One that fails is a text, and does not stop the others."""
    batches = 40 if quick else 200
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="shmloader-gpu-") as folder:
        jobs: dict[str, Callable[[], dict[str, Any]]] = {
            "bandwidth": lambda: gpu_figures.bandwidth(mib=64, repeats=10 if quick else 50, rounds=3 if quick else 7),
            "registration": lambda: gpu_figures.registration(CudaBench().engine(), gib=0.25 if quick else 2.0),
            "training": lambda: gpu_figures.training(
                Path(folder), images=512 if quick else 2048, batch_size=256, workers=workers, warm=10, batches=batches
            ),
            "overlap": lambda: gpu_figures.overlap(workers=workers, batches=batches, mib=16),
        }
        for name, job in jobs.items():
            try:
                figures[name] = job()
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the result
                figures[name] = {"error": f"{type(error).__name__}: {error}"}
            print("\n".join(lines_of(name, figures[name])), flush=True)
    return figures


def lines_of(name: str, numbers: dict[str, Any]) -> list[str]:
    """Return the table of one group of figures."""
    lines = []
    for key, value in numbers.items():
        if isinstance(value, dict):
            lines += lines_of(f"{name} {key}", value)
        else:
            shown = f"{value:12.3f}" if isinstance(value, float) else f"  {value}"
            lines.append(f"  {name:<26} {key:<30} {shown}")
    return lines


def verdict(checks: dict[str, Any], figures: dict[str, Any]) -> tuple[list[str], int]:
    """Return the lines that sum up, and the exit code: 0 if nothing failed, was missed, or could not be measured."""
    lines, failed = [], [name for name, result in checks.items() if not result["passed"]]
    lines += [f"  FAILED   {name}: {checks[name]['said']}" for name in failed]
    unmeasured = [name for name, numbers in figures.items() if "error" in numbers]
    lines += [f"  FAILED   {name}: {figures[name]['error']}" for name in unmeasured]
    missed = False
    for name, (value, promise, kept) in gpu_figures.targets(figures).items():
        lines.append(f"  {'kept' if kept else 'MISSED':<8} {name} = {value:.3f} ({promise})")
        missed = missed or not kept
    return lines, 1 if failed or unmeasured or missed else 0


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    if not torch.cuda.is_available():
        print(NO_CUDA.format(version=torch.__version__), file=sys.stderr)
        return 2
    start = time.perf_counter()
    results: dict[str, Any] = {"machine": machine(), "checks": {}, "figures": {}}
    print("  ".join(f"{key} {value}" for key, value in results["machine"].items()))
    if not options.figures:
        print("Checks")
        size = gpu_checks.QUICK if options.quick else gpu_checks.FULL
        results["checks"] = gpu_checks.run(CudaBench(), size)
    if not options.checks:
        print("Figures")
        results["figures"] = measure(options.quick, options.workers)
    lines, code = verdict(results["checks"], results["figures"])
    results["seconds"] = time.perf_counter() - start
    print("Verdict")
    print("\n".join(lines or ["  nothing failed"]))
    print(f"  {results['seconds']:.0f} s, exit code {code}")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))
    return code


if __name__ == "__main__":
    sys.exit(main())
