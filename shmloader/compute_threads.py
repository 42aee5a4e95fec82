"""One compute thread per worker: workers are the parallelism, and 12 of them with 16 library threads each are not.

Only what the process has loaded already is told; nothing is imported for it, except threadpoolctl where it is
installed, which finds the thread pools of BLAS and OpenMP libraries. A forked worker never starts a team of threads
then, so it cannot wait for one that only its parent had. The parent's own settings stay as they are, and
``worker_init_fn``, which runs later, may raise them again.
"""

from __future__ import annotations

import importlib
import sys

import torch


def limit_compute_threads() -> None:
    """Bring torch, OpenCV, and (with threadpoolctl) BLAS and OpenMP to one thread in this process."""
    torch.set_num_threads(1)
    opencv = sys.modules.get("cv2")
    if opencv is not None:
        opencv.setNumThreads(0)  # 0: run in the calling thread
    try:
        threadpoolctl = importlib.import_module("threadpoolctl")
    except ImportError:
        return
    threadpoolctl.threadpool_limits(1)
