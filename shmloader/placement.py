"""Where an arena's pages lie: huge pages where the host allows them, and the NUMA node that the user wants.

Huge pages. Who decides depends on the backing, and no page is ever asked for against the host's word:

    memfd                      /sys/kernel/mm/transparent_hugepage/shmem_enabled
    posix, a directory         the mount option huge= of that tmpfs; "deny" and "force" in shmem_enabled overrule it

``never``: 4 KiB pages. ``advise``: huge ones for who asks, and only in a fault, which is why a segment then commits by
mapping first. ``always`` and ``within_size``: ``posix_fallocate`` makes them by itself.

NUMA. A page of shared memory lies on the node of the CPU that touches it first, and that is the commit, not the use. So
a thread that may run on that node's CPUs alone commits the memory, and nothing else is bound to anything.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from .cgroups import read_text

_ASKED = ("advise", "always", "within_size", "force")


@dataclass(frozen=True, slots=True)
class Placement:
    """How a segment's pages are placed."""

    huge_pages: str = "never"
    """The host's word for this memory: ``'never'``, ``'deny'``, or one under which huge pages are asked for."""
    numa_node: int | None = None
    """The node on which memory is committed; None: where the kernel puts it."""
    cpus: frozenset[int] = frozenset()
    """That node's CPUs, as far as this process may run on them."""

    @property
    def wants_huge(self) -> bool:
        return self.huge_pages in _ASKED


ANYWHERE = Placement()


def place(directory: str | None, numa_node: int | None, *, huge: bool) -> Placement:
    """Return the placement of memory in ``directory`` (None: ``memfd_create``'s) as far as this host can give it.

    ``huge``: ask for huge pages if the host lets us. A node that this host does not have, or on whose CPUs this process
    may not run, is left out with a warning.
    """
    word = huge_pages_word(directory) if huge else "never"
    if numa_node is None:
        return Placement(word)
    cpus = node_cpus(numa_node)
    if not cpus:
        warnings.warn(
            f"arena_numa_node={numa_node}: this process may run on no CPU of such a node (there are nodes "
            f"{read_text('/sys/devices/system/node/online') or 'unknown'}, and CPUs "
            f"{sorted(os.sched_getaffinity(0))} for this process), so memory lies where the kernel puts it",
            stacklevel=2,
        )
        return Placement(word)
    return Placement(word, numa_node, cpus)


def huge_pages_word(directory: str | None, *, proc_root: str = "/proc", sys_root: str = "/sys") -> str:
    """Return the host's word on huge pages in the tmpfs that holds ``directory``; None: in ``memfd_create``'s memory.

    ``'never'`` if nothing says otherwise, and for file systems that are no tmpfs.
    """
    _, _, rest = (read_text(f"{sys_root}/kernel/mm/transparent_hugepage/shmem_enabled") or "").partition("[")
    word = rest.partition("]")[0] or "never"
    if directory is None or word in ("deny", "force"):
        return word
    return _mount_word(os.path.realpath(directory), read_text(f"{proc_root}/self/mounts") or "")


def _mount_word(path: str, mounts: str) -> str:
    """Return the ``huge=`` option of the tmpfs that ``path`` lies in."""
    holder, word = "", "never"
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 4:
            continue
        point = fields[1].replace("\\040", " ").rstrip("/")
        if (path == point or path.startswith(point + "/")) and len(point) >= len(holder):  # the last one lies on top
            options = dict(part.partition("=")[::2] for part in fields[3].split(","))
            holder, word = point, (options.get("huge", "never") if fields[2] == "tmpfs" else "never")
    return word


def node_cpus(node: int, *, sys_root: str = "/sys") -> frozenset[int]:
    """Return the CPUs of a NUMA node on which this process may run; empty if the node has none or does not exist."""
    text = read_text(f"{sys_root}/devices/system/node/node{node}/cpulist") or ""
    return frozenset(parse_list(text)) & os.sched_getaffinity(0)


def parse_list(text: str) -> list[int]:
    """Return the numbers of a kernel list such as ``0-1,4``. Parts that are no numbers are left out."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal() and (not last or last.isdecimal()):
            numbers.extend(range(int(first), int(last or first) + 1))
    return numbers


def run_on(cpus: frozenset[int], work: Callable[[], None]) -> None:
    """Run ``work`` in a thread that may use only ``cpus``, wait for it, and raise what it raised.

    With no CPUs, and where the system does not let a thread be bound, it runs where it likes. The caller's own thread
    is never bound. Threads that ``work`` starts inherit the CPUs.
    """
    if not cpus:
        work()
        return
    raised: list[BaseException] = []

    def body() -> None:
        with contextlib.suppress(OSError):  # a cpuset that changed since; placing is a wish
            os.sched_setaffinity(0, cpus)  # 0: this thread, not the process
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again below, in the thread that asked
            raised.append(error)

    thread = threading.Thread(target=body, name="shmloader-commit")
    thread.start()
    try:
        thread.join()
    except BaseException:  # Ctrl-C: nothing may go on behind the caller's back
        thread.join()
        raise
    if raised:
        raise raised[0]
