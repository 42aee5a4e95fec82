"""Page-locked batches for the GPU's copy engine.

    accelerator there   ──▶ each batch is copied once more, by torch's own function, into memory of torch's pinned
    allocator
    none                ──▶ one warning per process, ordinary shared memory

The arena itself is not page-locked yet. The copy is made in the main process, so its slot is free at once, and
torch's allocator keeps the pinned memory from being used again before a copy to the device has passed.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory

_warned = False


def pinning_device() -> str | None:
    """Return the type of the accelerator that batches can be pinned for, or None (and MPS cannot pin: None).

    Does not initialise it. Warns if there is none, once per process.
    """
    global _warned
    accelerator = getattr(torch, "accelerator", None)  # torch >= 2.6
    if accelerator is not None:
        found = accelerator.current_accelerator() if accelerator.is_available() else None
        kind = None if found is None else str(found.type)
    else:
        kind = "cuda" if torch.cuda.is_available() else None
    if kind is None or kind == "mps":
        if not _warned:
            _warned = True
            warnings.warn(
                "'pin_memory' argument is set as true but no accelerator is found, then device pinned memory won't be "
                "used.",
                stacklevel=5,
            )
        return None
    return kind


def pinned_copy(batch: Any, device: str) -> Any:
    """Return ``batch`` with its tensors copied into page-locked memory, and custom types' ``pin_memory()`` called."""
    return pin_memory(batch, device)
