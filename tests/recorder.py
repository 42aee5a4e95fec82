"""A copy engine of paper: refuses, is slow, writes down what it was asked, and checks the order of it on the spot.

    recorder = Recorder(refuse=lambda number, nbytes: number == 3, pace=0)
    loader = Recorded(dataset, batch_size=4, recorder=recorder, pin_memory=True)

Its copies are real and late: they read raw addresses, as a device does, and only when their stream is run. A slot that
is written again, unlocked or unmapped too early therefore shows as wrong data or as a crash, not only in the log.
Asked from a forked child it ends the child with FORKED.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from shmloader import DataLoader
from shmloader.errors import PinningRefused
from shmloader.pinning import Copying

FORKED = 77
PAGE = mmap.PAGESIZE
REFUSED = 2


class PaperStream:
    """Work in the order given; each event is a place in it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.work: list[Callable[[], None]] = []
        self.done = 0

    def run(self, operations: int | None = None) -> None:
        """Carry out the next ``operations``, or all."""
        stop = len(self.work) if operations is None else min(len(self.work), self.done + operations)
        while self.done < stop:
            self.work[self.done]()
            self.done += 1


class PaperEvent:
    """Has passed once everything that its stream was given before has been carried out."""

    def __init__(self, recorder: Recorder, stream: PaperStream) -> None:
        self.recorder, self.stream, self.place = recorder, stream, len(stream.work)

    def query(self) -> bool:
        self.recorder.own()
        self.stream.run(self.recorder.pace)
        return self.stream.done >= self.place


class Recorder:
    """``refuse(number, nbytes)`` says whether the number-th registration fails. ``pace``: operations that a stream
    carries out each time one of its events is asked; None: all; 0: none, until ``run`` is called."""

    def __init__(
        self,
        refuse: Callable[[int, int], bool] = lambda number, nbytes: False,
        pace: int | None = None,
        out: Path | None = None,
    ) -> None:
        self.device = torch.device("cpu")
        self.refuse = refuse
        self.pace = pace
        self.log: list[tuple[Any, ...]] = []
        self.registered: dict[int, int] = {}
        self.default = PaperStream("default")
        self.streams = [self.default]
        self.current = self.default
        self.capturing = False
        self.broken = False
        self._tried = 0
        self._pid = os.getpid()
        self._out = None if out is None else os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def own(self) -> None:
        """No call may come from a forked child."""
        if os.getpid() != self._pid:
            os._exit(FORKED)

    def note(self, *entry: Any) -> None:
        """Write an entry down, to the file as well: what happens at exit can only be read there."""
        self.own()
        self.log.append(entry)
        if self._out is not None:
            os.write(self._out, (" ".join(map(str, entry)) + "\n").encode())

    def words(self, *wanted: str) -> list[str]:
        """The first words of all entries, or of those that are wanted."""
        return [entry[0] for entry in self.log if not wanted or entry[0] in wanted]

    # --- page-locking

    def register(self, address: int, nbytes: int) -> None:
        """Refuses, or checks: whole pages, all of them there already, none of them registered."""
        self._tried += 1
        assert address % PAGE == nbytes % PAGE == 0, "not whole pages"
        assert all(stop <= address or start >= address + nbytes for start, stop in self._ranges()), "registered twice"
        assert all_present(address, nbytes), "registered before the pages were there"
        if self.refuse(self._tried, nbytes):
            self.note("refuse", address, nbytes)
            raise PinningRefused(nbytes, address, REFUSED, "CUDA_ERROR_OUT_OF_MEMORY: out of memory", "lower it")
        self.note("register", address, nbytes)
        self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        """Checks: the very base of a registration, its pages still there, and no copy from it still to be made."""
        self.note("unregister", address)
        nbytes = self.registered.pop(address)
        assert all_present(address, nbytes), "the pages went before they were unregistered"

    def _ranges(self) -> list[tuple[int, int]]:
        return [(start, start + nbytes) for start, nbytes in self.registered.items()]

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether all bytes of ``tensor`` lie in one registered range, without a seam."""
        start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(first <= start and stop <= last for first, last in self._ranges())

    # --- streams

    def fence(self, streams: Sequence[PaperStream]) -> list[PaperEvent] | None:
        self.own()
        if self.capturing or self.broken:
            return None
        return [self.record(stream) for stream in dict.fromkeys((self.default, self.current, *streams))]

    def open_stream(self, name: str = "side") -> PaperStream:
        self.own()
        self.streams.append(PaperStream(name))
        return self.streams[-1]

    def current_stream(self) -> PaperStream:
        self.own()
        return self.current

    @contextmanager
    def on(self, stream: PaperStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """As a device does it: page-locked bytes from a raw address, later, whatever is there then; others at once."""
        self.own()
        target = torch.full_like(tensor, 99, memory_format=torch.contiguous_format)
        if not self.is_pinned(tensor):
            target.copy_(tensor)
        elif tensor.nbytes:
            extent = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            raw = (ctypes.c_char * (extent * tensor.element_size())).from_address(tensor.data_ptr())
            source = torch.frombuffer(raw, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())
            late = target.detach()
            self.current.work.append(lambda: (late.copy_(source), None)[1])
        self.note("copy", self.current.name)
        return target

    def record(self, stream: PaperStream) -> PaperEvent:
        self.note("event", stream.name)
        return PaperEvent(self, stream)

    def wait(self, stream: PaperStream, event: PaperEvent) -> None:
        """The stream carries the other one out up to the event when it comes here."""
        self.note("wait", stream.name, event.stream.name)
        other, place = event.stream, event.place
        stream.work.append(lambda: other.run(max(0, place - other.done)))

    def keep_for(self, tensor: torch.Tensor, stream: PaperStream) -> None:
        self.note("keep_for", stream.name)

    def run(self) -> None:
        """The device does all that it was given."""
        for stream in self.streams:
            stream.run()


class Recorded(DataLoader[Any]):
    """A loader whose accelerator is a recorder. ``on_device``: batches are copied by it, as with ``device=``."""

    def __init__(self, *args: Any, recorder: Recorder, on_device: bool = False, **kwargs: Any) -> None:
        self.recorder, self.on_device = recorder, on_device
        super().__init__(*args, **kwargs)

    def _choose_copying(self) -> Copying:
        return Copying(
            engine=self.recorder,
            pin=self.pin_memory or self.on_device,
            drain=self.drain or self.on_device,
            to_device=self.on_device,
            streams=self._streams,
        )


def all_present(address: int, nbytes: int) -> bool:
    """Whether every page of the range is mapped into this process now (bit 63 of its entry in /proc/self/pagemap)."""
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        pagemap.seek(address // PAGE * 8)
        entries = struct.unpack(f"<{nbytes // PAGE}Q", pagemap.read(nbytes // PAGE * 8))
    return all(entry >> 63 for entry in entries)
