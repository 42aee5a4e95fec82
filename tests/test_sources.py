"""shmloader.sources: what is recognised, in which order it comes, what is left out and said."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from shmloader import sources
from shmloader.errors import BrokenImage, MisuseError, SourceError, UnknownSource
from shmloader.images import Fit
from shmloader.sources import ArrayFiles, ImageFolder, Options
from shmloader.sources.base import NameTable


def photo(path: Path, colour: tuple[int, int, int] = (200, 30, 90), size: tuple[int, int] = (12, 8)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes and five images; names out of order, one deeper, one in capitals."""
    root = tmp_path / "photos"
    photo(root / "dog" / "b.png", (0, 255, 0))
    photo(root / "dog" / "a.png", (0, 0, 255))
    photo(root / "cat" / "z.JPG", (255, 0, 0))
    photo(root / "cat" / "deep" / "a.png", (9, 9, 9))
    photo(root / "cat" / "b.png", (1, 2, 3))
    return root


def test_classes_are_the_sorted_subfolders(folder: Path) -> None:
    """Labels count the classes in the order of their names; the images follow class by class, folder by folder."""
    data = ImageFolder(folder)
    assert data.classes == ["cat", "dog"]
    assert data.labels.tolist() == [0, 0, 0, 1, 1]
    names = [os.path.relpath(data.name_of(i), folder) for i in range(len(data))]
    assert names == ["cat/b.png", "cat/z.JPG", "cat/deep/a.png", "dog/a.png", "dog/b.png"]
    assert data.class_counts() == {"cat": 3, "dog": 2}
    assert data.notes == ()


def test_samples_are_pixels_and_a_label(folder: Path) -> None:
    """An image comes as uint8 (3, h, w), its label as an int; negative indices count from the end."""
    data = ImageFolder(folder)
    image, label = data[-1]
    assert isinstance(image, torch.Tensor)
    assert (image.dtype, tuple(image.shape), label) == (torch.uint8, (3, 8, 12), 1)
    assert image[:, 0, 0].tolist() == [0, 255, 0]
    for index in (5, -6):
        with pytest.raises(IndexError, match="5 samples"):
            data[index]


def test_encoded_samples_are_the_bytes_of_the_files(folder: Path) -> None:
    """What is packed is what lay in the file, bit for bit."""
    data = ImageFolder(folder, encoded=True)
    assert data[3] == ((folder / "dog" / "a.png").read_bytes(), 1)
    assert data.encodings == {"image": "encoded-image"}
    assert data.field_names == ("image", "label")
    with pytest.raises(ValueError, match="fit"):
        ImageFolder(folder, encoded=True, fit=Fit(4, 4))


def test_a_fit_gives_every_image_one_size(folder: Path) -> None:
    """With a size the images can be batched; the manifest says how it came about."""
    photo(folder / "dog" / "wide.png", size=(50, 9))
    data = ImageFolder(folder, fit=Fit(6, 5))
    batch, labels = next(iter(DataLoader(data, batch_size=len(data))))
    assert tuple(batch.shape) == (6, 3, 6, 5)
    assert labels.dtype == torch.int64
    assert data.metadata["images"] == "decoded, stretched to 5x6"
    assert data.encodings == {}


def test_a_broken_image_is_named(folder: Path) -> None:
    """E7: decoding and packing stop with the path of the file."""
    bad = folder / "dog" / "c.jpg"
    bad.write_bytes((folder / "cat" / "z.JPG").read_bytes()[:200])
    for data in (ImageFolder(folder), ImageFolder(folder, encoded=True)):
        with pytest.raises(BrokenImage) as caught:
            data[5]
        assert caught.value.name == str(bad)


def test_everything_left_out_is_noted(folder: Path) -> None:
    """Hidden, foreign and stray files are counted and named, and do not move a label."""
    (folder / ".DS_Store").write_bytes(b"")
    photo(folder / ".git" / "a.png")
    (folder / "cat" / ".hidden.png").write_bytes(b"")
    for i in range(9):
        (folder / "cat" / f"notes{i}.txt").write_text("x")
    photo(folder / "stray.png")
    (folder / "readme.md").write_text("x")
    data = ImageFolder(folder)
    assert len(data) == 5
    notes = "\n".join(data.notes)
    assert "hidden: 3" in notes
    assert "not images by their names: 10 (cat/notes0.txt" in notes
    assert "and 5 more" in notes
    assert "outside of any class folder: 1 (stray.png)" in notes


def test_an_empty_class_keeps_its_label(folder: Path) -> None:
    """Leaving the class out would renumber the ones behind it."""
    (folder / "cow").mkdir()
    data = ImageFolder(folder)
    assert data.classes == ["cat", "cow", "dog"]
    assert data.labels.tolist() == [0, 0, 0, 2, 2]
    assert data.class_counts() == {"cat": 3, "cow": 0, "dog": 2}
    assert any("cow" in note for note in data.notes)


