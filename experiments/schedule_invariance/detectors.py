"""Detectors: computations of the same text that an invariance check must tell from the engine's own.

Three are what a usual server does (cut freely, batch with `vmap`, run another width), two are damage inside the valid
slots. Other shapes round alike for some sizes and machines, so a detector tries settings until one shows a difference,
and the results list every try. A request beside others is compared with the same program on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from experiments.schedule_invariance import schedules
import kvgraft_jax as kg
from kvgraft_jax import errors
from kvgraft_jax.gemma import cache as cache_lib
from kvgraft_jax.gemma import rotary
from kvgraft_jax.runtime import run as run_lib
from kvgraft_jax.runtime import step as step_lib

_COMPANY_TOKENS = 32


@dataclasses.dataclass(frozen=True)
class Try:
    """One setting of a detector.

    Attributes:
      detector: its name.
      setting: what was computed.
      compute: gives the outcome that must differ.
      alone (int or None): width of the computation from which it must differ; None: the engine's plain schedule.
    """

    detector: str
    setting: str
    compute: Callable[[], schedules.Outcome]
    alone: int | None = None


def tries(bench: Bench, width: int) -> Iterator[Try]:
    """Yields all settings in the order of trying; those that differ on most machines come first."""
    narrow, wide = max(2, width // 8), 4 * width
    for other in (narrow, wide):
        yield Try("another_width", f"width {other}", functools.partial(bench.alone, other))
    for widths in ((wide, narrow), (2 * width, wide)):
        text = f"{widths[0]} tokens in one program, then {widths[1]} at a time in another"
        yield Try("free_chunking", text, functools.partial(bench.chunked, widths))
    for requests, lanes in ((8, narrow), (4, width)):
        text = f"vmap over {requests} requests, against one alone, width {lanes}"
        yield Try("vmap_over_requests", text, functools.partial(bench.company, requests, lanes), alone=lanes)
    yield Try("row_bit", "lowest bit of one key element, newest row, layer 0", bench.flipped)
    yield Try("nan_inside", "NaN in the newest row of every layer", bench.poisoned)


class Bench:
    """Carries the computations out, in caches of one size so that each program is compiled once."""

    def __init__(self, engine: kg.Engine, token_ids: Sequence[int], checkpoints: Sequence[int]):
        self._engine, self._token_ids, self._checkpoints = engine, tuple(token_ids), checkpoints
        config = engine.step_config
        self._capacity = engine.capacity + 3 * config.width
        self._tables = rotary.make_tables(config.model, config.num_slots(self._capacity), config.jnp_dtype)
        self._alone: dict[int, tuple[schedules.Outcome, schedules.Checkpoints]] = {}

    def alone(self, width: int) -> schedules.Outcome:
        """Reads the whole text by itself through a program of this width; computed once."""
        return self._read_alone(width)[0]

    def _read_alone(self, width: int) -> tuple[schedules.Outcome, schedules.Checkpoints]:
        if width not in self._alone:
            watch = schedules.Checkpoints(self._checkpoints)
            self._alone[width] = self._chunked((width,), watch), watch
        return self._alone[width]

    def chunked(self, widths: Sequence[int]) -> schedules.Outcome:
        """Reads the text in chunks of these sizes, repeating the last, each through a program of its own width."""
        return self._chunked(widths, schedules.Checkpoints(self._checkpoints))

    def _chunked(self, widths: Sequence[int], watch: schedules.Checkpoints) -> schedules.Outcome:
        cache, read = self._engine.step_config.make_cache(self._capacity), 0
        for width in itertools.chain(widths, itertools.repeat(widths[-1])):
            runner, chunk = self._runner(width), self._token_ids[read : read + width]
            result = schedules.feed(runner, cache, chunk, read, watch)
            cache, read = result.cache, read + len(chunk)
            if read == len(self._token_ids):
                break
        return self._outcome(cache, run_lib.next_logits(runner, result), watch)

    def company(self, requests: int, width: int) -> schedules.Outcome:
        """Reads the last tokens as the first of several requests that one `vmap` runs side by side.

        The requests begin as copies of the text read alone, through the same width; the rows of its last tokens are
        overwritten by those that the company computes.
        """
        config, runner = self._engine.step_config, self._runner(width)
        alone, watch = self._read_alone(width)
        watch, start = watch.copy(), max(0, len(self._token_ids) - _COMPANY_TOKENS)
        tokens_BxT = np.random.default_rng(0).integers(
            0, config.model.vocab_size, (requests, len(self._token_ids) - start), np.int32
        )
        tokens_BxT[0] = self._token_ids[start:]
        step = jax.jit(jax.vmap(runner.programs.step, in_axes=(None, None, 0, 0, 0, 0)), donate_argnums=2)
        cache = jax.tree.map(lambda array: jnp.stack([array] * requests), alone.state.cache)
        for reads in zip(*(step_lib.cut(tokens_T, start, width) for tokens_T in tokens_BxT), strict=True):
            parts = ([read.tokens_T for read in reads], [read.start for read in reads], [read.count for read in reads])
            result = step(runner.params, runner.tables, cache, *map(np.stack, parts))
            cache, hidden_TxD = result.cache, result.hidden_TxD[0]
            watch.look(runner, hidden_TxD, reads[0])
        last = run_lib.RunResult(cache, hidden_TxD, int(reads[0].count) - 1)
        own_cache = jax.tree.map(lambda array: array[0], cache)
        return self._outcome(own_cache, run_lib.next_logits(runner, last), watch)

    def flipped(self) -> schedules.Outcome:
        """Changes one bit of a key before it reads the last token."""

        def damage(cache: cache_lib.Cache, newest: int) -> cache_lib.Cache:
            k_rot_SxKxH = np.array(cache.layers[0].k_rot_SxKxH)
            k_rot_SxKxH[newest].view(np.uint8)[0, 0] ^= 1
            layer = dataclasses.replace(cache.layers[0], k_rot_SxKxH=jnp.array(k_rot_SxKxH))
            return cache_lib.Cache((layer, *cache.layers[1:]))

        return self._damaged(damage)

    def poisoned(self) -> schedules.Outcome:
        """Overwrites the newest row with NaN, as if it were unused, before it reads the last token."""

        def damage(cache: cache_lib.Cache, newest: int) -> cache_lib.Cache:
            rng = np.random.default_rng(0)
            return schedules.fill_unused(cache, self._engine.model.config, 0, newest, schedules.NAN, rng)

        return self._damaged(damage)

    def _damaged(self, damage: Callable[[cache_lib.Cache, int], cache_lib.Cache]) -> schedules.Outcome:
        watch, runner = schedules.Checkpoints(self._checkpoints), self._engine.runner
        *most, last = self._token_ids
        result = schedules.feed(runner, self._engine.step_config.make_cache(self._engine.capacity), most, 0, watch)
        cache = damage(result.cache, len(most) - 1)
        result = schedules.feed(runner, cache, [last], len(most), watch)
        return self._outcome(result.cache, run_lib.next_logits(runner, result), watch)

    def _runner(self, width: int) -> run_lib.Runner:
        config = dataclasses.replace(self._engine.step_config, width=width)
        return run_lib.Runner(step_lib.programs(config), self._engine.runner.params, self._tables)

    def _outcome(self, cache: cache_lib.Cache, logits_V: jax.Array, watch: schedules.Checkpoints) -> schedules.Outcome:
        state = schedules.make_state(self._engine, cache, self._token_ids, logits_V)
        return schedules.outcome(state, watch)


def run(
    engine: kg.Engine, token_ids: Sequence[int], checkpoints: Sequence[int], reference: schedules.Outcome
) -> Iterator[dict[str, str | bool]]:
    """Tries every detector until it fires; gives a row for each try.

    Args:
      engine: the one under test.
      token_ids: the text.
      checkpoints: positions after which the logits are hashed.
      reference: of the plain schedule.
    """
    bench = Bench(engine, token_ids, checkpoints)
    fired = set()
    for attempt in tries(bench, engine.step_config.width):
        if attempt.detector in fired:
            continue
        try:
            outcome = attempt.compute()
        except errors.KVGraftError as error:
            outcome = schedules.refused(error)
        against = reference if attempt.alone is None else bench.alone(attempt.alone)
        if outcome.sha256 != against.sha256:
            fired.add(attempt.detector)
        yield {
            "detector": attempt.detector,
            "setting": attempt.setting,
            "fired": attempt.detector in fired,
            "sha256": outcome.sha256,
            "against_sha256": against.sha256,
        }
