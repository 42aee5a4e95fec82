"""Samples do not fit together, or cannot be stored."""

from __future__ import annotations

from .base import ShmLoaderError, shown


class DataError(ShmLoaderError, ValueError):
    """Samples do not fit together, or hold something that cannot be stored."""


class SampleMismatch(DataError):
    """A sample disagrees with the ones before it. ``field`` names the field, ``index`` the sample."""

    def __init__(self, index: int, field: str, expected: str, found: str, source: str = "") -> None:
        super().__init__(index, field, expected, found, source)
        self.index, self.field, self.expected, self.found, self.source = index, field, expected, found, source

    def _sentence(self) -> str:
        where = f" ({self.source})" if self.source else ""
        return f"sample {self.index}{where}, field {self.field!r}: expected {self.expected}, found {self.found}"


class UnsupportedField(DataError, TypeError):
    """A value of this kind cannot be stored in a pack."""

    hint = "arrays, tensors, numbers, strings, bytes and tuples, dicts and namedtuples of them can be packed"

    def __init__(self, index: int, field: str, found: str) -> None:
        super().__init__(index, field, found)
        self.index, self.field, self.found = index, field, found

    def _sentence(self) -> str:
        return f"sample {self.index}, field {self.field!r}: cannot pack {self.found}"


class BrokenImage(DataError):
    """The bytes of an image file cannot be decoded. ``name`` says which image, ``why`` what the decoder met."""

    def __init__(self, name: str, nbytes: int, why: str) -> None:
        super().__init__(name, nbytes, why)
        self.name, self.nbytes, self.why = name, nbytes, why

    def _sentence(self) -> str:
        return f"{self.name}: broken image file ({self.nbytes} bytes): {self.why}"

    hint = "replace the file or take it out, and run again"


class SourceError(DataError):
    """Data that was to be read or packed is missing or contradicts itself: ``path`` says where, ``why`` what."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(path, why)
        self.path, self.why = path, why

    def _sentence(self) -> str:
        return f"{self.path}: {self.why}"


class UnknownSource(SourceError):
    """Nothing that can be packed was recognised at ``path``. ``looked_for`` lists what would have been."""

    def __init__(self, path: str, why: str, looked_for: tuple[str, ...]) -> None:
        DataError.__init__(self, path, why, looked_for)
        self.path, self.why, self.looked_for = path, why, looked_for

    def _sentence(self) -> str:
        return f"{self.path}: {self.why}; looked for {', or '.join(self.looked_for)}"


class UnequalSamples(DataError, RuntimeError):
    """Samples of one batch have different shapes, and the default collate can only stack equal ones."""

    hint = (
        "make them equal in the dataset (resize, crop, pad), or collate them with shmloader.collate_list, "
        "shmloader.collate_padded or shmloader.collate_jagged as collate_fn"
    )

    def __init__(
        self,
        reason: str,
        field: str,
        index: object,
        shape: tuple[int, ...],
        other_index: object,
        other_shape: tuple[int, ...],
        are_dataset_indices: bool = True,
    ) -> None:
        super().__init__(reason, field, index, shape, other_index, other_shape, are_dataset_indices)
        self.reason, self.field = reason, field
        self.index, self.shape, self.other_index, self.other_shape = index, shape, other_index, other_shape
        self.are_dataset_indices = are_dataset_indices

    def _sentence(self) -> str:
        what = "dataset index" if self.are_dataset_indices else "place in the batch"
        return (
            f"{self.reason}\n{self.field} has shape {list(self.shape)} at {what} {self.index!r} but "
            f"{list(self.other_shape)} at {what} {self.other_index!r}"
        )


class AllSamplesBad(DataError, RuntimeError):
    """No sample of a batch can be had, so ``on_bad_sample="replace"`` has nothing to put in their places."""

    hint = "look at these samples, or leave such batches out with on_bad_sample='skip'"

    def __init__(self, indices: tuple[object, ...], error: str) -> None:
        super().__init__(indices, error)
        self.indices, self.error = indices, error

    def _sentence(self) -> str:
        return f"all samples of a batch are bad: indices [{shown(self.indices)}]; the first one: {self.error}"


class BadSampleWarning(UserWarning):
    """Samples were left out or replaced, as ``on_bad_sample`` asked for. Given once a pass, at its end."""


class DeviceTensor(DataError, RuntimeError):
    """A worker's batch holds a tensor that is not in CPU memory."""

    hint = "return CPU tensors from the dataset and collate_fn; the main process moves them to the device"

    def __init__(self, device: str, shape: str) -> None:
        super().__init__(device, shape)
        self.device, self.shape = device, shape

    def _sentence(self) -> str:
        return f"a worker produced a tensor of shape {self.shape} on device {self.device!r}"
