"""Which samples go where: pure functions of counts and seeds, the same on every machine for ever."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from shmloader import images
from shmloader.errors import MisuseError
from shmloader.sources import PackSettings, Part
from shmloader.sources.arrangement import arrange, random_order, shares_of


def test_random_orders_are_pinned() -> None:
    """These very numbers: a pack that was begun by another version is gone on with in the same order."""
    assert random_order(8, 0).tolist() == [5, 7, 2, 0, 3, 1, 6, 4]
    assert random_order(8, -1).tolist() == [5, 0, 2, 4, 7, 1, 6, 3]


@given(st.integers(0, 2000), st.integers(-(2**70), 2**70))
def test_random_orders_are_permutations(count: int, seed: int) -> None:
    """Nothing is lost or doubled, whatever the seed."""
    assert np.array_equal(np.sort(random_order(count, seed)), np.arange(count))


def test_random_orders_look_random() -> None:
    """Over many seeds, each sample is everywhere equally often (chi-squared), and neighbours part."""
    counts = np.zeros((10, 10))
    for seed in range(3000):
        counts[np.arange(10), random_order(10, seed)] += 1
    assert float(((counts - 300) ** 2 / 300).sum()) < 150  # 81 degrees of freedom
    order = random_order(10_000, 5)
    assert abs(float(np.corrcoef(order[:-1], order[1:])[0, 1])) < 0.05


@given(st.integers(0, 500), st.lists(st.floats(0.01, 1), min_size=1, max_size=5))
def test_shares_add_up(count: int, weights: list[float]) -> None:
    """Shares that are 1 together give everything away, each within one of its due."""
    shares = [weight / sum(weights) for weight in weights]
    given_out = shares_of(count, shares)
    assert sum(given_out) == count
    assert all(abs(number - share * count) <= 1 for number, share in zip(given_out, shares, strict=True))


@given(
    st.integers(30, 400),
    st.integers(0, 9),
    st.booleans(),
    st.one_of(st.none(), st.integers(0, 9)),
    st.integers(30, 500),
)
def test_parts_are_disjoint_and_complete(
    count: int, split_seed: int, stratify: bool, shuffle: int | None, limit: int
) -> None:
    """Of what the limit leaves, every sample is in one part; without shuffle parts keep the input's order."""
    classes = np.arange(count) % 3
    parts = (Part("a", 0.5), Part("b", 0.3), Part("c", 0.2))
    settings = PackSettings(split=parts, split_seed=split_seed, stratify=stratify, shuffle=shuffle, limit=limit)
    arranged = arrange(count, settings, classes)
    [whole] = arrange(count, PackSettings(shuffle=shuffle, limit=limit), None)
    assert sorted(np.concatenate(arranged).tolist()) == sorted(whole.tolist())
    place = {int(index): at for at, index in enumerate(whole)}
    for part in arranged:
        assert [place[int(index)] for index in part] == sorted(place[int(index)] for index in part)
    if stratify:
        for each in range(3):
            total = int((classes[whole] == each).sum())
            for part, share in zip(arranged, (0.5, 0.3, 0.2), strict=True):
                assert abs(int((classes[part] == each).sum()) - share * total) <= 1


def test_splits_that_cannot_be_are_refused() -> None:
    """No classes to stratify by, or too few samples for a part."""
    with pytest.raises(MisuseError, match="needs classes"):
        arrange(10, PackSettings(split=(Part("a", 0.5), Part("b", 0.5)), stratify=True), None)
    with pytest.raises(MisuseError, match="'b' of the split would be empty"):
        arrange(3, PackSettings(split=(Part("a", 0.95), Part("b", 0.05))), None)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")  # of Pillow, for a cut TIFF
@pytest.mark.parametrize("form", ["JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF"])
@pytest.mark.parametrize("options", [{}, {"progressive": True, "comment": b"x" * 300, "icc_profile": b"y" * 70_000}])
def test_the_size_of_an_image_is_read_from_its_head(form: str, options: dict[str, object]) -> None:
    """As Pillow says, for every format, whatever segments stand before it; a cut head is Pillow's to refuse."""
    buffer = io.BytesIO()
    Image.new("RGB", (37, 23)).save(buffer, form, **(options if form == "JPEG" else {}))
    data = buffer.getvalue()
    assert images.size_of(data) == images.size_of(memoryview(np.frombuffer(data, np.uint8))) == (23, 37)
    with pytest.raises(images.BrokenImage):
        images.size_of(data[:10])
