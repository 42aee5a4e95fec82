"""What ``shmloader-pack`` can be told of tokens, tar shards, key-value files and Python datasets: options of these."""

from __future__ import annotations

import argparse
import json
from typing import Any

from shmloader.sources import PythonDataset

from .imported import BadOption, imported


def add_arguments(top: argparse.ArgumentParser) -> None:
    """Add the options to the command line, in groups of their own."""
    tokens = top.add_argument_group("token files", "A flat .bin file of token ids is cut into windows.")
    tokens.add_argument("--window", type=int, metavar="N", help="tokens in one sample, as in 1025")
    tokens.add_argument(
        "--stride", type=int, metavar="N", help="tokens from one window to the next (default: a window's)"
    )
    tokens.add_argument(
        "--token-dtype", metavar="DTYPE", help="of the numbers in the file (default: as its head says, or uint16)"
    )
    tokens.add_argument("--tokens-as", metavar="DTYPE", help="of the samples (default: int64); stored as in the file")
    tokens.add_argument("--vocab-size", type=int, metavar="N", help="check that all tokens are below it")
    keyed = top.add_argument_group("LMDB files of others", "One sample a key, in the order of the keys.")
    keyed.add_argument(
        "--keys",
        metavar="PATTERNS",
        help="how the keys of samples look, as in image-%%09d,label-%%09d: one field a pattern; others are left out",
    )
    keyed.add_argument(
        "--decode", metavar="MODULE:FUNCTION", help="makes a sample of each key and value (with --keys: dict of values)"
    )
    python = top.add_argument_group("Python datasets")
    python.add_argument(
        "--dataset",
        metavar="MODULE:FUNCTION",
        help="instead of SOURCE: a function that returns the dataset, map-style or iterable; modules in the current "
        "folder are found",
    )
    python.add_argument("--dataset-args", metavar="JSON", help="its arguments: a JSON object, or a list of them")


def options_of(given: argparse.Namespace) -> dict[str, Any]:
    """Return what the command line says, as arguments for ``Options``. Raises BadOption for what cannot be had."""
    return {
        "window": given.window,
        "stride": given.stride,
        "token_dtype": given.token_dtype,
        "tokens_as": given.tokens_as,
        "vocab_size": given.vocab_size,
        "keys": None if given.keys is None else tuple(given.keys.split(",")),
        "decode": None if given.decode is None else imported(given.decode, "--decode"),
    }


def dataset_of(given: argparse.Namespace) -> PythonDataset:
    """Call the function that --dataset names, with --dataset-args. Raises BadOption, and whatever it raises."""
    make = imported(given.dataset, "--dataset")
    try:
        arguments = json.loads(given.dataset_args) if given.dataset_args is not None else []
    except ValueError as error:
        raise BadOption(f"--dataset-args {given.dataset_args!r} is no JSON: {error}") from error
    if not isinstance(arguments, dict | list):
        raise BadOption(f"--dataset-args {given.dataset_args!r} must be a JSON object or a list")
    dataset = make(**arguments) if isinstance(arguments, dict) else make(*arguments)
    name = given.dataset if given.dataset_args is None else f"{given.dataset} {given.dataset_args}"
    return PythonDataset(dataset, name)
