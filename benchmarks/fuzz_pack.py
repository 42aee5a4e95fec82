"""Damaged packs by the ten thousand: an exception of ours or right data, never a signal, never anything else.

    python benchmarks/fuzz_pack.py --count 20000 --seed 1

Each case takes one of three small packs (plain rows; ragged rows, free shapes and strings; many fields), damages a copy
in one to three ways (flipped bits, bytes and numbers with telling values, runs of zeros or noise, pages copied over
others, cut, lengthened; half of them in the head, the tree, the tables and the manifest), and reads all of it with
``verify="open"`` or ``"first-touch"``: sample by sample, in bulk, gathered, as columns, and by ``verify()``. One case
in four is damaged after it was opened. Right is: what was packed, or an exception of PackError that names the file.

A case is its seed: ``--seed 1 --only 4711`` repeats one. Cases run in child processes, so a signal is found and laid to
its case. What this does not show: a file that is cut between the look at its length and the reading (see
shmloader/packfile/checks.py), and reading with checksums off, which gives wrong data for wrong bytes by design.
Exit code 0: all right; 1: at least one case was not, and its line says how to repeat it.
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shmloader import PackedDataset, PackError, pack
from shmloader.packfile import verify

BATCH = 500
"""Cases a child runs before the next one takes over."""
STUCK_S = 120.0
REFUSED, RIGHT, VERIFY_ALONE = "refused", "right", "right, the damage found by verify() alone"
GOOD = (REFUSED, RIGHT, VERIFY_ALONE)
_NUMBERS = (0, 1, 2, 3, 7, 255, 4096, 65535, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)


def originals(folder: Path) -> list[tuple[bytes, list[Any], list[int]]]:
    """Return packs as bytes, with their samples, and the places that steer reading (the head, the tree, the tables)."""
    rng = np.random.default_rng(0)
    kinds: dict[str, list[Any]] = {
        "plain": [(rng.integers(0, 255, 96, np.uint8), i) for i in range(150)],
        "ragged": [(np.arange(i % 7), np.ones((i % 3, i % 4), np.float32), f"s{i}", b"b" * (i % 5)) for i in range(90)],
        "many": [{f"f{k}": np.full(3, i + k, np.int16) for k in range(12)} for i in range(60)],
    }
    made = []
    for name, samples in kinds.items():
        path = pack(samples, folder / f"{name}.lmdb", chunk_bytes=4096).path
        data = Path(path).read_bytes()
        dataset = PackedDataset(path)
        values = np.zeros(len(data), bool)
        for located in dataset._pack.fields:
            for places in located.parts.values():
                for place in places.tolist():
                    values[place : place + 3000] = True
        steering = np.flatnonzero(~values & (np.frombuffer(data, np.uint8) != 0)).tolist()
        made.append((data, [dataset[i] for i in range(len(dataset))], steering))
    return made


def damage(data: bytes, steering: list[int], rng: random.Random) -> bytes:
    """Return a damaged copy."""
    mutant = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.choice(steering) if rng.random() < 0.5 else rng.randrange(len(data))
        at = min(at, max(0, len(mutant) - 1))
        way = rng.randrange(9)
        if not mutant:
            break
        if way <= 1:
            mutant[at] ^= 1 << rng.randrange(8)
        elif way == 2:
            mutant[at] = rng.randrange(256)
        elif way == 3:
            width = rng.choice((2, 4, 8))
            at -= at % width
            value = (rng.choice(_NUMBERS) if rng.random() < 0.7 else rng.getrandbits(64)) % (1 << 8 * width)
            mutant[at : at + width] = value.to_bytes(width, "little")[: len(mutant) - at]
        elif way == 4:
            run = min(rng.choice((4, 64, 4096)), len(mutant) - at)
            mutant[at : at + run] = bytes(run) if rng.random() < 0.5 else rng.randbytes(run)
        elif way == 5:
            pages = max(1, len(mutant) // 4096)
            to, of = rng.randrange(pages) * 4096, rng.randrange(pages) * 4096
            mutant[to : to + 4096] = mutant[of : of + 4096]
        elif way == 6:
            del mutant[rng.randrange(len(mutant)) :]
        elif way == 7:
            mutant += rng.randbytes(rng.choice((1, 100, 4096, 8192)))
        else:
            run = rng.choice((1, 8, 4096))
            del mutant[at : at + run]
    return bytes(mutant)


def same(found: Any, packed: Any) -> bool:
    """Whether two samples are equal, tensors included."""
    if isinstance(packed, torch.Tensor):
        return isinstance(found, torch.Tensor) and found.dtype == packed.dtype and torch.equal(found, packed)
    if isinstance(packed, dict):
        return found.keys() == packed.keys() and all(same(found[key], packed[key]) for key in packed)
    if isinstance(packed, tuple):
        return len(found) == len(packed) and all(map(same, found, packed))
    return type(found) is type(packed) and bool(found == packed)


def read_all(dataset: PackedDataset, samples: list[Any], rng: random.Random) -> None:
    """Read everything, in the ways that there are, in some order. AssertionError for wrong data."""
    assert len(dataset) == len(samples), "another length"
    rows = np.array(rng.sample(range(len(samples)), len(samples)), np.int64)

    def one_by_one() -> None:
        for i in rows.tolist()[:40]:
            assert same(dataset[i], samples[i]), f"wrong sample {i}"

    def in_bulk() -> None:
        for start in range(0, len(rows), 32):
            part = rows[start : start + 32].tolist()
            for i, sample in zip(part, dataset.__getitems__(part), strict=True):
                assert same(sample, samples[i]), f"wrong sample {i} in bulk"

    def columns() -> None:
        for number, reader in enumerate(dataset.gather.fields):
            column = dataset.column(reader.name)
            if not reader.ragged and len(dataset.fields) > 1:
                first = list(samples[0].values() if isinstance(samples[0], dict) else samples[0])[number]
                assert np.array_equal(column[0], np.asarray(first)), f"wrong column {reader.name}"

    def gathered() -> None:
        dataset.before(rows)
        for number, reader in enumerate(dataset.gather.fields):
            if not reader.ragged:
                out = torch.empty((len(rows), *reader.shape), dtype=reader.torch_dtype)
                reader.gather(rows, out)
                for place, i in enumerate(rows.tolist()):
                    packed = list(samples[i].values() if isinstance(samples[i], dict) else samples[i])[number]
                    assert torch.equal(out[place], torch.as_tensor(packed)), f"wrong row {i} gathered"

    for way in rng.sample((one_by_one, in_bulk, columns, gathered), 4):
        way()


def judge(path: Path, original: tuple[bytes, list[Any], list[int]], rng: random.Random) -> str:
    """Run one case; return one of GOOD, or what is wrong."""
    data, samples, steering = original
    mutant = damage(data, steering, rng)
    how = rng.choice(("open", "first-touch"))
    try:
        if rng.random() < 0.25:
            path.write_bytes(data)
            os.utime(path, ns=(1, 1))  # so that writing is a change, however coarse the clock
            dataset = PackedDataset(path, verify=how)
            dataset[0]
            with open(path, "r+b") as file:
                file.write(mutant)
                file.truncate()
            read_all(dataset, samples, rng)
        else:
            path.write_bytes(mutant)
            found = PackedDataset(path, verify=how)
            read_all(found, samples, rng)
            if verify(path):  # it looks at every page, reading only at what it reads
                return VERIFY_ALONE
    except PackError as error:
        return REFUSED if str(path) in str(error) else f"no file in the message: {error}"
    except AssertionError as wrong:
        return f"WRONG DATA: {wrong}"
    except Exception as error:  # noqa: BLE001 - whatever else it is, it is the finding
        return f"{type(error).__name__}: {error}"
    return RIGHT


def run_cases(seed: int, cases: list[int], folder: str, status: mmap.mmap, results: Any) -> None:
    """The body of a child: run cases, telling beforehand which."""
    torch.set_num_threads(1)
    made = originals(Path(folder))
    counts: Counter[str] = Counter()
    failures = []
    path = Path(folder) / "mutant.lmdb"
    for case in cases:
        status[:8] = case.to_bytes(8, "little")
        rng = random.Random(f"{seed}/{case}")
        verdict = judge(path, made[case % len(made)], rng)
        counts[verdict if verdict in GOOD else "FAILED"] += 1
        if verdict not in GOOD:
            failures.append((case, verdict))
        path.unlink(missing_ok=True)
    results.send((counts, failures))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="repeat one case")
    chosen = parser.parse_args(arguments)
    cases = [chosen.only] if chosen.only is not None else list(range(chosen.count))
    status = mmap.mmap(-1, 8)
    context = multiprocessing.get_context("fork")
    counts: Counter[str] = Counter()
    failures: list[tuple[int, str]] = []
    started = time.monotonic()
    print(f"seed {chosen.seed}, {len(cases)} cases", flush=True)
    while cases:
        batch, cases = cases[:BATCH], cases[BATCH:]
        receive, send = context.Pipe(duplex=False)
        with tempfile.TemporaryDirectory() as folder:
            child = context.Process(target=run_cases, args=(chosen.seed, batch, folder, status, send))
            child.start()
            send.close()
            answered = receive.poll(STUCK_S)
            try:
                found, failed = receive.recv() if answered else (Counter(), [])
            except EOFError:
                answered, found, failed = False, Counter(), []
            if not answered:
                child.kill()
            child.join()
        counts += found
        failures += failed
        if not answered:
            case = int.from_bytes(status[:8], "little")
            failures.append((case, f"the process ended with exit code {child.exitcode}, or was stuck"))
            cases = [later for later in batch if later > case] + cases
        receive.close()
    for case, verdict in failures:
        print(f"--seed {chosen.seed} --only {case}: {verdict}")
    done = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    print(f"{done}; {len(failures)} not as it should be; {time.monotonic() - started:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
