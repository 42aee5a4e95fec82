"""Which samples, in which batches, in which order: samplers, batch samplers and kinds of datasets."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from .cases_carried import identity
from .compare import Cases
from .samples import (
    Backwards,
    Batched,
    ByKey,
    Counting,
    Fixed,
    OneShot,
    Rows,
    Stream,
    TypeOfIndex,
    Unsized,
    WhoAmI,
    cut,
    widen,
)

CASES = Cases()


def _rows(name: str, claim: str, arguments: Any, *, n: int = 11, **options: Any) -> None:
    """Declare a case on ``Rows(n)``; ``arguments`` makes the loader's arguments from the dataset."""

    def build() -> Any:
        dataset = Rows(n)
        return dataset, arguments(dataset)

    CASES.add(name, claim, build, **options)


def _seeded(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- samplers ---------------------------------------------------------------------------------------------------------

_rows("sequential_sampler", "SequentialSampler by name.", lambda d: {"batch_size": 4, "sampler": SequentialSampler(d)})
_rows("shuffle", "Three epochs of shuffle: three orders.", lambda d: {"batch_size": 4, "shuffle": True}, epochs=3)
_rows("shuffle_generator", "shuffle with an own generator, three epochs.",
      lambda d: {"batch_size": 4, "shuffle": True, "generator": _seeded()}, epochs=3)  # fmt: skip
_rows("generator_without_shuffle", "A generator alone only feeds the workers' seeds.",
      lambda d: {"batch_size": 4, "generator": _seeded()}, epochs=2)  # fmt: skip
_rows("random_sampler", "RandomSampler by name.", lambda d: {"batch_size": 4, "sampler": RandomSampler(d)}, epochs=2)
_rows("random_replacement", "With replacement, more draws than samples.",
      lambda d: {"batch_size": 4, "sampler": RandomSampler(d, replacement=True, num_samples=23)})  # fmt: skip
_rows("random_fewer", "Fewer draws than samples.",
      lambda d: {"batch_size": 4, "sampler": RandomSampler(d, num_samples=5, generator=_seeded())})  # fmt: skip
_rows("random_more", "Several rounds without replacement.",
      lambda d: {"batch_size": 4, "sampler": RandomSampler(d, num_samples=30, generator=_seeded())})  # fmt: skip
_rows("weighted", "WeightedRandomSampler.",
      lambda d: {"batch_size": 4, "sampler": WeightedRandomSampler([i + 0.1 for i in range(11)], 20)})  # fmt: skip
_rows("weighted_without_replacement", "Weighted, without replacement.",
      lambda d: {"sampler": WeightedRandomSampler(range(1, 12), 6, False, _seeded())})  # fmt: skip
_rows("subset_random", "SubsetRandomSampler.",
      lambda d: {"batch_size": 2, "sampler": SubsetRandomSampler([9, 1, 5, 7, 3], generator=_seeded())})  # fmt: skip
_rows("user_sampler", "A user's sampler class.", lambda d: {"batch_size": 3, "sampler": Backwards(d)}, epochs=2)
_rows("list_as_sampler", "Any iterable with a length is a sampler.", lambda d: {"batch_size": 2, "sampler": [3, 3, 1]})
_rows("range_as_sampler", "A range as sampler.", lambda d: {"batch_size": 2, "sampler": range(10, 0, -2)})
_rows("array_as_sampler", "An array as sampler: numpy ints as indices.",
      lambda d: {"batch_size": 2, "sampler": np.array([4, 2, 0])})  # fmt: skip
_rows("tensor_as_sampler", "A tensor as sampler: 0-d tensors as indices.",
      lambda d: {"batch_size": 2, "sampler": torch.tensor([4, 2, 0])})  # fmt: skip
_rows("empty_sampler", "A sampler without indices: no batch.", lambda d: {"batch_size": 2, "sampler": []}, epochs=2)
_rows("generator_as_sampler", "A generator as sampler: no length, no second epoch.",
      lambda d: {"batch_size": 2, "sampler": (i for i in range(5))}, epochs=2)  # fmt: skip
_rows("one_shot_sampler", "A sampler that ends for good after one epoch.",
      lambda d: {"batch_size": 2, "sampler": OneShot(5)}, epochs=2)  # fmt: skip
_rows("repeated_indices", "The same sample many times.", lambda d: {"batch_size": 3, "sampler": [1] * 10})
_rows("negative_indices", "Out of range fails as in torch.", lambda d: {"batch_size": 2, "sampler": [0, 1, -2]})
_rows("index_too_large", "IndexError after good batches.", lambda d: {"batch_size": 2, "sampler": [0, 1, 99, 2]})
_rows("drop_last", "The short batch is left out.", lambda d: {"batch_size": 4, "drop_last": True})
_rows("drop_last_exact", "Nothing to leave out.", lambda d: {"batch_size": 4, "drop_last": True}, n=12)
_rows("larger_than_dataset", "A batch larger than the dataset.", lambda d: {"batch_size": 100})
_rows("larger_drop_last", "A batch larger than the dataset, dropped.", lambda d: {"batch_size": 100, "drop_last": True})
_rows("empty_dataset", "No samples: no batch, length 0.", lambda d: {"batch_size": 4}, n=0, epochs=2)
_rows("empty_shuffled", "No samples with shuffle fails or not as in torch.", lambda d: {"shuffle": True}, n=0)
_rows("one_sample", "A single sample.", lambda d: {"batch_size": 4, "shuffle": True}, n=1, epochs=2)
for _rank in (0, 1):
    _rows(f"distributed_rank_{_rank}", "E3: DistributedSampler: each rank its share, padded.",
          lambda d, r=_rank: {"batch_size": 2, "sampler": DistributedSampler(d, 2, r, seed=3)}, epochs=2)  # fmt: skip
    _rows(f"distributed_drop_rank_{_rank}", "E3: DistributedSampler with drop_last.",
          lambda d, r=_rank: {"sampler": DistributedSampler(d, 2, r, shuffle=False, drop_last=True)})  # fmt: skip

# --- batch samplers ---------------------------------------------------------------------------------------------------

_rows("batch_sampler", "BatchSampler by name.",
      lambda d: {"batch_sampler": BatchSampler(Backwards(d), 3, drop_last=True)}, epochs=2)  # fmt: skip
_rows("list_of_lists", "Lists: batches of unequal size.", lambda d: {"batch_sampler": [[0], [1, 2, 3], [4, 0]]})
_rows("list_of_tuples", "Batches of indices as tuples.", lambda d: {"batch_sampler": [(0, 1), (2,)]})
_rows("list_of_arrays", "Batches of indices as arrays.", lambda d: {"batch_sampler": [np.array([0, 1]), np.array([2])]})
_rows("list_of_tensors", "Batches of indices as tensors.", lambda d: {"batch_sampler": [torch.tensor([0, 1, 5])]})
_rows("list_of_ranges", "Batches of indices as ranges.", lambda d: {"batch_sampler": [range(3), range(5, 9)]})
_rows("batches_as_sampler", "batch_size=None: the sampler's item is the index.",
      lambda d: {"batch_size": None, "sampler": [3, 1, 2]})  # fmt: skip
_rows("empty_batch", "A batch without indices fails in collate.", lambda d: {"batch_sampler": [[0], [], [1]]})
_rows("no_batches", "A batch sampler without batches.", lambda d: {"batch_sampler": []})
_rows("batch_generator", "A generator of batches.", lambda d: {"batch_sampler": ([i, i + 1] for i in range(4))})


@CASES.case()
def large_batches() -> Any:
    """200,000 indices in one batch: more than a pipe's buffer."""
    return Fixed(range(4)), {"batch_sampler": [[1, 2] * 100_000, [3], [0] * 100_000], "collate_fn": sum}


@CASES.case()
def large_batches_of_keys() -> Any:
    """20,000 strings as indices in one batch."""
    return ByKey(), {"batch_sampler": [["a", "ccc"] * 10_000, ["bb"]], "collate_fn": sum}


@CASES.case()
def strings_as_indices() -> Any:
    """Keys of a mapping as indices."""
    return ByKey(), {"batch_size": 2, "sampler": ["ccc", "a", "eeeee"]}


@CASES.case()
def batches_of_strings() -> Any:
    """A batch sampler of keys, tuples among them."""
    return ByKey(), {"batch_sampler": [["a", "bb"], [("x", 1), ("y", 2), "a"]]}


@CASES.case()
def tuples_as_indices() -> Any:
    """A sampler of tuples, unbatched."""
    return ByKey(), {"batch_size": None, "sampler": [("x", 1), "a", ("y", 2)]}


@CASES.case()
def default_indices_are_ints() -> Any:
    """Indices arrive as plain int."""
    return TypeOfIndex(5), {"batch_size": 2, "shuffle": True}


@CASES.case()
def odd_indices_keep_their_type() -> Any:
    """What a sampler yields arrives in its own type."""
    odd = [np.int64(3), True, 2**70, "s", (1, "t"), None, 2.5, -1, np.int8(1), frozenset({1})]
    return TypeOfIndex(5), {"batch_size": 3, "sampler": odd}


@CASES.case()
def tensor_indices_keep_their_type() -> Any:
    """Tensors as indices arrive as tensors."""
    return TypeOfIndex(5), {"batch_size": 3, "sampler": torch.arange(4), "collate_fn": identity}


@CASES.case()
def getitems_with_odd_batches() -> Any:
    """__getitems__ gets the very object that the batch sampler made."""
    return Batched(9), {"batch_sampler": [[0, 1], (2, 3), range(4, 7)]}


# --- datasets ---------------------------------------------------------------------------------------------------------


@CASES.case(epochs=2)
def getitems() -> Any:
    """__getitems__ is called once with the whole batch."""
    return Batched(9), {"batch_size": 4}


@CASES.case()
def getitems_unbatched() -> Any:
    """__getitems__ is not used without batches."""
    return Batched(3), {"batch_size": None}


@CASES.case()
def getitems_through_subset() -> Any:
    """Subset passes __getitems__ on."""
    return Subset(Batched(9), [8, 6, 4, 2, 0]), {"batch_size": 2}


@CASES.case()
def subset() -> Any:
    """Subset of a map-style dataset, shuffled."""
    return Subset(Rows(20), range(3, 17, 2)), {"batch_size": 3, "shuffle": True}


@CASES.case()
def concat() -> Any:
    """ConcatDataset of unequal parts."""
    return ConcatDataset([Rows(3), Rows(0), Rows(5)]), {"batch_size": 4}


@CASES.case()
def tensors() -> Any:
    """TensorDataset, shuffled."""
    data = TensorDataset(torch.arange(14.0).reshape(7, 2), torch.arange(7), torch.arange(7).to(torch.uint8))
    return data, {"batch_size": 3, "shuffle": True}


@CASES.case()
def stack_tuple() -> Any:
    """StackDataset of positions."""
    return StackDataset(Rows(5), Batched(5)), {"batch_size": 2}


@CASES.case()
def stack_dict() -> Any:
    """StackDataset of names."""
    return StackDataset(x=Rows(5), y=TensorDataset(torch.arange(5))), {"batch_size": 2, "shuffle": True}


@CASES.case()
def split() -> Any:
    """random_split by fractions."""
    return random_split(Rows(13), [0.5, 0.3, 0.2], generator=_seeded())[1], {"batch_size": 2}


@CASES.case()
def a_list() -> Any:
    """A plain list is a dataset."""
    return [(i, float(i)) for i in range(7)], {"batch_size": 3, "shuffle": True}


@CASES.case()
def a_string() -> Any:
    """A string is a dataset of characters."""
    return "abcdefg", {"batch_size": 3}


@CASES.case()
def an_array() -> Any:
    """An array is a dataset of rows."""
    return np.arange(14).reshape(7, 2), {"batch_size": 3}


@CASES.case()
def a_tensor() -> Any:
    """A tensor is a dataset of rows."""
    return torch.arange(14).reshape(7, 2), {"batch_size": 3}


@CASES.case(epochs=2)
def worker_info_of_map() -> Any:
    """get_worker_info() in __getitem__: id, number, seed, dataset; batch k comes from worker k mod n in each epoch."""
    return WhoAmI(), {"batch_size": 1, "generator": _seeded()}


@CASES.case(epochs=3, workers=(2, 3))
def worker_info_persistent() -> Any:
    """Persistent workers: batch k comes from worker k mod n in each epoch, 8 batches on 3 workers."""
    return WhoAmI(), {"batch_size": 1, "persistent_workers": True}


@CASES.case(epochs=2, workers=(2,))
def init_fn_changes_the_dataset() -> Any:
    """worker_init_fn gets the worker's id and may change the worker's own copy of the dataset."""
    return Rows(8), {"batch_size": 2, "worker_init_fn": widen}


@CASES.case(epochs=2, workers=(2,))
def init_fn_shards_a_stream() -> Any:
    """E3: the recipe of torch's documentation: worker_init_fn cuts the stream into shares."""
    return Stream(10, shard=False), {"batch_size": 2, "worker_init_fn": cut}


@CASES.case(epochs=3, workers=(0, 2))
def counting_dataset() -> Any:
    """What a dataset counts in itself: kept in main, new in each epoch's workers."""
    return Counting(7), {"batch_size": 2}


@CASES.case(epochs=3, workers=(2,))
def counting_dataset_persistent() -> Any:
    """C14: persistent workers keep their copy of the dataset."""
    return Counting(7), {"batch_size": 2, "persistent_workers": True}


class SelfShuffling:
    """A batch sampler that draws from Python's and numpy's global generators in main."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(4):
            yield [int(np.random.randint(11)), int(torch.randint(11, ()))]


@CASES.case(epochs=2, workers=(0, 2))
def sampler_draws_in_main() -> Any:
    """A sampler that draws from the global generators sees the states that it sees under torch."""
    return Rows(11), {"batch_sampler": SelfShuffling()}


# --- iterable datasets ------------------------------------------------------------------------------------------------


def _stream(name: str, claim: str, dataset: Any, arguments: dict[str, Any], **options: Any) -> None:
    CASES.add(name, claim, lambda: (dataset(), dict(arguments)), **options)


_sharded, _whole = functools.partial(Stream, 12), functools.partial(Stream, 7, shard=False)
_stream("stream", "E3: workers share the stream by get_worker_info().", _sharded, {"batch_size": 3}, epochs=2)
_stream("stream_unbatched", "E3: item by item.", _sharded, {"batch_size": None}, epochs=2)
_stream("stream_default", "E3: batches of one.", _sharded, {})
_stream("stream_drop_last", "E3: drop_last holds per worker.", _whole, {"batch_size": 3, "drop_last": True}, epochs=2)
_stream("stream_not_sharded", "E3: each worker reads everything, as in torch.", _whole, {"batch_size": 3}, bag=True)
_stream("stream_length", "E3: a declared length.", lambda: Stream(12, 12), {"batch_size": 4})
_stream("stream_length_drop", "E3: drop_last counts.", lambda: Stream(12, 12), {"batch_size": 5, "drop_last": True})
_stream("stream_too_short", "E3: a warning past the declared length, with torch's text.",
        lambda: Stream(6, 4), {"batch_size": 1}, epochs=2)  # fmt: skip
_stream("stream_far_too_short", "E3: unbatched, declared 1.", lambda: Stream(4, 1), {"batch_size": None})
_stream("stream_too_long", "E3: declared more than there is.", lambda: Stream(4, 40), {"batch_size": 2})
_stream("stream_no_length_asked", "E3: no warning when nobody asked for the length.",
        lambda: Stream(6, 2), {"batch_size": 1}, ask_length=False)  # fmt: skip
_stream("stream_empty", "E3: an empty stream.", lambda: Stream(0), {"batch_size": 3}, epochs=2)
_stream("stream_one", "E3: one item for two workers.", lambda: Stream(1), {"batch_size": 3}, epochs=2)
_stream("streams_unequal", "E3: one worker has much more than the other.",
        lambda: Unsized(range(20), range(100, 103)), {"batch_size": 2}, bag=True, epochs=2)  # fmt: skip
_stream("streams_first_empty", "E3: the first worker has nothing.",
        lambda: Unsized([], range(9)), {"batch_size": 2}, bag=True, epochs=2)  # fmt: skip
_stream("streams_unsized", "E3: no length: the same TypeError.", lambda: Unsized(range(4), range(4)), {"batch_size": 2})
_stream("streams_strings", "E3: items of any type.", lambda: Unsized(["a", "b"], ["c", "d"]), {"batch_size": None})
_stream("streams_lists", "E3: rows through default collate.",
        lambda: Unsized([torch.ones(2), torch.zeros(2)], [np.ones(2), np.zeros(2)]), {"batch_size": 2})  # fmt: skip
_stream("chain", "ChainDataset of streams.", lambda: ChainDataset([_sharded(), _sharded()]), {"batch_size": 3})
_stream("stream_collate", "E3: a collate_fn for a stream.", _sharded, {"batch_size": 3, "collate_fn": sum})
_stream("stream_no_shuffle", "shuffle=False is allowed for streams.", _sharded, {"batch_size": 3, "shuffle": False})
