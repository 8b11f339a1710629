"""Paths as callers give them: read in one way wherever one enters, so that save, list and load mean the same place.

TensorStore, below Orbax, removes `..` from the text of a path, which behind a link is another place; so it is resolved
here.
"""

from __future__ import annotations

import os
import pathlib
import re
from typing import Any

from kvgraft_jax import errors

# Two letters at least: one letter is a drive elsewhere. `Path("s3://x")` has lost a slash before it gets here.
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_WANTED = "a path, as text or a pathlib.Path"


def absolute(path: str | os.PathLike[str], name: str) -> pathlib.Path:
    """Returns the absolute path that a caller means, without `..`; nothing is made.

    `~` and `~user` at its beginning are home directories. Behind a link, `..` is the directory above the link's target,
    as the system has it. Other links stay as they are.

    Args:
      path: text or a `pathlib.Path`.
      name: what the path is for, as messages call it.

    Raises:
      InputError: None, bytes, an empty path, one with a NUL, an address such as `s3://bucket`, a home directory that
        nobody has, or a relative path from a working directory that is gone.
    """
    try:
        text = os.fspath(path)
    except TypeError:
        raise _refused(name, path, f"wanted {_WANTED}") from None
    if not isinstance(text, str):
        raise _refused(name, path, f"wanted {_WANTED}; os.fsdecode makes text of bytes")
    if not text:
        raise _refused(name, path, "wanted a path; '.' is the working directory")
    if "\0" in text:
        raise _refused(name, path, "no file has a NUL in its name")
    if _ADDRESS.match(text):
        raise _refused(name, path, f"only local paths can be used, no addresses; ./{text} is a local path")
    expanded = os.path.expanduser(text)
    if expanded.startswith("~") and text.startswith("~"):
        raise _refused(name, path, f"there is no such home directory; ./{text} is a path that begins with ~")
    try:
        found = pathlib.Path(expanded).absolute()
    except FileNotFoundError:
        raise _refused(name, path, "the working directory is gone; change to another, or name a path from /") from None
    if ".." not in found.parts:
        return found
    end = len(found.parts) - found.parts[::-1].index("..")
    return pathlib.Path(os.path.realpath(pathlib.Path(*found.parts[:end])), *found.parts[end:])


def check_plain(path: pathlib.Path, name: str) -> None:
    """Checks that TensorStore, which reads and writes the arrays of Orbax, can use an absolute path.

    It takes a backslash for a separator, so it would write elsewhere, and it takes no name that is not UTF-8.

    Raises:
      InputError: the path holds either.
    """
    try:
        is_plain = "\\" not in str(path) and bool(str(path).encode())
    except UnicodeEncodeError:
        is_plain = False
    if not is_plain:
        raise _refused(
            name,
            str(path),
            "Orbax can use no path with a backslash or with bytes that are not UTF-8; name another, or a link to it",
        )


def _refused(name: str, path: Any, reason: str) -> errors.InputError:
    return errors.InputError(f"{name}: got {errors.shown(path)}; {reason}")
