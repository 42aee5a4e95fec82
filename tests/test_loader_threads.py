"""Compute threads: alive in the parent when workers are forked, one in each worker, and the parent's as they were."""

import pytest

from support import run_file, run_script, start_methods, write_script

LIBRARIES = pytest.mark.parametrize("runs", [3, pytest.param(20, marks=pytest.mark.slow)])

POOLS_ALIVE = """
import cv2, numpy as np, torch
from torch.utils.data import Dataset
from shmloader import DataLoader

class Resized(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        image = cv2.GaussianBlur(cv2.resize(np.full((2000, 2000, 3), index, np.uint8), (500, 500)), (9, 9), 1)
        product = torch.full((400, 400), float(index)) @ torch.eye(400)
        blas = np.full((300, 300), index, np.float64) @ np.eye(300)
        return int(image[250, 250, 0]), int(product[7, 7]), int(blas[3, 3])

cv2.setNumThreads(4)
torch.set_num_threads(4)
for _ in range({runs}):
    cv2.GaussianBlur(cv2.resize(np.zeros((3000, 3000, 3), np.uint8), (2000, 2000)), (31, 31), 3)
    torch.rand(800, 800) @ torch.rand(800, 800)
    np.ones((800, 800)) @ np.ones((800, 800))
    found = [tuple(part.tolist()) for batch in DataLoader(Resized(), batch_size=4, num_workers=2) for part in batch]
    assert found == [(0, 1, 2, 3)] * 3 + [(4, 5, 6, 7)] * 3, found
assert (cv2.getNumThreads(), torch.get_num_threads()) == (4, 4)
"""

THREADS_OF_WORKERS = """
import cv2, numpy as np, os, torch
from threadpoolctl import threadpool_info
from torch.utils.data import Dataset
from shmloader import DataLoader

class Threads(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        pools = threadpool_info()
        assert any(pool["user_api"] == "blas" for pool in pools)
        return torch.get_num_threads(), cv2.getNumThreads(), max(pool["num_threads"] for pool in pools)

def settings():
    return torch.get_num_threads(), cv2.getNumThreads(), threadpool_info(), os.sched_getaffinity(0)

if __name__ == "__main__":
    cv2.setNumThreads(3)
    torch.set_num_threads(3)
    before = settings()
    for batch in DataLoader(Threads(), batch_size=2, num_workers=2, multiprocessing_context="{start_method}"):
        assert [part.tolist() for part in batch] == [[1, 1]] * 3, batch
    assert settings() == before
"""


@LIBRARIES
def test_thread_pools_alive_in_the_parent_hang_no_worker(runs):
    """C2: OpenCV, OpenMP and BLAS pools run in the parent when it forks; workers use all three, every time."""
    run_script(POOLS_ALIVE.format(runs=runs), timeout=60 * runs).silent()


@start_methods
def test_a_worker_has_one_compute_thread_and_the_parent_keeps_its_own(start_method, tmp_path):
    """C11: torch, OpenCV, BLAS and OpenMP run one thread in each worker; settings and affinity of the parent stay."""
    script = write_script(tmp_path, THREADS_OF_WORKERS.replace("{start_method}", start_method))
    run_file(script, timeout=90).silent()
