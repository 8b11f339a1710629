"""Feeding tokens through the step: a run over a list of tokens, greedy decoding, and logits of every position.

`plan_*` checks values on the host before any compute; jax itself never complains about them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses

import jax
import numpy as np

from kvgraft_jax import errors
from kvgraft_jax import progress as progress_lib
from kvgraft_jax import token_ids as token_ids_lib
from kvgraft_jax.gemma import cache as cache_lib
from kvgraft_jax.gemma import rotary, sharding
from kvgraft_jax.runtime import step as step_lib


@dataclasses.dataclass(frozen=True, eq=False)
class Runner:
    """The programs with the arrays that every call of them takes.

    Attributes:
      programs: step and head.
      params: parameters of the decoder.
      tables: rotary tables of capacity + width positions.
    """

    programs: step_lib.Programs
    params: Mapping
    tables: rotary.RotaryTables

    @property
    def num_slots(self) -> int:
        """S: rows of a cache that belongs to these tables."""
        return self.tables.full.cos_SxR.shape[0]


@dataclasses.dataclass(frozen=True, eq=False)
class RunResult:
    """What a run leaves.

    Attributes:
      cache: rows of the run's tokens written.
      hidden_TxD: [W, D] of the last step.
      lane: lane of the last token in it.
    """

    cache: cache_lib.Cache
    hidden_TxD: jax.Array
    lane: int


def plan_tokens(token_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Returns the tokens as a tuple of Python ints.

    Raises:
      InputError: not a flat sequence of integers, empty, or an id outside 0..V-1.
    """
    planned = token_ids_lib.check(token_ids, vocab_size)
    if not planned:
        raise errors.InputError("token_ids: got none, wanted one or more")
    return planned


