"""Tables as pandas, pyarrow and spreadsheets write them: typed columns, files, and missing values said early."""

from __future__ import annotations

import pickle
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from annotated import photograph
from shmloader import DataLoader, PackedDataset
from shmloader.errors import BrokenImage, MisuseError, SourceError
from shmloader.images import Fit
from shmloader.sources import Options, TableRows, open_source, pack_source, recognise
from support import run_script


def flowers(rows: int = 50) -> pd.DataFrame:
    """Whole numbers, floats, flags, words, and words that look like something else."""
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "height": rng.random(rows),
            "petals": np.arange(rows, dtype=np.int64),
            "wild": rng.random(rows) < 0.5,
            "species": np.array(["rose", "größe", "", "NA, \"quoted\"\nline"])[np.arange(rows) % 4],
        }
    )  # fmt: skip


WRITERS = {
    "t.csv": lambda frame, path: frame.to_csv(path, index=False),
    "t.tsv": lambda frame, path: frame.to_csv(path, index=False, sep="\t"),
    "semi.csv": lambda frame, path: frame.to_csv(path, index=False, sep=";", encoding="utf-8-sig"),
    "crlf.csv": lambda frame, path: frame.to_csv(path, index=False, lineterminator="\r\n"),
    "t.csv.gz": lambda frame, path: frame.to_csv(path, index=False),
    "t.parquet": lambda frame, path: frame.to_parquet(path),
    "zstd.PARQUET": lambda frame, path: frame.to_parquet(path, compression="zstd", row_group_size=7),
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_pandas_writes_is_read(tmp_path: Path, name: str) -> None:
    """Each value with its type, in the order of the rows, whatever the separator, line end, mark or compression."""
    frame = flowers()
    WRITERS[name](frame, tmp_path / name)
    assert recognise(tmp_path / name) is TableRows
    data = TableRows(tmp_path / name)
    assert len(data) == 50
    for index in (0, 3, -1):
        sample, row = data[index], frame.iloc[index]
        assert list(sample) == list(frame.columns)
        assert sample["height"].dtype == torch.float64
        assert sample["height"].item() == row["height"]
        assert (sample["petals"].dtype, sample["petals"].item()) == (torch.int64, row["petals"])
        assert (sample["wild"].dtype, sample["wild"].item()) == (torch.bool, row["wild"])
        assert sample["species"] == row["species"]
    assert data.notes == ()
    with pytest.raises(IndexError, match="50 samples"):
        data[50]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_table_of_numbers_is_packed_in_bulk(tmp_path: Path, kind: str) -> None:
    """Whole columns, no Python per row, and the same samples from the pack; labels from words are numbers too."""
    frame = flowers(3000)
    path = tmp_path / f"t.{kind}"
    frame.to_csv(path, index=False) if kind == "csv" else frame.to_parquet(path)
    data = open_source(path, options=Options(columns=("species=label", "height", "petals")))
    columns = data.columns()
    assert isinstance(columns, dict)
    assert list(columns) == ["species", "height", "petals"]
    np.testing.assert_array_equal(columns["height"], frame["height"])
    packed = PackedDataset(pack_source(data, tmp_path / "t.lmdb").path)
    assert packed.classes == sorted(set(frame["species"]))
    for index in (0, 1, 2999):
        ours, theirs = packed[index], data[index]
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        assert packed.classes[int(ours["species"])] == frame["species"][index]
    assert data.class_counts() == dict.fromkeys(packed.classes, 750)
    with DataLoader(packed, batch_size=1000, num_workers=1) as loader:
        assert torch.cat([batch["petals"] for batch in loader]).tolist() == list(range(3000))


def test_large_columns_are_mapped_and_not_held(tmp_path: Path) -> None:
    """Beyond the given memory, numbers lie in a file without a name; samples and packs are the same."""
    rng = np.random.default_rng(0)
    vectors = rng.random((5000, 8)).astype(np.float32)
    table = pa.table({"v": pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), 8), "n": np.arange(5000)})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet", row_group_size=700)
    data = TableRows(tmp_path / "t.parquet", memory=100_000)
    columns = data.columns()
    assert columns is not None
    assert isinstance(columns["v"], np.memmap)
    assert not isinstance(columns["n"], np.memmap)
    np.testing.assert_array_equal(columns["v"], vectors)
    assert data[4999]["v"].tolist() == vectors[4999].tolist()
    packed = PackedDataset(pack_source(data, tmp_path / "t.lmdb").path)
    np.testing.assert_array_equal(packed.column("v"), vectors)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.lmdb", "t.parquet"]


