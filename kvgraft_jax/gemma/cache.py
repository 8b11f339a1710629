"""The K/V cache: an explicit, immutable pytree of blocks, and the lanes of a step that read and write it.

A block holds the keys and values of `kv_block` consecutive positions in every layer. A sequence is a row of a table
that says which block of the cache holds which of its positions. So sequences share blocks that are only read, and a
context can be passed on without a copy. Attention loops over blocks by position, wherever they lie. Slots that no token
has written hold anything at all; no result depends on them.

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

FEWEST_FOR_PIECES = 5
"""Steps of fewer lanes attend lane by lane, so that their programs stay small."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer.

    Attributes:
      k_rot_JxSxKxH: [J, S, K, H] keys after norm and rotary encoding, in J blocks of S slots; float32, or bits of
        bfloat16 as uint16.
      v_JxSxKxH: [J, S, K, H] values, likewise.
    """

    k_rot_JxSxKxH: jax.Array
    v_JxSxKxH: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of all layers that own some, in layer order."""

    layers: tuple[LayerCache, ...]

    @property
    def num_blocks(self) -> int:
        """J."""
        return self.layers[0].k_rot_JxSxKxH.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class CacheBlock:
    """Keys and values of one block of positions in every layer: what a context is made of outside a cache.

    Attributes:
      kinds: per attention kind of the model, in its order: [L, 2, S, K, H], keys first; in the cache's dtype.
    """

    kinds: tuple[jax.Array, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.size * array.dtype.itemsize for array in self.kinds)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Lanes:
    """What the T lanes of a step carry, and where their rows lie; int32 throughout. `runtime.step.lay_out` makes them.

    Attributes:
      tokens_T: token of each lane; idle lanes may hold anything of the vocabulary.
      positions_T: its position.
      rows_T: the sequence it belongs to, a row of the table.
      live_T: 1 where a lane holds a token, 0 where it is idle.
      table_BxJ: the cache block that holds positions j S to j S + S - 1 of each row.
      writes_Tx4: stretches of lanes whose rows go to consecutive slots of one block: block, first slot, first lane,
        number of lanes.
      singles_T: lanes that are alone in their row.
      pieces_Tx2: stretches of several lanes of one row: first lane, number of lanes.
      counts_3: how many entries of the last three are used.
    """

    tokens_T: jax.Array
    positions_T: jax.Array
    rows_T: jax.Array
    live_T: jax.Array
    table_BxJ: jax.Array
    writes_Tx4: jax.Array
    singles_T: jax.Array
    pieces_Tx2: jax.Array
    counts_3: jax.Array


def make_cache(
    config: config_lib.GemmaConfig,
    num_blocks: int,
    kv_block: int,
    dtype: jnp.dtype,
    mesh: sharding.Mesh | None = None,
) -> Cache:
    """Makes a zeroed cache of `num_blocks` blocks per layer, for a model of `dtype`, sharded over `mesh` if given."""

    def layer(attention: config_lib.AttentionConfig) -> LayerCache:
        shape = (num_blocks, kv_block, attention.num_kv_heads, attention.head_dim)
        held, place = storage_dtype(dtype), sharding_lib.of_rows(mesh, shape)
        return LayerCache(_zeros(shape, held, place), _zeros(shape, held, place))

    return Cache(tuple(layer(config.attention(index)) for index in range(config.num_kv_layers)))


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "place"))
def _zeros(shape: tuple[int, ...], dtype: np.dtype, place: sharding.Sharding | None) -> jax.Array:
    """Makes zeros on the device: no number comes from the host."""
    zeros = jnp.zeros(shape, dtype)
    return zeros if place is None else lax.with_sharding_constraint(zeros, place)


def device_bytes(
    config: config_lib.GemmaConfig,
    num_blocks: int,
    kv_block: int,
    dtype: jnp.dtype,
    mesh: sharding.Mesh | None = None,
) -> int:
    """Returns the bytes that a cache of `make_cache` takes on one device."""
    held, total = storage_dtype(dtype), 0
    for kind in config.kinds:
        shape = (num_blocks, kv_block, kind.attention.num_kv_heads, kind.attention.head_dim)
        total += 2 * len(kind.layers) * sharding_lib.share_bytes(shape, held, sharding_lib.of_rows(mesh, shape))
    return total


