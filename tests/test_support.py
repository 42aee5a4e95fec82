"""The helpers tell the truth: a leak check that cannot fail would prove nothing."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from support import (
    SHM_ROOT,
    Counters,
    Script,
    ScriptTimeout,
    child_pids,
    context,
    no_leaks,
    run_file,
    run_script,
    shm_names,
    small_tmpfs,
    start_methods,
    wait_until,
    write_script,
)


def test_nothing_done_is_no_leak() -> None:
    """Two countings with nothing in between agree."""
    with no_leaks():
        pass


def test_a_file_in_shared_memory_is_a_leak() -> None:
    """A name with our prefix is reported; another's is not."""
    before = Counters.now()
    ours, theirs = (SHM_ROOT / f"{who}-{os.getpid()}-support" for who in ("shmloader", "somebody"))
    try:
        theirs.write_bytes(b"x")
        before.assert_no_leak(timeout=0)
        ours.write_bytes(b"x")
        with pytest.raises(AssertionError, match=ours.name):
            before.assert_no_leak(timeout=0)
    finally:
        ours.unlink(missing_ok=True)
        theirs.unlink(missing_ok=True)


def test_processes_threads_descriptors_and_maps_are_leaks() -> None:
    """Each kind is reported by itself, and no more once it is gone."""
    before = Counters.now()
    read_fd, write_fd = os.pipe()
    assert [leak.split(":")[0] for leak in before.leaks()] == ["descriptors"]
    thread = threading.Thread(target=os.read, args=(read_fd, 1))
    thread.start()
    assert [leak.split(":")[0] for leak in before.leaks()] == ["threads", "descriptors"]
    os.write(write_fd, b"x")
    thread.join()
    os.close(read_fd)
    os.close(write_fd)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert any(str(child.pid) in leak for leak in before.leaks())
        child.communicate(b"\n")
    fd = os.memfd_create("support")
    os.ftruncate(fd, 4096)
    shared = mmap.mmap(fd, 4096)
    os.close(fd)
    assert any("mapped" in leak for leak in before.leaks())
    shared.close()
    before.assert_no_leak()


@start_methods
def test_a_worker_is_seen_and_its_helpers_are_not(start_method: str) -> None:
    """Children of the fork server count as ours; the server and the resource tracker, which stay, do not."""
    spawner = context(start_method)
    before = Counters.now()
    read_fd, write_fd = spawner.Pipe(duplex=False)
    process = spawner.Process(target=read_fd.recv)  # type: ignore[attr-defined]
    process.start()
    wait_until("the worker is among the children", lambda: process.pid in child_pids())
    assert process.pid in child_pids() - before.children
    write_fd.send("done")
    process.join()
    process.close()
    read_fd.close()
    write_fd.close()
    before.assert_no_leak()


def test_the_deadline_kills_grandchildren_too() -> None:
    """A script that hangs is an error that shows what it had said; its own children die with it."""
    before = child_pids()
    source = """
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("grandchild", child.pid, flush=True)
        time.sleep(600)
    """
    with pytest.raises(ScriptTimeout, match=r"still alive after 3 s\nstdout:\ngrandchild \d+") as caught:
        run_script(source, timeout=3)
    pid = int(str(caught.value).split("grandchild ")[1].split()[0])
    wait_until("the grandchild is gone", lambda: not _runs(pid))
    assert child_pids() <= before


def _runs(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_script_tells_how_it_ended() -> None:
    """Exit codes, signals, both streams, the environment; a warning is an error."""
    result = run_script("import os, sys; print(os.environ['WHO']); sys.exit('no')", env={"WHO": "me"})
    assert (result.returncode, result.stdout, result.stderr) == (1, "me\n", "no\n")
    assert run_script("import os; os.kill(os.getpid(), 9)").returncode == -9
    assert "UserWarning" in run_script("import warnings; warnings.warn('loud')").stderr
    assert run_script("import sys; print(sys.argv[1:])", args=["a", "b"]).silent().stdout == "['a', 'b']\n"
    with pytest.raises(AssertionError, match="should have been silent"):
        run_script("import sys; print('psst', file=sys.stderr)").silent()


def test_a_script_file_can_spawn(tmp_path: Path) -> None:
    """Spawned children import the file again."""
    source = """
        import multiprocessing

        def work(number):
            print("child", number, flush=True)

        if __name__ == "__main__":
            process = multiprocessing.get_context("spawn").Process(target=work, args=(7,))
            process.start()
            process.join()
            assert process.exitcode == 0
    """
    assert run_file(write_script(tmp_path, source)).silent().stdout == "child 7\n"


def test_a_running_script_is_read_and_killed() -> None:
    """Its lines are seen as they come, and a kill ends it at once."""
    with Script("import time; print('ready'); time.sleep(600)") as script:
        assert script.read_until("ready", timeout=30).startswith("ready")
        script.kill()
        assert script.wait() == -9
    with Script("print('only this')") as script, pytest.raises(AssertionError, match="ended without 'more'"):
        script.read_until("more", timeout=30)


def test_a_small_mount_is_small_and_goes_away(tmp_path: Path) -> None:
    """Two MiB and no more; afterwards the folder is empty again."""
    with small_tmpfs(tmp_path / "mount", "2m") as mount:
        facts = os.statvfs(mount)
        assert facts.f_frsize * facts.f_blocks == 2 << 20
        (mount / "file").write_bytes(b"x")
    assert shm_names(tmp_path / "mount") == frozenset()


def test_waiting_ends_at_the_deadline() -> None:
    """What never comes true is named."""
    with pytest.raises(AssertionError, match="pigs fly"):
        wait_until("pigs fly", lambda: False, timeout=0.02)
