"""Page-locking of memory that is already there: the one thing that torch has no function for.

Two ways lead to it, and both leave no error for the next CUDA call to trip over:

    CUDA    the driver (libcuda, which torch has loaded): errors are returned, and never remembered
    ROCm    torch's own runtime binding; its error is remembered per thread and is drained here, on the same library

The driver wants a context. It gets the primary context of the device that was chosen, which is the one that torch
itself uses, pushed for the length of a call; so no other device is ever touched (B6). ``PORTABLE`` makes the memory
page-locked for all contexts of the process.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from ..errors import PinningRefused

PORTABLE = 1
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
DEINITIALIZED = 4  # the process is ending, the driver has gone before us, and with it every registration
NOT_PERMITTED = 800
NOT_SUPPORTED = 801
ALREADY_REGISTERED = 712

CURES = {
    INVALID_VALUE: "a single range can be too large for the driver: make batches smaller",
    OUT_OF_MEMORY: (
        "the system refuses to lock so much memory: lower arena_bytes= (or batch size, num_workers, prefetch_factor), "
        "raise the memory limit of the container; under WSL and Windows about half of the RAM can be locked"
    ),
    NOT_PERMITTED: "the container or the system forbids it",
    NOT_SUPPORTED: "this system cannot page-lock shared memory: try arena_backing='memfd' or another directory",
    ALREADY_REGISTERED: (
        "part of this range was registered before and not unregistered: look for code that registers memory, close "
        "earlier loaders with close() or `with`"
    ),
}


class Registrar(Protocol):
    """Locks and unlocks ranges for one device."""

    def register(self, address: int, nbytes: int) -> None:
        """Raises PinningRefused."""
        ...

    def unregister(self, address: int) -> int:
        """Return the error code, 0 if there is none."""
        ...


class DriverRegistrar:
    """By the CUDA driver, in the primary context of one device, which it keeps for the life of the process."""

    def __init__(self, device: int) -> None:
        try:
            self._cuda: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise PinningRefused(0, 0, 0, f"the CUDA driver cannot be loaded: {error}", "") from error
        self._context = ctypes.c_void_p()
        number = ctypes.c_int()
        for name, arguments in (
            ("cuInit", (0,)),
            ("cuDeviceGet", (ctypes.byref(number), device)),
        ):
            self._must(name, *arguments)
        self._must("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), number)

    def _must(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            raise PinningRefused(0, 0, code, f"{name}: {self._meaning(code)}", CURES.get(code, ""))

    def _meaning(self, code: int) -> str:
        name, text = ctypes.c_char_p(), ctypes.c_char_p()
        self._cuda.cuGetErrorName(code, ctypes.byref(name))
        self._cuda.cuGetErrorString(code, ctypes.byref(text))
        parts = [part.value.decode(errors="replace") for part in (name, text) if part.value]
        return ": ".join(parts) or "an error that the driver has no name for"

    @contextmanager
    def _in_context(self) -> Iterator[int]:
        """Yield the error code of making the context current; it is left as it was afterwards."""
        code: int = self._cuda.cuCtxPushCurrent_v2(self._context)
        try:
            yield code
        finally:
            if not code:
                self._cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def register(self, address: int, nbytes: int) -> None:
        with self._in_context() as context:
            code = context or self._cuda.cuMemHostRegister_v2(
                ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_uint(PORTABLE)
            )
        if code:
            raise PinningRefused(nbytes, address, code, self._meaning(code), CURES.get(code, ""))

    def unregister(self, address: int) -> int:
        with self._in_context() as code:
            return code or int(self._cuda.cuMemHostUnregister(ctypes.c_void_p(address)))


class RuntimeRegistrar:
    """By the runtime that torch is linked to, through ``torch.cuda.cudart()``; for builds without a CUDA driver."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._library = _loaded_library("libamdhip64")

    def register(self, address: int, nbytes: int) -> None:
        code = int(self._runtime.cudaHostRegister(address, nbytes, PORTABLE))
        if code:
            self._drain()
            raise PinningRefused(nbytes, address, code, f"hipHostRegister: error {code}", CURES.get(code, ""))

    def unregister(self, address: int) -> int:
        code = int(self._runtime.cudaHostUnregister(address))
        if code:
            self._drain()
        return code

    def _drain(self) -> None:
        if self._library is not None:
            self._library.hipGetLastError()


def _loaded_library(stem: str) -> Any:
    """Return the library of this name that is loaded in this process, or None. Loads nothing."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if os.path.basename(path).startswith(stem):
            return ctypes.CDLL("/" + path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    return None
