"""Comparing arrays bit by bit: equality, counts of differing elements, and distances in units of the last place."""

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


@jax.jit
def ulp_distance(a: jax.Array, b: jax.Array) -> jax.Array:
    """Counts the steps from one number to another through the numbers of their dtype.

    Math: |m(a) - m(b)|, where m numbers the floats in rising order and m(-0) = m(0) = 0.
    Exact: for all finite and infinite arguments; a NaN counts as a number beyond infinity.

    Args:
      a, b: of one shape and dtype, bfloat16 or float32.

    Returns:
      uint32, of their shape (-infinity and infinity are 4,278,190,080 float32 apart).

    Raises:
      ConfigError: as `bit_equal`.
    """
    a_order, b_order = _order(_bits(a, b)), _order(_bits(b, a))
    distance = jnp.where(a_order >= b_order, a_order - b_order, b_order - a_order)  # Modulo 2^32.
    return lax.bitcast_convert_type(distance, jnp.uint32)


def _bits(array: jax.Array, other: jax.Array) -> jax.Array:
    if array.shape != other.shape or array.dtype != other.dtype or array.dtype not in _SIGNED:
        raise errors.ConfigError(
            f"comparison of bits: got {array.dtype}{array.shape} and {other.dtype}{other.shape}, "
            "wanted one shape and one dtype, bfloat16 or float32"
        )
    return lax.bitcast_convert_type(array, _SIGNED[array.dtype])


def _order(bits: jax.Array) -> jax.Array:
    """Returns the number of a float among those of its dtype, int32."""
    magnitude = (bits & jnp.iinfo(bits.dtype).max).astype(jnp.int32)
    return jnp.where(bits < 0, -magnitude, magnitude)
