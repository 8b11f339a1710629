"""Detectors: computations of the same text that an invariance check must tell from the engine's own.

Two put back what the engine's arithmetic avoids: sums and products whose order a library chooses, down to a step of one
lane, which no engine has. One is what a usual server does with such sums, `vmap` over requests; a request beside others
is compared with the same program on its own. Two are damage inside the valid slots. A library may choose the same order
for some sizes and machines, so a detector tries settings until one shows a difference, and the results list every try.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from experiments.schedule_invariance import schedules
from experiments.width_invariance import detectors as causes
import kvgraft_jax as kg
from kvgraft_jax import errors
from kvgraft_jax.gemma import cache as cache_lib
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
      against: gives the outcome from which it must differ; None means the engine's plain schedule.
    """

    detector: str
    setting: str
    compute: Callable[[], schedules.Outcome]
    against: Callable[[], schedules.Outcome] | None = None


def tries(bench: Bench) -> Iterator[Try]:
    """Yields all settings in the order of trying; those that differ on most machines come first."""
    for cause, widths in ((causes.PLAIN_SUMS, (10, 64)), (causes.UNCUT_PRODUCTS, (10, 64, 1))):
        for width in widths:
            yield Try(cause, f"width {width}", functools.partial(bench.with_cause, cause, width))
    for requests, width in ((8, 2), (8, 10)):
        text = f"plain sums, vmap over {requests} requests, against one alone, width {width}"
        alone = functools.partial(bench.with_cause, causes.PLAIN_SUMS, width)
        yield Try("vmap_over_requests", text, functools.partial(bench.company, requests, width), alone)
    yield Try("row_bit", "lowest bit of one key element, newest row, layer 0", bench.flipped)
    yield Try("nan_inside", "NaN in the newest row of every layer", bench.poisoned)


