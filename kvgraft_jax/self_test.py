"""The self-test: what the executables of an engine compute for a few fixed tokens, before any result is returned.

A pin holds the text of the programs, but executables decide bits: one read from a compilation cache, or a library that
is not what it says, may compute otherwise under the same text. So the engine's own executables, one for each width of
the step and size of the cache, run on fixed tokens before they are used for anything else, and the SHA-256 of what they
leave stands in the pin, beside what the program that draws gives for fixed logits. The tokens go through in steps that
are as full as may be and then, the last of them, one at a time. Both ways and all widths have to leave the same bits: a
library whose bits depend on the cut does not do that.
"""

from __future__ import annotations

import dataclasses
import weakref

import jax
import numpy as np

from kvgraft_jax import digest, errors, host_memory
from kvgraft_jax.gemma import cache as cache_lib
from kvgraft_jax.grafting import differences, rows
from kvgraft_jax.runtime import run as run_lib
from kvgraft_jax.runtime import step as step_lib

_TOKENS, _SINGLES = 33, 5

# What each program's executables computed in this process: by weights and jax's options, then by their sizes.
_known: weakref.WeakKeyDictionary[step_lib.Programs, dict] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What an executable is compiled for.

    Attributes:
      width: lanes of the step.
      num_blocks: of the cache.
      num_rows: of the table.
    """

    width: int
    num_blocks: int
    num_rows: int

    def __str__(self) -> str:
        return f"{self.width} lanes, {self.num_rows} rows and {self.num_blocks} blocks"


@dataclasses.dataclass(frozen=True, eq=False)
class _Outcome:
    """What a schedule left: K/V rows of every kind, and float32 [V] logits after the last token."""

    rows: tuple[differences.Rows, ...]
    logits_V: np.ndarray


def result(runner: run_lib.Runner, weights: str, sizes: Sizes) -> str:
    """Returns the SHA-256 (hex) of what the runner's executables compute; each of them runs once per process.

    Exact: equal for every width, capacity and number of rows.

    Args:
      runner: programs, parameters and tables.
      weights: digest of the parameters.
      sizes: of the executable to run, unless it has run.

    Raises:
      DeterminismError: steps cut otherwise, or of another size, leave different bits.
    """
    of_options = _known.setdefault(runner.programs, {})
    by_sizes = of_options.setdefault((weights, step_lib.tracing_context()), {})
    if sizes not in by_sizes:
        found = measure(runner, sizes)
        for other, sha256 in by_sizes.items():
            if found != sha256:
                raise errors.DeterminismError(
                    f"self-test of {runner.programs.config.model.name}: steps of {sizes} leave other bits than steps "
                    f"of {other} ({found[:16]} and {sha256[:16]}), so nothing here would be exact; use in a "
                    f"new process one width, shapes=({sizes.width},), and report the processor and version of jaxlib"
                )
        by_sizes[sizes] = found
        host_memory.trim()  # Compilation is over.
    return by_sizes[sizes]


def prepare(runner: run_lib.Runner, width: int, num_blocks: int, num_rows: int, *, weights: str) -> None:
    """Runs an executable before its first use; see `result`."""
    result(runner, weights, Sizes(width, num_blocks, num_rows))


def measure(runner: run_lib.Runner, sizes: Sizes) -> str:
    """Runs the executables and returns the SHA-256 (hex) of rows and logits.

    Raises:
      DeterminismError: see `result`.
    """
    config = runner.programs.config
    runner = dataclasses.replace(runner, shapes=(sizes.width,), prepare=None)
    count = min(_TOKENS, config.kv_block, runner.num_positions)
    token_ids = tuple((7919 * (index + 1)) % config.model.vocab_size for index in range(count))
    whole = _outcome(runner, sizes, (token_ids,))
    cut = _outcome(runner, sizes, (token_ids[:-_SINGLES], *((token_id,) for token_id in token_ids[-_SINGLES:])))
    difference = differences.first(whole.rows, whole.logits_V, cut.rows, cut.logits_V)
    if difference is not None:
        raise errors.DeterminismError(
            f"self-test of {config.model.name}: {count} tokens read in steps of {sizes.width}, and the last {_SINGLES} "
            f"of them one at a time, leave different bits: {difference}. XLA runs these programs with code whose bits "
            "depend on the cut of a prompt, so nothing here would be exact; look for unusual flags or another build of "
            "jaxlib, and empty jax's compilation cache"
        )
    document = [[part.kind, list(part.layers), digest.array_digest(part.kv_Lx2xSxKxH)] for part in whole.rows]
    return digest.json_digest({"rows": document, "logits": digest.array_digest(whole.logits_V)})


def _outcome(runner: run_lib.Runner, sizes: Sizes, parts: tuple[tuple[int, ...], ...]) -> _Outcome:
    config, start = runner.programs.config, 0
    cache = config.make_cache(sizes.num_blocks)
    table = [[0] * config.num_blocks(runner.num_positions)] * sizes.num_rows
    for token_ids in parts:
        last = run_lib.run(runner, cache, token_ids, start, table=table)
        cache, start = last.cache, start + len(token_ids)
    block = cache_lib.take_block(cache, jax.device_put(np.int32(0), runner.place), config.model, config.mesh)
    kinds = [
        differences.Rows(kind.name, kind.layers, 0, rows.read_rows((block,), index, 0, start, config.jnp_dtype))
        for index, kind in enumerate(config.model.kinds)
    ]
    return _Outcome(tuple(kinds), np.asarray(jax.device_get(run_lib.next_logits(runner, last))))
