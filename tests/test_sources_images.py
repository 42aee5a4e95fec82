"""shmloader.images: whatever a file holds, RGB uint8 upright pixels come out, or an error that names the file."""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from shmloader import images
from shmloader.errors import BrokenImage, MissingExtra
from shmloader.images import Fit

# Pillow warns of some damage that it can live with; what this library promises is about values and exceptions.
pillow_may_warn = pytest.mark.filterwarnings("ignore::UserWarning")


def encode(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def ramp(height: int = 8, width: int = 12) -> np.ndarray:
    """All pixels differ, so that every turn and flip shows."""
    return np.arange(height * width * 3, dtype=np.uint8).reshape(height, width, 3)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int) -> None:
    """All eight orientations come out upright, as the EXIF standard defines rows and columns."""
    upright = ramp()
    undo = {
        1: lambda a: a,
        2: np.fliplr,
        3: lambda a: np.rot90(a, 2),
        4: np.flipud,
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a, 1),
        7: lambda a: np.rot90(a, 2).transpose(1, 0, 2),
        8: lambda a: np.rot90(a, -1),
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = Image.fromarray(np.ascontiguousarray(undo[orientation](upright)))
    data = encode(stored, exif=exif)
    np.testing.assert_array_equal(images.decode_rgb(data), upright)
    assert images.check(data) == upright.shape[:2]


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_a_nonsense_orientation_counts_as_upright(orientation: int) -> None:
    """Cameras write such values; the pixels are good."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(Image.fromarray(ramp()), exif=exif)
    np.testing.assert_array_equal(images.decode_rgb(data), ramp())


@pillow_may_warn
def test_a_damaged_exif_block_does_not_damage_the_image() -> None:
    """Only the orientation is lost with the block."""
    data = encode(Image.fromarray(ramp()), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff garbage")
    assert images.decode_rgb(data).shape == (8, 12, 3)
    assert images.check(data) == (8, 12)


def test_a_tiff_is_turned_once() -> None:
    """Pillow turns a TIFF upright by itself: turning it again would lay it down."""
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encode(Image.fromarray(np.ascontiguousarray(np.rot90(ramp(), 1))), "TIFF", exif=exif)
    np.testing.assert_array_equal(images.decode_rgb(data), ramp())
    assert images.check(data) == (8, 12)


def test_grey_fills_all_three_channels() -> None:
    """A grey image has three equal channels."""
    grey = ramp()[:, :, 0]
    np.testing.assert_array_equal(images.decode_rgb(encode(Image.fromarray(grey))), np.stack([grey] * 3, axis=2))


def test_one_bit_becomes_black_and_white() -> None:
    """Mode 1 comes out as 0 and 255."""
    pixels = images.decode_rgb(encode(Image.fromarray(ramp()[:, :, 0] > 100)))
    assert set(np.unique(pixels)) == {0, 255}


def test_sixteen_bit_grey_keeps_its_upper_byte() -> None:
    """It is scaled: clipping would turn nearly all of it white."""
    deep = (np.arange(96, dtype=np.uint16) * 600).reshape(8, 12)
    np.testing.assert_array_equal(
        images.decode_rgb(encode(Image.fromarray(deep)))[:, :, 1], (deep >> 8).astype(np.uint8)
    )


@pytest.mark.parametrize("mode", ["I", "F"])
def test_numbers_without_a_range_are_refused(mode: str) -> None:
    """A float image is an error, not a clipped picture."""
    data = encode(Image.fromarray(ramp()[:, :, 0]).convert(mode), "TIFF")
    with pytest.raises(BrokenImage, match=f"mode {mode}"):
        images.decode_rgb(data, name="heights.tif")
    with pytest.raises(BrokenImage, match=r"heights\.tif"):
        images.check(data, name="heights.tif")


def test_alpha_is_laid_over_white() -> None:
    """Transparent pixels are white whatever colour hides there, half transparent ones half way to it."""
    rgba = np.zeros((1, 3, 4), np.uint8)
    rgba[0, :, 3] = (0, 128, 255)
    pixels = images.decode_rgb(encode(Image.fromarray(rgba)))
    assert pixels[0, 0].tolist() == [255, 255, 255]
    assert pixels[0, 1].tolist() == [127, 127, 127]
    assert pixels[0, 2].tolist() == [0, 0, 0]


def test_palette_with_a_transparent_colour_is_laid_over_white() -> None:
    """The transparency of a palette image and of an RGB image with a key colour counts as alpha."""
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putdata([0, 1])
    assert images.decode_rgb(encode(palette))[0].tolist() == [[10, 20, 30], [40, 50, 60]]
    assert images.decode_rgb(encode(palette, transparency=0))[0].tolist() == [[255, 255, 255], [40, 50, 60]]
    keyed = Image.fromarray(np.array([[[1, 2, 3], [4, 5, 6]]], np.uint8))
    assert images.decode_rgb(encode(keyed, transparency=(1, 2, 3)))[0].tolist() == [[255, 255, 255], [4, 5, 6]]


def test_grey_with_alpha_is_laid_over_white() -> None:
    """Mode LA follows the same rule."""
    la = Image.merge("LA", [Image.new("L", (1, 1), 7), Image.new("L", (1, 1), 0)])
    assert images.decode_rgb(encode(la))[0, 0].tolist() == [255, 255, 255]


def test_cmyk_is_converted() -> None:
    """Pure cyan ink is no red at all."""
    red, green, blue = images.decode_rgb(encode(Image.new("CMYK", (8, 8), (255, 0, 0, 0)), "JPEG"))[4, 4].tolist()
    assert red < 10
    assert min(green, blue) > 245


def test_an_animation_gives_its_first_frame() -> None:
    """Frames after the first are not looked at."""
    frames = [Image.new("RGB", (3, 2), colour) for colour in ("red", "blue")]
    data = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert images.decode_rgb(data)[0, 0].tolist() == [255, 0, 0]


@pillow_may_warn
@given(cut=st.floats(0, 0.99), form=st.sampled_from(["JPEG", "PNG", "BMP", "TIFF", "WEBP"]))
def test_a_cut_file_is_an_error_with_its_name(cut: float, form: str) -> None:
    """Wherever a file ends too early: BrokenImage with name and length, or an image of full size; nothing else."""
    whole = encode(Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 30, 3), np.uint8)), form)
    data = whole[: int(len(whole) * cut)]
    for look in (
        lambda: images.decode_rgb(data, name="photos/a.jpg").shape[:2],
        lambda: images.check(data, name="photos/a.jpg"),
    ):
        error = None
        try:
            size = look()
        except BrokenImage as caught:
            error = caught
        if error is None:
            assert size == (40, 30)
        else:
            assert (error.name, error.nbytes) == ("photos/a.jpg", len(data))
            assert "BytesIO" not in str(error)


@pillow_may_warn
@given(at=st.integers(0, 2**16), value=st.integers(0, 255), form=st.sampled_from(["JPEG", "PNG", "GIF", "TIFF", "BMP"]))
def test_a_flipped_byte_never_escapes_as_another_exception(at: int, value: int, form: str) -> None:
    """Pillow raises a dozen classes for damaged bytes; one comes out of here."""
    data = bytearray(encode(Image.fromarray(ramp()), form))
    data[at % len(data)] = value
    for look in (images.decode_rgb, images.check):
        with contextlib.suppress(BrokenImage):
            look(data)


def test_a_jpeg_cut_short_is_found_by_the_quick_check() -> None:
    """The check decodes at an eighth of the size, and still reads to the end."""
    data = encode(Image.fromarray(np.random.default_rng(0).integers(0, 255, (200, 300, 3), np.uint8)), "JPEG")
    assert images.check(data) == (200, 300)
    with pytest.raises(BrokenImage, match="truncated"):
        images.check(data[:-200])


def test_chw_is_contiguous_and_can_be_born_in_place() -> None:
    """decode_chw gives torch's layout, and writes into memory of the caller's when given some."""
    data = encode(Image.fromarray(ramp()))
    fresh = images.decode_chw(data)
    assert fresh.flags.c_contiguous
    assert fresh.flags.writeable
    np.testing.assert_array_equal(fresh, ramp().transpose(2, 0, 1))
    slot = np.zeros((3, 8, 12), np.uint8)
    assert images.decode_chw(data, out=slot) is slot
    np.testing.assert_array_equal(slot, fresh)


def test_a_missing_pillow_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Pillow the error says what to install."""
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtra, match=r"shmloader\[images\]"):
        images.decode_rgb(b"")


