"""Rounds: ways to run sequences, alone or beside others, that must leave the same bits of each.

`alone` and `together` go through the engine's own calls. `mixed` hands whole sequences to the scheduler beneath them,
so that prompts are read in the same steps in which others decode, and so that a neighbour may be one that no engine
would make: a context whose rows are NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

import jax
import numpy as np

from experiments.batch_invariance import sequences as sequences_lib
import kvgraft_jax as kg
from kvgraft_jax.gemma import cache as cache_lib
from kvgraft_jax.gemma import sharding
from kvgraft_jax.runtime import batch as batch_lib
from kvgraft_jax.runtime import plans
from kvgraft_jax.runtime import run as run_lib
from kvgraft_jax.runtime import workspace as workspace_lib

_CAPACITIES = 4  # Of a workspace, as an engine makes it.


@dataclasses.dataclass(frozen=True, eq=False)
class Bench:
    """What all rounds have in common.

    Attributes:
      engine: with as many rows as sequences run at once.
      prefix: the grafted context that some sequences continue.
      new_tokens: the most that each decodes.
      stop_ids: decoding ends before these.
    """

    engine: kg.Engine
    prefix: kg.State
    new_tokens: int
    stop_ids: tuple[int, ...]


def alone(bench: Bench, sequence: sequences_lib.Sequence) -> sequences_lib.Outcome:
    """Runs one sequence by itself."""
    engine = bench.engine
    state = engine.extend(bench.prefix, sequence.first) if sequence.continues else engine.prefill(sequence.first)
    read, extended = sequences_lib.state_sha256(state), None
    if sequence.second:
        state = engine.extend(state, sequence.second)
        extended = sequences_lib.state_sha256(state)
    new_tokens, state = engine.generate(
        state, max_new_tokens=bench.new_tokens, stop_ids=bench.stop_ids, sampling=sequence.sampling
    )
    return sequences_lib.Outcome(read, extended, sequences_lib.state_sha256(state), tuple(new_tokens))


def together(bench: Bench, given: Sequence[sequences_lib.Sequence]) -> dict[int, sequences_lib.Outcome]:
    """Runs sequences side by side, in the order given; returns outcomes by number."""
    engine, states = bench.engine, {}
    fresh, later = ([each for each in given if each.continues is continues] for continues in (False, True))
    states |= _by_number(fresh, engine.prefill_many([each.first for each in fresh]))
    states |= _by_number(later, engine.extend_many([bench.prefix] * len(later), [each.first for each in later]))
    read = {number: sequences_lib.state_sha256(state) for number, state in states.items()}
    longer = [each for each in given if each.second]
    extended = engine.extend_many([states[each.number] for each in longer], [each.second for each in longer])
    states |= _by_number(longer, extended)
    found = engine.generate_many(
        [states[each.number] for each in given],
        max_new_tokens=bench.new_tokens,
        stop_ids=bench.stop_ids,
        sampling=[each.sampling for each in given],
    )
    longer_sha256 = {each.number: sequences_lib.state_sha256(states[each.number]) for each in longer}
    return {
        each.number: sequences_lib.Outcome(
            read[each.number],
            longer_sha256.get(each.number),
            sequences_lib.state_sha256(state),
            tuple(new_tokens),
        )
        for each, (new_tokens, state) in zip(given, found, strict=True)
    }


def mixed(
    bench: Bench,
    given: Sequence[sequences_lib.Sequence],
    *,
    poisoned: frozenset[int] = frozenset(),
    runner: run_lib.Runner | None = None,
) -> dict[int, sequences_lib.Outcome]:
    """Runs whole sequences side by side, in the order given, some reading while others decode.

    Args:
      bench: with the engine to use.
      given: the sequences.
      poisoned: numbers of those that continue a context of NaN instead, and are not looked at.
      runner: to use instead of the engine's.

    Returns:
      Outcomes of the others by number, in which only the last stage was looked at.
    """
    engine, config = bench.engine, bench.engine.step_config
    per_row = config.num_blocks(engine.capacity)
    workspace = workspace_lib.Workspace(config, per_row * min(engine.rows, _CAPACITIES), per_row)
    nan = poison(bench.prefix) if poisoned else None
    jobs = [_poisoned_job(bench, each, nan) if each.number in poisoned else _job(bench, each) for each in given]
    done = batch_lib.run(runner or engine.runner, workspace, jobs, num_rows=engine.rows)
    found = {}
    for each, job, one in zip(given, jobs, done, strict=True):
        if each.number not in poisoned:
            token_ids = (*(job.state.token_ids if job.state else ()), *job.token_ids, *one.new_tokens)
            first_row = job.state.first_row if job.state else 0
            state = dataclasses.replace(
                bench.prefix, blocks=one.blocks, token_ids=token_ids, logits=one.logits_V, first_row=first_row
            )
            found[each.number] = sequences_lib.Outcome(None, None, sequences_lib.state_sha256(state), one.new_tokens)
    return found


def poison(state: kg.State) -> kg.State:
    """Returns a context of as many tokens in which every row of every block is NaN."""
    config = state.step_config

    def nan(array: jax.Array) -> jax.Array:
        values = np.full(array.shape, np.nan, config.jnp_dtype).view(array.dtype)
        return jax.device_put(values, sharding.of_rows(config.mesh, array.shape))

    blocks = tuple(cache_lib.CacheBlock(tuple(map(nan, block.kinds))) for block in state.blocks)
    return dataclasses.replace(state, blocks=blocks)


def _job(bench: Bench, sequence: sequences_lib.Sequence) -> batch_lib.Job:
    state = bench.prefix if sequence.continues else None
    choose = plans.plan_choice(bench.engine.model, sequence.sampling)
    token_ids = sequence.first + sequence.second
    return batch_lib.Job(state, token_ids, batch_lib.Ends(bench.new_tokens, frozenset(bench.stop_ids)), choose)


def _poisoned_job(bench: Bench, sequence: sequences_lib.Sequence, nan: kg.State) -> batch_lib.Job:
    """Reads the sequence's tokens after rows of NaN; its logits are NaN, so it decodes what its position says."""
    vocab_size = bench.engine.model.config.vocab_size
    token_ids = sequence.first + sequence.second
    return batch_lib.Job(nan, token_ids, batch_lib.Ends(bench.new_tokens), lambda _, position: position % vocab_size)


def _by_number(given: Sequence[sequences_lib.Sequence], states: Sequence[kg.State]) -> dict[int, kg.State]:
    return {each.number: state for each, state in zip(given, states, strict=True)}
