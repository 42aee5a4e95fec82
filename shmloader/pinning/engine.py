"""The seam between this library and a copy engine: what is asked of CUDA, and nothing else.

    register ─▶ (batches are copied) ─▶ record an event behind the copies ─▶ query it ─▶ unregister ─▶ unmap

Two things implement it: :class:`~shmloader.pinning.cuda.CudaEngine` for a real device, and a recorder in the tests that
can refuse, be slow, and tells in which order it was asked. Whoever calls makes sure of the order above; whoever
implements makes sure that no call waits for the device and that no call leaves an error behind for others to find.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

Stream = Any
"""A stream of the engine's own kind: for CUDA a ``torch.cuda.Stream``."""


class Event(Protocol):
    """A mark in a stream: behind everything that was given to the stream before."""

    def query(self) -> bool:
        """Return whether the stream has passed it. Never waits."""
        ...


Fence = Sequence[Event]
"""Events that must all have passed before a slot may be written again; empty: at once."""


class Engine(Protocol):
    """A copy engine as the process sees it that owns the arena. A forked child never calls it."""

    @property
    def device(self) -> torch.device:
        """Where it copies to. Chosen when first asked; asking may create the context of this device, of no other."""
        ...

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock ``[address, address + nbytes)``, which has pages already. Raises PinningRefused, and then nothing
        of it is locked."""
        ...

    def unregister(self, address: int) -> None:
        """Undo ``register`` of the range that begins exactly at ``address``. Never raises."""
        ...

    def fence(self, streams: Sequence[Stream]) -> Fence | None:
        """Record events on the current and default streams of every device in use, and on ``streams``.

        None: it cannot be done at this moment (a graph is being captured), ask again later. Empty: no device is in use.
        Called from finalisers: never raises, never waits.
        """
        ...

    # --- for batches that are copied to the device here

    def open_stream(self) -> Stream:
        """Return a stream of its own for copies to ``device``."""
        ...

    def current_stream(self) -> Stream | None:
        """Return the stream that this thread's work goes to now; None if no device is in use."""
        ...

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Give the work of this thread to ``stream`` inside the block."""
        ...

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on ``device``, made by the current stream. Returns before the bytes have been read, if it can.

        A tensor that lies there already is returned as it is.
        """
        ...

    def record(self, stream: Stream) -> Event:
        """Return an event behind everything that ``stream`` was given so far."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """Let ``stream``, not the host, wait for ``event``."""
        ...

    def keep_for(self, tensor: torch.Tensor, stream: Stream) -> None:
        """The memory of ``tensor`` is used by ``stream`` too: it is not to be reused before that stream is done."""
        ...


def passed(fence: Fence) -> bool:
    """Whether all events of ``fence`` have passed. Never waits."""
    return all(event.query() for event in fence)
