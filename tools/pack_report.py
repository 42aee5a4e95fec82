"""What shmloader-pack says at the end: what became of what, what the data looks like, what was wrong with it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from shmloader.errors import human_bytes
from shmloader.sources import PackRun, PartRun, Source
from shmloader.sources.summary import LabelSummary

from .report import class_lines

_SHOWN = 8
_WORTH_WEIGHTS = 1.5


def report_lines(name: str, source: Source, run: PackRun) -> list[str]:
    """Return the report of a finished run."""
    lines: list[str] = []
    for part in run.parts:
        lines += _part_lines(name, source, part)
    samples = sum(part.report.samples for part in run.parts)
    rate = (samples - run.resumed) / run.seconds if run.seconds > 0 else 0
    how = f"{run.workers} workers" if run.workers else "one process"
    went_on = f"; {run.resumed:,} of an earlier run" if run.resumed else ""
    lines.append(f"Time      {run.seconds:.1f} s, {rate:,.0f} samples/s, {how}{went_on}")
    lines += _problem_lines(run)
    lines += [f"Note      {note}" for note in source.notes]
    for part in run.parts:
        if part.report.advice:
            lines.append(f"Advice    {part.report.advice}")
    shown = " ".join(shlex.quote(part.report.path) for part in run.parts[:1])
    lines.append(f"Look at   shmloader-inspect {shown}")
    return lines


def _part_lines(name: str, source: Source, part: PartRun) -> list[str]:
    report, labels = part.report, part.labels
    classes = sum(1 for count in labels.counts.values() if count) if labels else 0
    what = "classes" if labels and labels.per_sample else "classes (of all labels in them)"
    counts = f" in {len(labels.counts)} {what}" if labels and classes else ""
    lines = [
        f"{name} -> {report.path}  ({source.describe()})",
        f"Samples   {report.samples:,}{counts}",
        f"Fields    {', '.join(map(str, report.fields))}",
        *(f"{'' if i else 'Shapes':9} {line}" for i, line in enumerate(_shape_lines(part))),
        f"Payload   {human_bytes(report.payload_bytes)}",
        f"File      {human_bytes(report.file_bytes)}, {report.ratio:.3f} x payload",
    ]
    if labels:
        lines += class_lines(labels.counts) + _balance_lines(labels)
    return lines + [f"Odd       {odd}" for odd in part.odd]


def _shape_lines(part: PartRun) -> list[str]:
    """Return one line for each field whose samples differ in size."""
    lines = []
    for field in part.fields:
        found = []
        if "encoded-image" in field.text and part.image_sizes:
            found.append(_image_sizes(part.image_sizes))
        if field.different > 1:
            shown = [f"{each.count:,} x {each.shape}" for each in field.shapes[:_SHOWN]]
            more = f", {field.different - _SHOWN:,} more shapes" if field.different > _SHOWN else ""
            found.append(", ".join(shown) + more)
        elif field.sizes and field.sizes[0] != field.sizes[2]:
            least, middle, most = field.sizes
            found.append(f"{least:,} to {most:,} bytes, half of them up to {middle:,}")
        if field.compressed is not None:
            found.append(f"compressed to {field.compressed:.1%} of its size")
        if found:
            lines.append(f"{field.name}: {'; '.join(found)}")
    return lines


def _image_sizes(sizes: Mapping[tuple[int, int], int]) -> str:
    ordered = sorted(sizes.items(), key=lambda each: (-each[1], each[0]))
    if len(ordered) == 1:
        return f"all {ordered[0][0][1]}x{ordered[0][0][0]}"
    widths, heights = [width for _, width in sizes if width], [height for height, _ in sizes if height]
    shown = ", ".join(f"{count:,} of {width}x{height}" for (height, width), count in ordered[:3])
    return f"{min(widths)} to {max(widths)} wide, {min(heights)} to {max(heights)} high, most often {shown}"


def _balance_lines(labels: LabelSummary) -> list[str]:
    empty = [name for name, count in labels.counts.items() if not count]
    lines = [f"Empty     no sample has the class {', '.join(empty[:_SHOWN])}"] if empty else []
    lines_of_sampler = labels.sampler()
    if labels.imbalance >= _WORTH_WEIGHTS and lines_of_sampler is not None:
        first, second = lines_of_sampler
        lines.append(
            f"Balance   the largest class has {labels.imbalance:.1f} x the samples of the smallest; to draw all"
        )
        lines += ["          equally often:", f"            {first}", f"            {second}"]
    return lines


def _problem_lines(run: PackRun) -> list[str]:
    lines: list[str] = []
    for (severity, kind), count in sorted(run.problems.items()):
        fate = "left out" if severity == "error" else "packed as they are"
        lines.append(f"{'Skipped' if severity == 'error' else 'Warning':9} {count:,} {kind} ({fate}), such as")
        lines += [f"            {example}" for example in run.examples.get(kind, [])[:3]]
    if run.problems and run.report_file:
        lines.append(f"Problems  all of them: {run.report_file}")
    elif run.problems:
        lines.append("Problems  --report FILE writes down all of them")
    return lines


def skipped_line(run: PackRun) -> str | None:
    """Return the sentence that is said even by a quiet run, if samples were left out."""
    if not run.skipped:
        return None
    total = run.skipped + sum(part.report.samples for part in run.parts)
    kinds = ", ".join(
        f"{count:,} {kind}" for (severity, kind), count in sorted(run.problems.items()) if severity == "error"
    )
    return f"{run.skipped:,} of {total:,} samples were left out: {kinds}"
