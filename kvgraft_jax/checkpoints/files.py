"""Reading what a checkpoint says about itself before any tensor is read: JSON documents and byte ranges."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import numpy as np

from kvgraft_jax import digest, errors, paths


def parse_json(raw: bytes, origin: str) -> dict[str, Any]:
    """Parses the JSON object in `raw`; `WeightsError` for anything else, repeated keys included."""
    try:
        document = digest.parse_json(raw)
    except ValueError as error:
        raise errors.WeightsError(f"{origin}: not readable as JSON ({error}); fetch the file again") from None
    if not isinstance(document, dict):
        raise errors.WeightsError(f"{origin}: got a JSON {type(document).__name__}, wanted an object")
    return document


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Reads the JSON object in the file `path`."""
    return parse_json(path.read_bytes(), str(path))


def existing_file(path: str | os.PathLike[str], wanted: str) -> pathlib.Path:
    """Returns `path`; `WeightsError` says what was wanted there if it is missing."""
    path = paths.absolute(path, "model file")
    if not path.is_file():
        state = "is a directory" if path.is_dir() else "does not exist"
        raise errors.WeightsError(f"{path}: {state}; wanted {wanted}")
    return path


def check_directory(path: pathlib.Path, wanted: str) -> None:
    """Raises a `WeightsError` unless `path` is a directory; `wanted` says of what kind."""
    if not path.is_dir():
        state = "is a file" if path.exists() else "does not exist"
        raise errors.WeightsError(f"{path}: {state}; wanted a directory {wanted}")


def read_bytes(path: pathlib.Path, offset: int, size: int) -> np.ndarray:
    """Reads `size` bytes at `offset`, as a fresh uint8 array."""
    raw = np.fromfile(path, np.uint8, count=size, offset=offset)
    if raw.size != size:
        raise errors.WeightsError(f"{path}: ends at byte {offset + raw.size}, wanted {offset + size}; was it replaced?")
    return raw
