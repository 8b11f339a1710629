"""A small random model with both attention kinds, shared by tests of the engine."""

from __future__ import annotations

import functools

import numpy as np

from kvgraft_jax import engine as engine_lib
from kvgraft_jax.checkpoints import load
from kvgraft_jax.runtime import model as model_lib
from kvgraft_jax.runtime import step as step_lib

WINDOW = 24
NATIVE_CPU_FLAG = "--xla_cpu_enable_platform_dependent_math=true"
URI = f"random:gemma-3-270m?seed=0&layers=7&vocab=512&embed=64&hidden=96&heads=4&kv_heads=2&head_dim=32&window={WINDOW}"
WIDTH = 8
SHAPES = (2, WIDTH)  # Prompts are read by the wide step, single tokens and short ends by the narrow one.
ROWS = 3
KV_BLOCK = 16
CAPACITY = 160


@functools.cache
def model(dtype: str = "bfloat16", uri: str = URI) -> model_lib.Model:
    """Returns the small model."""
    return load.load_model(uri, dtype)


@functools.cache
def engine(
    dtype: str = "bfloat16",
    *,
    shapes: tuple[int, ...] = SHAPES,
    rows: int = ROWS,
    kv_block: int = KV_BLOCK,
    capacity: int = CAPACITY,
) -> engine_lib.Engine:
    """Returns an engine of the small model."""
    return engine_lib.Engine(model(dtype), capacity=capacity, shapes=shapes, rows=rows, kv_block=kv_block)


def num_compiled(programs: step_lib.Programs) -> int:
    """Returns how many executables of the programs there are by now."""
    jitted = {programs.embed, *programs.layers, programs.finish, programs.head}
    return sum(program._cache_size() for program in jitted)


def tokens(count: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return np.random.default_rng(seed).integers(0, 512, count).tolist()
