"""Readings: plans for cutting one text into steps of any widths, and what each of them leaves.

A plan drives the step itself, so it can put fewer tokens into a step than fit, which an engine would not do.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

import flax
import jax
import numpy as np

import kvgraft_jax as kg
from kvgraft_jax import digest, errors
from kvgraft_jax.gemma import cache as cache_lib
from kvgraft_jax.gemma import rotary
from kvgraft_jax.grafting import capture, compare, differences
from kvgraft_jax.grafting import manifest as manifest_lib
from kvgraft_jax.runtime import run as run_lib
from kvgraft_jax.runtime import step as step_lib


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one text is read.

    Attributes:
      name: for people.
      steps: width and number of live lanes of each step, in order; the live lanes add up to the text.
      idle_seed: of random tokens in the idle lanes; None leaves zeros there.
    """

    name: str
    steps: tuple[tuple[int, int], ...]
    idle_seed: int | None = None

    @property
    def widths(self) -> tuple[int, ...]:
        """Returns the different widths, rising."""
        return tuple(sorted({width for width, _ in self.steps}))


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
    """What a plan left.

    Attributes:
      sha256: of every K/V row of every layer and of the logits at every checkpoint and at the end; "refused: ..." where
        a value is not finite.
      logits_sha256: of the logits after each checkpoint, in order of position, and after the last token.
      state: the context at the end.
    """

    sha256: str
    logits_sha256: tuple[str, ...]
    state: kg.State

    @property
    def is_refused(self) -> bool:
        """Returns whether there was nothing to hash."""
        return self.sha256.startswith("refused: ")


def single(width: int, num_tokens: int) -> Plan:
    """Returns the plan that reads everything in steps of one width, each but the last one full."""
    lives = [min(width, num_tokens - start) for start in range(0, num_tokens, width)]
    return Plan(f"width {width}", tuple((width, live) for live in lives))


def draw(number: int, seed: int, shapes: Sequence[int], num_tokens: int) -> Plan:
    """Draws random plan `number`: each step has any width, and is full or has any number of live lanes.

    In every second plan the idle lanes hold random tokens.
    """
    rng = np.random.default_rng([seed, number])
    steps, left = [], num_tokens
    while left:
        width = int(rng.choice(shapes))
        live = min(left, width if rng.random() < 0.5 else int(rng.integers(1, width, endpoint=True)))
        steps.append((width, live))
        left -= live
    return Plan(f"random {number}", tuple(steps), number if number % 2 else None)


def make_runner(model: kg.Model, kv_block: int, num_tokens: int) -> run_lib.Runner:
    """Makes the programs and tables for texts of this length. The programs are traced anew and shared with nobody,
    so they go when the runner does.
    """
    config = step_lib.StepConfig(model.config, model.dtype, kv_block, model.mesh)
    num_positions = config.num_blocks(num_tokens) * kv_block
    tables = rotary.make_tables(model.config, num_positions, config.jnp_dtype, model.mesh)
    return run_lib.Runner(step_lib.Programs(config), flax.core.unfreeze(model.params), tables, ())


def place_checkpoints(num_tokens: int, kv_block: int, window: int | None) -> tuple[int, ...]:
    """Returns the positions whose logits are hashed: first, middle, and around a K/V block and the window."""
    last = num_tokens - 1
    wanted = {0, 1, kv_block - 1, kv_block, (window or 1) - 1, window or 0, last // 2, last - 1}
    return tuple(sorted(position for position in wanted if 0 <= position < last))


def read(
    runner: run_lib.Runner, weights: str, plan: Plan, token_ids: Sequence[int], checkpoints: Sequence[int]
) -> Outcome:
    """Reads a text as a plan says.

    Args:
      runner: its programs; widths and preparation of its own play no part.
      weights: digest of the parameters.
      plan: for a text of this length.
      token_ids: the text.
      checkpoints: positions whose logits count, rising.
    """
    config = runner.programs.config
    cache = config.make_cache(config.num_blocks(runner.num_positions))
    table = [range(cache.num_blocks)]
    rng = None if plan.idle_seed is None else np.random.default_rng(plan.idle_seed)
    start, logits = 0, []
    for width, live in plan.steps:
        piece = step_lib.Piece(0, start, tuple(token_ids[start : start + live]))
        idle = () if rng is None else rng.integers(0, config.model.vocab_size, width - live).tolist()
        result = runner.step(cache, [piece], table, width, idle_tokens=idle)
        cache, hidden_TxD, stop = result.cache, result.hidden_TxD, start + live
        lanes = [position - start for position in checkpoints if start <= position < stop]
        lanes += [live - 1] if stop == len(token_ids) else []
        logits += runner.heads(hidden_TxD, lanes)
        start = stop
    blocks = [
        cache_lib.take_block(cache, jax.device_put(np.int32(index), runner.place), config.model, config.mesh)
        for index in range(config.num_blocks(len(token_ids)))
    ]
    state = kg.State(tuple(blocks), tuple(token_ids), logits[-1], config, weights)
    return _outcome(state, [np.asarray(jax.device_get(logits_V)) for logits_V in logits])


def _outcome(state: kg.State, logits: Sequence[np.ndarray]) -> Outcome:
    logits_sha256 = tuple(map(compare.logits_sha256, logits))
    if not all(np.isfinite(logits_V).all() for logits_V in logits):
        return Outcome("refused: a logit is NaN or infinite", logits_sha256, state)
    try:
        kv_sha256 = compare.hashes(state, policy=manifest_lib.ALL_ROWS).kv_sha256
    except errors.CaptureError as error:  # All NaN is equal to all NaN, which shows nothing.
        return Outcome(f"refused: {error}", logits_sha256, state)
    return Outcome(digest.json_digest({"kv": kv_sha256, "logits": list(logits_sha256)}), logits_sha256, state)


def first_difference(reference: Outcome, other: Outcome, checkpoints: Sequence[int]) -> str:
    """Says where two outcomes of one text first differ: in a row of the lowest layer, or else in logits."""
    if reference.is_refused or other.is_refused:
        return (reference if reference.is_refused else other).sha256
    ours, theirs = (capture.read_stacks(outcome.state, manifest_lib.ALL_ROWS) for outcome in (reference, other))
    logits = (np.asarray(jax.device_get(outcome.state.logits)) for outcome in (reference, other))
    found = differences.first(ours, next(logits), theirs, next(logits))
    if found is not None:
        return found
    pairs = zip(checkpoints, reference.logits_sha256, other.logits_sha256, strict=False)
    return next(f"the logits after position {position}" for position, a, b in pairs if a != b)