def write_rows(layer: LayerCache, k_rot_TxKxH: jax.Array, v_TxKxH: jax.Array, lanes: Lanes) -> LayerCache:
    """Writes the rows of all live lanes to their slots.

    Exact: bit-exact copy; slots of no live lane keep their bits.
    """
    notation.check_shape("k_rot_TxKxH", k_rot_TxKxH, (None, *layer.k_rot_JxSxKxH.shape[2:]))
    notation.check_shape("v_TxKxH", v_TxKxH, (None, *layer.v_JxSxKxH.shape[2:]))
    slot_S = jnp.arange(layer.k_rot_JxSxKxH.shape[1], dtype=jnp.int32)
    given = _bits(k_rot_TxKxH), _bits(v_TxKxH)

    def write(index: jax.Array, held: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        block, first_slot, first_lane, count = lanes.writes_Tx4[index]
        is_new_S = (slot_S >= first_slot) & (slot_S < first_slot + count)
        lane_S = first_lane + slot_S - first_slot

        def written(array_JxSxKxH: jax.Array, rows_TxKxH: jax.Array) -> jax.Array:
            old_SxKxH = lax.dynamic_index_in_dim(array_JxSxKxH, block, 0, keepdims=False)
            new_SxKxH = jnp.take(rows_TxKxH, lane_S, axis=0, mode="clip")
            mixed_SxKxH = jnp.where(is_new_S[:, None, None], new_SxKxH, old_SxKxH)
            return lax.dynamic_update_index_in_dim(array_JxSxKxH, mixed_SxKxH, block, 0)

        return tuple(map(written, held, given))

    return LayerCache(*lax.fori_loop(0, lanes.counts_3[0], write, (layer.k_rot_JxSxKxH, layer.v_JxSxKxH)))


def read_block(array_JxSxKxH: jax.Array, block: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Reads the keys or values of one block in the model's dtype: [S, K, H].

    Exact: bit-exact copy.
    """
    rows = lax.dynamic_index_in_dim(array_JxSxKxH, block, 0, keepdims=False)
    return rows if rows.dtype == dtype else lax.bitcast_convert_type(rows, dtype)


@functools.partial(jax.jit, static_argnames=("config", "mesh"))
def take_block(
    cache: Cache, block: jax.Array, config: config_lib.GemmaConfig, mesh: sharding.Mesh | None = None
) -> CacheBlock:
    """Copies one block out of a cache.

    Exact: bit-exact copy.
    """

    def stack(layers: tuple[int, ...]) -> jax.Array:
        sides = [(cache.layers[layer].k_rot_JxSxKxH, cache.layers[layer].v_JxSxKxH) for layer in layers]
        rows = [[lax.dynamic_index_in_dim(array, block, 0, keepdims=False) for array in pair] for pair in sides]
        return sharding_lib.keep_rows(mesh, jnp.stack([jnp.stack(pair) for pair in rows]))

    return CacheBlock(tuple(stack(kind.layers) for kind in config.kinds))


@functools.partial(jax.jit, static_argnames=("config", "mesh"), donate_argnames="cache")
def put_block(
    cache: Cache,
    given: CacheBlock,
    block: jax.Array,
    config: config_lib.GemmaConfig,
    mesh: sharding.Mesh | None = None,
) -> Cache:
    """Copies a block into a cache, which is donated.

    Exact: bit-exact copy.
    """
    layers = list(cache.layers)
    for kind, kv_Lx2xSxKxH in zip(config.kinds, given.kinds, strict=True):
        for index, layer in enumerate(kind.layers):
            layers[layer] = LayerCache(
                *(
                    sharding_lib.keep_rows(mesh, lax.dynamic_update_index_in_dim(array, rows_SxKxH, block, 0))
                    for array, rows_SxKxH in zip(
                        (layers[layer].k_rot_JxSxKxH, layers[layer].v_JxSxKxH), kv_Lx2xSxKxH[index], strict=True
                    )
                )
            )
    return Cache(tuple(layers))


def storage_dtype(dtype: jnp.dtype) -> np.dtype:
    """Returns the dtype in which a cache holds rows of `dtype`: uint16 for bfloat16, itself for float32."""
    return np.dtype(np.uint16) if dtype == jnp.bfloat16 else np.dtype(dtype)


def _bits(rows: jax.Array) -> jax.Array:
    held = storage_dtype(rows.dtype)
    return rows if rows.dtype == held else lax.bitcast_convert_type(rows, held)
