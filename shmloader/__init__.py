"""A shared-memory, zero-copy DataLoader for PyTorch.

    from shmloader import DataLoader, PackedDataset

Workers write collated batches straight into a pre-allocated shared arena; the main process hands out views of its
slots.
"""

from .arena_stats import ArenaStats
from .badsamples import BadSample
from .collates import JaggedCollate, ListCollate, PaddedCollate, collate_jagged, collate_list, collate_padded
from .errors import (
    AllSamplesBad,
    ArenaTooSmall,
    BadSampleWarning,
    BatchTooLarge,
    CopiedOutWarning,
    DataError,
    DeviceTensor,
    DeviceUnavailable,
    IteratorClosed,
    MisuseError,
    NoSlotLeft,
    NotAPack,
    NotPinnedWarning,
    OomKills,
    PackDamaged,
    PackError,
    PackExists,
    PackNotFound,
    PackUnfinished,
    PackVersionError,
    ResourceError,
    SampleMismatch,
    SharedMemoryFull,
    ShmLoaderError,
    SlotMisuse,
    StaleSlot,
    UnequalSamples,
    UnsupportedField,
    WorkerDied,
    WorkerError,
    WorkerStuckWarning,
    WorkerTimeout,
)
from .loader import DataLoader, LoaderStats
from .packfile import PackedDataset, PackReport, pack

__version__ = "0.1.0"

__all__ = [
    "AllSamplesBad",
    "ArenaStats",
    "ArenaTooSmall",
    "BadSample",
    "BadSampleWarning",
    "BatchTooLarge",
    "CopiedOutWarning",
    "DataError",
    "DataLoader",
    "DeviceTensor",
    "DeviceUnavailable",
    "IteratorClosed",
    "JaggedCollate",
    "ListCollate",
    "LoaderStats",
    "MisuseError",
    "NoSlotLeft",
    "NotAPack",
    "NotPinnedWarning",
    "OomKills",
    "PackDamaged",
    "PackError",
    "PackExists",
    "PackNotFound",
    "PackReport",
    "PackUnfinished",
    "PackVersionError",
    "PackedDataset",
    "PaddedCollate",
    "ResourceError",
    "SampleMismatch",
    "SharedMemoryFull",
    "ShmLoaderError",
    "SlotMisuse",
    "StaleSlot",
    "UnequalSamples",
    "UnsupportedField",
    "WorkerDied",
    "WorkerError",
    "WorkerStuckWarning",
    "WorkerTimeout",
    "collate_jagged",
    "collate_list",
    "collate_padded",
    "pack",
]
