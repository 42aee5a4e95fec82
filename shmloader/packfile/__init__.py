"""The pack: one file that holds a whole dataset, written once, read by mapping it."""

from .dataset import Gather, PackedDataset
from .packing import pack
from .report import PackReport
from .schema import Field, Manifest
from .verify import verify
from .writer import PackWriter

__all__ = ["Field", "Gather", "Manifest", "PackReport", "PackWriter", "PackedDataset", "pack", "verify"]
