"""Moving K/V rows between the blocks of a context and the host as bit patterns."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import sharding
import numpy as np

from kvgraft_jax.gemma import cache as cache_lib
from kvgraft_jax.gemma import sharding as sharding_lib


def read_rows(blocks: Sequence[cache_lib.CacheBlock], kind: int, start: int, stop: int, dtype: np.dtype) -> np.ndarray:
    """Copies rows start..stop-1 of an attention kind to the host, in the model's dtype: [L, 2, stop - start, K, H].

    Exact: bit-exact copy.

    Args:
      blocks: of the context, all of them.
      kind: number of the attention kind, as in `CacheBlock.kinds`.
      start, stop: positions.
      dtype: of the model.
    """
    like = blocks[0].kinds[kind]
    kv_block = like.shape[2]
    kv_Lx2xSxKxH = np.empty((*like.shape[:2], stop - start, *like.shape[3:]), like.dtype)
    for index in range(start // kv_block, -(-stop // kv_block)):
        first = index * kv_block
        low, high = max(start, first), min(stop, first + kv_block)
        block_Lx2xSxKxH = jax.device_get(blocks[index].kinds[kind])
        kv_Lx2xSxKxH[:, :, low - start : high - start] = block_Lx2xSxKxH[:, :, low - first : high - first]
    return kv_Lx2xSxKxH.view(dtype)


def place_rows(
    kv_Lx2xSxKxH: np.ndarray, start: int, kv_block: int, mesh: sharding.Mesh | None = None
) -> tuple[jax.Array, ...]:
    """Puts rows of an attention kind from position `start` on into blocks on the device: [L, 2, kv_block, K, H] each.

    Slots before `start`, and behind the last row in its block, hold zeros.

    Exact: bit-exact copy; no computation touches the rows, and the device arrays share no memory with the argument.
    """
    stop = start + kv_Lx2xSxKxH.shape[2]
    kv_Lx2xSxKxH = kv_Lx2xSxKxH.view(cache_lib.storage_dtype(kv_Lx2xSxKxH.dtype))
    shape = (*kv_Lx2xSxKxH.shape[:2], kv_block, *kv_Lx2xSxKxH.shape[3:])
    place, placed, empty = sharding_lib.of_rows(mesh, shape), [], None
    for first in range(0, stop, kv_block):
        low, high = max(start, first), min(stop, first + kv_block)
        if low >= high:  # One array of zeros serves all of them.
            empty = jax.device_put(np.zeros(shape, kv_Lx2xSxKxH.dtype), place) if empty is None else empty
            placed.append(empty)
            continue
        block_Lx2xSxKxH = np.zeros(shape, kv_Lx2xSxKxH.dtype)
        block_Lx2xSxKxH[:, :, low - first : high - first] = kv_Lx2xSxKxH[:, :, low - start : high - start]
        placed.append(jax.device_put(block_Lx2xSxKxH, place))  # May take the buffer over; nothing else holds it.
    return tuple(placed)
