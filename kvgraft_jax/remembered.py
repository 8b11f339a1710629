"""The cache directory: what can be made again but costs time, such as digests of large files, is remembered there.

Nothing depends on it. Where there is no such directory, or it cannot be written, every answer is computed again; a
damaged entry is as good as none. Entries are one small file each, so processes do not overwrite each other's.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
import time
from typing import Any

from kvgraft_jax import digest, errors

_SETTLED_NS = 2_000_000_000  # A file written later than this before it was read may change again in the same tick.


def directory() -> pathlib.Path | None:
    """Returns kvgraft_jax below $XDG_CACHE_HOME, else below ~/.cache; None where no home directory is known.

    A relative $XDG_CACHE_HOME is passed over, as the XDG base directory specification asks. The directory need not
    exist yet.
    """
    root = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(root):
        return pathlib.Path(root) / "kvgraft_jax"
    try:
        home = pathlib.Path.home()
    except RuntimeError:
        return None
    return home / ".cache" / "kvgraft_jax" if home.is_absolute() else None


def required_directory(purpose: str) -> pathlib.Path:
    """Returns the cache directory, made if it was missing, for callers that cannot do without.

    Args:
      purpose: what is to be kept there, for the message.

    Raises:
      StorageError: no home directory is known, or the directory cannot be made or written to.
    """
    found = directory()
    remedy = "set XDG_CACHE_HOME to the absolute path of a directory that you can write to"
    if found is None:
        raise errors.StorageError(f"{purpose}: no home directory is known, so there is no place to keep it; {remedy}")
    try:
        found.mkdir(parents=True, exist_ok=True)
        if not os.access(found, os.W_OK | os.X_OK):
            raise PermissionError("no permission to write there")
    except OSError as error:
        raise errors.StorageError(f"{purpose}: cannot be kept in {found} ({error}); {remedy}") from error
    return found


def file_digest(path: str | os.PathLike[str]) -> str:
    """Returns the SHA-256 (hex) of a file's bytes, computed once and remembered.

    The file is recognised by path, size, inode and the times of its last write and last change of status, the second
    of which no program can set back. A file written within the last two seconds is hashed but not remembered.

    Raises:
      OSError: the file cannot be read.
    """
    path = os.path.abspath(os.fspath(path))
    key = ["file", path]
    identity = _identity(path)
    known = get(key)
    if isinstance(known, dict) and known.get("identity") == identity and isinstance(known.get("sha256"), str):
        return known["sha256"]
    now = time.time_ns()
    found = digest.file_digest(path)
    if _identity(path) == identity and max(identity[2:4]) < now - _SETTLED_NS:
        put(key, {"identity": identity, "sha256": found})
    return found


def get(key: Any) -> Any:
    """Returns the JSON value remembered for a key; None where there is none or its entry is damaged.

    Args:
      key: plain JSON data.
    """
    path = _entry(key)
    if path is None:
        return None
    try:
        entry = digest.parse_canonical_json(path.read_bytes())
        body = {"key": key, "value": entry["value"]}
        return entry["value"] if entry == {**body, "sha256": digest.json_digest(body)} else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def put(key: Any, value: Any) -> bool:
    """Remembers a JSON value for a key, in place of an earlier one; appears whole or not at all.

    Args:
      key: plain JSON data.
      value: plain JSON data, not None.

    Returns:
      Whether it could be written.
    """
    path = _entry(key)
    if path is None:
        return False
    body = {"key": key, "value": value}
    raw = digest.canonical_json({**body, "sha256": digest.json_digest(body)})
    scratch = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=".scratch-")
        with open(handle, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except OSError:
        if scratch is not None:
            with contextlib.suppress(OSError):
                os.unlink(scratch)
        return False
    return True


def _entry(key: Any) -> pathlib.Path | None:
    root = directory()
    return None if root is None else root / "remembered" / f"{digest.json_digest(key)}.json"


def _identity(path: str) -> list[int]:
    status = os.stat(path)
    return [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]
