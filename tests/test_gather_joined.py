"""Many small fields: one call gathers a run of equal ones, and every batch is what the samples say."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

from shmloader import DataLoader, PackedDataset, pack
from shmloader.packfile.joined import bind_joined, joinable

COUNT = 300


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Fields of several widths, so that runs begin and end, in chunks of few rows."""
    path = tmp_path_factory.mktemp("joined") / "many.lmdb"
    rng = np.random.default_rng(7)
    columns = {f"a{i}": torch.from_numpy(rng.random((COUNT, 8), np.float32)) for i in range(12)}
    columns |= {f"b{i}": torch.from_numpy(rng.integers(0, 99, COUNT)) for i in range(5)}
    columns["c"] = torch.from_numpy(rng.random((COUNT, 3), np.float32))
    columns |= {f"d{i}": torch.from_numpy(rng.random((COUNT, 2), np.float32)) for i in range(4)}
    samples = [{name: column[i] for name, column in columns.items()} for i in range(COUNT)]
    pack(samples, path, chunk_bytes=4096)
    return PackedDataset(path)


def same(batch, expected):
    assert list(batch) == list(expected)
    for name, column in batch.items():
        assert column.dtype == expected[name].dtype, name
        assert torch.equal(column, expected[name]), name


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("batch_size", [1, 7, 16, 64])
def test_batches_of_many_fields_are_those_of_the_samples(dataset, batch_size, num_workers):
    """A4: whether a run of fields lies without gaps (batch 16, 64) or with them (1, 7), over borders of chunks."""
    order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(batch_size)).tolist()
    loader = DataLoader(dataset, batch_size=batch_size, sampler=order, num_workers=num_workers)
    for number, batch in enumerate(loader):
        same(batch, default_collate([dataset[i] for i in order[number * batch_size : (number + 1) * batch_size]]))
    loader.close()


@settings(max_examples=40, deadline=None)
@given(indices=st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=40), skew=st.sampled_from([0, 1, 4, 8]))
def test_a_run_is_gathered_into_any_place(dataset, indices, skew):
    """One call writes all fields behind each other, also where the memory is aligned to nothing."""
    rows = [reader.rows for reader in dataset.gather.fields[:12]]
    count, nbytes = len(indices), 12 * len(indices) * 32
    whole = torch.zeros(nbytes + 64, dtype=torch.uint8)
    bind_joined(rows, whole[skew : skew + nbytes], count)(np.array(indices))
    found = np.frombuffer(whole.numpy().tobytes()[skew : skew + nbytes], np.float32).reshape(12, count, 8)
    for number in range(12):
        assert np.array_equal(found[number], np.stack([dataset[i][f"a{number}"].numpy() for i in indices]))
    assert not whole[:skew].any()
    assert not whole[skew + nbytes :].any()


@pytest.mark.parametrize("wrong", [-1, COUNT, 2**62])
def test_a_wrong_index_writes_nothing(dataset, wrong):
    """IndexError comes before the first byte."""
    rows = [reader.rows for reader in dataset.gather.fields[:12]]
    out = torch.zeros(12 * 2 * 32, dtype=torch.uint8)
    with pytest.raises(IndexError, match=str(wrong)):
        bind_joined(rows, out, 2)(np.array([0, wrong]))
    assert not out.any()


def test_only_equal_rows_of_one_pack_are_joined(dataset, tmp_path):
    """Rows of another size, and rows of another file, are gathered by calls of their own."""
    pack([{"a": torch.zeros(8)} for _ in range(COUNT)], tmp_path / "other.lmdb")
    other = PackedDataset(tmp_path / "other.lmdb").gather.fields[0].rows
    a, b = dataset.gather.fields[0].rows, dataset.gather.fields[12].rows
    assert joinable(a, dataset.gather.fields[1].rows)
    assert not joinable(a, b)
    assert not joinable(a, other)
