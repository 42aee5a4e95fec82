"""``shmloader-inspect PACK``: what a pack holds, and whether it is whole.

Without ``--verify`` only the head and the labels are read, so it is quick whatever the size. Exit code 0: a whole pack,
as far as looked; 1: not a pack, or damaged (``--verify`` lists every damaged chunk); 2: the command line is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from shmloader.errors import ShmLoaderError, human_bytes
from shmloader.packfile import PackedDataset, verify

from .report import class_lines, one_line, progress_bar, show

PROG = "shmloader-inspect"


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    top = argparse.ArgumentParser(
        prog=PROG,
        description="Show what a pack holds. Reads its head only, unless asked to verify.",
        epilog="Exit code 0: a whole pack, as far as looked; 1: not a pack, or damaged; 2: wrong arguments.",
    )
    top.add_argument("pack", metavar="PACK", help="the file that shmloader-pack wrote")
    top.add_argument("--verify", action="store_true", help="read everything, and list every damaged chunk")
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
        if options.verify:
            facts["problems"] = _verify(options.pack)
    except (ShmLoaderError, OSError) as error:
        print(f"{PROG}: error: {one_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{PROG}: interrupted", file=sys.stderr)
        return 130
    if options.json:
        print(json.dumps(facts))
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
    classes = manifest.metadata.get("classes")
    if isinstance(classes, list):
        facts["classes"] = classes
        if any(field.name == "label" and field.kind == "int" for field in dataset.fields):
            labels = np.asarray(dataset.column("label"))
            if not len(labels) or (labels.min() >= 0 and labels.max() < len(classes)):
                counts = np.bincount(labels, minlength=len(classes)).tolist()
                facts["class_counts"] = dict(zip(map(str, classes), counts, strict=True))
    return facts


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
        *(f"{key.capitalize():9} {value}" for key, value in facts["metadata"].items()),
    ]
    if facts.get("class_counts"):
        text += class_lines(facts["class_counts"])
    problems = facts.get("problems")
    if problems is not None:
        text.append("Verified  everything was read, nothing is damaged" if not problems else "DAMAGED")
        text += [f"          {problem}" for problem in problems]
    return text


if __name__ == "__main__":
    sys.exit(main())
