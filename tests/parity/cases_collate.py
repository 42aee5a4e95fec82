"""A user's collate_fn: the ones that people write, and what they may return."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.utils.data import default_collate, default_convert

from .compare import Cases
from .samples import Fixed, Opaque, Pinnable, Point, Record, Rows

CASES = Cases()


def detections(n: int = 9) -> Fixed:
    """Images of one size, with 0 to 4 boxes each."""
    return Fixed(
        [
            (torch.full((3, 4, 4), i, dtype=torch.uint8), torch.full((i % 5, 4), float(i)), torch.full((i % 5,), i))
            for i in range(n)
        ]
    )


def sentences(n: int = 9) -> Fixed:
    """Token lists of unequal length."""
    return Fixed([torch.arange(1, i % 4 + 2) for i in range(n)])


def detection_collate(samples: list[Any]) -> Any:
    """Stack the images; keep boxes and labels as lists of tensors of unequal size."""
    images, boxes, labels = zip(*samples, strict=True)
    return torch.stack(images), list(boxes), list(labels)


def detection_tuple_collate(samples: list[Any]) -> Any:
    """Transpose, nothing else: the collate of torchvision's references."""
    return tuple(zip(*samples, strict=True))


def targets_collate(samples: list[Any]) -> Any:
    """Images as a list, targets as a list of dicts with mixed values."""
    images = [image for image, _, _ in samples]
    targets = [
        {"boxes": boxes, "labels": labels, "image_id": index, "area": float(boxes.sum()), "name": f"img{index}"}
        for index, (_, boxes, labels) in enumerate(samples)
    ]
    return images, targets


def pad_collate(samples: list[Any]) -> Any:
    """Pad to the longest, with the lengths."""
    return pad_sequence(samples, batch_first=True, padding_value=-1), torch.tensor([len(s) for s in samples])


def pack_collate(samples: list[Any]) -> Any:
    """Return a PackedSequence."""
    return pack_sequence(samples, enforce_sorted=False)


def cat_collate(samples: list[Any]) -> Any:
    """Return values and offsets."""
    lengths = torch.tensor([0] + [len(sample) for sample in samples])
    return torch.cat(samples), torch.cumsum(lengths, 0)


def numpy_collate(samples: list[Any]) -> Any:
    """Return numpy arrays and numpy scalars."""
    return np.stack([row.numpy() for row, _ in samples]), np.array([i for _, i in samples]), np.float32(len(samples))


def mixed_collate(samples: list[Any]) -> Any:
    """Return a dict with everything in it."""
    rows = torch.stack([row for row, _ in samples])
    return {
        "rows": rows,
        "mean": rows.mean().item(),
        "view": rows[:, 1:],
        "first": rows[0],
        "count": len(samples),
        "names": [f"sample {i}" for _, i in samples],
        "none": None,
        "record": Record(rows * 2, "label", ["note"]),
        "point": Point(rows.t(), (rows.numpy().copy(), b"raw")),
        "flag": True,
    }


def twice_collate(samples: list[Any]) -> Any:
    """Return the same tensor object in two places."""
    rows = torch.stack([row for row, _ in samples])
    return rows, rows


def view_collate(samples: list[Any]) -> Any:
    """Return views into one buffer: rows, columns, a transposition, an expansion."""
    rows = torch.stack([row for row, _ in samples])
    return rows[0], rows[:, 0], rows.t(), rows[:1].expand(4, -1), rows.flip(0), rows[::2]


def inplace_collate(samples: list[Any]) -> Any:
    """Fill preallocated tensors."""
    out = torch.empty(len(samples), 3, dtype=torch.float64)
    for place, (row, _) in enumerate(samples):
        out[place] = row
    out += 1
    counts = torch.zeros(len(samples))
    torch.add(out[:, 0], 1, out=counts.to(torch.float64))
    return out, counts


def out_collate(samples: list[Any]) -> Any:
    """Use ``out=`` itself, and stack along another axis."""
    out = torch.empty(len(samples), 3)
    torch.stack([row for row, _ in samples], out=out)
    return out, torch.stack([row for row, _ in samples], dim=1), torch.cat([row for row, _ in samples])


def scratch_collate(samples: list[Any]) -> Any:
    """Make many tensors and return only a number drawn from them."""
    big = [torch.stack([row for row, _ in samples]) for _ in range(20)]
    return float(sum(part.sum() for part in big))


def grad_collate(samples: list[Any]) -> Any:
    """Return a leaf that requires grad."""
    return torch.stack([row for row, _ in samples]).requires_grad_()


def sparse_collate(samples: list[Any]) -> Any:
    """Return a sparse batch."""
    return torch.stack([row for row, _ in samples]).to_sparse()


def nested_collate(samples: list[Any]) -> Any:
    """Return a jagged nested tensor."""
    return torch.nested.nested_tensor(samples, layout=torch.jagged)


