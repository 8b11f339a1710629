"""The K/V cache: an explicit, immutable pytree with one slot per position.

Slot s holds the key and value of position s, in every layer, so the blocks over which attention loops lie at absolute
places and nothing wraps around. Behind the `capacity` usable slots lie `width` spare ones: a step that begins near the
end writes a whole width of rows. Rows that no token has written hold anything at all; no result depends on them.
"""

from __future__ import annotations

import dataclasses

import jax
from jax import lax
import jax.numpy as jnp

from kvgraft_jax import notation
from kvgraft_jax.gemma import config as config_lib


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer.

    Attributes:
      k_rot_SxKxH: [S, K, H] keys after norm and rotary encoding.
      v_SxKxH: [S, K, H] values.
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


def make_cache(config: config_lib.GemmaConfig, num_slots: int, dtype: jnp.dtype) -> Cache:
    """A zeroed cache of `num_slots` slots per layer."""

    def layer(attention: config_lib.AttentionConfig) -> LayerCache:
        shape = (num_slots, attention.num_kv_heads, attention.head_dim)
        return LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    return Cache(tuple(layer(config.attention(index)) for index in range(config.num_kv_layers)))


def write_rows(layer: LayerCache, k_rot_TxKxH: jax.Array, v_TxKxH: jax.Array, start: jax.Array) -> LayerCache:
    """Writes the rows of T positions beginning at slot `start`.

    Exact: bit-exact copy. `start` + T must not pass the last slot (jax would slide the write back): callers check.
    """
    notation.check_shape("k_rot_TxKxH", k_rot_TxKxH, (None, *layer.k_rot_SxKxH.shape[1:]))
    notation.check_shape("v_TxKxH", v_TxKxH, (None, *layer.v_SxKxH.shape[1:]))
    return LayerCache(
        lax.dynamic_update_slice(layer.k_rot_SxKxH, k_rot_TxKxH, (start, 0, 0)),
        lax.dynamic_update_slice(layer.v_SxKxH, v_TxKxH, (start, 0, 0)),
    )
