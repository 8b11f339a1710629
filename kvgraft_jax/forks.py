"""Knows whether this process was forked from one that had used TensorStore, which ends a process that goes on so."""

from __future__ import annotations

import os

from kvgraft_jax import errors

_is_used = False
_is_lost = False
_is_forked = False


def is_forked() -> bool:
    """Tells whether this process was forked from one that had imported this package."""
    return _is_forked


def use_tensorstore(what: str) -> None:
    """Notes that TensorStore is about to be used, on whose threads every later one of its calls depends.

    A child that was forked afterwards has none of those threads: TensorStore would end it at once.

    Args:
      what: is to be done, for the message.

    Raises:
      ResourceError: this process is such a child.
    """
    global _is_used
    if _is_lost:
        raise errors.ResourceError(
            f"{what}: this process was forked from one that had already used TensorStore, whose threads a fork leaves "
            "behind. Start workers with multiprocessing.get_context('spawn'), or fork them before anything is loaded"
        )
    _is_used = True


def _note_child() -> None:
    global _is_lost, _is_forked
    _is_lost, _is_forked = _is_used, True


os.register_at_fork(after_in_child=_note_child)
