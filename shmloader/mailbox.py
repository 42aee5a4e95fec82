"""The messages between the main process and one worker, and the ring of shared memory that carries them.

    main ── tickets ──▶ ┌─┬─┬─┬─┐ ──▶ worker        one ring a direction and worker, one writer and one reader each,
         ◀── replies ── └─┴─┴─┴─┘                   64 bytes a message, read in the order written

A message is written into the ring first and announced by the doorbell after; the reader reads as many messages as it
took rings. No more than ``capacity`` messages are ever under way, which the sender's own rules ensure (see pool.py).
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .doorbell import Doorbell

_MESSAGE = struct.Struct("<8q")
MESSAGE_BYTES = _MESSAGE.size  # one cache line

# Kinds of ticket: what the main process asks of a worker.
WORK = 1
"""Make batch ``batch`` from the indices in the slot."""
REGRANT = 2
"""Here is the slot that you asked for; smaller than that: send the batch in pieces; ``nbytes`` 0: drop the batch."""
RESUME = 3
"""A new epoch begins; what was asked before it and not answered is void."""
STOP = 4
"""Leave."""

# Kinds of reply: what a worker answers.
BATCH = 11
"""The batch is in the slot."""
NEED = 12
"""The batch is ready but the slot is too small: ``need`` bytes."""
FAILED = 13
"""The dataset or collate_fn raised: the pickled error is in the slot."""
EXHAUSTED = 14
"""This worker's iterable dataset has ended."""
VOID = 15
"""The ticket was cancelled before work on it began, or belongs to an epoch that is over."""
RESUMED = 16
"""Answer to RESUME."""
PIECE = 17
"""The slot holds the next ``need`` bytes of a batch that is larger than any slot to be had; a REGRANT asks for more."""

SKIPPED = 18
"""All samples of the batch are bad and left out: the pickled list of them is in the slot."""

KEPT = 1 << 8
"""Added to BATCH, NEED or FAILED: the worker's own code still looks at the slot, so it must never be written again."""

# How a ticket's indices lie at the beginning of its slot.
INT64 = 1
"""As ``count`` int64 numbers."""
PICKLED = 2
"""As ``count`` bytes of pickle."""
COUNT = 3
"""Not at all: an iterable dataset is asked for its next ``count`` samples."""
SINGLE = 4
"""Not at all: an iterable dataset is asked for its next sample, without collation."""


def label_of(epoch: int, batch: int) -> int:
    """Return the number of a WORK ticket among all of a worker's life: at least 1, and rising."""
    return (epoch << 40 | batch) + 1


class Ticket(NamedTuple):
    """One batch of work for one worker, or an order."""

    kind: int
    batch: int
    """Position in the epoch."""
    slot: int
    """Which slot was granted; the worker only returns it."""
    offset: int
    """Where the slot begins in the segment."""
    nbytes: int
    """How large it is."""
    index_kind: int
    index_count: int
    """Length of the indices, in the unit of ``index_kind``."""
    epoch: int


class Reply(NamedTuple):
    """What became of a ticket."""

    kind: int
    batch: int
    slot: int
    layout: int
    """Number under which the receiver knows the layout, or shall keep it; -1: this layout is not to be kept."""
    layout_offset: int
    layout_bytes: int
    """Where the pickled layout (or error) lies in the slot; 0 bytes: it was sent before."""
    need: int
    """NEED: bytes that the batch needs. BATCH: bytes of the slot that are in use."""
    copied: int
    """Bytes of the batch that were not born in the slot."""


class Outbox:
    """The sending end of a ring."""

    __slots__ = ("_bell", "_capacity", "_memory", "_offset", "_sent")

    def __init__(self, memory: npt.NDArray[np.uint8], offset: int, capacity: int, bell: Doorbell) -> None:
        self._memory = memory.data
        self._offset = offset
        self._capacity = capacity
        self._bell = bell
        self._sent = 0

    def send(self, message: tuple[int, ...]) -> None:
        """Write a Ticket or Reply, or its eight numbers, and ring. The ring must have room: see the header."""
        _MESSAGE.pack_into(self._memory, self._offset + self._sent % self._capacity * MESSAGE_BYTES, *message)
        self._sent += 1
        self._bell.ring()


class Inbox:
    """The receiving end of a ring."""

    __slots__ = ("_announced", "_capacity", "_memory", "_offset", "_read", "bell")

    def __init__(self, memory: npt.NDArray[np.uint8], offset: int, capacity: int, bell: Doorbell) -> None:
        self._memory = memory.data
        self._offset = offset
        self._capacity = capacity
        self.bell = bell
        self._announced = 0
        self._read = 0

    def has_message(self) -> bool:
        """Whether ``receive`` would return a message. Never blocks."""
        if self._announced == self._read:
            self._announced += self.bell.take()
        return self._announced != self._read

    def receive(self) -> tuple[int, ...] | None:
        """Return the eight numbers of the next message, or None if none is announced. Never blocks."""
        if self._announced == self._read:
            self._announced += self.bell.take()
            if self._announced == self._read:
                return None
        place = self._offset + self._read % self._capacity * MESSAGE_BYTES
        self._read += 1
        return _MESSAGE.unpack_from(self._memory, place)
