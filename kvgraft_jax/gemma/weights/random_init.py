"""Random weights for any configuration, made on the device: the same bits in every process, order and program.

A value is an integer hash of (seed, parameter path, index), so nothing depends on a generator's state or flags.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from kvgraft_jax import digest as digest_lib
from kvgraft_jax import errors
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma.weights import assemble, layout

_NORM_RANGE = 0.25


def cut(
    config: config_lib.GemmaConfig,
    *,
    layers: int | None = None,
    vocab: int | None = None,
    embed: int | None = None,
    hidden: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    window: int | None = None,
) -> config_lib.GemmaConfig:
    """`config` with other sizes; the first `layers` layers keep their kinds. None leaves a size as it is."""
    if layers is not None and not 1 <= layers <= config.num_layers:
        raise errors.ConfigError(f"layers: got {layers}, wanted 1 to {config.num_layers}, the layers of {config.name}")

    def kind(attention: config_lib.AttentionConfig) -> config_lib.AttentionConfig:
        return dataclasses.replace(
            attention,
            num_kv_heads=attention.num_kv_heads if kv_heads is None else kv_heads,
            head_dim=attention.head_dim if head_dim is None else head_dim,
            window=window if attention.window is not None and window is not None else attention.window,
        )

    full = kind(config.full)
    follows_head_dim = config.query_scale == config.full.head_dim**-0.5
    return dataclasses.replace(
        config,
        vocab_size=config.vocab_size if vocab is None else vocab,
        embed_dim=config.embed_dim if embed is None else embed,
        hidden_dim=config.hidden_dim if hidden is None else hidden,
        num_heads=config.num_heads if heads is None else heads,
        layer_kinds=config.layer_kinds[:layers],
        sliding=kind(config.sliding),
        full=full,
        query_scale=full.head_dim**-0.5 if follows_head_dim else config.query_scale,
    )


def initialise(config: config_lib.GemmaConfig, seed: int, dtype: np.dtype) -> assemble.Assembled:
    """Random parameters for `config`.

    Math: kernels and embeddings are uniform with variance 1 / fan-in (D for the embedding, so that scaled embeddings
    and logits have variance near 1); norm weights are uniform in ±0.25.

    Exact: bit-exact across processes, backends and load order; bfloat16 values are the float32 ones, rounded.

    Args:
      config: any configuration.
      seed: chooses the weights; 0 or above.
      dtype: dtype of all leaves.
    """

    def load(parameter: layout.Parameter) -> tuple[jax.Array, str]:
        fan_in = parameter.stored_shape[-1]
        bound = _NORM_RANGE if parameter.is_scale else math.sqrt(3.0 / fan_in)
        key = int.from_bytes(hashlib.sha256(f"{seed}/{parameter.path}".encode()).digest()[:8], "little")
        words = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)
        values = _uniform(*words, np.float32(bound * 2.0**-23), parameter.shape, dtype)
        # An array keeps the host copy that it once gave out: hash that of a copy, which is dropped.
        return values, digest_lib.array_digest(np.asarray(jnp.copy(values)))

    return assemble.collect(config.name, layout.parameters(config), dtype, load)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _uniform(low: jax.Array, high: jax.Array, step: jax.Array, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    """Multiples of `step`, uniform in ±2^23 steps: integer operations, then one multiplication and one rounding."""
    columns = shape[-1]
    rows = shape[:-1]
    index = lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)
    stride = columns
    for axis in reversed(range(len(rows))):
        index = index + lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
        stride *= shape[axis]
    bits = _mix(_mix(index ^ low) + high)
    integers = lax.shift_right_logical(bits, jnp.uint32(8)).astype(jnp.int32) - jnp.int32(1 << 23)
    return (integers.astype(jnp.float32) * step).astype(dtype)


def _mix(bits: jax.Array) -> jax.Array:
    """A bijection of 32-bit words in which every input bit reaches every output bit (the MurmurHash3 finaliser)."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ lax.shift_right_logical(bits, jnp.uint32(shift))) * jnp.uint32(factor)
    return bits ^ lax.shift_right_logical(bits, jnp.uint32(16))
