"""``shmloader-inspect PACK``: what a pack holds, and whether it is whole.

Without ``--verify`` only the head and the labels are read, so it is quick whatever the size. ``--sample`` shows one
sample, ``--image`` a sheet of pictures. Exit code 0: a whole pack, as far as looked; 1: not a pack, or damaged
(``--verify`` lists every damage); 2: the command line is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from typing import Any

from shmloader.errors import MisuseError, ShmLoaderError, human_bytes
from shmloader.packfile import PackedDataset, verify
from shmloader.packfile.schema import ENCODED_IMAGE
from shmloader.sources.summary import label_summary

from .report import class_lines, one_line, progress_bar, show

PROG = "shmloader-inspect"

_TEXT, _BYTES, _NUMBERS = 200, 32, 16
"""Characters, bytes and numbers of one value that are shown whole."""


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    top = argparse.ArgumentParser(
        prog=PROG,
        description="Show what a pack holds. Reads its head only, unless asked to verify.",
        epilog="Exit code 0: a whole pack, as far as looked; 1: not a pack, or damaged; 2: wrong arguments.",
    )
    top.add_argument("pack", metavar="PACK", help="the file that shmloader-pack wrote")
    top.add_argument("--verify", action="store_true", help="read everything, and list every damage")
    top.add_argument("--sample", type=int, metavar="N", help="show what sample N holds; -1 is the last one")
    top.add_argument(
        "--image",
        metavar="OUT.png",
        help="draw a sheet of 16 samples from all over the pack, or with --sample of that one; boxes and points too",
    )
    top.add_argument("--json", action="store_true", help="print the facts as JSON")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    try:
        options = parser().parse_args(argv)
    except SystemExit as stop:  # argparse has said why
        return stop.code if isinstance(stop.code, int) else 2
    try:
        facts = collect(options.pack)
        if options.sample is not None:
            facts["sample"] = _sample(options.pack, options.sample)
        if options.image is not None:
            facts["image"] = _draw(options.pack, options.sample, options.image)
        if options.verify:
            facts["problems"] = _verify(options.pack)
    except (ShmLoaderError, OSError) as error:
        print(f"{PROG}: error: {one_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{PROG}: interrupted", file=sys.stderr)
        return 130
    if options.json:
        show([json.dumps(facts)])
    else:
        show(lines(facts))
    return 1 if facts.get("problems") else 0


def collect(path: str) -> dict[str, Any]:
    """Return what is known about a pack as JSON-able facts. Of the samples, only the labels are read: to count them."""
    dataset = PackedDataset(path)
    manifest = dataset.manifest
    file_bytes = os.stat(path).st_size
    facts: dict[str, Any] = {
        "path": path,
        "samples": manifest.count,
        "fields": [{**field.to_json(), "text": str(field)} for field in dataset.fields],
        "payload_bytes": manifest.payload_bytes,
        "file_bytes": file_bytes,
        "ratio": file_bytes / manifest.payload_bytes if manifest.payload_bytes else None,
        "chunk_bytes": manifest.chunk_bytes,
        "digest": manifest.digest,
        "metadata": {key: value for key, value in manifest.metadata.items() if key != "classes"},
    }
    if dataset.classes is not None:
        facts["classes"] = dataset.classes
    labels = label_summary(dataset)
    if labels is not None:
        facts["class_counts"] = labels.counts
        facts["counted"] = "samples" if labels.per_sample else "labels"
    return facts


def _sample(path: str, index: int) -> dict[str, Any]:
    """Return what one sample holds, field by field, as JSON-able values: numbers and short texts whole, else a look."""
    dataset = PackedDataset(path)
    if not -len(dataset) <= index < len(dataset):
        raise MisuseError(f"{path} has {len(dataset)} samples: there is no sample {index}")
    found: dict[str, Any] = {"index": index % len(dataset)}
    found["fields"] = {
        reader.field.name: _shown(reader.get(found["index"]), reader.field.encoding) for reader in dataset.gather.fields
    }
    label = found["fields"].get("label")
    if isinstance(label, int) and dataset.classes is not None and 0 <= label < len(dataset.classes):
        found["class"] = dataset.classes[label]
    return found


def _shown(value: Any, encoding: str | None) -> Any:
    if isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return value if len(value) <= _TEXT else f"{value[:_TEXT]}... ({len(value)} characters)"
    if isinstance(value, bytes):
        return f"{len(value)} bytes: {value[:_BYTES].hex(' ')}{' ...' if len(value) > _BYTES else ''}"
    shape = "x".join(map(str, value.shape)) or "one number"
    if value.numel() <= _NUMBERS and encoding != ENCODED_IMAGE:
        return f"{str(value.dtype).removeprefix('torch.')} {shape}: {value.tolist()}"
    told = f"{str(value.dtype).removeprefix('torch.')} {shape}"
    if value.numel() and not value.dtype.is_complex:
        plain = value.double()
        told += f", {plain.min().item():g} to {plain.max().item():g}, mean {plain.mean().item():g}"
    return told


def _draw(path: str, sample: int | None, target: str) -> str:
    from .contact_sheet import chosen, draw  # needs Pillow, which nothing else here does

    dataset = PackedDataset(path)
    draw(dataset, chosen(len(dataset), None if sample is None else sample % max(1, len(dataset))), target)
    return target


def _verify(path: str) -> list[str]:
    with progress_bar(unit="B", desc="verify") as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        return [str(problem) for problem in verify(path, progress)]


def lines(facts: dict[str, Any]) -> list[str]:
    """Return the facts for people."""
    ratio = f", {facts['ratio']:.3f} x payload" if facts["ratio"] else ""
    text = [
        facts["path"],
        f"Samples   {facts['samples']:,}",
        *(f"{'' if number else 'Fields':9} {field['text']}" for number, field in enumerate(facts["fields"])),
        f"Payload   {human_bytes(facts['payload_bytes'])}",
        f"File      {human_bytes(facts['file_bytes'])}{ratio}",
        *(f"{key.capitalize():9} {value}" for key, value in facts["metadata"].items() if key != "run"),
    ]
    if facts.get("class_counts"):
        text += class_lines(facts["class_counts"])
        if facts["counted"] == "labels":
            text.append("          (all labels of all samples)")
    if "sample" in facts:
        text.append(f"Sample    {facts['sample']['index']:,}")
        text += [f"          {name}: {shown}" for name, shown in facts["sample"]["fields"].items()]
        if "class" in facts["sample"]:
            text.append(f"          class {facts['sample']['class']}")
    if "image" in facts:
        text.append(f"Image     {facts['image']}")
    problems = facts.get("problems")
    if problems is not None:
        text.append("Verified  everything was read, nothing is damaged" if not problems else "DAMAGED")
        text += [f"          {problem}" for problem in problems]
    return text


if __name__ == "__main__":
    sys.exit(main())
