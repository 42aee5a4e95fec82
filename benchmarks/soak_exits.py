"""How long programs take to end, in each way that they can, with eight workers asleep in a sample. Part of soak.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

HANG_S = 120

EXITS = {
    "nothing but importing torch": ("", 0),
    "end of script": ("", 0),
    "exception": ("raise KeyError('mine')", 1),
    "sys.exit": ("sys.exit(7)", 7),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(100)", -signal.SIGTERM),
    "Ctrl-C": ("os.kill(os.getpid(), signal.SIGINT); time.sleep(100)", -signal.SIGINT),
    "os._exit": ("os._exit(3)", 3),
}
EXIT = """
import os, signal, sys, time, warnings
warnings.simplefilter("ignore")
signal.signal(signal.SIGINT, signal.default_int_handler)  # what is started in the background ignores Ctrl-C
from shmloader import DataLoader
from soak_oracle import Known
loader = DataLoader(Known(400, slow=frozenset(range(40, 400)), nap_s=1000.0), 4, num_workers=8)
iterator = iter(loader)
next(iterator)
print(time.monotonic(), flush=True)
{body}
"""
ALONE = """
import time, torch
print(time.monotonic(), flush=True)
"""


def exits() -> list[tuple[str, float, str]]:
    """End programs with eight busy workers in each way: (way, seconds, what is wrong)."""
    found = []
    for way, (body, code) in EXITS.items():
        source = EXIT.format(body=body) if "torch" not in way else ALONE
        command = [sys.executable, "-c", source]
        environment = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.abspath(__file__))}
        child = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False, env=environment)
        seconds = time.monotonic() - float(child.stdout.split()[0])
        traceback = "Traceback" in child.stderr
        wrong = "" if child.returncode == code else f"exit code {child.returncode}, not {code}; "
        if traceback != (way in ("exception", "Ctrl-C")) or child.stderr.count("Traceback") > 1:
            wrong += f"stderr: {child.stderr}"
        found.append((way, seconds, wrong))
    return found
