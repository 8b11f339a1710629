"""The container: a directory that appears whole or not at all, and in which every byte of every file is accounted for.

It is filled in a hidden scratch directory beside its place, sealed with a list of its files (size and SHA-256), flushed
and then renamed. A scratch directory is locked while its writer lives, so the next writer recognises and removes what a
dead one left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import fcntl
import os
import pathlib
import shutil
import stat
import tempfile
import time
from typing import Any

from kvgraft_jax import digest, errors, progress

SEAL = "files.json"
SCHEMA = "kvgraft/files/1"

_MAX_SEAL_BYTES = 1 << 20
_LOCK = ".lock"
_SCRATCH = ".writing-"
_PATIENCE_S = 5.0
_POLL_S = 0.05


@contextlib.contextmanager
def writing(directory: pathlib.Path) -> Iterator[pathlib.Path]:
    """Gives an empty, private directory to fill and `publish`; removes whatever is left of it afterwards.

    Args:
      directory: where the container will stand; made if it is not there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        with _locked(directory):
            for leftover in directory.glob(_SCRATCH + "*"):
                _remove_leftover(leftover)
            scratch = pathlib.Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=directory))
            stack.enter_context(_flock(_open(scratch)))
        stack.callback(_remove, scratch)
        entry = scratch / "entry"
        entry.mkdir()
        yield entry


def publish(entry: pathlib.Path, place: pathlib.Path, is_intact: Callable[[], bool]) -> None:
    """Moves a sealed container from its scratch directory to its place, in one rename; readers never see a part of it.

    Args:
      entry: what `writing` gave.
      place: its path from now on.
      is_intact: asked when something stands there already; it is kept if so, replaced otherwise.
    """
    for folder, _, names in os.walk(entry):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            _share(path, place.parent)
    with _locked(place.parent):
        if os.path.lexists(place):
            if is_intact():
                return
            os.rename(place, entry.parent / "replaced")
        os.rename(entry, place)
        _flush(place.parent)


def seal(entry: pathlib.Path, artifact_id: str) -> None:
    """Writes the list of files into a container and flushes all of it to the disk."""
    paths = [entry / name for name in _walk(entry, artifact_id)]
    files = {
        path.relative_to(entry).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256}
        for path, sha256 in zip(paths, _digests(paths), strict=True)
    }
    document = {"schema": SCHEMA, "artifact": artifact_id, "files": files}
    (entry / SEAL).write_bytes(digest.canonical_json(document))
    for folder, _, names in os.walk(entry, topdown=False):
        for name in names:
            _flush(os.path.join(folder, name))
        _flush(folder)


def verify(entry: pathlib.Path, artifact_id: str, check_sizes: Callable[[dict[str, int]], None]) -> None:
    """Compares a container with its seal: names and sizes of its files first, then their content.

    Exact: one flipped bit, a missing, added, shortened or lengthened file, and any link are found, wherever they are.

    Args:
      entry: the container.
      artifact_id: for messages, and named in the seal.
      check_sizes: called before any content is hashed with the size in bytes of each file but the seal, by relative
        path; it raises where they cannot be right, so that nobody makes a reader hash terabytes.

    Raises:
      IntegrityError: names the first file that is not as sealed; and what `check_sizes` raises.
    """
    found = _walk(entry, artifact_id)
    sealed = _read_seal(entry, found.pop(SEAL, None), artifact_id)
    for name in sorted(found.keys() | sealed.keys()):
        if name not in found:
            raise errors.IntegrityError(artifact_id, name, "the file is missing")
        if name not in sealed:
            raise errors.IntegrityError(artifact_id, name, f"{SEAL} does not list it; {foreign(entry / name)}")
        if sealed[name]["bytes"] != found[name]:
            raise errors.IntegrityError(artifact_id, name, f"has {found[name]} bytes, wanted {sealed[name]['bytes']}")
    check_sizes(found)
    names = sorted(found, key=found.__getitem__, reverse=True)
    for name, sha256 in zip(names, _digests([entry / name for name in names]), strict=True):
        if sealed[name]["sha256"] != sha256:
            raise errors.IntegrityError(artifact_id, name, f"SHA-256 is {sha256}, wanted {sealed[name]['sha256']}")


def _read_seal(entry: pathlib.Path, size: int | None, artifact_id: str) -> dict[str, dict[str, Any]]:
    if size is None:
        raise errors.IntegrityError(artifact_id, SEAL, "the file is missing")
    if size > _MAX_SEAL_BYTES:
        raise errors.IntegrityError(artifact_id, SEAL, f"has {size} bytes, wanted at most {_MAX_SEAL_BYTES}")
    try:
        document = digest.parse_canonical_json((entry / SEAL).read_bytes())
    except ValueError as error:
        raise errors.IntegrityError(artifact_id, SEAL, str(error)) from None
    if type(document) is not dict or document.keys() != {"schema", "artifact", "files"}:
        raise errors.IntegrityError(artifact_id, SEAL, "wanted exactly the fields schema, artifact and files")
    for field, wanted in (("schema", SCHEMA), ("artifact", artifact_id)):
        if document[field] != wanted:
            raise errors.IntegrityError(artifact_id, f"{SEAL}: {field}", f"got {document[field]!r}, wanted {wanted!r}")
    files = document["files"]
    if type(files) is not dict or any(
        type(record) is not dict or record.keys() != {"bytes", "sha256"} or type(record["bytes"]) is not int
        for record in files.values()
    ):
        raise errors.IntegrityError(artifact_id, f"{SEAL}: files", "wanted the size and SHA-256 of each file")
    return files


