"""The parts that sources are made of: JSON read in pieces, run lengths, ragged rows, and boxes moved with pixels."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pycocotools import mask as coco_mask

from shmloader.images import Fit, Seen
from shmloader.sources import rle
from shmloader.sources.geometry import Placing
from shmloader.sources.json_walk import BLOCK, JsonWalk, NotJson
from shmloader.sources.ragged import Ragged

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


class Trickle(io.StringIO):
    """A file that gives a few characters at a time, whatever is asked for."""

    step = 1

    def read(self, size: int | None = -1, /) -> str:
        return super().read(self.step)


def walked(file: Any) -> dict[str, Any]:
    """Put what the walk gives together again; a value that is an array is a list of its items."""
    walk = JsonWalk(file)
    items = list(walk)
    return {key: [item for at, item in items if at == key] for key in walk.keys}


@given(st.dictionaries(st.text(max_size=4), json_values, max_size=4), st.integers(1, 5), st.sampled_from([None, 1]))
def test_a_walk_gives_what_json_gives(content: dict[str, Any], step: int, indent: int | None) -> None:
    """However the text is cut into pieces: numbers, escapes and nested values included."""
    file = Trickle(json.dumps(content, indent=indent))
    file.step = step
    expected = {key: value if isinstance(value, list) else [value] for key, value in content.items()}
    assert walked(file) == expected


@given(st.dictionaries(st.text(max_size=4), json_values, min_size=1, max_size=3), st.data())
def test_a_cut_text_is_never_taken_for_whole(content: dict[str, Any], data: st.DataObject) -> None:
    """D6: a broken download does not become a smaller set."""
    text = json.dumps(content)
    cut = data.draw(st.integers(0, len(text) - 1))
    with pytest.raises(NotJson):
        walked(io.StringIO(text[:cut]))


def test_a_walk_reads_little_ahead_of_what_it_gives() -> None:
    """Of a text of many blocks, no more than two have been read beyond the item at hand."""
    items = [json.dumps({"n": number, "pad": "x" * 100}) for number in range(40_000)]
    file = io.StringIO(f'{{"items": [{",".join(items)}]}}')
    given = 0
    for (_, item), text in zip(JsonWalk(file), items, strict=True):
        assert item == json.loads(text)
        given += len(text) + 1
        assert file.tell() <= given + 2 * BLOCK


masks = st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(0, 2**32 - 1), st.floats(0, 1)).map(
    lambda each: np.random.default_rng(each[2]).random((each[0], each[1])) < each[3]
)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of pycocotools itself
@given(masks)
def test_run_lengths_are_those_of_pycocotools(mask: np.ndarray) -> None:
    """Packed by pycocotools and read here, made here and read by pycocotools: the same pixels."""
    packed = coco_mask.encode(np.asfortranarray(mask.astype(np.uint8)))
    text = {"size": packed["size"], "counts": packed["counts"].decode()}
    rle.check(text)
    np.testing.assert_array_equal(rle.to_mask(text), mask)
    ours = rle.from_mask(mask)
    rle.check(ours)
    assert ours["counts"] == rle.counts_of(text["counts"])
    theirs = coco_mask.decode(coco_mask.frPyObjects(ours, *ours["size"]))
    np.testing.assert_array_equal(theirs.astype(bool), mask)


@pytest.mark.parametrize("counts", ["\x00", "o", [1, 2], [5, -1], "ä"])
def test_run_lengths_that_make_no_mask_are_refused(counts: Any) -> None:
    """Foreign characters, cut numbers, runs of another size."""
    with pytest.raises(rle.BadRle):
        rle.to_mask({"size": [2, 2], "counts": counts})


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=6), st.data())
def test_ragged_rows_are_the_rows(rows: list[list[int]], data: st.DataObject) -> None:
    """One by one, and taken in any order, with repetitions."""
    ragged = Ragged(
        np.array([each for row in rows for each in row], np.int64), np.array([len(row) for row in rows], np.int64)
    )
    assert [ragged[i].tolist() for i in range(len(ragged))] == rows
    order = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8)) if rows else []
    taken = ragged.take(np.array(order, np.int64))
    assert [taken[i].tolist() for i in range(len(taken))] == [rows[i] for i in order]


def test_ragged_lengths_must_add_up() -> None:
    """A wrong table is refused where it is made."""
    with pytest.raises(ValueError, match="3, but there are 2"):
        Ragged(np.zeros(2), np.array([1, 2]))


@given(
    st.integers(1, 8),
    st.integers(2, 40),
    st.integers(2, 40),
    st.sampled_from([None, Fit(9, 7), Fit(6, 6, None, "center"), Fit(6, 6, 9, "center")]),
    st.data(),
)
def test_a_box_moves_with_its_pixels(turn: int, width: int, height: int, fit: Fit | None, data: st.DataObject) -> None:
    """For all eight orientations: a stored pixel and its box end in the same place; corners never change sides."""
    x, y = data.draw(st.integers(0, width - 1)), data.draw(st.integers(0, height - 1))
    pixels = np.zeros((height, width), np.float64)
    pixels[y, x] = 1
    seen = Seen(*((width, height) if turn >= 5 else (height, width)), turn)
    placing = Placing.of(seen, (0, 0), "stored", None)
    box = np.array([[x, y, x + 1, y + 1]], np.float32)
    (x1, y1, x2, y2), (kept,) = placing.boxes(box)[0][0].tolist(), placing.boxes(box)[1]
    upright = placing.upright(pixels)
    assert upright.shape == (seen.height, seen.width)
    assert kept
    assert upright[int(y1) : int(y2), int(x1) : int(x2)].tolist() == [[1]]
    wrong = box[:, [2, 1, 0, 3]]
    assert (placing.boxes(wrong)[0][0, 2] < placing.boxes(wrong)[0][0, 0]) or x1 == x2 or turn >= 5
    if fit is not None:
        whole = np.array([[0, 0, width, height]], np.float32)
        fitted, _ = Placing.of(seen, (0, 0), "stored", fit).boxes(whole)
        assert fitted.tolist() == [[0, 0, fit.width, fit.height]]
