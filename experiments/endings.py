"""Signals that ask a run to end, raised as an exception so that everything opened is closed on the way out."""

from __future__ import annotations

import signal
import sys
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_AGAIN_SECONDS = 0.01


class Ended(BaseException):
    """A signal that asks the process to end."""

    def __init__(self, number: int):
        super().__init__(number)
        self.signal = signal.Signals(number)


def raise_signals() -> None:
    """Makes SIGTERM and SIGHUP raise `Ended`, but for those that are ignored, as nohup does with SIGHUP.

    Python drops an exception that is raised in a callback of the garbage collector, of which jax has one, or in a
    finalizer. What a signal raised there, SIGINT among them, is raised once more in the code that runs next.
    """
    for number in _SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)
    sys.unraisablehook = _raise_again


def _end(number: int, _: Any) -> None:
    for ending in _SIGNALS:
        signal.signal(ending, signal.SIG_IGN)  # A second one must not break off the cleaning.
    raise Ended(number)


def _raise_again(dropped: Any) -> None:
    if not isinstance(dropped.exc_value, (Ended, KeyboardInterrupt)):
        sys.__unraisablehook__(dropped)
        return
    error = dropped.exc_value.with_traceback(None)

    def end(*_: Any) -> None:
        raise error

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)