@given(
    width=st.integers(1, 300),
    height=st.integers(1, 300),
    target=st.tuples(st.integers(1, 64), st.integers(1, 64)),
    crop=st.sampled_from([None, "center"]),
    more=st.none() | st.integers(0, 40),
)
def test_a_fit_gives_exactly_the_size_asked_for(
    width: int, height: int, target: tuple[int, int], crop: str | None, more: int | None
) -> None:
    """For every image and every target, by every way."""
    short = None if more is None or crop is None else max(target) + more
    fitted = Fit(*target, short=short, crop=crop).apply(Image.new("RGB", (width, height)))
    assert (fitted.height, fitted.width) == target


def test_a_centre_crop_takes_the_middle() -> None:
    """An image with its middle marked gives the mark."""
    array = np.zeros((40, 80, 3), np.uint8)
    array[10:30, 30:50] = 255
    fitted = Fit(20, 20, short=40, crop="center").apply(Image.fromarray(array))
    assert np.asarray(fitted).min() == 255


@pytest.mark.parametrize(
    ("words", "fit"),
    [
        (("224x224",), Fit(224, 224)),
        (("320X200",), Fit(200, 320)),
        (("64",), Fit(64, 64)),
        (("224x224", "short:256", "center"), Fit(224, 224, 256, "center")),
        (("224x224", None, "center"), Fit(224, 224, None, "center")),
    ],
)
def test_words_of_the_command_line(words: tuple[str, ...], fit: Fit) -> None:
    """Sizes are width before height, as people write them."""
    assert Fit.parse(*words) == fit
    assert pickle.loads(pickle.dumps(fit)) == fit


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("big",), "WIDTHxHEIGHT"),
        (("0x5",), "at least 1"),
        (("224x224", "long:5"), "short:PIXELS"),
        (("224x224", "short:256"), "crop='center'"),
        (("224x224", "short:200", "center"), "at least 224"),
        (("224x224", None, "left"), "'center'"),
    ],
)
def test_a_size_that_cannot_be_is_explained(words: tuple[str, ...], text: str) -> None:
    """The error says what was expected."""
    with pytest.raises(ValueError, match=text):
        Fit.parse(*words)


def test_names_of_image_files_are_known_in_any_case() -> None:
    """Suffixes are compared in lower case by whoever asks."""
    assert Path("A.JPG").suffix.lower() in images.SUFFIXES
    assert ".txt" not in images.SUFFIXES
