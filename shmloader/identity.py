"""Who a worker process is: its threads, its seeds, what ``get_worker_info()`` says. All as in torch's workers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterDataPipe
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data.graph_settings import apply_random_seed

from .compute_threads import limit_compute_threads
from .orders import WorkerOrders


def seed_data_pipes(dataset: Any, shared_seed: int | None) -> Any:
    """Give a data pipe the random seed that all workers share; other datasets are returned as they are."""
    if not isinstance(dataset, IterDataPipe) or shared_seed is None:
        return dataset
    rng = torch.Generator()
    rng.manual_seed(shared_seed)
    return apply_random_seed(dataset, rng)


def take_identity(orders: WorkerOrders) -> None:
    """Make this process the worker of ``orders``: one compute thread, seeds of its own, worker info for the dataset.

    ``random`` and torch get ``base_seed + worker``; NumPy's global state gets four words mixed from both, which no
    other worker and no other epoch has.
    """
    limit_compute_threads()
    seed = orders.base_seed + orders.worker
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(torch_worker._generate_state(orders.base_seed, orders.worker))
    dataset = seed_data_pipes(orders.recipe.dataset, orders.shared_seed)
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=orders.worker, num_workers=orders.num_workers, seed=seed, dataset=dataset
    )
