"""``shmloader-pack SOURCE OUT.lmdb``: turn real data into one file that trains fast.

Exit code 0: packed. 1: an error, in one sentence on stderr; OUT.lmdb is as it was before, and what has been packed so
far waits in OUT.lmdb.partial for the same command. 2: the command line is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing

from shmloader.budget import parse_bytes
from shmloader.errors import MisuseError, ShmLoaderError, human_bytes
from shmloader.images import Fit
from shmloader.packfile.writer import CHUNK_BYTES
from shmloader.sources import PackSettings, Part, PythonDataset, Source, kinds, open_source, pack_parts

from . import pack_formats, pack_sources
from .imported import BadOption
from .pack_report import report_lines, skipped_line
from .report import one_line, progress_bar, show

PROG = "shmloader-pack"


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    top = argparse.ArgumentParser(
        prog=PROG,
        description="Pack real data into one LMDB file for shmloader.DataLoader. What SOURCE is, is found out.",
        epilog="Recognised: "
        + "; ".join(f"{kind} ({source.looked_for})" for kind, source in kinds().items())
        + ". Images are stored as the files they are, unless --size asks for pixels. Exit code 0: packed; 1: an error, "
        "and OUT is as it was before; 2: wrong arguments. The same command goes on with a run that was killed, "
        "interrupted or out of space.",
    )
    top.add_argument("source", metavar="SOURCE", nargs="?", help="what to pack")
    top.add_argument("out", metavar="OUT.lmdb", help="the file to write")
    top.add_argument("--as", dest="kind", choices=sorted(kinds()), help="do not find out what SOURCE is: it is this")
    top.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    top.add_argument("--restart", action="store_true", help="begin anew, if an earlier run was not finished")
    top.add_argument("--quiet", action="store_true", help="no progress, no report: errors and left-out samples only")
    pack_sources.add_arguments(top)
    pack_formats.add_arguments(top)
    _add_images(top.add_argument_group("images"))
    _add_fields(top.add_argument_group("fields"))
    _add_choice(top.add_argument_group("which samples, in which order"))
    _add_run(top.add_argument_group("the run"))
    return top


def _add_images(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--size", metavar="WxH", help="decode images and bring all of them to this size, as in 224x224")
    group.add_argument(
        "--resize", metavar="short:N", help="with --size and --crop: first scale the shorter side to N pixels"
    )
    group.add_argument(
        "--crop", choices=["center"], help="with --size: keep the proportions and cut out the middle, do not stretch"
    )
    group.add_argument(
        "--quality", type=int, metavar="N", help="JPEG quality, 1 to 100: image files are encoded anew with it"
    )


def _add_fields(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--store",
        action="append",
        default=[],
        metavar="FIELD=HOW",
        type=_pair,
        help="an image field: 'raw' stores pixels, 'encoded' an image file (of pixels: PNG, or JPEG with --quality); "
        "any array, text or bytes: 'zlib' compresses each row by itself, for masks and the like",
    )
    group.add_argument(
        "--dtype",
        action="append",
        default=[],
        metavar="FIELD=DTYPE",
        type=_pair,
        help="store a field of numbers with this dtype, as in x=float16; a number that does not fit is an error",
    )
    group.add_argument(
        "--chunk",
        metavar="SIZE",
        type=_size,
        default=CHUNK_BYTES,
        help="what is collected, written and checksummed together (default 16MiB)",
    )


def _add_choice(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--shuffle",
        metavar="SEED",
        nargs="?",
        const=0,
        type=_seed,
        help="pack in a random order; the same SEED (0 if not given) gives the same order everywhere",
    )
    group.add_argument(
        "--limit", type=int, metavar="N", help="only N samples: the first, or with --shuffle random ones"
    )
    group.add_argument(
        "--split",
        metavar="SHARES",
        type=_split,
        default=(),
        help="several packs, drawn at random: 0.9,0.1 makes OUT.0.lmdb and OUT.1.lmdb; train=0.9,val=0.1 makes "
        "OUT.train.lmdb and OUT.val.lmdb",
    )
    group.add_argument("--split-seed", type=int, default=0, metavar="SEED", help="which sample goes where (default 0)")
    group.add_argument("--stratify", action="store_true", help="with --split: the same share of each class in each")


def _add_run(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--workers", type=int, metavar="N", help="processes that read, decode and check (default: the usable CPUs)"
    )
    group.add_argument(
        "--on-error",
        choices=["stop", "skip"],
        default="stop",
        help="a sample that cannot be packed: stop there (default), or leave it out, and say so",
    )
    group.add_argument(
        "--report", metavar="FILE", help="write every problem that is found to FILE, one JSON object a line"
    )


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.rpartition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not FIELD=VALUE")
    return name, value


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seed(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no seed; without one, put --shuffle at the end") from None


def _split(text: str) -> tuple[Part, ...]:
    parts = []
    for number, word in enumerate(text.split(",")):
        name, _, share = word.rpartition("=")
        try:
            parts.append(Part(name or str(number), float(share)))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not like 0.9,0.1 or train=0.9,val=0.1") from None
    return tuple(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    top = parser()
    try:
        options = top.parse_intermixed_args(argv)  # SOURCE may be missing, and options may stand before OUT
        if (options.source is None) == (options.dataset is None):
            top.error("give a SOURCE, or a --dataset, and OUT.lmdb")
        fit = _fit(top, options)
        settings = _settings(top, options)
    except SystemExit as stop:  # argparse has said why
        return stop.code if isinstance(stop.code, int) else 2
    try:
        return _run(options, fit, settings)
    except (ShmLoaderError, OSError, BadOption) as error:
        print(f"{PROG}: error: {one_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{PROG}: interrupted: {options.out} is as it was before; the same command goes on", file=sys.stderr)
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


def _settings(top: argparse.ArgumentParser, options: argparse.Namespace) -> PackSettings:
    if options.workers is not None and options.workers < 0:
        top.error(f"{options.workers} workers cannot be")
    if not 4096 <= options.chunk <= 1 << 30:
        top.error(f"a chunk of {human_bytes(options.chunk)} cannot be: 4 KiB to 1 GiB")
    try:
        return PackSettings(
            store=dict(options.store),
            quality=options.quality,
            dtypes=dict(options.dtype),
            chunk_bytes=options.chunk,
            shuffle=options.shuffle,
            limit=options.limit,
            split=options.split,
            split_seed=options.split_seed,
            stratify=options.stratify,
        )
    except MisuseError as error:
        top.error(str(error))


def _run(options: argparse.Namespace, fit: Fit | None, settings: PackSettings) -> int:
    source, salt = _open(options, fit)
    total = None if isinstance(source, PythonDataset) and source.streams else len(source)
    with closing(_Progress(total, quiet=options.quiet)) as progress:
        run = pack_parts(
            source,
            options.out,
            settings=settings,
            overwrite=options.overwrite,
            restart=options.restart,
            workers=options.workers,
            on_error=options.on_error,
            report=options.report,
            salt=salt,
            progress=progress,
        )
    if not options.quiet:
        show(report_lines(options.source or options.dataset, source, run))
    left_out = skipped_line(run)
    if left_out is not None:
        print(f"{PROG}: {one_line(left_out)}", file=sys.stderr)
    return 0


def _open(options: argparse.Namespace, fit: Fit | None) -> tuple[Source, str]:
    """Return the source, and what else decides what its samples are."""
    chosen = pack_sources.source_options(options, fit)
    if options.dataset is not None:
        return pack_formats.dataset_of(options), repr(chosen)
    return open_source(options.source, options.kind, chosen), repr(chosen)


class _Progress:
    """A progress bar on stderr with rate and time left; nothing at all when stderr is no terminal."""

    def __init__(self, total: int | None, *, quiet: bool) -> None:
        self._bar = progress_bar(quiet=quiet, total=total, unit=" samples")

    def __call__(self, done: int, total: int | None, nbytes: int) -> None:
        if total is not None:
            self._bar.total = total
        self._bar.set_postfix_str(human_bytes(nbytes), refresh=False)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        self._bar.close()


if __name__ == "__main__":
    sys.exit(main())
