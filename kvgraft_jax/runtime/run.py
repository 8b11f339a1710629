"""Feeding tokens through the step: a run over the tokens of one sequence, and logits of every position.

`plan_*` checks values on the host before any compute; jax itself never complains about them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses

import jax
from jax.sharding import Sharding
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
      tables: rotary tables of as many positions as a context has at most.
      shapes: widths of steps, rising.
      prepare: called with the runner, a width, the blocks of the cache and the rows of the table before a step of these
        sizes; None for nothing.
    """

    programs: step_lib.Programs
    params: Mapping
    tables: rotary.RotaryTables
    shapes: tuple[int, ...]
    prepare: Callable[[Runner, int, int, int], None] | None = None

    @property
    def num_positions(self) -> int:
        """Positions of the tables."""
        return self.tables.full.cos_SxR.shape[0]

    @property
    def place(self) -> Sharding | None:
        """Where what the host gives to a program lies: on every device of the mesh, None for the default device."""
        return sharding.whole(self.programs.config.mesh)

    def step(
        self,
        cache: cache_lib.Cache,
        pieces: Sequence[step_lib.Piece],
        table: Sequence[Sequence[int]],
        width: int,
        *,
        idle_tokens: Sequence[int] = (),
    ) -> step_lib.StepResult:
        """Runs one step; see `step.lay_out` for what it reads.

        Args:
          cache: donated; the caller must own it.
          pieces, table, width, idle_tokens: as for `step.lay_out`.
        """
        if self.prepare is not None:
            self.prepare(self, width, cache.num_blocks, len(table))
        config = self.programs.config
        one_width = config.width is not None
        lanes = step_lib.lay_out(pieces, table, width, config.kv_block, idle_tokens=idle_tokens, one_width=one_width)
        # Put on the device by name, so that it works where jax was told to refuse transfers that are not.
        return self.programs.step(self.params, self.tables, cache, jax.device_put(lanes, self.place))

    def heads(self, hidden_TxD: jax.Array, lanes: Sequence[int]) -> list[jax.Array]:
        """Computes the logits of lanes of a step: float32 [V] each."""
        found = []
        for lanes_B in step_lib.head_lanes(lanes, self.programs.config.head_sizes):
            found += self.programs.head(self.params, hidden_TxD, jax.device_put(lanes_B, self.place))
        return found[: len(lanes)]  # Only the last call has lanes to spare.

    def compile_heads(self, width: int, most: int) -> None:
        """Compiles the head for every number of lanes up to `most` of a step of `width`, by computing some logits."""
        config = self.programs.config
        hidden_TxD = jax.device_put(np.zeros((width, config.model.embed_dim), config.jnp_dtype), self.place)
        counts, sizes = range(1, min(width, most) + 1), config.head_sizes
        for size in sorted({len(lanes_B) for count in counts for lanes_B in step_lib.head_lanes(range(count), sizes)}):
            jax.block_until_ready(self.heads(hidden_TxD, [0] * size))


@dataclasses.dataclass(frozen=True, eq=False)
class RunResult:
    """What a run leaves.

    Attributes:
      cache: rows of the run's tokens written.
      hidden_TxD: [T, D] of the last step.
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
    if isinstance(stop_ids, set | frozenset):  # Their order does not matter.
        stop_ids = sorted(stop_ids, key=repr)
    return token_ids_lib.check(stop_ids, vocab_size, name="stop_ids")


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
    table: Sequence[Sequence[int]] | None = None,
    progress: bool = False,
    on_step: Callable[[jax.Array, step_lib.Piece], None] | None = None,
) -> RunResult:
    """Reads the tokens of one sequence, which has a whole cache to itself, from position `start` on.

    Exact: bit-exact whatever the cuts and widths, for finite values: running the same tokens in several calls gives the
      same rows and hidden states.

    Args:
      runner: programs and parameters.
      cache: donated; the caller must own it.
      token_ids: planned tokens, which fit.
      start: position of the first.
      table: of the cache, the sequence in row 0; None for one row in which block j holds positions j S to j S + S - 1.
      progress: shows a bar of tokens on stderr.
      on_step: called with each step's hidden states [T, D] and what it read, from lane 0 on.

    Returns:
      The new cache and the last step's hidden states.
    """
    hidden_TxD, lane, table = None, 0, table or [range(cache.num_blocks)]
    with progress_lib.bar(len(token_ids), unit="tok", stays=False, is_shown=progress) as bar:
        for width, piece in step_lib.cut(token_ids, start, runner.shapes):
            result = runner.step(cache, [piece], table, width)
            cache, hidden_TxD, lane = result.cache, result.hidden_TxD, len(piece.tokens) - 1
            if on_step is not None:
                on_step(hidden_TxD, piece)
            if progress:
                hidden_TxD.block_until_ready()
            bar.update(len(piece.tokens))
    return RunResult(cache, hidden_TxD, lane)


def next_logits(runner: Runner, result: RunResult) -> jax.Array:
    """Computes the logits of the token after a run: float32 [V]."""
    return runner.heads(result.hidden_TxD, [result.lane])[0]


def score(
    runner: Runner, cache: cache_lib.Cache, token_ids: Sequence[int], start: int = 0, *, progress: bool = False
) -> np.ndarray:
    """Computes next-token logits after each token of a run from position `start` on: float32 [T, V] on the host.

    Exact: row t is bit-equal to the logits after a prefill of tokens 0..start + t, as long as all values are finite.
    """
    logits_TxV = np.empty((len(token_ids), runner.programs.config.model.vocab_size), np.float32)

    def read_heads(hidden_TxD: jax.Array, piece: step_lib.Piece) -> None:
        first = piece.start - start
        for lane, row_V in enumerate(runner.heads(hidden_TxD, range(len(piece.tokens)))):
            logits_TxV[first + lane] = jax.device_get(row_V)

    run(runner, cache, token_ids, start, progress=progress, on_step=read_heads)
    return logits_TxV
