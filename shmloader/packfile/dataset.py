"""PackedDataset: a pack as a map-style torch Dataset."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from ..errors import BadChoice
from .checks import OFF, OPEN, VERIFY, Checks
from .fields import Reader, open_fields
from .mapping import OpenPack, open_pack
from .schema import Field, Manifest
from .structure import Branch, builder, leaves, renumber, select

_BULK = 4
"""So many samples at a time are worth a gather."""


class Gather:
    """Batches of a pack: one reader per selected field, in the order of a sample."""

    def __init__(self, fields: tuple[Reader, ...]) -> None:
        self.fields = fields
        self.is_plain = all(field.is_plain for field in fields)
        """Whether every field is a number or an array of one shape, so that batches need no Python per sample."""


class PackedDataset(Dataset[Any]):
    """A pack made by ``shmloader-pack`` or ``shmloader.pack``. Yields samples built as they were when packed.

    Arrays and tensors come back as new CPU tensors, Python numbers as numbers, str and bytes as themselves, encoded
    images decoded to uint8 tensors (3, height, width): ``default_collate`` gives what it gave on the original dataset.
    Nothing that is handed out looks into the file: samples may be changed. Dicts of any kind come back as dicts; a
    namedtuple as its own class if this process has loaded that, else as a class with the same name and fields.

    ``fields`` selects, and orders, parts of the sample by name: ``("image", "label")``; or one, unpacked: ``"label"``.
    ``transform`` is called with each sample.

    ``verify`` compares the checksums of chunks with what is read. ``"off"`` (the default): never; only the head and the
    tables are checked, when the file is opened. ``"first-touch"``: of each chunk, when it is first read from; once for
    all processes that were forked from here. ``"open"``: of all selected fields at once, here. Comparing costs one pass
    over the bytes: 2.3 GB/s measured from memory, so 7 ms a chunk of 16 MiB; from a cold disk, the reading of whole
    chunks where rows would do. Whatever it says, a file that was cut is noticed before each batch.

    Opening maps the file (read-only, no lock, no other file) and reads its head, whatever its size. It may be opened,
    read, pickled, forked and used from threads in any order. Pickled it is path and options; the process that
    unpickles it maps the file for itself, and refuses one that has been replaced meanwhile.
    Raises PackNotFound, NotAPack, PackUnfinished, PackDamaged, PackVersionError, and KeyError for an unknown field;
    PackDamaged also when samples are read.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        fields: str | Sequence[str] | None = None,
        transform: Callable[[Any], Any] | None = None,
        verify: str = OFF,
    ) -> None:
        if verify not in VERIFY:
            raise BadChoice("verify", verify, "must be " + ", ".join(map(repr, VERIFY)))
        self.path = os.path.abspath(path)
        self.verify = verify
        self.transform = transform
        self.selected = fields if fields is None or isinstance(fields, str) else tuple(fields)
        """The ``fields`` that it was made with: one name, several in their order, or None for all."""
        self._attach(open_pack(self.path))
        if verify == OPEN:
            self._checks.everything()

    def _attach(self, pack: OpenPack) -> None:
        self._pack = pack
        readers = open_fields(pack)
        structure = pack.manifest.structure
        numbers = list(range(len(readers)))
        if self.selected is not None and structure is not None:
            names = [field.name for field in pack.manifest.fields]
            wanted = (self.selected,) if isinstance(self.selected, str) else self.selected
            try:
                structure = select(structure, wanted, names)
            except KeyError as fault:
                raise KeyError(f"{self.path} has no field {fault.args[0]!r}; it has {', '.join(names)}") from None
            if isinstance(self.selected, str) and isinstance(structure, Branch):
                structure = structure.children[0]
            numbers = list(dict.fromkeys(leaves(structure)))
            structure = renumber(structure, numbers)
        self._readers = tuple([readers[number] for number in numbers])
        self._checks = Checks(pack, numbers, self.verify)
        self._gets = [reader.get for reader in self._readers]
        self._build = builder(structure) if structure is not None else None
        order = leaves(structure) if structure is not None else []
        self.gather = Gather(tuple([self._readers[number] for number in order]))
        """Readers of the selected fields for batches, valid in any process."""
        self._length = pack.manifest.count

    @property
    def manifest(self) -> Manifest:
        """What the pack says about itself."""
        return self._pack.manifest

    @property
    def file_bytes(self) -> int:
        """Bytes of the file."""
        return self._pack.file_bytes

    @property
    def fields(self) -> tuple[Field, ...]:
        """The selected fields, in the order of a sample."""
        return tuple([reader.field for reader in self.gather.fields])

    @property
    def classes(self) -> list[str] | None:
        """Names of the classes, in the order of their labels; None if the packer was not told."""
        found = self.manifest.metadata.get("classes")
        return None if found is None else list(found)

    def column(self, name: str) -> npt.NDArray[Any] | tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """Return a whole field as a new array (count, *shape), without touching the others. Any field, selected or not.

        Of a ragged field, a string or bytes: (values, offsets), where row i is ``values[offsets[i]:offsets[i + 1]]``
        (of strings and images: the bytes). Of windows, a read-only view (count, *shape) of one new array, with the
        dtype that they are stored with. Raises KeyError, and TypeError for a dtype that numpy does not know.
        """
        for number, field in enumerate(self.manifest.fields):
            if field.name == name:
                self._checks.whole(number)
                stored = field.stored or field.dtype
                if not field.stores_bytes and field.numpy_dtype.name != stored:
                    raise TypeError(f"numpy has no {stored}: read field {name!r} with ds.gather or ds[i]")
                return open_fields(self._pack)[number].column()
        raise KeyError(f"{self.path} has no field {name!r}; it has {', '.join(f.name for f in self.manifest.fields)}")

    def before(self, rows: npt.NDArray[np.int64]) -> None:
        """To be called before rows are read by ``gather``: look at the file, compare what ``verify`` asks for."""
        self._checks.before(rows)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        """Return sample ``index``, a new object. Negative indices count from the end."""
        try:
            at = operator.index(index)
        except TypeError:
            raise TypeError(
                f"a pack is indexed by one integer, not by {type(index).__name__}; "
                "for a part of it use torch.utils.data.Subset"
            ) from None
        if at < 0:
            at += self._length
        if not 0 <= at < self._length or self._build is None:
            raise IndexError(f"index {index} is out of range for a pack of {self._length} samples")
        self._checks.before_one(at)
        sample = self._build([get(at) for get in self._gets])
        return sample if self.transform is None else self.transform(sample)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples of a batch as a list; torch's loaders ask for batches this way.

        Arrays are read with one gather a field, so those of one batch share memory (a row may be changed, and keeping
        one keeps its batch's). Raises what ``ds[i]`` raises.
        """
        # Decoded images are large: one at a time, so that a transform can make it small before the next is decoded.
        bulk = len(indices) >= _BULK and not any(reader.field.encoding for reader in self._readers)
        rows = np.asarray(indices) if bulk else None
        if rows is None or rows.ndim != 1 or rows.dtype != np.int64 or self._build is None:
            return [self[index] for index in indices]
        if rows.min() < 0:
            rows = np.where(rows < 0, rows + self._length, rows)
        self._checks.before(rows)
        build, transform = self._build, self.transform
        columns = zip(*[reader.get_many(rows) for reader in self._readers], strict=True)
        samples = [build(list(values)) for values in columns]
        return samples if transform is None else [transform(sample) for sample in samples]

    def __getstate__(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "selected": self.selected,
            "transform": self.transform,
            "digest": self._pack.digest,
            "verify": self.verify,
            "whole_at": self._checks.seen if self.verify == OPEN else None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path, self.selected, self.transform = state["path"], state["selected"], state["transform"]
        self.verify = state["verify"]
        self._attach(open_pack(self.path, state["digest"]))
        if state["whole_at"] is not None:
            self._checks.trust(state["whole_at"])

    def __repr__(self) -> str:
        return f"PackedDataset({self.path!r}: {self._length} samples of {', '.join(map(str, self.fields))})"
