"""PackWriter: samples in, a sealed pack out.

    add(sample), add_columns(arrays), add_block(values, shapes)
         │ checked against the first sample (outline.py)
         ▼
    Body: columns, chunks, commits (body.py) ──seal──▶ tables, manifest, sync ──publish──▶ the name

Memory is bounded by the chunk size: one buffer of it for all fields together.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import MisuseError, SampleMismatch, UnsupportedField
from .block import read
from .body import Body, Notes
from .bulk import Columns, take_apart
from .columns import Differs
from .compressed import deflate
from .environment import Item, WriteEnvironment
from .mapping import open_pack
from .outline import Outline
from .report import PackReport
from .schema import ENCODINGS, MANIFEST_KEY, SEAL_KEY, ZLIB, Manifest, json_copy, require_little_endian
from .structure import StructureDiffers, flatten
from .texts import block_field
from .values import Bytes, Unstorable, Value, describe, value_of

CHUNK_BYTES = 16 << 20
_LARGEST_CHUNK_BYTES = 1 << 30


class PackWriter:
    """Writes a pack under a temporary name; sealing gives it its own. A context manager: an exception leaves nothing.

    ``chunk_bytes`` is what is read, buffered and committed at a time.
    ``fingerprint``: says what the pack is made of, so that a killed run can be gone on with: ``samples`` then begins at
    what was committed, ``recovered_notes`` is what ``notes`` returned for each commit, and an exception keeps what is
    committed. ``restart`` drops an earlier run's work instead. The caller adds the very samples that come next.
    Raises PackExists, PackInUse, ResumeRefused, and PackError where the file cannot be made.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        field_names: Sequence[str] | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        metadata: Mapping[str, Any] | None = None,
        encodings: Mapping[str, str] | None = None,
        fingerprint: str | None = None,
        restart: bool = False,
        notes: Notes | None = None,
    ) -> None:
        require_little_endian()
        if not 4096 <= chunk_bytes <= _LARGEST_CHUNK_BYTES:
            raise ValueError(f"chunk_bytes is {chunk_bytes}; it must be 4096 to {_LARGEST_CHUNK_BYTES}")
        for name, encoding in (encodings or {}).items():
            if encoding not in ENCODINGS:
                raise ValueError(f"field {name!r}: encoding {encoding!r} is none of {', '.join(sorted(ENCODINGS))}")
        self._metadata = json_copy(metadata or {})
        self._encodings = dict(encodings or {})
        self._field_names = None if field_names is None else tuple(field_names)
        self._chunk_bytes = chunk_bytes
        self._notes = notes
        self._body: Body | None = None
        self._started = time.monotonic()
        self._sealed_bytes: int | None = None
        self._report: PackReport | None = None
        self._ended = ""
        self._env = WriteEnvironment(os.fspath(path), overwrite=overwrite, fingerprint=fingerprint, restart=restart)
        self.recovered_notes = [dict(commit.record.get("notes", {})) for commit in self._env.recovered]
        """What ``notes`` returned for each commit of the run that this one goes on with."""
        if self._env.recovered:
            self._body = Body.restore(self._env, chunk_bytes, notes)
        self.resumed = self.samples
        """Samples that an earlier run has packed."""

    @property
    def samples(self) -> int:
        """Samples added so far, by earlier runs too."""
        return 0 if self._body is None else self._body.samples

    @property
    def payload_bytes(self) -> int:
        """Bytes of values added so far."""
        return 0 if self._body is None else self._body.payload_bytes

    @property
    def outline(self) -> Outline | None:
        """What the samples have in common; None before the first."""
        return None if self._body is None else self._body.outline

    # --- samples in ---------------------------------------------------------------------------------------------------

    def begin(self, outline: Outline) -> None:
        """Say what the samples look like, before the first one is added. Raises MisuseError after that."""
        self._check_open()
        if self._body is not None:
            raise MisuseError(f"{self._env.target}: the first sample has been added already")
        self._body = Body(self._env, outline, self._chunk_bytes, self._notes)

    def _begun(self, first: Any, columns: Sequence[Value] = ()) -> Body:
        self._check_open()
        if self._body is None:
            outline = Outline.of(first, 0, self._field_names, self._encodings)
            self.begin(outline.windowed(columns) if columns else outline)
        assert self._body is not None
        return self._body

    def add(self, sample: Any) -> None:
        """Add one sample. Copies its values. Raises SampleMismatch or UnsupportedField, and then has added nothing."""
        body = self._begun(sample)
        values: list[Value] = []
        nbytes = 0
        for column, leaf in zip(body.columns, body.outline.leaves(self.samples, sample), strict=True):
            try:
                value = value_of(leaf)
                if column.inner is not None:
                    if not column.inner.fits(value):
                        raise Differs(column.inner.describe(), value.describe())
                    value = deflate(value)
                nbytes += column.check(value)
            except Unstorable as fault:
                raise UnsupportedField(self.samples, column.name, fault.found) from None
            except Differs as differs:
                raise SampleMismatch(self.samples, column.name, differs.expected, differs.found) from None
            values.append(value)
        body.add(values, nbytes)

    def add_columns(self, columns: Columns) -> None:
        """Add many samples at once: arrays or tensors of the same first axis, sample i being made of their rows i.

        A dict of arrays makes samples that are dicts, a tuple or list tuples, one array single values. No Python per
        sample as long as the rows keep their shape. Arrays of strings (of bytes) make str (bytes). ``Windows`` are
        stored without what they share; each call goes on where the last one ended. Copies. Raises SampleMismatch,
        UnsupportedField, ValueError.
        """
        self._check_open()
        first, arrays, count = take_apart(columns, self.samples)
        if not count:
            return
        body = self._begun(first, arrays)
        try:
            flatten(first, body.outline.structure, [])
        except StructureDiffers as differs:
            raise SampleMismatch(self.samples, "sample", differs.expected, differs.found) from None
        fits = True
        for column, value in zip(body.columns, arrays, strict=True):
            if column.inner is not None:
                raise UnsupportedField(self.samples, column.name, f"a column at once, to be stored with {ZLIB}")
            axes = 1 if column.kind in ("str", "bytes") else value.array.ndim - 1
            if column.kind != value.kind or column.dtype != value.dtype or len(column.first_shape) != axes:
                found = describe(value.kind, value.dtype, value.array.shape[1:])
                raise SampleMismatch(self.samples, column.name, column.describe(), found)
            if value.windowing is not None or column.windowing is not None:
                try:
                    column.check_windows(value)
                except Differs as differs:
                    raise SampleMismatch(self.samples, column.name, differs.expected, differs.found) from None
            fits = fits and column.fixed_row_bytes is not None and column.first_shape == value.array.shape[1:]
        if any(value.kind != "array" for value in arrays):
            if any(value.windowing is not None for value in arrays):
                raise UnsupportedField(self.samples, body.columns[0].name, "windows beside text")
            body.add_block([block_field(value) for value in arrays])
            return
        if fits:
            body.add_rows(arrays, count)
            return
        for i in range(count):
            row = [Value("array", value.dtype, np.asarray(value.array[i])) for value in arrays]
            body.add(row, sum([value.array.nbytes for value in row]))

    def add_block(self, rows: int, values: Bytes, shapes: npt.NDArray[np.int64]) -> None:
        """Add the samples of a block (block.py), which was made after this writer's ``outline``. Copies."""
        self._check_open()
        if self._body is None:
            raise MisuseError(f"{self._env.target}: begin() comes before add_block()")
        if any(each.windowing is not None for each in self._body.outline.fields):
            raise MisuseError(f"{self._env.target}: windows are added as columns, not as blocks")
        self._body.add_block(read(self._body.outline, rows, values, shapes))

    # --- the end ------------------------------------------------------------------------------------------------------

    def seal(self, metadata: Mapping[str, Any] | None = None) -> PackReport:
        """Finish, sync and rename. The report of a sealed writer is always the same.

        ``metadata`` is kept beside what the writer was given.
        """
        if self._report is None:
            self.finish(metadata)
            self.publish()
        assert self._report is not None
        return self._report

    def finish(self, metadata: Mapping[str, Any] | None = None) -> None:
        """Write what is left, seal and sync, but leave the file under its temporary name: ``publish`` is left to do."""
        self._check_open()
        try:
            body, tables = self._body, []
            if body is not None:
                tables = body.close()
            manifest = Manifest(
                self.samples,
                tuple([column.field() for column in body.columns]) if body is not None else (),
                None if body is None else body.outline.structure,
                self._chunk_bytes,
                self.payload_bytes,
                tuple([zlib.crc32(table.tobytes()) for table in tables]),
                {**self._metadata, **json_copy(metadata or {})},
            )
            text = manifest.to_bytes()
            self._env.put(Item.of(MANIFEST_KEY, text))
            self._env.put(Item.of(SEAL_KEY, zlib.crc32(text).to_bytes(4, "little")))
            self._sealed_bytes = self._env.settle()
            open_pack(self._env.path)  # what a reader checks is checked before the name is given
            self._manifest = manifest
        except BaseException:
            self.give_up()
            raise

    def publish(self) -> None:
        """Give the finished pack its name."""
        if self._sealed_bytes is None:
            raise MisuseError(f"{self._env.target}: finish() comes before publish()")
        try:
            self._env.publish()
        except BaseException:
            self.give_up()
            raise
        seconds = time.monotonic() - self._started
        self._report = PackReport(
            self._env.target, self.samples, self.payload_bytes, self._sealed_bytes, seconds, self._manifest.fields
        )

    def give_up(self) -> None:
        """End without a pack: keep what can be gone on with, if a fingerprint was given, else ``discard``."""
        if self._env.fingerprint is None or not self._env.committed:
            self.discard()
            return
        self._ended = self._ended or "given up"
        self._env.keep()

    def discard(self) -> None:
        """Give up: remove the temporary file. Does nothing once sealed."""
        self._ended = self._ended or "given up"
        self._env.discard()

    def _check_open(self) -> None:
        ended = "sealed" if self._sealed_bytes is not None and not self._ended else self._ended
        if ended:
            raise MisuseError(f"{self._env.target}: this writer has {ended}")

    def __enter__(self) -> PackWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            if self._report is None:
                self.give_up()
        elif not self._ended:
            self.seal()
