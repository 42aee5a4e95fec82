"""A user's collate_fn in workers: whatever it does with what torch made for it, the batch is what torch gives."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, default_collate

from shmloader import DataLoader


class Samples(Dataset):
    """Two kilobytes a sample, so that stacking is worth redirecting, and a label."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.full((2, 3, 200), float(index)), index


def stacked(samples):
    """What most begin with."""
    return torch.stack([image for image, _ in samples])


def in_place(change):
    """A collate_fn that changes the stacked tensor in place and returns it."""

    def collate(samples):
        images = stacked(samples)
        change(images)
        return images

    return collate


def squeezed(samples):
    """Joins with an axis too many, and takes it away."""
    images = torch.cat([image[None, None] for image, _ in samples])
    images.squeeze_(1)
    return images


def default_then_unsqueezed(samples):
    """Calls torch's own collate and changes one result in place."""
    images, labels = default_collate(samples)
    labels.unsqueeze_(1)
    return images, labels


def other_data(samples):
    """Gives the stacked tensor other memory."""
    images = stacked(samples)
    images.data = images.data + 1
    return images


def shared(samples):
    """Moves the stacked tensor elsewhere and writes there."""
    images = stacked(samples)
    images.share_memory_()
    images += 1
    return images


def swapped(samples):
    """Exchanges two tensors."""
    images, others = stacked(samples), torch.ones(5000)
    torch.utils.swap_tensors(images, others)
    return images


def filled(samples):
    """Preallocates and writes row by row."""
    images = torch.zeros(len(samples), 2, 3, 200)
    for row, (image, _) in enumerate(samples):
        images[row] = image
    return images


def through_numpy(samples):
    """Writes through an array over a preallocated tensor and returns both."""
    images = torch.empty(len(samples), 2, 3, 200)
    array = images.numpy()
    array[:] = np.stack([image.numpy() for image, _ in samples])
    return array, images


def larger(samples):
    """Grows a preallocated tensor."""
    values = torch.empty(len(samples) * 1000)
    values.resize_(len(samples) * 2000)
    return values.fill_(len(samples))


class KeepsLast:
    """Returns the last batch's tensor beside this one's, and so keeps every one for a while."""

    def __init__(self):
        self.last = None

    def __call__(self, samples):
        """Two batches at once."""
        images = stacked(samples)
        both = images, images if self.last is None else self.last
        self.last = images
        return both


class OneBuffer:
    """Makes its buffer with the first batch and uses it for all, returning a copy of what it holds."""

    def __init__(self):
        self.buffer = None

    def __call__(self, samples):
        """Fresh memory every time."""
        if self.buffer is None:
            self.buffer = torch.zeros(4, 2, 3, 200)
        self.buffer.copy_(stacked(samples))
        return self.buffer + 0


COLLATES = {
    "unsqueeze_": in_place(lambda images: images.unsqueeze_(1)),
    "transpose_": in_place(lambda images: images.transpose_(1, 3)),
    "mul_": in_place(lambda images: images.mul_(2)),
    "set_": in_place(lambda images: images.set_(torch.ones(5))),
    "resize_ smaller": in_place(lambda images: images.resize_(2, 3)),
    "requires_grad_": in_place(lambda images: images.requires_grad_()),
    "squeeze_": squeezed,
    "default_collate, unsqueeze_": default_then_unsqueezed,
    "data": other_data,
    "share_memory_": shared,
    "swap_tensors": swapped,
    "rows": filled,
    "numpy": through_numpy,
    "resize_ larger": larger,
    "detach_": lambda samples: stacked(samples).detach_(),
    "the same twice": lambda samples: (lambda images: (images, [images]))(stacked(samples)),
    "views": lambda samples: (lambda images: (images[:, 1], images[1:], images.permute(3, 0, 1, 2)))(stacked(samples)),
    "another dtype": lambda samples: stacked(samples).view(torch.int32),
    "an intermediate": lambda samples: stacked(samples).mean(0) * 2,
    "a parameter": lambda samples: torch.nn.Parameter(stacked(samples)),
    "a deep view": lambda samples: stacked(samples).flatten(1)[:, ::3].t(),
    "keeps the last": KeepsLast(),
    "one buffer": OneBuffer(),
    "half of it": lambda samples: stacked(samples)[: len(samples) // 2],
    "numpy only": lambda samples: np.stack([image.numpy() for image, _ in samples]),
    "nothing": lambda samples: None,
}


def flat(batch):
    """All tensors and arrays, as tensors that are copies, with what tells them apart."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        tensor = torch.as_tensor(batch)
        return [(type(batch), tensor.dtype, tensor.shape, tensor.requires_grad, tensor.detach().clone())]
    return [leaf for part in batch or () for leaf in flat(part)]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", COLLATES)
def test_a_collate_function_gives_what_it_gives_with_torch(name, num_workers):
    """Same types, dtypes, shapes and values in every batch, also after it was learnt what is worth redirecting."""
    outcomes = []
    for kind in (TorchLoader, DataLoader):
        collate = COLLATES[name] if not isinstance(COLLATES[name], KeepsLast | OneBuffer) else type(COLLATES[name])()
        outcomes.append([flat(batch) for batch in kind(Samples(), 4, num_workers=num_workers, collate_fn=collate)])
    theirs, ours = outcomes
    assert len(ours) == len(theirs) == 6
    for number, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        assert [leaf[:4] for leaf in b] == [leaf[:4] for leaf in a], number
        assert all(torch.equal(x[4], y[4]) for x, y in zip(a, b, strict=True)), number


def test_stacked_results_are_born_in_the_slot_and_others_are_copied_in_once():
    """``copied_bytes`` counts what was not born there: nothing of a stack, all of an intermediate's product."""
    copied = {}
    for name in ("rows", "one buffer", "mul_"):
        loader = DataLoader(Samples(), 4, num_workers=1, collate_fn=COLLATES[name])
        for _batch in loader:
            pass
        copied[name] = loader.stats().copied_bytes
        loader.close()
    batch = 4 * 2 * 3 * 200 * 4
    assert copied["mul_"] <= 2 * batch  # the first two slots are granted before the size of a batch is known
    assert copied["rows"] <= 2 * batch
    assert copied["one buffer"] >= 6 * batch


class Failing(Samples):
    """Every second batch cannot be stacked."""

    def __len__(self):
        return 400

    def __getitem__(self, index):
        return torch.zeros(2000 + (index % 8 == 5))


def test_a_storm_of_errors_costs_no_slot():
    """Half of a hundred batches raise in the collate function; the arena stays as small as without errors."""
    loader = DataLoader(Failing(), 4, num_workers=2)
    iterator, good, bad = iter(loader), 0, 0
    while True:
        try:
            next(iterator)
            good += 1
        except StopIteration:
            break
        except RuntimeError:
            bad += 1
    assert (good, bad) == (50, 50)
    arena = loader.stats().arena
    assert arena.slots <= 6
    assert arena.free == arena.slots
    loader.close()
