"""Shows progress on stderr: what is shown never decides whether a program works, or how it ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
import sys
from typing import TypeVar

import tqdm

_Item = TypeVar("_Item")


class _Stderr:
    """The stderr of the moment, whatever it is: closed, full, missing, or an object that has no more than `write`.

    A failed write is the one error that this project passes over: there is no place left to tell of it.
    """

    @property
    def encoding(self) -> str | None:
        return getattr(sys.stderr, "encoding", None)

    def write(self, text: str) -> int:
        try:
            sys.stderr.write(text)
        except Exception:  # Another program's object may raise anything.
            pass
        return len(text)

    def flush(self) -> None:
        try:
            sys.stderr.flush()
        except Exception:  # As above.
            pass

    def isatty(self) -> bool:
        try:
            return bool(sys.stderr.isatty())
        except Exception:  # As above.
            return False

    def fileno(self) -> int:
        return sys.stderr.fileno()  # tqdm asks for the width of the terminal, and does without an answer.


_STDERR = _Stderr()


class _Bar(tqdm.tqdm):
    monitor_interval = 0  # No thread that watches the bar: one that cannot start would be an error.


def is_terminal() -> bool:
    """Tells whether stderr is a terminal; False where it is gone or does not say."""
    return _STDERR.isatty()


def say(text: str) -> None:
    """Writes a line to stderr, where there is one."""
    write(text + "\n")


def write(text: str) -> None:
    """Writes text to stderr as it is, where there is one."""
    _STDERR.write(text)
    _STDERR.flush()


def print_line(text: str) -> None:
    """Prints a line to stdout at once, above the bars that are open."""
    with _Bar.external_write_mode(file=_STDERR):
        print(text, flush=True)


def bar(
    total: float | None = None,
    *,
    description: str = "",
    unit: str = "it",
    in_thousands: bool = False,
    delay: float = 0.0,
    stays: bool = True,
    is_shown: bool = True,
) -> tqdm.tqdm:
    """Opens a bar, a context manager whose `update(n)` moves it.

    Args:
      total: what `update` adds up to; None where that is not known.
      description: stands in front.
      unit: of the count.
      in_thousands: writes large counts with k, M, G.
      delay: seconds before it appears.
      stays: whether it is left on the screen when it is closed.
      is_shown: False shows nothing.
    """
    return _Bar(
        total=total,
        desc=description or None,
        unit=unit,
        unit_scale=in_thousands,
        delay=delay,
        leave=stays,
        disable=not is_shown,
        file=_STDERR,
        dynamic_ncols=True,
    )


def each(items: Iterable[_Item], *, description: str, unit: str) -> Iterator[_Item]:
    """Yields the items, with a bar that counts them."""
    return iter(_Bar(items, desc=description, unit=unit, mininterval=0.5, file=_STDERR, dynamic_ncols=True))
