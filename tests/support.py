"""What tests share: children with a deadline, what this machine holds before and after, small mounts.

    result = run_script(SOURCE, timeout=30)            # a real process; its whole group dies at the deadline
    before = Counters.now(); ...; before.assert_no_leak()
    with small_tmpfs(folder, "2m") as mount: ...       # skips where mounting is not allowed

Test files import it as ``from support import run_script``.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

MIB = 1 << 20
SHM_ROOT = Path("/dev/shm")
START_METHODS = ("fork", "forkserver", "spawn")

start_methods = pytest.mark.parametrize("start_method", START_METHODS)
"""Run a test once for each way of starting workers (argument ``start_method``)."""

# In time for slow machines; a test that needs more says so itself.
DEADLINE_S = 60.0


# --- children ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """How a child ended. ``returncode`` is -9 for one that was killed, as in ``subprocess``."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float

    def check(self) -> Result:
        """Return self; AssertionError with both streams if the child did not exit with 0."""
        assert self.returncode == 0, f"exit code {self.returncode}\nstdout:\n{self.stdout}\nstderr:\n{self.stderr}"
        return self

    def silent(self) -> Result:
        """``check``, and nothing was written to stderr: no warning, no traceback, no resource tracker."""
        assert self.check().stderr == "", f"stderr of a child that should have been silent:\n{self.stderr}"
        return self


class ScriptTimeout(AssertionError):
    """A child was still alive at its deadline. Its group has been killed; what it had said is in the text."""


# Warnings are errors, but for the one that Python >= 3.12 gives for every fork below torch's threads.
PYTHON = (sys.executable, "-X", "faulthandler", "-W", "error", "-W", "ignore:This process:DeprecationWarning")


def script_command(source: str, args: Sequence[str] = ()) -> list[str]:
    """Return a command that runs ``source`` (dedented), with warnings as errors and stacks on a fatal signal."""
    return [*PYTHON, "-c", textwrap.dedent(source), *args]


def run_command(
    command: Sequence[str],
    *,
    timeout: float = DEADLINE_S,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Result:
    """Run a command in its own process group and wait for it and for all that hold its output.

    ``env`` is added to this process's environment. At the deadline, and whenever this function ends, the whole group is
    killed, so that no grandchild survives a test. Raises ScriptTimeout.
    """
    started = time.monotonic()
    with subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        cwd=cwd,
        env={**os.environ, **(env or {})},
        start_new_session=True,
    ) as child:
        try:
            stdout, stderr = child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            kill_group(child.pid)
            stdout, stderr = child.communicate()
            raise ScriptTimeout(f"still alive after {timeout} s\nstdout:\n{stdout}\nstderr:\n{stderr}") from None
        finally:
            kill_group(child.pid)
    return Result(child.returncode, stdout, stderr, time.monotonic() - started)


