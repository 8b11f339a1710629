"""Token ids as callers give them: read and checked in one way, for a run, an artifact and a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import operator

import numpy as np

from kvgraft_jax import errors

MAX_VOCAB_SIZE = 1 << 31
"""Ids fit an int32."""


def check(token_ids: Iterable[int], vocab_size: int, name: str = "token_ids") -> tuple[int, ...]:
    """Returns the ids as Python ints; there may be none.

    Args:
      token_ids: integers of any type, NumPy's and jax's among them, in any iterable that has an order.
      vocab_size: V.
      name: what they are, as messages call it.

    Raises:
      InputError: names the position of anything but an integer from 0 to V - 1; or got text, a set or the like.
    """
    if isinstance(token_ids, str | bytes):
        raise errors.InputError(
            f"{name}: got text, wanted a list of int; encode it with model.tokenizer.encode(text), and "
            "with bos=True at the start of a context"
        )
    try:
        given = None if isinstance(token_ids, set | frozenset | Mapping) else tuple(token_ids)
    except TypeError:
        given = None
    if given is None:
        raise errors.InputError(f"{name}: {errors.mistaken(token_ids, 'a list of int')}")
    return tuple(_checked(token_id, vocab_size, f"{name}[{place}]") for place, token_id in enumerate(given))


def checked_one(token_id: int, vocab_size: int) -> int:
    """Returns one id as a Python int.

    Raises:
      InputError: no integer from 0 to V - 1.
    """
    return _checked(token_id, vocab_size, "token id")


def _checked(token_id: int, vocab_size: int, name: str) -> int:
    try:
        index = None if isinstance(token_id, bool | np.bool_) else operator.index(token_id)
    except TypeError:
        index = None
    if index is None or not 0 <= index < vocab_size:
        kind = f" of type {type(token_id).__name__}" if index is None else ""
        raise errors.InputError(f"{name}: got {errors.shown(token_id)}{kind}, wanted 0 to {vocab_size - 1}")
    return index
