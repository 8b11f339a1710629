"""Checking what callers give to the engine, on the host, before any compute; jax itself never complains about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
import dataclasses
import functools
import inspect
from typing import Any, TypeVar
import warnings

import jax
import numpy as np

from kvgraft_jax import errors
from kvgraft_jax.runtime import batch as batch_lib
from kvgraft_jax.runtime import model as model_lib
from kvgraft_jax.runtime import sampling as sampling_lib
from kvgraft_jax.runtime import state as state_lib
from kvgraft_jax.runtime import step as step_lib

RAISE, RETURN = "raise", "return"
MOST_TOKENS = 1 << 22
"""Of a context."""

_Item = TypeVar("_Item")


def plan_sizes(capacity: int, kv_block: int, rows: int) -> None:
    """Raises `ConfigError` for sizes of an engine that make no sense; `StepConfig` looks at the K/V block's own."""
    for name, size in (("capacity", capacity), ("kv_block", kv_block), ("rows", rows)):
        if type(size) is not int:
            raise errors.ConfigError(f"{name}: got {errors.shown(size)} of type {type(size).__name__}, wanted an int")
    if not 1 <= capacity <= MOST_TOKENS:
        raise errors.ConfigError(f"capacity: got {errors.shown(capacity)}, wanted 1 to {MOST_TOKENS} tokens")
    if not 1 <= rows <= step_lib.MOST_LANES:
        raise errors.ConfigError(f"rows: got {errors.shown(rows)}, wanted 1 to {step_lib.MOST_LANES}")


@functools.lru_cache(maxsize=64)
def warn_beyond(name: str, capacity: int, max_positions: int) -> None:
    """Warns once per process of more tokens than the model has ever seen in one text."""
    if capacity > max_positions:
        warnings.warn(
            f"capacity: got {capacity} tokens, but {name} was trained on {max_positions} positions; what it computes "
            "beyond them is exact all the same, and means little",
            errors.KVGraftWarning,
            stacklevel=4,
        )


def plan_shapes(shapes: Sequence[int] | None, width: int | None) -> tuple[int, ...] | None:
    """Returns the widths of steps that a caller wants; None for the platform's own.

    Raises:
      ConfigError: widths that make no sense, or both ways to name them at once.
    """
    if width is None:
        return None if shapes is None else step_lib.plan_shapes(shapes)
    if shapes is not None:
        raise errors.ConfigError(
            f"width, shapes: got {errors.shown(width)} and {errors.shown(shapes)}, wanted one of the two; width=N is "
            "another way to write shapes=(N,)"
        )
    if type(width) is not int or not step_lib.FEWEST_LANES <= width <= step_lib.MOST_LANES:
        raise errors.ConfigError(
            f"width: got {errors.shown(width)}, wanted an int, {step_lib.FEWEST_LANES} to {step_lib.MOST_LANES}"
        )
    return (width,)


def plan_state(state: state_lib.State, step_config: step_lib.StepConfig, weights: str) -> None:
    """Raises `InputError` unless a state was made by the same programs and weights.

    What `on_error="return"` left in the place of a state is raised itself, since it says why there is none.
    """
    if isinstance(state, errors.KVGraftError):
        raise state
    if not isinstance(state, state_lib.State):
        raise errors.InputError(f"state: {errors.mistaken(state, 'State')}")
    ours, theirs = (step_config, weights), (state.step_config, state.weights)
    for name, our, their in zip(("step_config", "weights"), ours, theirs, strict=True):
        if our != their:
            field, our, their = _first_difference(name, our, their)
            raise errors.InputError(
                f"state: its {field} is {their}, this engine's is {our}; states live in engines of one model and K/V "
                "block, artifacts move between engines"
            )


def _first_difference(name: str, a: Any, b: Any) -> tuple[str, Any, Any]:
    """Returns the name and both values of the first field, however deep, in which two unequal values differ."""
    if dataclasses.is_dataclass(a) and type(a) is type(b):
        for field in dataclasses.fields(a):
            pair = getattr(a, field.name), getattr(b, field.name)
            if pair[0] != pair[1]:
                return _first_difference(f"{name}.{field.name}", *pair)
    return name, a, b


