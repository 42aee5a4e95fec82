"""Every exception of shmloader, sorted by whose fault it is.

    ShmLoaderError
    ├── ResourceError      the host said no: too little shared memory, a limit, a lost mount
    ├── PackError          a file said no: unfinished, damaged, foreign, too new
    ├── DataError          the dataset said no: samples that do not fit together
    ├── WorkerError        a worker process ended or hangs: the world broke
    └── MisuseError        the caller asked for something that cannot be

Rules: the fields are the arguments of ``__init__`` and are passed to ``super().__init__`` unchanged, so that every
exception survives pickling; the sentence is made in ``__str__``; ``hint`` says what to do next. Each class also derives
from the built-in exception that torch or Python would raise in its place, so that existing ``except`` clauses match.
"""

from .base import ShmLoaderError, human_bytes
from .data import (
    AllSamplesBad,
    BadSampleWarning,
    BrokenImage,
    DataError,
    DeviceTensor,
    SampleMismatch,
    SourceError,
    UnequalSamples,
    UnknownSource,
    UnsupportedField,
)
from .host import (
    ArenaTooSmall,
    BatchTooLarge,
    CopiedOutWarning,
    DeviceUnavailable,
    NoSlotLeft,
    NotPinnedWarning,
    PinningRefused,
    ResourceError,
    SharedMemoryFull,
)
from .misuse import BadChoice, IteratorClosed, MissingExtra, MisuseError, SlotMisuse, StaleSlot
from .pack import (
    NotAPack,
    PackDamaged,
    PackError,
    PackExists,
    PackInUse,
    PackNotFound,
    PackUnfinished,
    PackVersionError,
    ResumeRefused,
)
from .workers import OomKills, WorkerDied, WorkerError, WorkerStuckWarning, WorkerTimeout

__all__ = [
    "AllSamplesBad",
    "ArenaTooSmall",
    "BadChoice",
    "BadSampleWarning",
    "BatchTooLarge",
    "BrokenImage",
    "CopiedOutWarning",
    "DataError",
    "DeviceTensor",
    "DeviceUnavailable",
    "IteratorClosed",
    "MissingExtra",
    "MisuseError",
    "NoSlotLeft",
    "NotAPack",
    "NotPinnedWarning",
    "OomKills",
    "PackDamaged",
    "PackError",
    "PackExists",
    "PackInUse",
    "PackNotFound",
    "PackUnfinished",
    "PackVersionError",
    "PinningRefused",
    "ResourceError",
    "ResumeRefused",
    "SampleMismatch",
    "SharedMemoryFull",
    "ShmLoaderError",
    "SlotMisuse",
    "SourceError",
    "StaleSlot",
    "UnequalSamples",
    "UnknownSource",
    "UnsupportedField",
    "WorkerDied",
    "WorkerError",
    "WorkerStuckWarning",
    "WorkerTimeout",
    "human_bytes",
]
