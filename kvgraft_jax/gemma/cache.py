"""The K/V cache: an explicit, immutable pytree with one slot per position.

Slot s holds the key and value of position s, in every layer, so the blocks over which attention loops lie at absolute
places and nothing wraps around. Behind the `capacity` usable slots lie `width` spare ones: a step that begins near the
end writes a whole width of rows. Rows that no token has written hold anything at all; no result depends on them.

bfloat16 rows are held as their bit patterns, uint16: XLA's CPU backend computes in float32 and would otherwise convert
whole buffers there and back in every step, though nothing but copies touches them.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
from jax import lax, sharding
import jax.numpy as jnp
import numpy as np

from kvgraft_jax import notation
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma import sharding as sharding_lib


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer.

    Attributes:
      k_rot_SxKxH: [S, K, H] keys after norm and rotary encoding; float32, or bits of bfloat16 as uint16.
      v_SxKxH: [S, K, H] values, likewise.
    """

    k_rot_SxKxH: jax.Array
    v_SxKxH: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of all layers that own some, in layer order; S = capacity + width slots each."""

    layers: tuple[LayerCache, ...]

    @property
    def num_slots(self) -> int:
        """S, spare slots included."""
        return self.layers[0].k_rot_SxKxH.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))


def make_cache(
    config: config_lib.GemmaConfig, num_slots: int, dtype: jnp.dtype, mesh: sharding.Mesh | None = None
) -> Cache:
    """Makes a zeroed cache of `num_slots` slots per layer, for a model of `dtype`, sharded over `mesh` if given."""

    def layer(attention: config_lib.AttentionConfig) -> LayerCache:
        shape = (num_slots, attention.num_kv_heads, attention.head_dim)
        held, place = storage_dtype(dtype), sharding_lib.of_rows(mesh, shape)
        return LayerCache(_zeros(shape, held, place), _zeros(shape, held, place))

    return Cache(tuple(layer(config.attention(index)) for index in range(config.num_kv_layers)))


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "place"))
def _zeros(shape: tuple[int, ...], dtype: np.dtype, place: sharding.Sharding | None) -> jax.Array:
    """Makes zeros on the device: no number comes from the host."""
    zeros = jnp.zeros(shape, dtype)
    return zeros if place is None else lax.with_sharding_constraint(zeros, place)


def device_bytes(
    config: config_lib.GemmaConfig, num_slots: int, dtype: jnp.dtype, mesh: sharding.Mesh | None = None
) -> int:
    """Returns the bytes that a cache of `make_cache` takes on one device."""
    leaves = jax.tree.leaves(jax.eval_shape(lambda: make_cache(config, num_slots, dtype)))
    return sum(
        sharding_lib.share_bytes(leaf.shape, leaf.dtype, sharding_lib.of_rows(mesh, leaf.shape)) for leaf in leaves
    )


def write_rows(layer: LayerCache, k_rot_TxKxH: jax.Array, v_TxKxH: jax.Array, start: jax.Array) -> LayerCache:
    """Writes the rows of T positions beginning at slot `start`.

    Exact: bit-exact copy. `start` + T must not pass the last slot (jax would slide the write back): callers check.
    """
    notation.check_shape("k_rot_TxKxH", k_rot_TxKxH, (None, *layer.k_rot_SxKxH.shape[1:]))
    notation.check_shape("v_TxKxH", v_TxKxH, (None, *layer.v_SxKxH.shape[1:]))
    return LayerCache(
        lax.dynamic_update_slice(layer.k_rot_SxKxH, _bits(k_rot_TxKxH), (start, 0, 0)),
        lax.dynamic_update_slice(layer.v_SxKxH, _bits(v_TxKxH), (start, 0, 0)),
    )


def read_slots(array_SxKxH: jax.Array, start: jax.Array, count: int, dtype: jnp.dtype) -> jax.Array:
    """Reads the keys or values of `count` slots from `start` on, in the model's dtype: [count, K, H].

    Exact: bit-exact copy.
    """
    rows = lax.dynamic_slice_in_dim(array_SxKxH, start, count)
    return rows if rows.dtype == dtype else lax.bitcast_convert_type(rows, dtype)


def storage_dtype(dtype: jnp.dtype) -> np.dtype:
    """Returns the dtype in which a cache holds rows of `dtype`: uint16 for bfloat16, itself for float32."""
    return np.dtype(np.uint16) if dtype == jnp.bfloat16 else np.dtype(dtype)


def _bits(rows: jax.Array) -> jax.Array:
    held = storage_dtype(rows.dtype)
    return rows if rows.dtype == held else lax.bitcast_convert_type(rows, held)