def test_links_are_followed_and_loops_are_not(folder: Path, tmp_path: Path) -> None:
    """A linked file and a linked folder are data; a link upwards is noted; a dangling one is an error."""
    outside = photo(tmp_path / "elsewhere" / "o.png")
    (folder / "dog" / "linked.png").symlink_to(outside)
    (folder / "emu").symlink_to(outside.parent)
    (folder / "cat" / "up").symlink_to(folder / "cat")
    data = ImageFolder(folder)
    assert data.class_counts() == {"cat": 3, "dog": 3, "emu": 1}
    assert any("lead back" in note and "cat/up" in note for note in data.notes)
    (folder / "dog" / "gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
    with pytest.raises(SourceError, match=r"gone\.jpg: a symbolic link to .*nowhere\.jpg, which does not exist"):
        ImageFolder(folder)


def test_a_pipe_named_like_an_image_is_not_waited_for(folder: Path) -> None:
    """Opening a fifo would block for ever."""
    os.mkfifo(folder / "dog" / "pipe.png")
    data = ImageFolder(folder)
    assert len(data) == 5
    assert any("pipe.png" in note for note in data.notes)


def test_any_file_name_can_be_read(folder: Path) -> None:
    """Names with spaces, newlines, other scripts and bytes that are no UTF-8."""
    names = [b"a b.png", b"new\nline.png", "größe 画像.png".encode(), b"\xff\xfe.png"]
    for name in names:
        photo(folder / "dog" / os.fsdecode(name))
    data = ImageFolder(folder)
    found = {os.fsencode(os.path.basename(data.name_of(i))) for i in range(len(data))}
    assert found >= set(names)
    assert all(len(data[i]) == 2 for i in range(len(data)))


def test_an_image_folder_pickles_small_and_works_in_spawned_workers(folder: Path) -> None:
    """C6: it can go to workers however they are started."""
    for i in range(300):
        (folder / "dog" / f"{i:04}.png").symlink_to(folder / "dog" / "a.png")
    data = ImageFolder(folder, fit=Fit(4, 4))
    assert len(pickle.dumps(data)) < 40 * len(data)
    copy = pickle.loads(pickle.dumps(data))
    assert torch.equal(copy[7][0], data[7][0])


def test_a_name_table_holds_any_names() -> None:
    """Empty ones, long ones, surrogates; and no index outside."""
    names = ["", "a", "x" * 5000, "\udcff", "ü/日本"]
    table = NameTable(names)
    assert [table[i] for i in range(len(table))] == names
    for index in (-1, 5):
        with pytest.raises(IndexError):
            table[index]


# --- arrays -----------------------------------------------------------------------------------------------------------


def test_rows_of_an_npy_are_its_samples(tmp_path: Path) -> None:
    """One array gives its rows as tensors of its dtype, copied: writing to one changes nothing."""
    array = np.arange(24, dtype=np.int16).reshape(4, 3, 2)
    np.save(tmp_path / "x.npy", array)
    data = ArrayFiles(tmp_path / "x.npy")
    data[1].fill_(0)
    assert len(data) == 4
    assert torch.equal(data[1], torch.from_numpy(array[1]))
    assert torch.equal(data[-1], torch.from_numpy(array[3]))
    assert isinstance(data.columns(), np.memmap)
    with pytest.raises(IndexError):
        data[4]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_members_of_an_npz_become_dict_samples(tmp_path: Path, save: Any) -> None:
    """Compressed or not, the fields keep their names, order and dtypes; a 1-d one gives 0-d tensors."""
    x = np.random.default_rng(0).random((5, 2)).astype(np.float32)
    save(tmp_path / "d.npz", x=x, label=np.arange(5, dtype=np.int32))
    data = ArrayFiles(tmp_path / "d.npz")
    sample = data[2]
    assert list(sample) == ["x", "label"]
    assert torch.equal(sample["x"], torch.from_numpy(x[2]))
    assert sample["label"].dtype == torch.int32
    assert int(sample["label"]) == 2
    columns = ArrayFiles(tmp_path / "d.npz").columns()
    assert isinstance(columns, dict)
    assert isinstance(columns["x"], np.memmap) == (save is np.savez)


def test_a_folder_of_npy_files_is_one_set(tmp_path: Path) -> None:
    """The stem of each file names its field."""
    np.save(tmp_path / "b.npy", np.zeros((3, 2)))
    np.save(tmp_path / "a.npy", np.ones(3, dtype=bool))
    sample = ArrayFiles(tmp_path)[0]
    assert list(sample) == ["a", "b"]
    assert sample["a"].dtype == torch.bool


def test_unequal_first_axes_are_named_with_both_lengths(tmp_path: Path) -> None:
    """The message shows which arrays, and how long each is."""
    np.savez(tmp_path / "d.npz", x=np.zeros((5, 2)), y=np.zeros(4))
    with pytest.raises(SourceError, match="'x' has 5 rows, 'y' has 4"):
        ArrayFiles(tmp_path / "d.npz")


def test_odd_layouts_read_right(tmp_path: Path) -> None:
    """Fortran order, foreign byte order, empty arrays and half floats come out as numpy reads them."""
    np.savez(
        tmp_path / "d.npz",
        f=np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        b=np.arange(3, dtype=">i4"),
        e=np.zeros((3, 0), np.float16),
    )
    sample = ArrayFiles(tmp_path / "d.npz")[1]
    assert sample["f"].tolist() == [4, 5, 6, 7]
    assert (sample["b"].dtype, int(sample["b"])) == (torch.int32, 1)
    assert (sample["e"].dtype, sample["e"].shape) == (torch.float16, (0,))


def test_strings_and_bytes_come_out_as_such(tmp_path: Path) -> None:
    """Arrays of text are data too."""
    np.savez(tmp_path / "d.npz", s=np.array(["a", "größer"]), b=np.array([b"x", b"yz"]))
    data = ArrayFiles(tmp_path / "d.npz")
    assert data[1] == {"s": "größer", "b": b"yz"}
    assert data.columns() is not None


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda p: np.save(p, np.array([{}, 1], dtype=object)), "Python objects"),
        (lambda p: np.save(p, np.float32(3)), "no rows"),
        (lambda p: np.save(p, np.zeros(3, dtype="datetime64[s]")), "torch does not know"),
        (lambda p: np.save(p, np.zeros(3, dtype=[("a", "i4")])), "torch does not know"),
        (lambda p: p.write_bytes(b"no array"), "not readable"),
        (lambda p: p.write_bytes(b""), "not readable"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, make: Any, why: str) -> None:
    """No pickle is ever loaded; each refusal names the file and the reason."""
    path = tmp_path / "bad.npy"
    make(path)
    with pytest.raises(SourceError, match=why) as caught:
        ArrayFiles(path)
    assert caught.value.path == str(path)


