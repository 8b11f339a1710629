"""The self-test: what the executables of an engine compute for a few fixed tokens, before any result is returned.

A pin holds the text of the programs, but executables decide bits: one read from a compilation cache, or a library that
is not what it says, may compute otherwise under the same text. So the engine's own executables run on fixed tokens, at
its own capacity, and the SHA-256 of what they leave stands in the pin. The tokens go through steps of full width (one
step where the width exceeds the K/V block) and then one at a time as well, which has to give the same bits: a library
whose bits depend on the cut does not do that.
"""

from __future__ import annotations

from collections.abc import Hashable
import dataclasses
import weakref

import jax
import numpy as np

from kvgraft_jax import digest, errors, host_memory
from kvgraft_jax.gemma import cache as cache_lib
from kvgraft_jax.grafting import differences, rows
from kvgraft_jax.runtime import run as run_lib
from kvgraft_jax.runtime import step as step_lib

_SINGLE = 16  # Of the tokens, at most this many go through steps of their own as well.

# What each program's executables computed in this process: by weights, slots and jax's options.
_known: weakref.WeakKeyDictionary[step_lib.Programs, dict[Hashable, str]] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True, eq=False)
class _Outcome:
    """What a schedule left: K/V rows of every kind, and float32 [V] logits after the last token."""

    rows: tuple[differences.Rows, ...]
    logits_V: np.ndarray


def result(runner: run_lib.Runner, weights: str) -> str:
    """Returns the SHA-256 (hex) of what the runner's executables compute; they run once per process.

    Exact: equal for every capacity, since the tokens fit the smallest and capacity leaves no trace in bits.

    Args:
      runner: programs, parameters and tables of one capacity.
      weights: digest of the parameters.

    Raises:
      DeterminismError: whole steps and single ones leave different bits; names the first difference.
    """
    of_program = _known.setdefault(runner.programs, {})
    key = (weights, runner.num_slots, step_lib.tracing_context())
    if key not in of_program:
        of_program[key] = measure(runner)
        host_memory.trim()  # Compilation is over.
    return of_program[key]


def measure(runner: run_lib.Runner) -> str:
    """Runs the executables and returns the SHA-256 (hex) of rows and logits.

    Raises:
      DeterminismError: see `result`.
    """
    config = runner.programs.config
    count = min(config.width + (config.width + 1) // 2, config.kv_block)
    token_ids = tuple((7919 * (index + 1)) % config.model.vocab_size for index in range(count))
    singles = min(count - 1, config.width, _SINGLE)  # A token of each lane, of a step that is not wider.
    whole = _outcome(runner, (token_ids,))
    cut = _outcome(runner, (token_ids[:-singles], *((token_id,) for token_id in token_ids[-singles:])))
    difference = differences.first(whole.rows, whole.logits_V, cut.rows, cut.logits_V)
    if difference is not None:
        raise errors.DeterminismError(
            f"self-test of {config.model.name}: {count} tokens read in steps of {config.width}, and the last {singles} "
            f"of them one at a time, leave different bits: {difference}. XLA runs these programs with code whose bits "
            "depend on the cut of a prompt, so nothing here would be exact; look for unusual flags or another build of "
            "jaxlib, and empty jax's compilation cache"
        )
    document = [[part.kind, list(part.layers), digest.array_digest(part.kv_Lx2xSxKxH)] for part in whole.rows]
    return digest.json_digest({"rows": document, "logits": digest.array_digest(whole.logits_V)})


def _outcome(runner: run_lib.Runner, parts: tuple[tuple[int, ...], ...]) -> _Outcome:
    config, start = runner.programs.config, 0
    cache = cache_lib.make_cache(config.model, runner.num_slots, config.jnp_dtype, config.mesh)
    for token_ids in parts:
        last = run_lib.run(runner, cache, token_ids, start)
        cache, start = last.cache, start + len(token_ids)
    kinds = []
    for kind in config.model.kinds:
        layers = tuple(cache.layers[index] for index in kind.layers)
        kv_Lx2xSxKxH = rows.read_rows(layers, 0, start, config.kv_block, config.jnp_dtype)
        kinds.append(differences.Rows(kind.name, kind.layers, 0, kv_Lx2xSxKxH))
    return _Outcome(tuple(kinds), np.asarray(jax.device_get(run_lib.next_logits(runner, last))))
