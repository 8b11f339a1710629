"""Scratch folders of a run: removed when it ends, by a signal too; those of a run that was killed go with the next."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import fcntl
import os
import pathlib
import shutil
import tempfile

PREFIX = ".scratch-"


@contextlib.contextmanager
def folder(parent: pathlib.Path, prefix: str = PREFIX) -> Iterator[pathlib.Path]:
    """Gives a new folder in `parent`, locked while this process lives, and removes it afterwards.

    Args:
      parent: where it is made.
      prefix: how its name begins.
    """
    sweep(parent, prefix)
    with contextlib.ExitStack() as stack:
        path = None
        while path is None or not path.exists():  # Another process may sweep it away before it is locked.
            path = pathlib.Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            with contextlib.suppress(FileNotFoundError):
                _lock(path, 0, stack)
        stack.callback(shutil.rmtree, path, ignore_errors=True)
        yield path


def sweep(parent: pathlib.Path, prefix: str = PREFIX) -> None:
    """Removes the folders with that prefix that no living process has locked, as far as they can be removed."""
    for leftover in parent.glob(prefix + "*"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            _lock(leftover, fcntl.LOCK_NB, stack)
            shutil.rmtree(leftover, ignore_errors=True)


def _lock(path: pathlib.Path, more: int, stack: contextlib.ExitStack) -> None:
    """Locks a folder until the stack is closed; the system unlocks it when the process ends in any way."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    stack.callback(os.close, descriptor)
    fcntl.flock(descriptor, fcntl.LOCK_EX | more)
