"""What ``pin_memory=``, ``pin_memory_device=`` and ``device=`` ask for, and what this machine can do about it.

Who gets what:

    CUDA or ROCm                ──▶ the arena is page-locked where it lies (engine)
    another accelerator         ──▶ each batch is copied once more, by torch's own function, into torch's pinned memory
    none, or one that cannot    ──▶ one warning per process, ordinary shared memory
    device= that is not there   ──▶ an error at once: who names a device wants that device
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from ..errors import DeviceUnavailable, NotPinnedWarning, PinningRefused
from .cuda import CudaEngine
from .engine import Engine, Stream

_warned = False


@dataclass
class Copying:
    """How the batches of one loader are read by a copy engine. One object per loader and process."""

    engine: Engine | None
    """None: there is no CUDA in this torch, so nothing can read a slot behind our back."""
    pin: bool = False
    """Whether slots are to be page-locked."""
    drain: bool = True
    """Whether a slot waits for the copies that may still read it."""
    to_device: bool = False
    """Whether batches are delivered on the engine's device."""
    copy_for: str | None = None
    """The accelerator whose pinned memory batches are copied into once more, because the arena itself cannot be."""
    call_types: bool = False
    """Whether ``pin_memory()`` of custom types is called, as torch does where there is an accelerator."""
    streams: list[Stream] = field(default_factory=list)
    """Streams that read batches, beside those that can be found: named by the user, and the side stream."""
    side_stream: Stream | None = None
    """Copies to the device go here."""
    refused: PinningRefused | None = None
    """Why slots are not page-locked though they were to be. Set once; then it is not tried again."""
    pid: int = field(default_factory=os.getpid)

    def tell(self) -> None:
        """Warn about ``refused``, once."""
        refused, self.refused = self.refused, None
        self.pin = False
        if refused is not None:
            warnings.warn(f"batches are not page-locked: {refused}", NotPinnedWarning, stacklevel=3)


def parse_device(device: Any) -> torch.device | None:
    """Return ``device=`` as a CUDA device, or None for host batches (``None``, ``"cpu"``).

    Raises DeviceUnavailable if it cannot be had. Does not initialise CUDA.
    """
    if device is None:
        return None
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if found.type == "cpu":
        return None
    if found.type != "cuda":
        raise DeviceUnavailable(str(device), "batches are delivered to the CPU or to CUDA devices only")
    if not torch.cuda.is_available():
        built = torch.version.cuda is not None or torch.version.hip is not None
        why = "torch sees no CUDA device here" if built else "this torch was built without CUDA"
        raise DeviceUnavailable(str(device), why)
    if found.index is not None and found.index >= torch.cuda.device_count():
        raise DeviceUnavailable(str(device), f"torch sees {torch.cuda.device_count()} CUDA devices")
    return found


def choose_copying(
    device: torch.device | None, pin_memory: bool, pin_memory_device: str, drain: bool, streams: list[Stream]
) -> Copying:
    """Return what the arguments come to on this machine; ``device`` is what ``parse_device`` returned.

    Does not initialise CUDA. Warns about a missing accelerator, once per process.
    """
    cuda = torch.version.cuda is not None or torch.version.hip is not None
    kind = accelerator() if pin_memory else None
    wanted = device
    if wanted is None and kind == "cuda" and pin_memory_device:
        wanted = torch.device(pin_memory_device)
    return Copying(
        engine=CudaEngine(wanted) if cuda else None,
        pin=device is not None or kind == "cuda",
        drain=drain or device is not None,
        to_device=device is not None,
        copy_for=kind if kind != "cuda" else None,
        call_types=kind is not None,
        streams=streams,
    )


def accelerator() -> str | None:
    """Return the type of the accelerator that batches can be pinned for, or None (and MPS cannot pin: None).

    Does not initialise it. Warns if there is none, once per process.
    """
    global _warned
    module = getattr(torch, "accelerator", None)  # torch >= 2.6
    if module is not None:
        found = module.current_accelerator() if module.is_available() else None
        kind = None if found is None else str(found.type)
    else:
        kind = "cuda" if torch.cuda.is_available() else None
    if kind is None or kind == "mps":
        if not _warned:
            _warned = True
            warnings.warn(
                "'pin_memory' argument is set as true but no accelerator is found, then device pinned memory won't be "
                "used.",
                stacklevel=6,
            )
        return None
    return kind


def pinned_copy(batch: Any, device: str) -> Any:
    """Return ``batch`` with its tensors in page-locked memory, and custom types' ``pin_memory()`` called.

    Tensors that are page-locked already are not copied.
    """
    return pin_memory(batch, device)
