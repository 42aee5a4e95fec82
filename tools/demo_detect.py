"""The demo's detection step: a Pascal VOC set packed and drawn, and its boxes compared with what was pasted where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader as TorchLoader

from shmloader import DataLoader, ListCollate, PackedDataset

from . import demo_voc
from .demo_steps import command

BATCH = 8
WORKERS = 2
SEED = 0
TOLERANCE = 1.0  # pixels: the files count from 1, what was pasted is known from 0


def images_and_targets(samples: list[dict[str, Any]]) -> tuple[list[Any], list[dict[str, Any]]]:
    """The collate function of classic detection code: a list of images, a list of dicts."""
    return [sample.pop("image") for sample in samples], samples


def detect(folder: str, pack: str, sheet: str, pictures: int) -> bool:
    """Make a set in ``folder``, pack it, and read it back in batches; say whether every box is where it was pasted.

    Some of its pictures are drawn with their boxes into the file ``sheet``.
    """
    truth = demo_voc.build(Path(folder), pictures=pictures, seed=SEED)
    command("shmloader-pack", folder, pack)
    command("shmloader-inspect", pack, "--image", sheet)
    data = PackedDataset(pack)
    classes = data.classes or []
    varying = ("image", "boxes", "labels", "difficult", "truncated")
    boxes, largest = 0, 0.0
    with DataLoader(data, batch_size=BATCH, num_workers=WORKERS, collate_fn=ListCollate(*varying)) as loader:
        index = 0
        for batch in loader:
            for found, labels in zip(batch["boxes"], batch["labels"], strict=True):
                expected = truth[index]
                if [classes[label] for label in labels.tolist()] != [each.name for each in expected]:
                    print(f"picture {index} has other objects than were pasted")
                    return False
                distance = np.abs(found.numpy() - np.array([each.box for each in expected]).reshape(-1, 4))
                largest = max(largest, float(distance.max(initial=0)))
                boxes += len(expected)
                index += 1
    classic = TorchLoader(data, batch_size=BATCH, collate_fn=images_and_targets)
    targets = sum(len(target["boxes"]) for _, batch_of_targets in classic for target in batch_of_targets)
    good = largest <= TOLERANCE and index == pictures and targets == boxes
    print(
        f"{index} pictures with {boxes} objects in batches of {BATCH}: lists of images and boxes in shared memory\n"
        f"boxes lie at most {largest:g} pixels from where the objects were pasted; "
        f"torch's loader with a classic collate: {targets} boxes"
    )
    return good
