"""Lightning's Trainer: with several devices it builds the loader anew, with a sampler of its own in it.

``--way hook`` lets the module make its loader, ``--way argument`` makes it first and passes it to ``fit``; Lightning
learns a loader's arguments in two different ways then.
"""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader, Dataset

from frameworks import task


class Module(lightning.LightningModule):
    """The model, and a note of all that it is given."""

    def __init__(self, make_loader: Any, training: task.Training) -> None:
        super().__init__()
        self.model = task.make_model()
        self.make_loader = make_loader
        self.training_log = training

    def train_dataloader(self) -> Any:
        """Make the loader inside a hook, as most modules do."""
        return self.make_loader()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.model.parameters(), lr=0.01)

    def on_train_epoch_start(self) -> None:
        """The loader that Lightning really iterates is the trainer's, not the one that was made."""
        self.training_log.begin_epoch(self.trainer.train_dataloader)

    def training_step(self, batch: task.Batch, batch_idx: int) -> torch.Tensor:
        """One batch."""
        loss = task.loss_of(self.model, batch)
        self.training_log.step(self.trainer.train_dataloader, batch, loss)
        return loss


class Experiment:
    """The trainings of one run, and the rank that it turned out to have."""

    def __init__(self, devices: int, way: str) -> None:
        self.devices = devices
        self.way = way
        self.rank = 0

    def train(self, cls: type[DataLoader[Any]], dataset: Dataset[dict[str, Any]], training: task.Training) -> None:
        """Train with one class of loader."""
        lightning.seed_everything(task.SEED, verbose=False)

        def make_loader() -> DataLoader[Any]:
            return task.make_loader(cls, dataset, shuffle=True)

        module = Module(make_loader, training)
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=self.devices,
            strategy="ddp" if self.devices > 1 else "auto",
            max_epochs=task.EPOCHS,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        if self.way == "hook":
            trainer.fit(module)
        else:
            trainer.fit(module, make_loader())
        self.rank = trainer.global_rank


def main() -> None:
    """Train under both classes and report, one file per rank."""
    options = task.arguments()
    experiment = Experiment(options.devices, options.way)
    trainings = task.train_both(experiment.train, task.DATASETS[options.dataset](options.pack))
    task.Report(experiment.rank, options.devices, trainings).write(options.out)


if __name__ == "__main__":
    main()
