"""Gives freed host memory back to the system: glibc keeps what loading and compilation freed, hundreds of megabytes."""

from __future__ import annotations

import ctypes
import functools
import sys


def trim() -> None:
    """Returns free heap pages to the system where the C library can (glibc); nothing elsewhere. Milliseconds."""
    release = _malloc_trim()
    if release is not None:
        release(0)


@functools.cache
def _malloc_trim():
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
