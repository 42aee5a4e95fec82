"""What the GPU checks and figures need of a device: real here, of paper in the tests, which run the same checks.

busy(0.05) ─▶ copy ─▶ later(look at the copy) ─▶ ... ─▶ synchronize()
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch.utils.data import Dataset

from shmloader import DataLoader
from shmloader.pinning import CudaEngine, Engine


class Bench(Protocol):
    """A device and how to give work to it."""

    def loader(self, dataset: Any, batch_size: int, **options: Any) -> Any:
        """A loader of ours whose slots this device reads."""
        ...

    def engine(self) -> Engine:
        """An engine for registering ranges by hand."""
        ...

    def is_pinned(self, tensor: torch.Tensor) -> bool: ...

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the device, by the current stream, that has perhaps not begun when this returns."""
        ...

    def later(self, work: Callable[[], None]) -> None:
        """Give work to the current stream."""
        ...

    def busy(self, seconds: float) -> None:
        """Give the current stream something to do for so long."""
        ...

    def stream(self) -> Any:
        """A new stream."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Give work to ``stream`` inside the block."""
        ...

    def join(self, stream: Any) -> None:
        """Let the current stream wait for ``stream``."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has done everything; raise what went wrong there."""
        ...


class CudaBench:
    """The current CUDA device."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._cycles_per_s = self._clock()

    def _clock(self) -> float:
        """Cycles of ``torch.cuda._sleep`` in a second."""
        cycles = 20_000_000
        torch.cuda._sleep(1000)
        torch.cuda.synchronize()
        start = time.perf_counter()
        torch.cuda._sleep(cycles)
        torch.cuda.synchronize()
        return cycles / (time.perf_counter() - start)

    def loader(self, dataset: Any, batch_size: int, **options: Any) -> Any:
        return DataLoader(dataset, batch_size, **{"pin_memory": True, **options})

    def engine(self) -> Engine:
        return CudaEngine(self.device)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned() and tensor.pin_memory().data_ptr() == tensor.data_ptr()

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, non_blocking=True)

    def later(self, work: Callable[[], None]) -> None:
        work()

    def busy(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * self._cycles_per_s))

    def stream(self) -> Any:
        return torch.cuda.Stream()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def join(self, stream: Any) -> None:
        torch.cuda.current_stream().wait_stream(stream)

    def synchronize(self) -> None:
        torch.cuda.synchronize()


class Numbered(Dataset[torch.Tensor]):
    """``count`` batches of ``rows`` samples; all elements of batch k are k. Says so if CUDA is in use where it runs."""

    def __init__(self, count: int, rows: int, elements: int) -> None:
        self.count, self.rows, self.elements = count, rows, elements

    def __len__(self) -> int:
        return self.count * self.rows

    def __getitem__(self, index: int) -> torch.Tensor:
        if torch.utils.data.get_worker_info() is not None and torch.cuda.is_initialized():
            raise RuntimeError("CUDA is initialised in a worker")
        return torch.full((self.elements,), index // self.rows, dtype=torch.int32)