def test_a_table_with_words_is_packed_row_by_row(tmp_path: Path) -> None:
    """Texts with quotes, commas and line breaks come back as they were."""
    frame = flowers(9)
    frame.to_csv(tmp_path / "t.csv", index=False)
    packed = PackedDataset(pack_source(open_source(tmp_path / "t.csv"), tmp_path / "t.lmdb").path)
    assert [packed[i]["species"] for i in range(9)] == frame["species"].tolist()
    assert [packed[i]["height"].item() for i in range(9)] == frame["height"].tolist()


def test_all_of_parquets_types(tmp_path: Path) -> None:
    """Small and unsigned numbers, lists, bytes, categories, dates and decimals: kept, or converted and noted."""
    table = pa.table(
        {
            "small": pa.array([1, 2, 3], pa.uint8()),
            "half": pa.array(np.array([1, 2, 3], np.float16)),
            "vector": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.float32(), 2)),
            "ragged": pa.array([[1], [], [2, 3]], pa.list_(pa.int32())),
            "raw": pa.array([b"\x00", b"", b"\xff\xfe"], pa.binary()),
            "category": pa.array(["x", "y", "x"]).dictionary_encode(),
            "day": pa.array([0, 1, 20_000], pa.date32()),
            "when": pa.array([0, 1, 2], pa.timestamp("ms")),
            "price": pa.array([Decimal(1), Decimal(2), Decimal(3)], pa.decimal128(10, 2)),
        }
    )
    pyarrow.parquet.write_table(table.slice(0, 3), tmp_path / "t.parquet", row_group_size=2)
    data = TableRows(tmp_path / "t.parquet")
    sample = data[2]
    assert sample["small"].dtype == torch.uint8
    assert sample["half"].dtype == torch.float16
    assert (sample["vector"].dtype, sample["vector"].tolist()) == (torch.float32, [5, 6])
    assert (sample["ragged"].dtype, sample["ragged"].tolist()) == (torch.int32, [2, 3])
    assert [data[i]["raw"] for i in range(3)] == [b"\x00", b"", b"\xff\xfe"]
    assert sample["category"] == "x"
    assert (sample["day"].item(), sample["when"].item(), sample["price"].item()) == (20_000, 2, 3.0)
    assert len(data.notes) == 2
    assert "column 'when' (timestamp[ms]) is kept as whole numbers, int64" in data.notes
    packed = PackedDataset(pack_source(data, tmp_path / "t.lmdb").path)
    for index in range(3):
        ours, theirs = packed[index], data[index]
        for name, value in theirs.items():
            assert torch.equal(ours[name], value) if isinstance(value, torch.Tensor) else ours[name] == value, name
    vectors = TableRows(tmp_path / "t.parquet", columns=("vector", "small")).columns()
    assert vectors is not None
    assert vectors["vector"].shape == (3, 2)


