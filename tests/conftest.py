"""Settings for all tests: no test is judged by the clock, and the whole run leaves nothing behind."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from support import shm_names

# Machines that run tests are slow and shared: a slow example is no failure.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background by a shell, which makes it ignore Ctrl-C, and all children too: tests send it to them.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--alone", action="store_true", help="run the tests marked 'alone', and no others")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests that count what the whole machine holds out of runs in several processes (pytest-xdist)."""
    together = "PYTEST_XDIST_WORKER" in os.environ
    only = config.getoption("--alone")
    if not together and not only:
        return
    left_out = [item for item in items if (item.get_closest_marker("alone") is not None) != only]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


def pytest_collection_finish() -> None:
    """Take what collection made out of every later garbage collection: many tests ask for one."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def nothing_stays_in_shared_memory() -> Iterator[None]:
    """Names of ours in the shared-memory mount that are new at the end of the run fail its last test."""
    before = shm_names()
    yield
    ours = {name for name in shm_names() - before if "shmloader" in name}
    assert not ours, f"left in /dev/shm by this run: {sorted(ours)}"
