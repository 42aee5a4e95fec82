"""The demo's data: an image folder cut from the photographs that scikit-image and scikit-learn ship in their packages.

    photos/cat/000.jpg ... photos/rocket/039.jpg

Every file is a random window of a photograph, scaled, sometimes mirrored, and saved at a random JPEG quality: hundreds
of real JPEGs of different sizes. In between, as in any real folder: grey files, files that lie on their side and say so
in EXIF, PNGs with a transparent border, and a text file. The same seed gives the same files.

The photographs are read from the installed packages without importing them (their loaders may write a cache into the
home directory). Run by hand: ``python -m shmloader_tools.demo_photos FOLDER [--per-class N]``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image

PHOTOGRAPHS: dict[str, tuple[str, str]] = {
    "astronaut": ("skimage", "data/astronaut.png"),
    "camera": ("skimage", "data/camera.png"),  # grey: its files are stored grey
    "cat": ("skimage", "data/chelsea.png"),
    "coffee": ("skimage", "data/coffee.png"),
    "flower": ("sklearn", "datasets/images/flower.jpg"),
    "motorcycle": ("skimage", "data/motorcycle_left.png"),
    "palace": ("sklearn", "datasets/images/china.jpg"),
    "retina": ("skimage", "data/retina.jpg"),
    "rocket": ("skimage", "data/rocket.jpg"),
    "stars": ("skimage", "data/hubble_deep_field.jpg"),
}
"""Class -> (package, file in it)."""


def load_photograph(package: str, inside: str) -> Image.Image:
    """Return a photograph that a package ships: a value of PHOTOGRAPHS."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is not installed: pip install 'shmloader[demo]'")
    image = Image.open(Path(spec.origin).parent / inside)
    image.load()
    return image


def build(folder: Path, *, per_class: int = 40, seed: int = 0) -> int:
    """Write ``per_class`` files for each class into ``folder``, which must not exist; return how many in all."""
    folder.mkdir(parents=True)
    written = 0
    for name, (package, inside) in PHOTOGRAPHS.items():
        photograph = load_photograph(package, inside)
        (folder / name).mkdir()
        # One stream per class and file: adding a class does not change the files of another.
        for number in range(per_class):
            rng = np.random.default_rng([seed, *name.encode(), number])
            _write(_window(photograph, rng), folder / name / f"{number:03}", number, rng)
            written += 1
    (folder / "cat" / "about.txt").write_text("This file is no image, and the packer says so.\n")
    return written


def _window(photograph: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Return a random window of the photograph, 160 to 400 pixels on each side."""
    width, height = (int(rng.integers(160, 401)) for _ in range(2))
    zoom = rng.uniform(0.5, 1.0)  # of the largest window with these proportions
    scale = zoom * min(photograph.width / width, photograph.height / height)
    across, down = width * scale, height * scale
    left, top = rng.uniform(0, photograph.width - across), rng.uniform(0, photograph.height - down)
    window = photograph.resize((width, height), Image.Resampling.BICUBIC, box=(left, top, left + across, top + down))
    return window.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else window


def _write(image: Image.Image, stem: Path, number: int, rng: np.random.Generator) -> None:
    if number % 40 == 7 and image.mode == "RGB":
        framed = image.convert("RGBA")
        alpha = Image.new("L", image.size, 0)
        alpha.paste(255, (8, 8, image.width - 8, image.height - 8))
        framed.putalpha(alpha)
        framed.save(stem.with_suffix(".png"))
        return
    exif = Image.Exif()
    if number % 8 == 3:  # a camera held upright: the pixels lie on their side, EXIF says how to turn them
        image = image.transpose(Image.Transpose.ROTATE_90)
        exif[0x0112] = 6
    image.save(stem.with_suffix(".jpg"), "JPEG", quality=int(rng.integers(75, 96)), exif=exif)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="demo_photos", description="Write an image folder of real photographs.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--per-class", type=int, default=40, metavar="N")
    options = parser.parse_args(argv)
    if options.folder.exists():
        print(f"demo_photos: error: {options.folder} exists already", file=sys.stderr)
        return 1
    print(f"{build(options.folder, per_class=options.per_class)} photographs in {options.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
