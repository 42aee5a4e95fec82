"""What ``shmloader-pack`` can be told of its input: the options that only some kinds of sources know."""

from __future__ import annotations

import argparse

from shmloader.images import Fit
from shmloader.sources import Options

from . import pack_formats


def add_arguments(top: argparse.ArgumentParser) -> None:
    """Add the options to the command line, in a group of their own."""
    group = top.add_argument_group(
        "annotations, lists and tables", "All of this is found out; these options correct what was found wrong."
    )
    group.add_argument("--images", metavar="DIR", help="the folder that names of image files are relative to")
    group.add_argument(
        "--image-set", metavar="NAME", help="voc: only what ImageSets/Main/NAME.txt (or the file NAME) lists"
    )
    group.add_argument(
        "--annotated",
        choices=["auto", "upright", "stored"],
        default="auto",
        help="how images with an EXIF rotation lay when boxes and points were drawn on them: upright, or as their "
        "pixels are stored. auto: as the annotated size tells, else upright",
    )
    group.add_argument(
        "--separator",
        metavar="CHAR",
        help="list, table: what stands between columns: a character, or one of tab, comma, semicolon, space",
    )
    group.add_argument(
        "--columns",
        metavar="WORDS",
        help="list: the roles of the columns, as in path,points,label (of path, label, points, boxes, numbers, "
        "number, text, skip); table: the columns to keep, as in photo=image,species=label,height; "
        "webdataset, huggingface: the suffixes or "
        "columns to keep, as in jpg,cls",
    )


_SEPARATORS = {"tab": "\t", "\\t": "\t", "comma": ",", "semicolon": ";", "space": " "}


def source_options(given: argparse.Namespace, fit: Fit | None) -> Options:
    """Return what the command line says of its input."""
    return Options(
        fit=fit,
        images=given.images,
        image_set=given.image_set,
        annotated=given.annotated,
        separator=_SEPARATORS.get(given.separator, given.separator),
        columns=None if given.columns is None else tuple(given.columns.split(",")),
        **pack_formats.options_of(given),
    )
