"""Moving K/V rows between a cache and the host as bit patterns, one K/V block at a time.

Both functions have fixed shapes, so each is compiled once per engine and attention kind, whatever an artifact's length.
"""

from __future__ import annotations

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from kvgraft_jax.gemma import cache as cache_lib
from kvgraft_jax.gemma import config as config_lib

LayerCaches = tuple[cache_lib.LayerCache, ...]


def layers_of_kind(config: config_lib.GemmaConfig, kind: str) -> tuple[int, ...]:
    """Numbers of the layers of one attention kind that own keys and values."""
    return tuple(layer for layer in range(config.num_kv_layers) if config.layer_kinds[layer] == kind)


@functools.partial(jax.jit, static_argnames="kv_block")
def read_block(layers: LayerCaches, block: jax.Array, *, kv_block: int) -> jax.Array:
    """The rows of one block of some layers: [L, 2, kv_block, K, H], keys at [:, 0] and values at [:, 1].

    Exact: bit-exact copy.
    """

    def rows(array_SxKxH: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(array_SxKxH, block * kv_block, kv_block)

    return jnp.stack([jnp.stack([rows(layer.k_rot_SxKxH), rows(layer.v_SxKxH)]) for layer in layers])


@functools.partial(jax.jit, donate_argnames="layers")
def write_block(layers: LayerCaches, kv_Lx2xSxKxH: jax.Array, block: jax.Array) -> LayerCaches:
    """The layers with one block overwritten by `kv_Lx2xSxKxH`; the layers are donated.

    Exact: bit-exact copy.
    """
    kv_block = kv_Lx2xSxKxH.shape[2]
    return tuple(
        cache_lib.write_rows(layer, kv_Lx2xSxKxH[index, 0], kv_Lx2xSxKxH[index, 1], block * kv_block)
        for index, layer in enumerate(layers)
    )


def read_rows(layers: LayerCaches, start: int, stop: int, kv_block: int) -> np.ndarray:
    """Rows start..stop-1 of some layers on the host: [L, 2, stop - start, K, H], read-only and its own memory."""
    num_kv_heads, head_dim = layers[0].k_rot_SxKxH.shape[1:]
    dtype = layers[0].k_rot_SxKxH.dtype
    kv_Lx2xSxKxH = np.empty((len(layers), 2, stop - start, num_kv_heads, head_dim), dtype)
    for block in range(start // kv_block, (stop - 1) // kv_block + 1):
        rows = np.asarray(read_block(layers, np.int32(block), kv_block=kv_block))
        low, high = max(start, block * kv_block), min(stop, (block + 1) * kv_block)
        kv_Lx2xSxKxH[:, :, low - start : high - start] = rows[:, :, low - block * kv_block : high - block * kv_block]
    kv_Lx2xSxKxH.flags.writeable = False
    return kv_Lx2xSxKxH


def write_rows(layers: LayerCaches, kv_Lx2xSxKxH: np.ndarray, start: int, kv_block: int) -> LayerCaches:
    """The layers (donated) with rows from `start` on replaced; the rest of the touched blocks becomes zero."""
    stop = start + kv_Lx2xSxKxH.shape[2]
    shape = list(kv_Lx2xSxKxH.shape)
    shape[2] = kv_block
    for block in range(start // kv_block, (stop - 1) // kv_block + 1):
        low, high = max(start, block * kv_block), min(stop, (block + 1) * kv_block)
        rows = np.zeros(shape, kv_Lx2xSxKxH.dtype)
        rows[:, :, low - block * kv_block : high - block * kv_block] = kv_Lx2xSxKxH[:, :, low - start : high - start]
        layers = write_block(layers, jnp.array(rows), np.int32(block))
    return layers
