"""Keys of a real run before rotation, and the tables that turn them: what both experiments on a model share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools

import jax
import numpy as np

import kvgraft_jax as kg
from kvgraft_jax.gemma import cache as cache_lib
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
    config, runner = engine.step_config, engine.runner
    num_blocks = config.num_blocks(engine.capacity)
    cache, table = config.make_cache(num_blocks), [range(num_blocks)]
    found: list[list[np.ndarray]] = [[] for _ in range(config.model.num_layers)]
    programs = step_lib.Programs(config)
    programs.layers = [
        functools.partial(_collect, program, rows) for program, rows in zip(_programs(config), found, strict=True)
    ]
    for width, piece in step_lib.cut(token_ids, 0, runner.shapes):
        lanes = step_lib.lay_out([piece], table, width, config.kv_block)
        cache = programs.step(runner.params, runner.tables, cache, jax.device_put(lanes, runner.place)).cache
        for rows in found:
            rows[-1] = rows[-1][: len(piece.tokens)]
    return [np.concatenate(rows) for rows in found[: config.model.num_kv_layers]]


def _collect(program: Callable, rows: list[np.ndarray], *inputs) -> tuple[jax.Array, cache_lib.LayerCache]:
    """Runs a layer and puts the keys of its lanes, [T, K, H], at the end of `rows`."""
    outputs, k_raw_TxKxH = program(*inputs)
    rows.append(np.asarray(k_raw_TxKxH))
    return outputs


@functools.lru_cache(maxsize=16)
def _programs(config: step_lib.StepConfig) -> list[Callable]:
    """Compiles the layers of a configuration with one more output, the result of the key norm, where there is one."""

    def run(block: transformer.Block, params, x_TxD, rotary, cache, vector_TxP, lanes):
        outputs, collected = block.apply(
            {"params": params},
            *(x_TxD, rotary, cache, vector_TxP, lanes),
            mutable=["intermediates"],
            capture_intermediates=lambda module, method: module.name == "k_norm" and method == "__call__",
        )
        owns_keys = block.index < config.model.num_kv_layers
        return outputs, collected["intermediates"]["attention"]["k_norm"]["__call__"][0] if owns_keys else x_TxD

    return step_lib.jit_layers(config, run)
