"""Hugging Face accelerate: ``prepare`` builds a loader of torch's own class in place of whatever it is given.

It keeps that loader in the attribute ``base_dataloader`` and puts its own work around it (shards of batches for each
process, the last batch made known, device placement). So ours goes there, over the sharded batch sampler that
accelerate made, and all the rest of accelerate stays in use.
"""

from __future__ import annotations

from typing import Any

import accelerate
import torch
from torch.utils.data import DataLoader, Dataset

from frameworks import task


def train(cls: type[DataLoader[Any]], dataset: Dataset[dict[str, Any]], training: task.Training) -> None:
    """Train with one class of loader."""
    accelerator = accelerate.Accelerator(cpu=True)
    accelerate.utils.set_seed(task.SEED)
    model = task.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = task.make_loader(cls, dataset, shuffle=True)
    model, optimizer, prepared = accelerator.prepare(model, optimizer, loader)
    assert type(prepared.base_dataloader) is DataLoader, "accelerate keeps loaders now: hand ours to prepare alone"
    if cls is not DataLoader:
        prepared.base_dataloader = cls(
            prepared.dataset,
            batch_sampler=prepared.batch_sampler,
            num_workers=task.WORKERS,
            persistent_workers=True,
            generator=prepared.generator,
            arena_bytes=task.ARENA_BYTES,  # type: ignore[call-arg]
        )
    for _ in range(task.EPOCHS):
        training.begin_epoch(prepared.base_dataloader)
        for batch in prepared:
            loss = task.loss_of(model, batch)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            training.step(prepared.base_dataloader, batch, loss)
        assert prepared.end_of_dataloader, "accelerate knows that this was the last batch"
    accelerator.free_memory()


def main() -> None:
    """Train under both classes and report, one file per rank."""
    options = task.arguments()
    trainings = task.train_both(train, task.DATASETS[options.dataset](options.pack))
    state = accelerate.PartialState()
    task.Report(state.process_index, state.num_processes, trainings).write(options.out)
    state.destroy_process_group()


if __name__ == "__main__":
    main()