def plan_callback(on_token: Any, parameters: str) -> None:
    """Raises `InputError` for what is given as a callback and cannot be called with the parameters that are named."""
    if on_token is None:
        return
    wanted = f"wanted a function of ({parameters}), or None"
    if not callable(on_token):
        raise errors.InputError(f"on_token: got {errors.shown(on_token)}, {wanted}")
    try:
        inspect.signature(on_token).bind(*parameters.split(", "))
    except TypeError as error:
        raise errors.InputError(f"on_token: {error} in {errors.shown(on_token)}; {wanted}") from None
    except ValueError:  # A function that tells no signature, as some in C do.
        pass


def plan_list(name: str, given: Iterable[_Item], wanted: str = "a list with an entry for each sequence") -> list[_Item]:
    """Returns a caller's list as a list.

    Raises:
      InputError: text, or nothing that has an order.
    """
    try:
        if not isinstance(given, str | bytes | Set | Mapping):
            return list(given)
    except TypeError:  # Not iterable.
        pass
    raise errors.InputError(f"{name}: got {errors.shown(given)}, wanted {wanted}")


def plan_texts(token_ids: Iterable[_Item]) -> list[_Item]:
    """Returns a caller's list of token ids of each text.

    Raises:
      InputError: no list, or the ids of a single text.
    """
    texts = plan_list("token_ids", token_ids)
    if texts and all(isinstance(text, int | np.integer) for text in texts):
        raise errors.InputError(
            f"token_ids: got {len(texts)} ids, wanted a list with the ids of each text; `prefill` reads a single text"
        )
    return texts


def plan_pairs(first: tuple[str, Sequence], second: tuple[str, Sequence]) -> list[tuple]:
    """Returns the pairs of two lists, each given with its name.

    Raises:
      InputError: no sequences, or of two lengths.
    """
    lists = [plan_list(*named) for named in (first, second)]
    if len(lists[0]) != len(lists[1]):
        raise errors.InputError(
            f"{first[0]}, {second[0]}: got {len(lists[0])} and {len(lists[1])} entries, wanted the same number of both"
        )
    return list(zip(*lists, strict=True))


def plan_samplings(sampling: Any, count: int) -> list:
    """Returns one way of drawing for each of `count` sequences.

    Raises:
      InputError: a list of another length.
    """
    if sampling is None or isinstance(sampling, sampling_lib.Sampling):
        return [sampling] * count
    samplings = plan_list("sampling", sampling, "a Sampling, or a list with one for each state")
    if len(samplings) != count:
        raise errors.InputError(f"sampling: got {len(samplings)} of them, wanted one, or {count}, one for each state")
    return samplings


def plan_choice(model: model_lib.Model, sampling: sampling_lib.Sampling | None) -> Callable[[jax.Array, int], int]:
    """Returns how the next token is chosen: from float32 [V] logits and its position to its id.

    Raises:
      InputError: no Sampling.
    """
    if sampling is not None and not isinstance(sampling, sampling_lib.Sampling):
        raise errors.InputError(f"sampling: {errors.mistaken(sampling, 'Sampling')}")
    suppress_ids = model.config.suppress_ids
    num_pieces = model.tokenizer.vocab_size if model.tokenizer else None
    if sampling is None:
        return lambda logits_V, _: sampling_lib.argmax(logits_V, suppress_ids, num_pieces)
    return lambda logits_V, position: sampling_lib.draw(logits_V, position, sampling, suppress_ids, num_pieces)


def plan_each(
    items: Sequence[_Item], plan: Callable[[_Item], batch_lib.Job], on_error: str
) -> list[batch_lib.Job | errors.KVGraftError]:
    """Plans every item; see `Engine.prefill_many` for `on_error`.

    Raises:
      InputError: another `on_error`.
      BatchError: names every item that cannot be planned.
    """
    if not isinstance(on_error, str) or on_error not in (RAISE, RETURN):
        raise errors.InputError(f"on_error: got {errors.shown(on_error)}, wanted {RAISE!r} or {RETURN!r}")
    planned: list[batch_lib.Job | errors.KVGraftError] = []
    for item in items:
        try:
            planned.append(plan(item))
        except errors.KVGraftError as error:
            planned.append(error)
    refused = {index: error for index, error in enumerate(planned) if isinstance(error, errors.KVGraftError)}
    if refused and on_error == RAISE:
        raise errors.BatchError(refused)
    return planned