def half_collate(samples: list[Any]) -> Any:
    """Convert after stacking: half, bfloat16, channels last."""
    rows = torch.stack([row for row, _ in samples])
    images = rows.reshape(-1, 3, 1, 1).expand(-1, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    return rows.half(), rows.bfloat16(), images


def remembering_collate(samples: list[Any], memory: list[Any]) -> Any:
    """Return the batch before as well: the result of one call is used in the next."""
    rows = torch.stack([row for row, _ in samples])
    memory.append(rows)
    return rows, memory[-2] if len(memory) > 1 else None


def aliased_collate(samples: list[Any]) -> Any:
    """Return a tensor and the numpy array that shares its memory."""
    rows = torch.stack([row for row, _ in samples])
    return rows, rows.numpy(), rows[1:].numpy()


def scaled_collate(samples: list[Any], scale: float) -> Any:
    """For functools.partial."""
    return torch.stack([row * scale for row, _ in samples])


class CallableCollate:
    """A collate_fn with state: it counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, samples: list[Any]) -> Any:
        self.calls += 1
        return default_collate(samples), self.calls


def input_facts(samples: list[Any]) -> Any:
    """Return what collate_fn was called with."""
    return type(samples).__name__, len(samples), [type(sample).__name__ for sample in samples]


_USERS: tuple[tuple[str, str, Any, Any], ...] = (
    ("detection", "E1: stacked images and lists of boxes.", detections, detection_collate),
    ("detection_tuple", "E1: tuples of tensors of unequal size.", detections, detection_tuple_collate),
    ("targets", "E1: a list of target dicts.", detections, targets_collate),
    ("padded", "E1: padded with lengths.", sentences, pad_collate),
    ("packed", "B7: a PackedSequence from collate.", sentences, pack_collate),
    ("values_offsets", "E1: values and offsets.", sentences, cat_collate),
    ("jagged", "E1: a jagged nested tensor.", sentences, nested_collate),
    ("numpy", "numpy arrays stay numpy arrays.", lambda: Rows(8), numpy_collate),
    ("mixed", "B7: a dict of everything.", lambda: Rows(8), mixed_collate),
    ("same_twice", "The same tensor in two places.", lambda: Rows(8), twice_collate),
    ("views", "Views into one buffer keep shape and values.", lambda: Rows(8), view_collate),
    ("preallocated", "Tensors filled in place.", lambda: Rows(8), inplace_collate),
    ("own_out", "A collate that uses out= itself.", lambda: Rows(8), out_collate),
    ("scratch", "Tensors that collate makes but does not return cost nothing.", lambda: Rows(8), scratch_collate),
    ("requires_grad", "A leaf that requires grad.", lambda: Rows(8), grad_collate),
    ("sparse", "A sparse batch.", lambda: Rows(8), sparse_collate),
    ("halves", "Converted after stacking.", lambda: Rows(8), half_collate),
    ("input", "collate_fn gets a list with the samples as the dataset made them.", lambda: Rows(8), input_facts),
    ("length", "A collate_fn that returns an int.", lambda: Rows(8), len),
    ("as_tuple", "A builtin type as collate_fn.", lambda: Rows(8), tuple),
    ("convert", "default_convert as collate_fn.", lambda: Rows(8), default_convert),
    ("default", "default_collate given by name.", lambda: Rows(8), default_collate),
    ("partial", "functools.partial as collate_fn.", lambda: Rows(8), functools.partial(scaled_collate, scale=2.0)),
    ("lambda", "A lambda as collate_fn, under fork.", lambda: Rows(8), lambda samples: [i for _, i in samples]),
    ("to_none", "A collate_fn that returns None.", lambda: Rows(8), lambda samples: None),
    ("to_string", "A collate_fn that returns a string.", lambda: Rows(8), str),
    ("to_opaque", "B7: a collate_fn that returns an unknown object.", lambda: Rows(8), lambda s: Opaque(len(s))),
    ("to_pinnable", "B7: a custom batch type.", lambda: Rows(8), Pinnable),
    ("to_record", "B7: a dataclass.", lambda: Rows(8), lambda s: Record(torch.stack([r for r, _ in s]), len(s))),
)


def _build(dataset: Any, collate: Any, **arguments: Any) -> Any:
    return lambda: (dataset(), {"batch_size": 3, "collate_fn": collate, **arguments})


for _name, _claim, _dataset, _collate in _USERS:
    CASES.add(_name, _claim, _build(_dataset, _collate))
CASES.add(
    "pinned_custom_type",
    "B7: pin_memory=True with a type that has pin_memory(): called when there is an accelerator, as in torch.",
    _build(lambda: Rows(8), Pinnable, pin_memory=True),
    free_warnings=True,
)


CASES.add(
    "numpy_alias",
    "A tensor and its .numpy() in one batch. (Torch frees the memory under the array on the way from a worker.)",
    _build(lambda: Rows(9), aliased_collate),
    torch_garbles=True,
)


@CASES.case(epochs=2)
def stateful_collate() -> Any:
    """State in collate_fn lives as long as in torch: in main for ever, in a worker for its epoch."""
    return Rows(8), {"batch_size": 3, "collate_fn": CallableCollate()}


@CASES.case(epochs=2)
def collate_that_remembers() -> Any:
    """What collate_fn keeps is not overwritten by later batches: a tensor born in a slot may be used again."""
    return Rows(30), {"batch_size": 3, "collate_fn": functools.partial(remembering_collate, memory=[])}


@CASES.case()
def collate_unbatched() -> Any:
    """With batch_size=None, collate_fn gets each sample alone."""
    return Rows(5), {"batch_size": None, "collate_fn": lambda sample: (type(sample).__name__, sample[0] * 2)}
