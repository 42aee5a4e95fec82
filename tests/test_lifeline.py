"""The life line: its end is the end of the worker, whatever the worker is doing."""

import os
import signal
import time

import pytest

from shmloader.lifeline import LifeLine
from support import no_leaks, wait_until


def fork(body):
    """Run ``body`` in a forked child that then exits with 7; return its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
        finally:
            os._exit(7)
    return pid


def exit_of(pid, timeout=10.0):
    """The exit code (negative: signal) of a child, waited for with a deadline."""
    status = []

    def ended():
        found, code = os.waitpid(pid, os.WNOHANG)
        if found:
            status.append(os.waitstatus_to_exitcode(code))
        return bool(found)

    wait_until(f"child {pid} has ended", ended, timeout)
    return status[0]


def holding(line, write_end, work):
    """A worker's first steps: let go of the inherited write end, arm, say so, work."""
    said, say = os.pipe()

    def body():
        os.close(write_end)
        line.arm()
        os.write(say, b"x")
        work()

    pid = fork(body)
    line.close()
    os.close(say)
    assert os.read(said, 1) == b"x"
    os.close(said)
    return pid


def count_for_ever():
    """Python that never returns."""
    while True:
        pass


@pytest.mark.parametrize(
    "work", [lambda: time.sleep(1000), count_for_ever, signal.pause], ids=["sleep", "loop", "pause"]
)
def test_closing_the_line_kills_an_armed_worker(work):
    """At once, by SIGKILL, in whatever state."""
    with no_leaks():
        line, write_end = LifeLine.create()
        pid = holding(line, write_end, work)
        os.close(write_end)
        assert exit_of(pid) == -signal.SIGKILL


def test_a_line_that_was_closed_before_it_was_armed_ends_the_worker_too():
    """Arm first, look second: there is no moment at which the death of the parent is missed."""
    line, write_end = LifeLine.create()
    os.close(write_end)
    pid = fork(line.arm)
    line.close()
    assert exit_of(pid) in (0, -signal.SIGKILL)


def test_a_disarmed_worker_leaves_in_peace():
    """After ``disarm`` the end of the line is not the end of the process."""
    go, wait = os.pipe()
    line, write_end = LifeLine.create()
    said, say = os.pipe()

    def body():
        os.close(write_end)
        os.close(wait)
        line.arm()
        line.disarm()
        os.write(say, b"x")
        os.read(go, 1)

    pid = fork(body)
    assert os.read(said, 1) == b"x"
    os.close(write_end)
    os.close(wait)
    assert exit_of(pid) == 7
    for fd in (go, said, say):
        os.close(fd)
    line.close()
    line.close()


def test_the_line_is_not_cut_by_a_sibling_that_ends():
    """Only the last holder of the write end counts; another process that had a copy may come and go."""
    line, write_end = LifeLine.create()
    pid = holding(line, write_end, lambda: time.sleep(1000))
    sibling = fork(lambda: None)
    assert exit_of(sibling) == 7
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    os.close(write_end)
    assert exit_of(pid) == -signal.SIGKILL
