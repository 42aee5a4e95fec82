"""Page-locked slots, and events behind the copies that read them. The only place, beside ``device``, that knows CUDA.

What is where:

    engine    what is asked of a copy engine: the seam
    driver    page-locking through the CUDA driver, or ROCm's runtime
    cuda      the engine for torch.cuda
    pins      the page-locked pieces of one arena
    choice    which engine, which device, and what to do without
"""

from .choice import Copying, choose_copying, parse_device, pinned_copy
from .cuda import CudaEngine, choose_device
from .engine import Engine, Event, Fence, Stream, passed
from .pins import Pins

__all__ = [
    "Copying",
    "CudaEngine",
    "Engine",
    "Event",
    "Fence",
    "Pins",
    "Stream",
    "choose_copying",
    "choose_device",
    "parse_device",
    "passed",
    "pinned_copy",
]
