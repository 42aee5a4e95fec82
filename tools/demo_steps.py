"""What all parts of the demo share: headings, and the installed commands run before the reader's eyes."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path


def heading(text: str) -> None:
    print(f"\n=== {text}", flush=True)


def command(*words: str, show: bool = True) -> str:
    """Run one of the installed commands, show it and what it prints; return its stdout. Ends the demo if it fails."""
    program = Path(sys.executable).parent / words[0]
    if show:
        print(f"$ {shlex.join(words)}", flush=True)
    done = subprocess.run([str(program), *words[1:]], capture_output=True, text=True, check=False)
    if show or done.returncode:
        print(done.stdout + done.stderr, end="", flush=True)
    if done.returncode:
        raise SystemExit(f"{words[0]} ended with exit code {done.returncode}")
    return done.stdout