def test_a_folder_of_parquet_files_is_one_table(tmp_path: Path) -> None:
    """Parts in the order of their names; parts of other columns are refused."""
    frame = flowers(10)
    frame[:4].to_parquet(tmp_path / "part-0.parquet")
    frame[4:].to_parquet(tmp_path / "part-1.parquet")
    data = open_source(tmp_path)
    assert isinstance(data, TableRows)
    assert [data[i]["petals"].item() for i in range(10)] == list(range(10))
    frame.drop(columns="wild").to_parquet(tmp_path / "part-2.parquet")
    with pytest.raises(SourceError, match=r"part-2\.parquet: its columns are not those of .*part-0"):
        TableRows(tmp_path)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_missing_values_are_errors_with_row_and_column_or_nan(tmp_path: Path, kind: str) -> None:
    """Floats have NaN, and a note; whole numbers and texts have nothing to stand for it, and say what to do."""
    frame = pd.DataFrame(
        {
            "x": [0.5, None, 2.5, None],
            "age": pd.array([1, 2, None, 4], "Int64"),
            "name": pd.array(["a", "b", "c", None], "string"),
        }
    )
    path = tmp_path / f"t.{kind}"
    frame.to_csv(path, index=False) if kind == "csv" else frame.to_parquet(path)
    data = TableRows(path, columns=("x",))
    assert np.isnan(data[1]["x"].item())
    assert data.notes == ("column 'x': 2 missing values became NaN",)
    with pytest.raises(SourceError, match=r"row 2: column 'age' has no value here; .*age=float") as caught:
        TableRows(path)
    assert caught.value.path == f"{path}, row 2"
    aged = TableRows(path, columns=("age=float", "name=text"))
    assert np.isnan(aged[2]["age"].item())
    assert aged[3]["name"] == ""
    if kind == "parquet":  # in CSV an empty text is an empty text
        with pytest.raises(SourceError, match=r"row 3: column 'name' has no value here; .*name=text"):
            TableRows(path, columns=("name",))
    pd.DataFrame({"x": [1, 2], "none": [None, None]}).to_parquet(tmp_path / "n.parquet")
    with pytest.raises(SourceError, match="column 'none' has no values at all"):
        TableRows(tmp_path / "n.parquet")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A table beside its photographs."""
    for name in ("a.jpg", "b.png"):
        photograph(tmp_path / "img" / name)
    pd.DataFrame({"photo": ["img/a.jpg", "img\\b.png"], "age": [3, 4]}).to_csv(tmp_path / "t.csv", index=False)
    return tmp_path


@pytest.mark.parametrize("fit", [None, Fit(16, 24)])
def test_a_column_of_paths_becomes_images(photos: Path, fit: Fit | None) -> None:
    """Found to be images because they are there; stored as files or as pixels; kept as words if that is said."""
    data = TableRows(photos / "t.csv", fit=fit)
    assert tuple(data[1]["photo"].shape) == ((3, 80, 120) if fit is None else (3, 16, 24))
    assert any("'photo' names images" in note for note in data.notes)
    report = pack_source(open_source(photos / "t.csv", options=Options(fit=fit)), photos / "t.lmdb")
    packed = PackedDataset(report.path)
    assert all(torch.equal(packed[i]["photo"], data[i]["photo"]) for i in range(2))
    assert TableRows(photos / "t.csv", columns=("photo=text",))[1]["photo"] == "img\\b.png"
    as_file = TableRows(photos / "t.csv", columns=("photo=file",))
    assert as_file[0]["photo"] == (photos / "img" / "a.jpg").read_bytes()


def test_files_that_are_missing_or_broken_are_named_with_their_row(photos: Path) -> None:
    """One of several: when its row is asked for. All of them: when the table is opened, unless they were a guess."""
    data = TableRows(photos / "t.csv", encoded=True)
    (photos / "img" / "b.png").unlink()
    with pytest.raises(SourceError, match=r"t\.csv, row 1, column 'photo': the file .* is not there"):
        data[1]
    (photos / "img" / "a.jpg").write_bytes(b"\xff\xd8\xff")
    with pytest.raises(BrokenImage, match=r"a\.jpg"):
        data[0]
    (photos / "img" / "a.jpg").unlink()
    guessed = TableRows(photos / "t.csv")
    assert guessed[0]["photo"] == "img/a.jpg"
    assert any("stays text: looked for img/a.jpg in" in note for note in guessed.notes)
    with pytest.raises(SourceError, match=r"files of column 'photo' are not there: looked for img/a\.jpg in"):
        TableRows(photos / "t.csv", columns=("photo=image",))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "it is empty"),
        ("a,b\n", "it has no rows"),
        ("a,b\n1,2\n1,2,3\n", "line 3: it has 3 columns, expected 2: '1,2,3'"),
        ("a,a\n1,2\n", "two columns are called 'a'"),
    ],
)
def test_a_damaged_csv_is_said_to_be_one(tmp_path: Path, content: str, why: str) -> None:
    """One sentence, with the line where there is one."""
    (tmp_path / "t.csv").write_text(content)
    with pytest.raises(SourceError, match=why):
        TableRows(tmp_path / "t.csv")


def test_a_damaged_parquet_is_said_to_be_one(tmp_path: Path) -> None:
    """Cut at its end, or in its middle; and a kind of column that nothing can store."""
    flowers().to_parquet(tmp_path / "t.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "t.parquet").read_bytes()[:-20])
    with pytest.raises(SourceError, match=r"cut\.parquet: not readable as a table"):
        TableRows(tmp_path / "cut.parquet")
    pyarrow.parquet.write_table(pa.table({"s": [{"a": 1}], "x": [1]}), tmp_path / "s.parquet")
    with pytest.raises(SourceError, match=r"column 's' holds struct<.*, which cannot be stored: leave it out"):
        TableRows(tmp_path / "s.parquet")
    assert TableRows(tmp_path / "s.parquet", columns=("x",))[0]["x"].item() == 1


def test_headers_that_are_none_or_without_a_name(tmp_path: Path) -> None:
    """A first line of numbers is data; the index that pandas writes has no name and gets one."""
    (tmp_path / "n.csv").write_text("5.1,3.5,1\n4.9,3.0,0\n")
    data = TableRows(tmp_path / "n.csv")
    assert len(data) == 2
    assert data[0]["column_2"].item() == 1
    assert any("taken for data" in note for note in data.notes)
    pd.DataFrame({"x": [1, 2]}).to_csv(tmp_path / "i.csv")
    assert list(TableRows(tmp_path / "i.csv")[0]) == ["column_0", "x"]


def test_choices_that_cannot_be_are_refused(tmp_path: Path) -> None:
    """Unknown columns and roles, doubled ones, labels that are no labels; a name with = in it is a name."""
    pd.DataFrame({"x": [0.5], "y": [-1], "a=label": [2], "s": ["t"]}).to_parquet(tmp_path / "t.parquet")
    cases: list[tuple[tuple[str, ...], str]] = [
        (("z",), "no column 'z'; it has 'x', 'y', 'a=label'"),
        (("z=label",), "no column 'z'"),
        (("x=klass",), "'x' cannot be 'klass'"),
        (("x", "x"), "chosen twice"),
        (("y=label", "s=label"), "only one column can be the label"),
    ]
    for columns, why in cases:
        with pytest.raises(MisuseError, match=why):
            TableRows(tmp_path / "t.parquet", columns=columns)
    for columns, why in [(("x=label",), "neither whole numbers nor texts"), (("x=image",), "cannot name files")]:
        with pytest.raises(SourceError, match=why):
            TableRows(tmp_path / "t.parquet", columns=columns)
    data = TableRows(tmp_path / "t.parquet", columns=("a=label", "y=label"))
    assert list(data[0]) == ["a=label", "y"]
    assert data.class_counts() == {"-1": 1}
    assert [problem.kind for problem in data.problems(0, data[0])] == ["label-out-of-range"]


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_read_a_table_without_pyarrow(tmp_path: Path, start_method: str) -> None:
    """C6: numbers and texts reach workers however they are started; pyarrow's threads do not live there."""
    frame = flowers(8)
    frame.to_parquet(tmp_path / "t.parquet")
    data = TableRows(tmp_path / "t.parquet")
    with DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context=start_method) as loader:
        batches = list(loader)
    assert [name for batch in batches for name in batch["species"]] == frame["species"].tolist()
    assert torch.cat([batch["height"] for batch in batches]).tolist() == frame["height"].tolist()
    assert pickle.loads(pickle.dumps(data))[7]["species"] == data[7]["species"]


def test_without_pyarrow_one_sentence_says_what_to_install(tmp_path: Path) -> None:
    """The extra is named with its pip line."""
    (tmp_path / "t.csv").write_text("a\n1\n")
    script = """
        import sys
        sys.modules["pyarrow"] = None
        from shmloader.errors import MissingExtra
        from shmloader.sources import TableRows
        try:
            TableRows(sys.argv[1])
        except MissingExtra as missing:
            print(missing)
    """
    done = run_script(script, args=[str(tmp_path / "t.csv")]).silent()
    assert "pyarrow is needed to read tables: pip install 'shmloader[tables]'" in done.stdout
