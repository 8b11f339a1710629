"""Comparing arrays bit by bit: equality, and counts of differing elements."""

from __future__ import annotations

import jax
from jax import lax
import jax.numpy as jnp

from kvgraft_jax import errors

_SIGNED = {jnp.dtype(jnp.bfloat16): jnp.int16, jnp.dtype(jnp.float32): jnp.int32}


@jax.jit
def bit_equal(a: jax.Array, b: jax.Array) -> jax.Array:
    """Tells which elements have the same bit pattern: -0 is not 0, a NaN is equal to itself.

    Args:
      a, b: of one shape and dtype, bfloat16 or float32.

    Returns:
      bool, of their shape.

    Raises:
      ConfigError: shapes or dtypes differ, or another dtype.
    """
    return _bits(a, b) == _bits(b, a)


def bit_difference_count(a: jax.Array, b: jax.Array, axis: int | tuple[int, ...] | None = None) -> jax.Array:
    """Counts how many elements differ in any bit, int32; over the given axes, or over all.

    Raises:
      ConfigError: as `bit_equal`.
    """
    return jnp.sum(~bit_equal(a, b), axis=axis, dtype=jnp.int32)


def _bits(array: jax.Array, other: jax.Array) -> jax.Array:
    if array.shape != other.shape or array.dtype != other.dtype or array.dtype not in _SIGNED:
        raise errors.ConfigError(
            f"comparison of bits: got {array.dtype}{array.shape} and {other.dtype}{other.shape}, "
            "wanted one shape and one dtype, bfloat16 or float32"
        )
    return lax.bitcast_convert_type(array, _SIGNED[array.dtype])