def test_a_cut_npy_is_refused_before_it_can_kill(tmp_path: Path) -> None:
    """Mapping a file that is shorter than its header says would end in SIGBUS."""
    path = tmp_path / "x.npy"
    np.save(path, np.zeros((1000, 10)))
    os.truncate(path, 5000)
    with pytest.raises(SourceError, match="80000 bytes of data were announced"):
        ArrayFiles(path)


def test_a_broken_npz_is_refused(tmp_path: Path) -> None:
    """A file that is no archive, and an archive of something else."""
    (tmp_path / "x.npz").write_bytes(b"PK nothing")
    with pytest.raises(SourceError, match="not readable"):
        ArrayFiles(tmp_path / "x.npz")


def test_arrays_pickle_as_their_path(tmp_path: Path) -> None:
    """C6: a memory map would travel as all of its bytes."""
    np.save(tmp_path / "x.npy", np.arange(100_000))
    data = ArrayFiles(tmp_path / "x.npy")
    pickled = pickle.dumps(data)
    assert len(pickled) < 1000
    assert int(pickle.loads(pickled)[77]) == 77


# --- recognition ------------------------------------------------------------------------------------------------------


def test_each_kind_is_recognised_by_itself(folder: Path, tmp_path: Path) -> None:
    """Nobody has to say what lies there."""
    np.save(tmp_path / "x.npy", np.zeros(3))
    assert sources.recognise(folder) is ImageFolder
    assert sources.recognise(tmp_path / "x.npy") is ArrayFiles
    opened = sources.open_source(folder)
    assert isinstance(opened, ImageFolder)
    assert opened.encoded
    fitted = sources.open_source(folder, options=Options(fit=Fit(4, 4)))
    assert tuple(fitted[0][0].shape) == (3, 4, 4)
    assert set(sources.kinds()) >= {"image-folder", "arrays", "voc"}


def test_what_is_not_recognised_says_what_was_looked_for(tmp_path: Path) -> None:
    """The error names the path, what is there, and all that would have been recognised."""
    photo(tmp_path / "flat" / "a.jpg")
    (tmp_path / "empty").mkdir()
    (tmp_path / "t.xyz").write_text("")
    for name, there in (("flat", r"1 \.jpg"), ("empty", "is empty"), ("t.xyz", "'.xyz'")):
        with pytest.raises(UnknownSource, match=there) as caught:
            sources.recognise(tmp_path / name)
        assert all(source.looked_for in str(caught.value) for source in sources.SOURCES)
    with pytest.raises(SourceError, match="no such file"):
        sources.recognise(tmp_path / "nothing")


def test_a_kind_that_is_named_is_taken_at_its_word(tmp_path: Path) -> None:
    """The reader itself then says what is missing."""
    (tmp_path / "a").mkdir()
    with pytest.raises(SourceError, match="no image"):
        sources.open_source(tmp_path, "image-folder")
    with pytest.raises(SourceError, match="no array"):
        sources.open_source(tmp_path, "arrays")
    with pytest.raises(SourceError, match="no such file"):
        sources.open_source(tmp_path / "gone", "arrays")
    np.save(tmp_path / "x.npy", np.zeros(3))
    with pytest.raises(MisuseError, match="not image files"):
        sources.open_source(tmp_path / "x.npy", options=Options(fit=Fit(4, 4)))