def _walk(entry: pathlib.Path, artifact_id: str) -> dict[str, int]:
    """Returns the size of each file under `entry` by relative path; empty folders count as files, links are refused."""
    found: dict[str, int] = {}
    rest = [(entry, "")]
    while rest:
        path, name = rest.pop()
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode):
            inside = [(path / child, f"{name}/{child}" if name else child) for child in os.listdir(path)]
            if not inside:
                found[f"{name}/"] = 0
            rest += inside
        elif stat.S_ISREG(status.st_mode):
            found[name] = status.st_size
        else:
            raise errors.IntegrityError(artifact_id, name or str(path), f"a link or special file; {foreign(path)}")
    return found


def foreign(path: pathlib.Path) -> str:
    """Says what to do about a file or link that no artifact has."""
    return (
        "an artifact has no such file. If a file manager or synchronisation tool left it there (such as .DS_Store), "
        f"delete {str(path)!r}; if a link replaced it, copy what the link points to"
    )


def _digests(paths: list[pathlib.Path]) -> list[str]:
    return digest.in_parallel(digest.file_digest, paths)


def _remove(scratch: pathlib.Path) -> None:
    """Removes a scratch directory, into which threads of a save that failed may still be writing for a moment."""
    deadline = time.monotonic() + _PATIENCE_S
    shutil.rmtree(scratch, ignore_errors=True)
    while scratch.exists() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        shutil.rmtree(scratch, ignore_errors=True)


def _remove_leftover(leftover: pathlib.Path) -> None:
    """Removes a scratch directory whose writer is dead, which is known from its lock being free."""
    with contextlib.suppress(OSError), _flock(_open(leftover, os.O_DIRECTORY), fcntl.LOCK_NB):
        shutil.rmtree(leftover, ignore_errors=True)


@contextlib.contextmanager
def _locked(directory: pathlib.Path) -> Iterator[None]:
    """Holds the lock of a directory of containers; says so where another process holds it for long.

    A lock needs no right to write, so every user who can read the lock file can take it.

    Raises:
      StorageError: something else than a plain file stands in the place of the lock.
    """
    path = directory / _LOCK
    if not os.path.lexists(path):
        descriptor, made = tempfile.mkstemp(prefix=f"{_LOCK}-", dir=directory)
        try:  # Whoever may use the directory may lock it, whatever this user's umask.
            os.fchmod(descriptor, directory.stat().st_mode & 0o666)
            with contextlib.suppress(FileExistsError):
                os.link(made, path)
        finally:
            os.close(descriptor)
            os.unlink(made)
    if not stat.S_ISREG(path.lstat().st_mode):
        raise errors.StorageError(f"{path}: a link or special file stands where the lock should be; delete it")
    descriptor = _open(path)
    with _flock(descriptor, waits_for=str(path)):
        yield


def _share(path: str, directory: pathlib.Path) -> None:
    """Gives group and others, where they may write the directory, the same rights to a file or folder in it."""
    given, mode = directory.stat().st_mode, os.stat(path).st_mode
    shared = given & (0o070 * bool(given & 0o020) | 0o007 * bool(given & 0o002))
    os.chmod(path, stat.S_IMODE(mode) | (shared if stat.S_ISDIR(mode) else shared & 0o066))


def _open(path: pathlib.Path, more: int = 0) -> int:
    """Opens a file or directory for a lock; never follows a link, and never waits for the other end of a pipe."""
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | more)


@contextlib.contextmanager
def _flock(descriptor: int, more: int = 0, waits_for: str = "") -> Iterator[None]:
    """Holds an exclusive lock on an open file or directory, and closes it; a process that ends in any way releases it.

    The one exception: a child that was forked while the lock was held keeps it if its parent is killed before the end.

    Args:
      descriptor: of the file.
      more: flags beside LOCK_EX.
      waits_for: a path to name on stderr when the lock is not free for some seconds; "" waits silently.
    """
    try:
        if waits_for:
            _wait(descriptor, waits_for)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | more)
        try:
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # A child that was forked meanwhile would go on holding it.
    finally:
        os.close(descriptor)


def _wait(descriptor: int, path: str) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_POLL_S)
    progress.say(f"kvgraft_jax: waiting for {path}, which another process has locked")
    fcntl.flock(descriptor, fcntl.LOCK_EX)


def _flush(path: str | pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
