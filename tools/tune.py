"""``shmloader-tune PACK --batch-size B --ram 4GiB``: what loading takes, whether it fits, and the line to paste.

Changes nothing: collects facts, makes a plan, prints both with advice. ``--measure`` also runs loaders on the pack.

Exit code 0: it fits. 2: it does not fit, and the advice says what would. 1: an error (a wrong command line too).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch

from shmloader.budget import parse_bytes
from shmloader.collates import collate_jagged, collate_list, collate_padded
from shmloader.errors import ShmLoaderError, human_bytes
from shmloader.facts import stackable
from shmloader.limits import UNLIMITED, HostLimits, Limit
from shmloader.packfile import PackedDataset
from shmloader.plan import MemoryPlan, plan_memory

from .imported import imported
from .report import show
from .tune_measure import Measurement, measure

PROG = "shmloader-tune"
FITS, ERROR, DOES_NOT_FIT = 0, 1, 2
COLLATES: dict[str, Callable[[list[Any]], Any]] = {
    "list": collate_list,
    "padded": collate_padded,
    "jagged": collate_jagged,
}
"""Ready collate functions by the word on the command line."""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors end with 1, since 2 says here that the plan does not fit."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(ERROR, f"{self.prog}: error: {message}\n")


def _count(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return number


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    top = _Parser(
        prog=PROG,
        description="Say what loading this data takes, whether it fits, and which DataLoader(...) line to use. "
        "Changes nothing.",
        epilog="Exit code 0: it fits; 2: it does not, and the advice says what would; 1: an error.",
    )
    top.add_argument("pack", metavar="PACK", nargs="?", help="the pack; may be left out if --dataset needs none")
    top.add_argument("--batch-size", type=_count(1), required=True, metavar="B", help="samples per batch and rank")
    top.add_argument(
        "--ram", type=_size, metavar="SIZE", help="what the loaders of all local ranks may take, as in 4GiB"
    )
    top.add_argument("--workers", type=_count(0), metavar="N", help="workers per rank; chosen to fit if not given")
    top.add_argument("--prefetch-factor", type=_count(1), metavar="P", help="batches under way per worker (default 2)")
    top.add_argument(
        "--ranks", type=_count(1), metavar="R", help="training processes on this host (default: launcher's)"
    )
    top.add_argument(
        "--collate",
        default="",
        metavar="HOW",
        help="default, list, padded, jagged or module:function; without it, list for samples of unequal shape",
    )
    top.add_argument(
        "--dataset",
        metavar="MODULE:FACTORY",
        help="a function that returns the dataset; called with the opened pack if PACK is given",
    )
    top.add_argument("--sample-bytes", type=_size, metavar="SIZE", help="do not measure: each sample takes this much")
    top.add_argument("--json", action="store_true", help="print everything as JSON")
    top.add_argument("--measure", action="store_true", help="run loaders with several numbers of workers and slots")
    top.add_argument("--seconds", type=_count(1), default=2, help="for each loader that --measure runs (default 2)")
    top.add_argument("--plot", metavar="OUT.png", help="with --measure: draw throughput over workers and arena size")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    top = parser()
    try:
        options = top.parse_args(argv)
        if options.pack is None and options.dataset is None:
            top.error("give a PACK, or a --dataset")
        if options.plot and not options.measure:
            top.error("--plot draws what --measure measures: give both")
    except SystemExit as stop:  # argparse has said why
        return stop.code if isinstance(stop.code, int) else ERROR
    try:
        return _run(options)
    except KeyboardInterrupt:
        print(f"{PROG}: interrupted", file=sys.stderr)
        return 130
    except (ShmLoaderError, OSError, ValueError, TypeError, RuntimeError, LookupError) as error:
        # The last ones come from the user's dataset, with the worker's traceback as their text.
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return ERROR


def _run(options: argparse.Namespace) -> int:
    dataset = _dataset(options.pack, options.dataset)
    collate_fn, collate_name, notes = _collate(options.collate, dataset)
    plan = plan_memory(
        dataset,
        batch_size=options.batch_size,
        num_workers=options.workers,
        prefetch_factor=options.prefetch_factor,
        ram=options.ram,
        local_ranks=options.ranks,
        collate_fn=collate_fn,
        sample_bytes=options.sample_bytes,
    )
    if options.dataset is not None:  # the line to paste calls what was called here
        opened = "" if options.pack is None else f"PackedDataset({options.pack!r})"
        expression = f"{options.dataset.partition(':')[2]}({opened})"
        plan = replace(plan, data=replace(plan.data, expression=expression))
    measured = None
    if options.measure and plan.fits:
        measured = measure(dataset, plan, collate_fn, seconds=options.seconds, fixed_workers=options.workers)
        if options.plot:
            from .tune_plot import draw  # matplotlib is optional and slow to import

            draw(plan, measured, options.plot)
    if options.json:
        document = plan.to_dict()
        document["advice"] = [*plan.advice, *notes]
        document["measured"] = measured.to_dict() if measured else None
        show([json.dumps(document, indent=2)])
    else:
        show(report(plan, notes, measured, collate_name))
    return FITS if plan.fits else DOES_NOT_FIT


# --- what the command line names --------------------------------------------------------------------------------------


def _dataset(path: str | None, factory: str | None) -> Any:
    pack = None if path is None else PackedDataset(path)
    if factory is None:
        return pack
    make = imported(factory, "--dataset")
    dataset = make() if pack is None else make(pack)
    if not callable(getattr(type(dataset), "__len__", None)) or not callable(getattr(dataset, "__getitem__", None)):
        raise ValueError(f"--dataset {factory!r} returned a {type(dataset).__name__}, which has no length or no items")
    return dataset


def _collate(how: str, dataset: Any) -> tuple[Callable[[list[Any]], Any] | None, str, list[str]]:
    """Return the collate function (None: torch's default), how to write it, and what to say about it."""
    if how == "default":
        return None, "", []
    if how in COLLATES:
        return COLLATES[how], f"collate_{how}", []
    if how:
        return imported(how, "--collate"), how.partition(":")[2], []
    if stackable(dataset):
        return None, "", []
    note = (
        "Samples differ in shape, which the default collate cannot stack: this plan is for shmloader's collate_list. "
        "Name another one (--collate padded, jagged, or module:function) to plan with it."
    )
    return COLLATES["list"], "collate_list", [note]


# --- what is printed --------------------------------------------------------------------------------------------------


def report(plan: MemoryPlan, notes: Sequence[str], measured: Measurement | None, collate_name: str) -> list[str]:
    """Return the lines of the report: facts, plan, advice, the line to paste, the verdict."""
    lines = [
        *_titled("Store", _store(plan)),
        *_titled("Batch", _batch(plan)),
        *_titled("Host", _host(plan.host)),
        *_titled("Plan", _plan(plan)),
    ]
    if measured is not None:
        lines += _titled("Measured", measured.table())
    lines += _titled("Advice", [*plan.advice, *notes, *([measured.why] if measured else [])])
    if plan.fits:
        call = plan.call(pin_memory=torch.cuda.is_available()) if measured is None else measured.call()
        if collate_name:
            call = f"{call[:-1]}, collate_fn={collate_name})"
        lines += _titled("Use", [call])
    lines.append("Ready" if plan.fits else "Not ready")
    return lines


def _titled(title: str, texts: Sequence[str]) -> list[str]:
    return [f"{title if place == 0 else '':9}{text}" for place, text in enumerate(texts)]


def _store(plan: MemoryPlan) -> list[str]:
    size = f", file {human_bytes(plan.data.file_bytes)}" if plan.data.path is not None else ""
    return [f"{plan.data.samples:,} samples of about {human_bytes(plan.batch.sample_bytes)} in a batch{size}"]


def _batch(plan: MemoryPlan) -> list[str]:
    batch = plan.batch
    largest = ""
    if batch.largest_bytes > batch.batch_bytes:
        largest = f"; the largest there can be takes {human_bytes(batch.largest_bytes)}"
    return [f"{batch.batch_size:,} samples take {human_bytes(batch.batch_bytes)} ({batch.source}){largest}"]


def _free(limit: Limit) -> str:
    return "unlimited" if limit.nbytes_free >= UNLIMITED else f"{human_bytes(limit.nbytes_free)} free"


def _host(host: HostLimits) -> list[str]:
    shm = host.shm_problem or (f"{host.shm.source} {_free(host.shm)}" if host.shm else "")
    lines = [f"shared memory: {shm}"]
    lines += [f"memory: {_free(limit)} of {human_bytes(limit.nbytes_total)}, {limit.where}" for limit in host.memory]
    lock = "unlimited" if host.memlock.unlimited else human_bytes(host.memlock.nbytes_free)
    ranks = host.local_ranks
    cpus = f"{host.cpus.usable} CPUs ({host.cpus.source}) on {len(host.numa_nodes) or 'unknown'} NUMA node(s)"
    huge = f"huge pages for shared memory: {host.huge_pages.shmem or 'unknown'}"
    lines.append(f"{cpus}; {ranks.count} local rank(s) ({ranks.source}); {huge}")
    lines.append(f"locked memory: {lock} (CUDA pinning does not count against it)")
    return lines


def counted(count: int, one: str, many: str = "") -> str:
    """Return a number with its noun."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def _plan(plan: MemoryPlan) -> list[str]:
    backing = "posix shared memory" if plan.backing == "posix" else "memfd"
    workers = "no workers"
    if plan.num_workers:
        workers = f"{counted(plan.num_workers, 'worker')}, {counted(plan.prefetch_factor, 'batch', 'batches')} each"
    slots = f"{plan.slots} slots of {human_bytes(plan.slot_bytes)} = {human_bytes(plan.arena_used_bytes)}"
    lines = [f"{workers}: {slots}; arena_bytes {human_bytes(plan.arena_bytes)} ({backing})"]
    if plan.num_workers:
        own = human_bytes(plan.num_workers * plan.private_bytes)
        lines.append(f"the workers' own memory: {plan.num_workers} x {human_bytes(plan.private_bytes)} = {own}")
    if plan.page_cache_bytes:
        lines.append(
            f"page cache, shared and given back when needed: {human_bytes(plan.page_cache_bytes)} for all of it"
        )
    lines.append(
        f"total for {plan.local_ranks} rank(s): {human_bytes(plan.total_bytes)} of "
        f"{human_bytes(plan.limit.nbytes_free)}, {plan.limit.where}"
    )
    return lines


if __name__ == "__main__":
    sys.exit(main())
