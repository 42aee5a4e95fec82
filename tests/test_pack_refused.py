"""Samples and columns that do not fit a pack: which one, in which field, and what was expected."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shmloader.errors import (
    SampleMismatch,
    UnsupportedField,
)
from shmloader.packfile import PackedDataset, PackWriter, pack, verify

# --- samples that do not fit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("good", "odd", "field", "expected", "found"),
    [
        (np.zeros((3, 8, 8), np.uint8), np.zeros((8, 8), np.uint8), "x", "uint8 array of shape (3, 8, 8)", "(8, 8)"),
        (np.zeros(3, np.float32), np.zeros(3), "x", "float32 array", "float64 array of shape (3,)"),
        (torch.zeros(3), 1.0, "x", "float32 array", "a float"),
        (1, 1.5, "x", "an int", "a float"),
        (1, True, "x", "an int", "a bool"),
        ("a", b"a", "x", "a str", "a bytes"),
        (1, (1,), "x", "a single value", "a tuple of 1"),
        ((1, 2), (1, 2, 3), "x", "a tuple of 2", "a tuple of 3"),
        ((1, 2), [1, 2], "x", "a tuple of 2", "a list of 2"),
        ({"a": 1}, {"b": 1}, "x", "keys ['a']", "keys ['b']"),
        ({"a": (1, 2)}, {"a": (1, "s")}, "x.a.1", "an int", "a str"),
    ],
)
def test_a_sample_that_disagrees_is_named(
    tmp_path: Path, good: Any, odd: Any, field: str, expected: str, found: str
) -> None:
    """E1: index, field, and what both are; nothing is left behind; the error crosses processes."""
    samples = [{"y": i, "x": good} for i in range(99)]
    samples.insert(70, {"y": 0, "x": odd})
    with pytest.raises(SampleMismatch) as caught:
        pack(samples, tmp_path / "p.lmdb")
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.index, error.field) == (70, field)
    assert expected in error.expected
    assert found in error.found
    assert "sample 70" in str(error)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "cannot pack None"),
        ({1, 2}, "a value of type set"),
        (2**63, "does not fit into 64 bits"),
        (np.array(["a"]), "dtype <U1"),
        (np.array([object()]), "dtype object"),
        (np.datetime64("2020"), "datetime64"),
        (1j, "a value of type complex"),
        ({b"k": 1}, "a dict with the key b'k' of type bytes"),
        (torch.eye(2).to_sparse(), "sparse"),
    ],
)
def test_a_value_that_cannot_be_kept_is_named(tmp_path: Path, value: Any, said: str) -> None:
    """First or later, in any place: sample, field and kind."""
    for samples in ([(1, value)], [(1, 2), (1, value)]):
        with pytest.raises((UnsupportedField, SampleMismatch)) as caught:
            pack(samples, tmp_path / "p.lmdb", field_names=("a", "b"))
        if isinstance(caught.value, UnsupportedField):
            assert said in str(caught.value)
            assert f"sample {len(samples) - 1}" in str(caught.value)
            assert "'b'" in str(caught.value) or "'1'" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_refused_sample_adds_nothing(tmp_path: Path) -> None:
    """Whoever goes on after an error has a pack of the good samples only, all fields in step."""
    refused = 0
    with PackWriter(tmp_path / "p.lmdb", chunk_bytes=4096) as writer:
        for i in range(900):
            try:
                writer.add((i, np.full(5, i), "x") if i % 7 != 3 else (i, i, "x"))
            except SampleMismatch:
                refused += 1
    packed = PackedDataset(tmp_path / "p.lmdb")
    good = [i for i in range(900) if i % 7 != 3]
    assert (len(packed), refused) == (len(good), 900 - len(good))
    assert [packed[k][0] for k in range(len(good))] == good
    assert [int(packed[k][1][4]) for k in range(len(good))] == good


def test_what_encodings_and_names_say_must_fit(tmp_path: Path) -> None:
    """A misspelt field or encoding is found at once."""
    with pytest.raises(ValueError, match="encodings name the fields"):
        pack([(b"x", 1)], tmp_path / "p.lmdb", encodings={"image": "encoded-image"})
    with pytest.raises(ValueError, match="is none of encoded-image"):
        pack([b"x"], tmp_path / "p.lmdb", encodings={"0": "jpeg"})
    with pytest.raises(SampleMismatch, match="bytes, to be kept as encoded-image"):
        pack([1], tmp_path / "p.lmdb", encodings={"0": "encoded-image"})
    with pytest.raises(ValueError, match="chunk_bytes is 5"):
        pack([1], tmp_path / "p.lmdb", chunk_bytes=5)
    with pytest.raises(UnsupportedField, match="neither len"):
        pack(3, tmp_path / "p.lmdb")
    assert list(tmp_path.iterdir()) == []


# --- whole columns ----------------------------------------------------------------------------------------------------


def test_columns_in_pieces_equal_samples(tmp_path: Path) -> None:
    """Any mixture of add and add_columns, in pieces that fit no chunk, gives the pack of the samples."""
    x, y = np.arange(5000, dtype=np.float32).reshape(1000, 5), torch.arange(1000).to(torch.int16)
    pack([{"x": x[i], "y": y[i]} for i in range(1000)], tmp_path / "a.lmdb", chunk_bytes=4096)
    with PackWriter(tmp_path / "b.lmdb", chunk_bytes=4096) as writer:
        at = 0
        for step in (1, 700, 0, 99, 200):
            writer.add_columns({"x": x[at : at + step], "y": y[at : at + step]})
            at += step
    assert verify(tmp_path / "b.lmdb") == []
    assert (tmp_path / "a.lmdb").read_bytes() == (tmp_path / "b.lmdb").read_bytes()
    with PackWriter(tmp_path / "c.lmdb", chunk_bytes=4096) as writer:
        writer.add({"x": x[0], "y": y[0]})
        writer.add_columns({"x": x[1:], "y": y[1:]})
    assert PackedDataset(tmp_path / "c.lmdb").manifest == PackedDataset(tmp_path / "a.lmdb").manifest


def test_columns_of_another_length_make_the_field_ragged(tmp_path: Path) -> None:
    """Two blocks of different row length are one ragged field."""
    with PackWriter(tmp_path / "p.lmdb", chunk_bytes=4096) as writer:
        writer.add_columns(np.ones((300, 4), np.int32))
        writer.add_columns(np.ones((300, 7), np.int32))
    packed = PackedDataset(tmp_path / "p.lmdb")
    assert packed.fields[0].shape == (None,)
    assert [len(packed[i]) for i in (0, 299, 300, 599)] == [4, 4, 7, 7]


def test_columns_that_do_not_fit_are_named(tmp_path: Path) -> None:
    """Different lengths, another dtype, no array: which, and what both are."""
    with PackWriter(tmp_path / "p.lmdb") as writer:
        with pytest.raises(ValueError, match="column 'b' has 3 rows, column 'a' has 2"):
            writer.add_columns({"a": np.zeros(2), "b": np.zeros(3)})
        writer.add_columns({"a": np.zeros(2), "b": np.zeros(2)})
        with pytest.raises(SampleMismatch, match="field 'b': expected float64 array"):
            writer.add_columns({"a": np.zeros(2), "b": np.zeros(2, np.float32)})
        with pytest.raises(UnsupportedField, match="as a whole column"):
            writer.add_columns({"a": np.zeros(2), "b": 3.0})
        with pytest.raises(SampleMismatch, match="a dict with the keys"):
            writer.add_columns((np.zeros(2), np.zeros(2)))
    assert len(PackedDataset(tmp_path / "p.lmdb")) == 2
