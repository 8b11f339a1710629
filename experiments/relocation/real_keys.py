"""Keys of a real run before rotation, and the tables that turn them: what both experiments on a model share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools

import jax
import numpy as np

import kvgraft_jax as kg
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma import transformer
from kvgraft_jax.relocation import encodings, keys, tables
from kvgraft_jax.runtime import step as step_lib

SCHEMES = {"bfloat16": keys.ENGINE_BF16, "float32": keys.ENGINE_F32}
"""How an engine of each dtype rotates and stores keys."""


def make_table(attention: config_lib.AttentionConfig, num_positions: int) -> tables.Table:
    """Returns the rotary table of an attention kind, of any head width."""
    encoding = encodings.Encoding(f"{attention.head_dim} wide", attention.head_dim, attention.rotary)
    return tables.make_table(encoding, num_positions)


def raw_keys(engine: kg.Engine, token_ids: Sequence[int]) -> list[np.ndarray]:
    """Collects a text's keys in a fresh context, after norm and before rotation: [T, K, H] per layer that owns keys.

    Exact: rotated, they are the engine's keys in every bit wherever that was looked at. The step has no such output, so
      a second program of the same layers collects them; both experiments compare it with the step and fail where the
      two differ.

    Args:
      engine: reads the text at positions 0..T-1.
      token_ids: a text that fits.
    """
    config, collect = engine.step_config, _program(engine.step_config)
    cache = config.make_cache(engine.capacity)
    pieces: list[list[np.ndarray]] = [[] for _ in range(config.model.num_kv_layers)]
    for read in step_lib.cut(token_ids, 0, config.width):
        result, k_raw = collect(
            engine.runner.params, engine.runner.tables, cache, read.tokens_T, read.start, read.count
        )
        cache = result.cache
        for piece, k_raw_TxKxH in zip(pieces, k_raw, strict=True):
            piece.append(np.asarray(k_raw_TxKxH)[: read.count])
    return [np.concatenate(piece) for piece in pieces]


@functools.lru_cache(maxsize=16)
def _program(config: step_lib.StepConfig) -> Callable:
    """Compiles the step of a configuration with one more output, the result of every key norm; donates the cache.

    It gives out everything that the step does: the compiler would drop what nothing hangs on, and round the rest of the
    last layer otherwise.
    """
    model = transformer.Transformer(config.model, config.jnp_dtype, config.kv_block)

    def step(params, rotary_tables, cache, tokens_T, start, count) -> tuple[step_lib.StepResult, tuple[jax.Array, ...]]:
        (hidden_TxD, cache), collected = model.apply(
            {"params": params},
            *(tokens_T, rotary_tables, cache, start, count),
            mutable=["intermediates"],
            capture_intermediates=lambda module, method: module.name == "k_norm" and method == "__call__",
        )
        layers = [collected["intermediates"][f"layer_{index}"] for index in range(config.model.num_kv_layers)]
        k_raw = tuple(layer["attention"]["k_norm"]["__call__"][0] for layer in layers)
        return step_lib.StepResult(hidden_TxD, cache), k_raw

    return jax.jit(step, donate_argnames="cache")
