"""From a source to a pack, or to several: by columns where the data lies in columns, else through worker processes.

    source ──arrange──▶ an order for each part ──▶ loader: workers read and check ──blocks──▶ writer of the part
                                                                                               │ all parts finished
                                                                                      rename ◀─┘ one after the other

A run that was killed, interrupted or out of space is gone on with by the same call: see packfile/journal.py. What it
was made of is compared by fingerprint. How many workers there are, and what is done about errors, may change.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from itertools import takewhile
from typing import Any

from ..errors import MisuseError, PackError
from ..packfile import PackReport
from ..packfile.environment import PARTIAL
from ..packfile.mapping import open_pack
from .arrangement import arrange
from .base import Source, StrPath
from .journal import Tally
from .part import PackingPart
from .python_dataset import PythonDataset
from .result import PackRun
from .settings import PackSettings
from .streaming import pack_stream

Progress = Callable[[int, int | None, int], None]
"""Called with samples done, samples in all, bytes of values; of all parts together."""

STOP, SKIP = "stop", "skip"

_PROGRESS_S = 0.1


def pack_source(source: Source, path: StrPath, **options: Any) -> PackReport:
    """Write all samples of ``source`` to one pack: ``pack_parts`` without a split. Takes its options, but no split."""
    settings = options.get("settings")
    if settings is not None and settings.split:
        raise MisuseError("a split gives several packs: call pack_parts")
    return pack_parts(source, path, **options).parts[0].report


def pack_parts(
    source: Source,
    path: StrPath,
    *,
    settings: PackSettings | None = None,
    overwrite: bool = False,
    restart: bool = False,
    workers: int | None = None,
    on_error: str = STOP,
    report: StrPath | None = None,
    check_space: bool = True,
    salt: str = "",
    progress: Progress | None = None,
) -> PackRun:
    """Write the samples of ``source`` to the pack ``path``, or to those that ``settings.split`` names.

    ``workers``: processes that read and check; None: the usable CPUs, or none where that would take longer.
    ``on_error``: ``"stop"`` raises what is wrong with the first bad sample; ``"skip"`` leaves such samples out. Either
    way every finding is counted, and written to ``report``, one JSON object a line.
    ``salt``: anything else that decides what the samples are; a run is gone on with only if it is the same.
    ``restart``: drop what an unfinished run has left, instead of going on with it.

    No target changes before all of them are finished. After any failure what has been committed waits beside the target
    (``.partial``) for the same call. Raises what is wrong with a sample, PackExists, PackInUse, ResumeRefused,
    PackError for the target, MisuseError for settings that do not fit.
    """
    if on_error not in (STOP, SKIP):
        raise MisuseError(f"on_error is {on_error!r}; it is {STOP!r} or {SKIP!r}")
    settings = settings or PackSettings()
    if isinstance(source, PythonDataset) and source.streams:
        if on_error == SKIP:
            raise MisuseError(f"{source.name} can only be iterated, and ends at its first error: it cannot be skipped")
        return pack_stream(source, path, settings=settings, overwrite=overwrite, progress=progress)
    begun = time.monotonic()
    classes = source.classes_of_samples() if settings.stratify else None
    orders = arrange(len(source), settings, classes)
    digest = hashlib.sha256(json.dumps([source.fingerprint(), settings.to_json(), salt]).encode()).hexdigest()
    targets = [settings.target(os.fspath(path), part) for part in settings.split or (None,)]
    done = _published(targets, digest)
    with closing(Tally(None if report is None else os.fspath(report))) as tally, ExitStack() as stack:
        parts: list[PackingPart] = []
        for each, target, order in zip(settings.split or (None,), targets, orders, strict=True):
            part = PackingPart(source, settings, each, target, order, digest, tally, stop_at_errors=on_error == STOP)
            if len(parts) >= done:
                stack.enter_context(part.open(overwrite=overwrite, restart=restart))
            parts.append(part)
        telling = _Telling(parts, progress)
        used = [part.write(workers, telling, check_space=check_space) for part in parts if part.writer is not None]
        for part in parts:
            part.finish()
        for part in parts:
            part.publish()
        telling.last()
    return PackRun(
        tuple(part.result() for part in parts),
        sum(part.resumed for part in parts),
        sum(len(part.journal.skipped) for part in parts),
        dict(tally.counts),
        tally.examples,
        tally.report,
        max(used, default=0),
        time.monotonic() - begun,
    )


def _published(targets: list[str], digest: str) -> int:
    """Return how many parts have their names already, because a run was killed while it gave them away one by one."""
    waiting = [os.path.lexists(target + PARTIAL) for target in targets]
    done = len(list(takewhile(lambda each: not each, waiting)))
    if not 0 < done < len(targets) or not all(waiting[done:]):
        return 0
    return done if all(_is_of(target, digest) for target in targets[:done]) else 0


def _is_of(target: str, digest: str) -> bool:
    try:
        return open_pack(target).manifest.metadata.get("run") == digest
    except PackError:
        return False


class _Telling:
    """Tells progress seldom enough to cost nothing."""

    def __init__(self, parts: list[PackingPart], progress: Progress | None) -> None:
        self._parts, self._progress = parts, progress
        self._total = sum(len(part.order) for part in parts)
        self._due = 0.0

    def __call__(self) -> None:
        if self._progress is not None and time.monotonic() >= self._due:
            self._due = time.monotonic() + _PROGRESS_S
            self._tell(self._total - sum(len(part.journal.skipped) for part in self._parts))

    def last(self) -> None:
        """Tell the end."""
        if self._progress is not None:
            self._tell(sum(part.writer.samples for part in self._parts if part.writer is not None))

    def _tell(self, total: int) -> None:
        assert self._progress is not None
        writers = [part.writer for part in self._parts if part.writer is not None]
        done, nbytes = sum(each.samples for each in writers), sum(each.payload_bytes for each in writers)
        self._progress(done, total, nbytes)