class Bench:
    """Carries the computations out, in caches of the engine's size with the blocks in order."""

    def __init__(self, engine: kg.Engine, token_ids: Sequence[int], checkpoints: Sequence[int]):
        self._engine, self._token_ids, self._checkpoints = engine, tuple(token_ids), checkpoints
        self._config = engine.step_config
        self._places = range(self._config.num_blocks(engine.capacity))

    def alone(self, width: int) -> schedules.Outcome:
        """Reads the whole text in steps of this width, through programs that are traced for it."""
        return self._read(self._runner(width))

    def with_cause(self, cause: str, width: int) -> schedules.Outcome:
        """Reads it as `alone` does, by programs to which one of `causes.CAUSES` was put back."""
        with causes.CAUSES[cause](self._engine.model) as params:
            return self._read(dataclasses.replace(self._runner(width), params=params))

    def company(self, requests: int, width: int) -> schedules.Outcome:
        """Reads the last tokens as the first of several requests that one `vmap` runs side by side, with plain sums.

        The requests begin as copies of the context in which the same program read all tokens before these.
        """
        with causes.plain_sums(self._engine.model):
            return self._company(requests, width)

    def _company(self, requests: int, width: int) -> schedules.Outcome:
        config, runner, table = self._config, self._runner(width), [self._places]
        watch, start = schedules.Checkpoints(self._checkpoints), max(0, len(self._token_ids) - _COMPANY_TOKENS)
        alone = config.make_cache(len(self._places))
        if start:
            alone = schedules.feed(runner, alone, table, self._token_ids[:start], 0, watch).cache
        tokens_BxT = np.random.default_rng(0).integers(
            0, config.model.vocab_size, (requests, len(self._token_ids) - start), np.int32
        )
        tokens_BxT[0] = self._token_ids[start:]
        step = jax.jit(jax.vmap(runner.programs.step, in_axes=(None, None, 0, 0)), donate_argnums=2)
        cache = jax.tree.map(lambda array: jnp.stack([array] * requests), alone)
        for done in range(0, tokens_BxT.shape[1], width):
            some_BxT = tokens_BxT[:, done : done + width].tolist()
            pieces = [step_lib.Piece(0, start + done, tuple(tokens_T)) for tokens_T in some_BxT]
            lanes = [step_lib.lay_out([piece], table, width, config.kv_block) for piece in pieces]
            result = step(runner.params, runner.tables, cache, jax.tree.map(lambda *arrays: np.stack(arrays), *lanes))
            cache, hidden_TxD = result.cache, result.hidden_TxD[0]
            watch.look(runner, hidden_TxD, pieces[0])
        last = run_lib.RunResult(cache, hidden_TxD, len(pieces[0].tokens) - 1)
        own_cache = jax.tree.map(lambda array: array[0], cache)
        return self._outcome(own_cache, run_lib.next_logits(runner, last), watch)

    def flipped(self) -> schedules.Outcome:
        """Changes one bit of a key before it reads the last token."""

        def damage(cache: cache_lib.Cache, newest: int) -> cache_lib.Cache:
            k_rot_JxSxKxH = np.array(cache.layers[0].k_rot_JxSxKxH)
            k_rot_JxSxKxH[divmod(newest, self._config.kv_block)].view(np.uint8)[0, 0] ^= 1
            layer = dataclasses.replace(cache.layers[0], k_rot_JxSxKxH=jnp.array(k_rot_JxSxKxH))
            return cache_lib.Cache((layer, *cache.layers[1:]))

        return self._damaged(damage)

    def poisoned(self) -> schedules.Outcome:
        """Overwrites the newest row with NaN, as if it were unused, before it reads the last token."""

        def damage(cache: cache_lib.Cache, newest: int) -> cache_lib.Cache:
            rng = np.random.default_rng(0)
            return schedules.fill_unused(cache, self._config, self._places, 0, newest, schedules.NAN, rng)

        return self._damaged(damage)

    def _damaged(self, damage: Callable[[cache_lib.Cache, int], cache_lib.Cache]) -> schedules.Outcome:
        watch, runner, table = schedules.Checkpoints(self._checkpoints), self._engine.runner, [self._places]
        *most, last = self._token_ids
        result = schedules.feed(runner, self._config.make_cache(len(self._places)), table, most, 0, watch)
        cache = damage(result.cache, len(most) - 1)
        result = schedules.feed(runner, cache, table, [last], len(most), watch)
        return self._outcome(result.cache, run_lib.next_logits(runner, result), watch)

    def _runner(self, width: int) -> run_lib.Runner:
        """Returns the engine's runner with programs of its own, which jax traces anew."""
        programs = step_lib.Programs(self._config)
        return dataclasses.replace(self._engine.runner, programs=programs, shapes=(width,), prepare=None)

    def _read(self, runner: run_lib.Runner) -> schedules.Outcome:
        watch, cache = schedules.Checkpoints(self._checkpoints), self._config.make_cache(len(self._places))
        result = schedules.feed(runner, cache, [self._places], self._token_ids, 0, watch)
        return self._outcome(result.cache, run_lib.next_logits(runner, result), watch)

    def _outcome(self, cache: cache_lib.Cache, logits_V: jax.Array, watch: schedules.Checkpoints) -> schedules.Outcome:
        state = schedules.make_state(self._engine, cache, self._places, self._token_ids, logits_V)
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
    for attempt in tries(bench):
        if attempt.detector in fired:
            continue
        try:
            outcome = attempt.compute()
        except errors.ResourceError:
            raise  # Says nothing about bits.
        except errors.KVGraftError as error:
            outcome = schedules.refused(error)
        against = reference if attempt.against is None else attempt.against()
        if outcome.sha256 != against.sha256:
            fired.add(attempt.detector)
        yield {
            "detector": attempt.detector,
            "setting": attempt.setting,
            "fired": attempt.detector in fired,
            "sha256": outcome.sha256,
            "against_sha256": against.sha256,
        }