def run_script(
    source: str,
    *,
    args: Sequence[str] = (),
    timeout: float = DEADLINE_S,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Result:
    """Run Python source in a fresh process. Under forkserver and spawn use ``write_script``: they need a file."""
    return run_command(script_command(source, args), timeout=timeout, env=env, cwd=cwd)


def write_script(folder: Path, source: str, name: str = "script.py") -> Path:
    """Write dedented source to a file, which spawned workers can import again. Guard its body with ``__main__``."""
    path = folder / name
    path.write_text(textwrap.dedent(source))
    return path


def run_file(
    path: Path, *, args: Sequence[str] = (), timeout: float = DEADLINE_S, env: Mapping[str, str] | None = None
) -> Result:
    """Run a script file in a fresh process, with warnings as errors."""
    return run_command([*PYTHON, str(path), *args], timeout=timeout, env=env, cwd=path.parent)


def kill_group(pid: int) -> None:
    """SIGKILL every process of the group that ``pid`` leads. Does nothing if the group is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


class Script:
    """A child that runs beside the test: wait for its lines, kill it at a chosen moment. Use with ``with``.

    Its group is killed when the block ends.
    """

    def __init__(self, source: str, *, args: Sequence[str] = (), env: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            script_command(source, args),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.output = ""
        """All that was read so far, of both streams."""

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *exc: object) -> None:
        kill_group(self.pid)
        self._process.communicate()

    def read_until(self, text: str, timeout: float = DEADLINE_S) -> str:
        """Read until ``text`` has been seen; return ``output``. AssertionError at the deadline or at the end."""
        assert self._process.stdout is not None
        fd, deadline = self._process.stdout.fileno(), time.monotonic() + timeout
        while text not in self.output:
            left = deadline - time.monotonic()
            assert left > 0, f"{text!r} did not appear within {timeout} s; so far:\n{self.output}"
            if select.select([fd], [], [], left)[0]:
                data = os.read(fd, 1 << 16)
                assert data, f"the child ended without {text!r}; it said:\n{self.output}"
                self.output += data.decode(errors="replace")
        return self.output

    def kill(self) -> None:
        """SIGKILL the whole group, workers included, and reap the leader."""
        kill_group(self.pid)
        self._process.wait(DEADLINE_S)

    def wait(self, timeout: float = DEADLINE_S) -> int:
        """Wait for the leader to end; return its exit code. Its output must fit a pipe (64 KiB) if nobody reads it."""
        return self._process.wait(timeout)


def wait_until(what: str, true: Callable[[], bool], timeout: float = DEADLINE_S) -> None:
    """Wait for what the kernel or another process does and nobody announces. AssertionError names ``what``."""
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(0.005)


# --- what this machine holds ------------------------------------------------------------------------------------------


def shm_names(root: Path = SHM_ROOT) -> frozenset[str]:
    """Names in the shared-memory mount; the empty set where there is none."""
    return frozenset(os.listdir(root)) if root.is_dir() else frozenset()


def shmem_bytes() -> int:
    """Shared memory in use on the whole machine, with and without a name (``Shmem`` of /proc/meminfo)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Shmem line in /proc/meminfo")


def shared_mappings(pid: int | None = None) -> int:
    """Bytes of shared memory that a process maps (posix shared memory and memfd), committed or only reserved."""
    total = 0
    for line in Path(f"/proc/{pid or os.getpid()}/maps").read_text().splitlines():
        parts = line.split(maxsplit=5)
        if len(parts) == 6 and parts[5].startswith(("/dev/shm/", "/memfd:")):
            first, last = (int(end, 16) for end in parts[0].split("-"))
            total += last - first
    return total


def child_pids() -> frozenset[int]:
    """Processes below this one, but for multiprocessing's own helpers, which live as long as this process."""
    helpers = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
    pids = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended while we looked
            line = " ".join(child.cmdline())
            # The workers of a fork server have the server's command line: only the direct child is the server.
            if child.ppid() == os.getpid() and any(helper in line for helper in helpers):
                continue
            pids.add(child.pid)
    return frozenset(pids)


@dataclass(frozen=True)
class Counters:
    """What this process and the mount held at one moment."""

    children: frozenset[int]
    threads: int
    descriptors: dict[int, str]
    """Descriptor to what it points at."""
    shm_names: frozenset[str]
    shmem: int
    """Bytes of shared memory in use on the whole machine: other processes move this number too."""
    mapped: int
    """Bytes of shared memory mapped by this process."""
    rss: int
    """Resident bytes of this process, shared pages included."""

    @classmethod
    def now(cls) -> Counters:
        """Collect garbage, then count."""
        gc.collect()
        own = psutil.Process()
        descriptors = {}
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
                descriptors[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        return cls(
            children=child_pids(),
            threads=own.num_threads(),
            descriptors=descriptors,
            shm_names=shm_names(),
            shmem=shmem_bytes(),
            mapped=shared_mappings(),
            rss=own.memory_info().rss,
        )

    def leaks(self, *, threads: int = 0, names: Callable[[str], bool] = lambda name: True) -> list[str]:
        """Sentences about what is there now and was not then; empty when nothing is.

        ``threads`` more are allowed. ``names`` picks the names in /dev/shm that count: others may use the mount.
        RSS and Shmem are for the caller to judge: they need a tolerance.
        """
        now = Counters.now()
        found = []
        if extra := now.children - self.children:
            found.append(f"processes: {sorted(extra)}")
        if now.threads > self.threads + threads:
            found.append(f"threads: {self.threads} before, {now.threads} now")
        if len(now.descriptors) > len(self.descriptors):
            more = {fd: to for fd, to in now.descriptors.items() if self.descriptors.get(fd) != to}
            found.append(f"descriptors: {len(self.descriptors)} before, {len(now.descriptors)} now; new: {more}")
        if extra_names := {name for name in now.shm_names - self.shm_names if names(name)}:
            found.append(f"names in {SHM_ROOT}: {sorted(extra_names)}")
        if now.mapped > self.mapped:
            found.append(f"mapped shared memory: {self.mapped} bytes before, {now.mapped} now")
        return found

    def assert_no_leak(self, *, threads: int = 0, timeout: float = 10.0) -> None:
        """AssertionError if something of ours that was not there then is still there at the deadline.

        Names count if they contain ``shmloader``. Waiting is for the kernel, which reaps and unmaps in its own time.
        """
        deadline = time.monotonic() + timeout
        while leaks := self.leaks(threads=threads, names=lambda name: "shmloader" in name):
            assert time.monotonic() < deadline, "; ".join(leaks)
            time.sleep(0.01)


@contextlib.contextmanager
def no_leaks(*, threads: int = 0) -> Iterator[Counters]:
    """Whatever the block starts, maps or opens must be gone when it ends. Yields the counters from before."""
    before = Counters.now()
    yield before
    before.assert_no_leak(threads=threads)


# --- start methods, mounts, memory ------------------------------------------------------------------------------------


def context(start_method: str) -> multiprocessing.context.BaseContext:
    """A multiprocessing context; the fork server is started first, so that it is in ``Counters`` before a test."""
    chosen = multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        process = chosen.Process(target=os.getpid)  # type: ignore[attr-defined]
        process.start()
        process.join()
        process.close()
    return chosen


@contextlib.contextmanager
def small_tmpfs(folder: Path, size: str = "2m", options: str = "") -> Iterator[Path]:
    """Mount a tmpfs of ``size`` (as in mount's ``size=``) on ``folder``, unmount it afterwards.

    Skips the test where mounting is not allowed. A mapping that outlives the block keeps its memory, not the mount.
    """
    folder.mkdir(parents=True, exist_ok=True)
    chosen = f"size={size}" + (f",{options}" if options else "")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", chosen, "none", str(folder)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], capture_output=True, timeout=30, check=True)