def plan_stops(stop_ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    """Returns the stop tokens as a tuple of Python ints; there may be none.

    Raises:
      InputError: no iterable of integers, or an id outside 0..V-1.
    """
    try:
        planned = tuple(stop_ids)
    except TypeError:
        raise errors.InputError(f"stop_ids: got {errors.shown(stop_ids)}, wanted a list of int, or None") from None
    return token_ids_lib.check(planned, vocab_size, name="stop_ids")


def plan_capacity(held: int, wanted: int, capacity: int, what: str) -> None:
    """Raises `CapacityError` when `held` + `wanted` tokens do not fit into `capacity` slots."""
    if held + wanted > capacity:
        total = errors.shown(held + wanted)
        raise errors.CapacityError(
            f"capacity: {held} tokens held + {errors.shown(wanted)} {what} = {total}, but the cache has {capacity} "
            f"slots; build the engine with capacity={total} or more"
        )


def run(
    runner: Runner,
    cache: cache_lib.Cache,
    token_ids: Sequence[int],
    start: int,
    *,
    progress: bool = False,
    on_step: Callable[[jax.Array, step_lib.StepInput], None] | None = None,
) -> RunResult:
    """Writes tokens into a cache, a width at a time, from position `start` on.

    Exact: bit-exact whatever the cuts, for finite values: running the same tokens in several calls gives the same rows
      and hidden states.

    Args:
      runner: programs and parameters.
      cache: donated; the caller must own it.
      token_ids: planned tokens, which fit.
      start: position of the first.
      progress: shows a bar of tokens on stderr.
      on_step: called with each step's hidden states [W, D] and what it read.

    Returns:
      The new cache and the last step's hidden states.
    """
    hidden_TxD, lane = None, 0
    place = sharding.whole(runner.programs.config.mesh)
    with progress_lib.bar(len(token_ids), unit="tok", stays=False, is_shown=progress) as bar:
        for read in step_lib.cut(token_ids, start, runner.programs.config.width):
            # Put on the device by name, so that it works where jax was told to refuse transfers that are not.
            given = jax.device_put((read.tokens_T, read.start, read.count), place)
            result = runner.programs.step(runner.params, runner.tables, cache, *given)
            cache, hidden_TxD, lane = result.cache, result.hidden_TxD, int(read.count) - 1
            if on_step is not None:
                on_step(hidden_TxD, read)
            if progress:
                hidden_TxD.block_until_ready()
            bar.update(int(read.count))
    return RunResult(cache, hidden_TxD, lane)


def next_logits(runner: Runner, result: RunResult) -> jax.Array:
    """Computes the logits of the token after a run: float32 [V]."""
    return heads(runner, result.hidden_TxD, result.lane)[0]


def heads(runner: Runner, hidden_TxD: jax.Array, lane: int) -> tuple[jax.Array, ...]:
    """Computes the logits of the lanes of one head call from `lane` on: head_lanes arrays float32 [V]."""
    place = sharding.whole(runner.programs.config.mesh)
    return runner.programs.head(runner.params, hidden_TxD, jax.device_put(np.int32(lane), place))


def score(
    runner: Runner, cache: cache_lib.Cache, token_ids: Sequence[int], start: int = 0, *, progress: bool = False
) -> np.ndarray:
    """Computes next-token logits after each token of a run from position `start` on: float32 [T, V] on the host.

    Exact: row t is bit-equal to the logits after a prefill of tokens 0..start + t, as long as all values are finite.
    """
    config = runner.programs.config
    logits_TxV = np.empty((len(token_ids), config.model.vocab_size), np.float32)
    done = 0

    def read_heads(hidden_TxD: jax.Array, read: step_lib.StepInput) -> None:
        nonlocal done
        for lane in range(0, read.count, config.head_lanes):
            for row_V in heads(runner, hidden_TxD, lane)[: read.count - lane]:
                logits_TxV[done] = jax.device_get(row_V)
                done += 1

    run(runner, cache, token_ids, start, progress=progress, on_step=read_heads)
    return logits_TxV


@dataclasses.dataclass(frozen=True, eq=False)
class Decoded:
    """What greedy decoding leaves.

    Attributes:
      token_ids: the new tokens, a stop token not among them.
      cache: their rows written.
      logits_V: float32 [V] of the token after the last.
    """

    token_ids: tuple[int, ...]
    cache: cache_lib.Cache
    logits_V: jax.Array


def decode(
    runner: Runner,
    cache: cache_lib.Cache,
    logits_V: jax.Array,
    start: int,
    *,
    max_new_tokens: int,
    stop_ids: frozenset[int],
    num_pieces: int | None = None,
    on_token: Callable[[int, jax.Array], None] | None = None,
) -> Decoded:
    """Decodes greedily: the token of the largest logit (the lowest id on a tie), one step of the same program each.

    Tokens that the model suppresses are never chosen, nor those without a piece in the tokenizer; the logits given out
    are the model's own all the same.

    Args:
      runner: programs and parameters.
      cache: donated; the caller must own it.
      logits_V: float32 [V] of the first new token.
      start: position of the first new token.
      max_new_tokens: the most tokens to decode, which fit.
      stop_ids: ends before any of these.
      num_pieces: tokens from this one on have no text and are never chosen; None means that all have one.
      on_token: called with each new token and the logits that follow it.

    Returns:
      New tokens, cache, and the logits after the last.
    """
    suppress_ids = runner.programs.config.model.suppress_ids
    token_ids: list[int] = []
    while len(token_ids) < max_new_tokens:
        token_id = argmax(logits_V, suppress_ids, num_pieces)
        if token_id in stop_ids:
            break
        result = run(runner, cache, (token_id,), start + len(token_ids))
        cache, logits_V = result.cache, next_logits(runner, result)
        token_ids.append(token_id)
        if on_token is not None:
            on_token(token_id, logits_V)
    return Decoded(tuple(token_ids), cache, logits_V)


def argmax(logits_V: jax.Array, suppress_ids: tuple[int, ...], num_pieces: int | None = None) -> int:
    """Finds the lowest id of the largest logit, on the host: NumPy is much faster at it than XLA's CPU backend.

    Raises:
      WeightsError: a logit is NaN, so none is the largest.
    """
    on_host_V = np.asarray(jax.device_get(logits_V))[:num_pieces]
    suppress_ids = [token_id for token_id in suppress_ids if token_id < len(on_host_V)]
    if suppress_ids:
        on_host_V = on_host_V.copy()
        on_host_V[suppress_ids] = -np.inf
    token_id = int(on_host_V.argmax())  # The first NaN where there is one.
    if np.isnan(on_host_V[token_id]):
        raise errors.WeightsError(
            f"logit of token {token_id}: got NaN instead of a number, so no next token can be chosen; the weights are "
            "damaged or too large for their dtype: load the model with dtype='float32', or fetch its weights again"
        )
    return token_id
