"""Plain DistributedDataParallel over gloo, started by torchrun: the loop that people write by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from frameworks import task


def train(cls: type[DataLoader[Any]], dataset: Dataset[dict[str, Any]], training: task.Training) -> None:
    """Train with one class of loader."""
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, shuffle=True, seed=task.SEED)
    loader = task.make_loader(cls, dataset, sampler=sampler)
    model = DistributedDataParallel(task.make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(task.EPOCHS):
        sampler.set_epoch(epoch)
        training.begin_epoch(loader)
        for batch in loader:
            loss = task.loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            training.step(loader, batch, loss)


def main() -> None:
    """Train under both classes and report, one file per rank."""
    options = task.arguments()
    dist.init_process_group("gloo")
    try:
        trainings = task.train_both(train, task.DATASETS[options.dataset](options.pack))
        task.Report(dist.get_rank(), dist.get_world_size(), trainings).write(options.out)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
