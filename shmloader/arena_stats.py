"""What an arena tells about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ArenaStats:
    """What an arena looks like at one moment. Sizes in bytes."""

    address: int
    """Where the reserved range begins in the main process; batches lie in ``[address, address + reserved)``."""
    reserved: int
    """Length of the reserved address range. Costs nothing."""
    nbytes: int
    """Committed bytes: the shared memory that really exists."""
    limit: int | None
    """What ``nbytes`` never exceeds, or None if only the host's own limits hold."""
    slot_bytes: int
    """Size that new slots get; 0 until the first batch has told it."""
    slots: int
    """Number of slots that exist."""
    free: int
    """Slots that hold nothing."""
    granted: int
    """Slots that a worker is writing."""
    ready: int
    """Slots with a finished batch that was not delivered yet."""
    lent: int
    """Slots in the user's hands: at least one view of their batch is alive."""
    draining: int
    """Slots without a view, which a copy to a device may still be reading."""
    quarantined: int
    """Slots that code in a worker still looks at: a ``collate_fn`` that keeps what it made, say."""
    peak_lent: int
    """The most slots that were ever lent or draining at one time."""
    pinned: bool
    """Whether every slot is page-locked for CUDA, where it lies."""
    pinned_bytes: int
    """Bytes that are page-locked."""
    pinned_s: float
    """Seconds that page-locking has taken."""
    backing: str
    """``'posix'``, ``'memfd'`` or a directory."""
    prefaulted: int
    """Bytes of slots that the main process has mapped ahead of their use; a slot's first batch maps it."""
    huge_pages: str
    """``'never'``, or the host's word under which huge pages were asked for (``'advise'``, ``'always'``,
    ``'within_size'``, ``'force'``). Small arenas do not ask."""
    numa_node: int | None
    """The NUMA node on which memory is committed, or None where the kernel chooses."""
