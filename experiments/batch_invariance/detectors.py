"""Detectors: mistakes of a server of many sequences that the comparison must see.

`swapped_rows` swaps two rows of a step's table, so two sequences write to and read from each other's blocks.
`neighbours_row` lets the lanes of one sequence attend to the row of another. `row_bit` changes the lowest bit of one
key. `swapped_seeds` gives each draw the seed of another sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses

import jax
import numpy as np

from experiments.batch_invariance import rounds
from experiments.batch_invariance import sequences as sequences_lib
from kvgraft_jax import errors
from kvgraft_jax.gemma import cache as cache_lib
from kvgraft_jax.runtime import run as run_lib
from kvgraft_jax.runtime import step as step_lib

NAMES = ("swapped_rows", "neighbours_row", "row_bit", "swapped_seeds")


class _SwappedRows(run_lib.Runner):
    """Swaps the rows of the first two sequences of a step, in about every second step."""

    def step(self, cache, pieces, table, width, *, idle_tokens=()):
        if len(pieces) > 1 and pieces[0].start % 2:
            table, (a, b) = list(table), (pieces[0].row, pieces[1].row)
            table[a], table[b] = table[b], table[a]
        return super().step(cache, pieces, table, width, idle_tokens=idle_tokens)


class _NeighboursRow(run_lib.Runner):
    """Lets the first sequence of a step attend to the row of the second, though it writes to its own."""

    def step(self, cache, pieces, table, width, *, idle_tokens=()):
        lanes = step_lib.lay_out(pieces, table, width, self.programs.config.kv_block, idle_tokens=idle_tokens)
        if len(pieces) > 1:
            own, other = pieces[0].row, pieces[1].row
            lanes = dataclasses.replace(lanes, rows_T=np.where(lanes.rows_T == own, np.int32(other), lanes.rows_T))
        return self.programs.step(self.params, self.tables, cache, jax.device_put(lanes, self.place))


def run(
    bench: rounds.Bench, given: Sequence[sequences_lib.Sequence], singly: Mapping[int, sequences_lib.Outcome]
) -> Iterator[dict[str, str | int | bool]]:
    """Carries out each detector; gives a row for each.

    Args:
      bench: with two rows or more.
      given: some sequences, draws among them.
      singly: their outcomes by number.
    """
    computed = {
        "swapped_rows": lambda: rounds.mixed(bench, given, runner=_made(_SwappedRows, bench)),
        "neighbours_row": lambda: rounds.mixed(bench, given, runner=_made(_NeighboursRow, bench)),
        "row_bit": lambda: _flipped(bench, given[0]),
        "swapped_seeds": lambda: rounds.mixed(bench, _swap_seeds(given)),
    }
    for name in NAMES:
        count, differing = _compare(computed[name], singly)
        yield {"detector": name, "sequences": count, "different": differing, "fired": differing != "0"}


def _compare(
    compute: Callable[[], Mapping[int, sequences_lib.Outcome]], singly: Mapping[int, sequences_lib.Outcome]
) -> tuple[int, str]:
    """Returns how many sequences were run, and how many of them differ in words."""
    try:
        found = compute()
    except errors.ResourceError:
        raise  # Says nothing about bits.
    except errors.KVGraftError as error:
        return len(singly), f"refused: {error}"
    differing = sum(outcome.difference(singly[number]) is not None for number, outcome in found.items())
    return len(found), str(differing)


def _made(kind: type[run_lib.Runner], bench: rounds.Bench) -> run_lib.Runner:
    runner = bench.engine.runner
    return kind(**{field.name: getattr(runner, field.name) for field in dataclasses.fields(runner)})


def _flipped(bench: rounds.Bench, sequence: sequences_lib.Sequence) -> dict[int, sequences_lib.Outcome]:
    """Returns the outcome of a sequence, whose context after the first call has one other bit."""
    engine = bench.engine
    state = engine.extend(bench.prefix, sequence.first) if sequence.continues else engine.prefill(sequence.first)
    newest, (*earlier, block) = (state.length - 1) % engine.kv_block, state.blocks
    kv_Lx2xSxKxH = np.array(block.kinds[0])
    kv_Lx2xSxKxH.view(f"u{kv_Lx2xSxKxH.dtype.itemsize}")[0, 0, newest, 0, 0] ^= 1
    damaged = cache_lib.CacheBlock((jax.device_put(kv_Lx2xSxKxH, block.kinds[0].sharding), *block.kinds[1:]))
    state = dataclasses.replace(state, blocks=(*earlier, damaged))
    outcome = rounds.alone(bench, sequence)
    return {sequence.number: dataclasses.replace(outcome, read=sequences_lib.state_sha256(state))}


def _swap_seeds(given: Sequence[sequences_lib.Sequence]) -> list[sequences_lib.Sequence]:
    """Gives each sequence that draws the seed of the next one that does."""
    seeds = [each.sampling.seed for each in given if each.sampling]
    seeds = iter(seeds[1:] + seeds[:1])
    return [
        dataclasses.replace(each, sampling=dataclasses.replace(each.sampling, seed=next(seeds)))
        if each.sampling
        else each
        for each in given
    ]
