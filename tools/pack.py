"""``shmloader-pack SOURCE OUT.lmdb``: turn real data into one file that trains fast.

Exit code 0: packed. 1: an error, in one sentence on stderr; OUT.lmdb is as it was before. 2: the command line is wrong.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from contextlib import closing

from shmloader.errors import ShmLoaderError, human_bytes
from shmloader.images import Fit
from shmloader.packfile import PackReport
from shmloader.sources import Source, kinds, open_source, pack_source

from . import pack_sources
from .report import class_lines, one_line, progress_bar, show

PROG = "shmloader-pack"


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    top = argparse.ArgumentParser(
        prog=PROG,
        description="Pack real data into one LMDB file for shmloader.DataLoader. What SOURCE is, is found out.",
        epilog="Recognised: "
        + "; ".join(f"{kind} ({source.looked_for})" for kind, source in kinds().items())
        + ". Images are stored as the files they are, unless --size asks for pixels. Exit code 0: packed; 1: an error, "
        "and OUT is as it was before; 2: wrong arguments.",
    )
    top.add_argument("source", metavar="SOURCE", help="what to pack")
    top.add_argument("out", metavar="OUT.lmdb", help="the file to write")
    top.add_argument("--as", dest="kind", choices=sorted(kinds()), help="do not find out what SOURCE is: it is this")
    top.add_argument("--size", metavar="WxH", help="decode images and bring all of them to this size, as in 224x224")
    top.add_argument(
        "--resize", metavar="short:N", help="with --size and --crop: first scale the shorter side to N pixels"
    )
    top.add_argument(
        "--crop", choices=["center"], help="with --size: keep the proportions and cut out the middle, do not stretch"
    )
    pack_sources.add_arguments(top)
    top.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    top.add_argument("--quiet", action="store_true", help="no progress, no report: errors only")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    top = parser()
    try:
        options = top.parse_args(argv)
        fit = _fit(top, options)
    except SystemExit as stop:  # argparse has said why
        return stop.code if isinstance(stop.code, int) else 2
    try:
        return _run(options, fit)
    except (ShmLoaderError, OSError) as error:
        print(f"{PROG}: error: {one_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{PROG}: interrupted: {options.out} is as it was before", file=sys.stderr)
        return 130


def _fit(top: argparse.ArgumentParser, options: argparse.Namespace) -> Fit | None:
    if options.size is None:
        if options.resize or options.crop:
            top.error("--resize and --crop say how images come to one size: give the size too, as in --size 224x224")
        return None
    try:
        return Fit.parse(options.size, options.resize, options.crop)
    except ValueError as error:
        top.error(str(error))


def _run(options: argparse.Namespace, fit: Fit | None) -> int:
    source = open_source(options.source, options.kind, pack_sources.source_options(options, fit))
    with closing(_Progress(len(source), quiet=options.quiet)) as progress:
        report = pack_source(source, options.out, overwrite=options.overwrite, progress=progress)
    if not options.quiet:
        show(report_lines(options.source, source, report))
    return 0


class _Progress:
    """A progress bar on stderr with rate and time left; nothing at all when stderr is no terminal."""

    def __init__(self, total: int, *, quiet: bool) -> None:
        self._bar = progress_bar(quiet=quiet, total=total, unit=" samples")

    def __call__(self, done: int, total: int | None, nbytes: int) -> None:
        if total is not None:
            self._bar.total = total
        self._bar.set_postfix_str(human_bytes(nbytes), refresh=False)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        self._bar.close()


def report_lines(name: str, source: Source, report: PackReport) -> list[str]:
    """Return the final report: what became of what, how large, how fast, and what was left out."""
    counts = source.class_counts()
    rate = report.samples / report.seconds if report.seconds > 0 else 0
    lines = [
        f"{name} -> {report.path}  ({source.describe()})",
        f"Samples   {report.samples:,}" + (f" in {len(counts)} classes" if counts else ""),
        f"Fields    {', '.join(map(str, report.fields))}",
        f"Payload   {human_bytes(report.payload_bytes)}",
        f"File      {human_bytes(report.file_bytes)}, {report.ratio:.3f} x payload",
        f"Time      {report.seconds:.1f} s, {rate:,.0f} samples/s",
    ]
    if counts:
        lines += class_lines(counts)
    lines += [f"Note      {note}" for note in source.notes]
    if report.advice:
        lines.append(f"Advice    {report.advice}")
    lines.append(f"Look at   shmloader-inspect {shlex.quote(str(report.path))}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
