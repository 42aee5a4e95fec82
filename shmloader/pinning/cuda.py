"""The engine for CUDA devices (and ROCm's, which torch calls by the same names).

Made without touching CUDA. The first use of ``device`` chooses the device and creates its context; ``fence`` never
creates anything: as long as this process does not use CUDA, there is nothing to wait for.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from .driver import DEINITIALIZED, DriverRegistrar, Registrar, RuntimeRegistrar
from .engine import Event, Fence, Stream

_log = logging.getLogger("shmloader")


def choose_device(current: int, in_use: Sequence[bool], local_rank: str | None) -> int:
    """Return the device that this process means, so that no context is opened on one that it does not (B6). Pure.

    The current device, if it is in use already. Else the only one that is in use: the current device is a thread's own,
    and other threads begin with 0. Else, with ``set_device`` not called yet, the one that a launcher gave this process
    with ``LOCAL_RANK``, if there are so many. Else the current one.
    """
    if in_use[current]:
        return current
    if sum(in_use) == 1:
        return list(in_use).index(True)
    if current == 0 and not any(in_use) and local_rank is not None and local_rank.isdecimal():
        rank = int(local_rank)
        if rank < len(in_use):
            return rank
    return current


def has_context(device: int) -> bool:
    """Whether this process uses ``device`` already. Does not create its context."""
    return bool(torch._C._cuda_hasPrimaryContext(device))  # type: ignore[attr-defined]


class CudaEngine:
    """See :class:`~shmloader.pinning.engine.Engine`. ``wanted``: the device that the user named, or None."""

    def __init__(self, wanted: torch.device | None) -> None:
        self._wanted = wanted
        self._device: torch.device | None = None
        self._registrar: Registrar | None = None

    @property
    def device(self) -> torch.device:
        if self._device is None:
            torch.cuda.init()
            index = self._wanted.index if self._wanted is not None else None
            if index is None:
                in_use = [has_context(number) for number in range(torch.cuda.device_count())]
                index = choose_device(torch.cuda.current_device(), in_use, os.environ.get("LOCAL_RANK"))
            self._device = torch.device("cuda", index)
        return self._device

    # --- page-locked ranges

    def register(self, address: int, nbytes: int) -> None:
        if self._registrar is None:
            device = self.device.index
            if torch.version.hip is not None:
                with torch.cuda.device(device):
                    self._registrar = RuntimeRegistrar(torch.cuda.cudart())
            else:
                self._registrar = DriverRegistrar(device)
        self._registrar.register(address, nbytes)

    def unregister(self, address: int) -> None:
        assert self._registrar is not None
        code = self._registrar.unregister(address)
        if code not in (0, DEINITIALIZED):
            _log.error("cannot unregister the page-locked range at %#x: error %d", address, code)

    # --- what may still be read

    def fence(self, streams: Sequence[Stream]) -> Fence | None:
        if not torch.cuda.is_initialized():  # also in a forked child of a process that uses CUDA
            return ()
        try:
            if torch.cuda.is_current_stream_capturing():
                return None
            readers = list(streams)
            for device in range(torch.cuda.device_count()):
                if has_context(device):
                    readers += (torch.cuda.default_stream(device), torch.cuda.current_stream(device))
            return [stream.record_event() for stream in dict.fromkeys(readers)]
        except RuntimeError:  # the device has failed: whoever asks again, and is no finaliser, is told
            return None

    # --- copies to the device

    def open_stream(self) -> Stream:
        return torch.cuda.Stream(self.device)

    def current_stream(self) -> Stream | None:
        return torch.cuda.current_stream(self._device) if torch.cuda.is_initialized() else None

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, non_blocking=True)

    def record(self, stream: Stream) -> Event:
        event: Event = stream.record_event()
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)

    def keep_for(self, tensor: torch.Tensor, stream: Stream) -> None:
        tensor.record_stream(stream)
