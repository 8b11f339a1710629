"""Moving K/V rows between a cache and the host as bit patterns."""

from __future__ import annotations

import functools

import jax
from jax import lax, sharding
import numpy as np

from kvgraft_jax.gemma import cache as cache_lib
from kvgraft_jax.gemma import sharding as sharding_lib

LayerCaches = tuple[cache_lib.LayerCache, ...]


@functools.partial(jax.jit, static_argnames="kv_block")
def read_block(array_SxKxH: jax.Array, block: jax.Array, *, kv_block: int) -> jax.Array:
    """Reads the rows of one block of keys or values: [kv_block, K, H].

    Exact: bit-exact copy.
    """
    return lax.dynamic_slice_in_dim(array_SxKxH, block * kv_block, kv_block)


def read_rows(layers: LayerCaches, start: int, stop: int, kv_block: int, dtype: np.dtype) -> np.ndarray:
    """Reads rows start..stop-1 of some layers on the host, in the model's dtype: [L, 2, stop - start, K, H]."""
    like = layers[0].k_rot_SxKxH
    kv_Lx2xSxKxH = np.empty((len(layers), 2, stop - start, *like.shape[1:]), like.dtype)
    place = sharding_lib.whole(like.sharding.mesh if isinstance(like.sharding, sharding.NamedSharding) else None)
    for index, layer in enumerate(layers):
        for side, array_SxKxH in enumerate((layer.k_rot_SxKxH, layer.v_SxKxH)):
            for block in range(start // kv_block, (stop - 1) // kv_block + 1):
                first = block * kv_block
                low, high = max(start, first), min(stop, first + kv_block)
                block_SxKxH = jax.device_get(
                    read_block(array_SxKxH, jax.device_put(np.int32(block), place), kv_block=kv_block)
                )
                kv_Lx2xSxKxH[index, side, low - start : high - start] = block_SxKxH[low - first : high - first]
    return kv_Lx2xSxKxH.view(dtype)


def place_rows(kv_Lx2xSxKxH: np.ndarray, start: int, num_slots: int, mesh: sharding.Mesh | None = None) -> LayerCaches:
    """Makes layer caches of `num_slots` slots that hold the given rows from slot `start` on, and zeros elsewhere.

    Exact: bit-exact copy; no computation touches the rows, and the device arrays share no memory with the argument.
    """
    stop = start + kv_Lx2xSxKxH.shape[2]
    kv_Lx2xSxKxH = kv_Lx2xSxKxH.view(cache_lib.storage_dtype(kv_Lx2xSxKxH.dtype))

    def placed(rows_SxKxH: np.ndarray) -> jax.Array:
        slots_SxKxH = np.zeros((num_slots, *rows_SxKxH.shape[1:]), rows_SxKxH.dtype)
        slots_SxKxH[start:stop] = rows_SxKxH
        place = sharding_lib.of_rows(mesh, slots_SxKxH.shape)
        return jax.device_put(slots_SxKxH, place)  # may take the buffer over; nothing else holds it

    return tuple(cache_lib.LayerCache(placed(kv[0]), placed(kv[1])) for kv in kv_Lx2xSxKxH)
