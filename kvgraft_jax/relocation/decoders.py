"""The best decoder of a stored key that could exist: how many keys it gets right, over a whole set of them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from kvgraft_jax import errors


def binade_keys(low: float, high: float) -> np.ndarray:
    """Returns all pairs (x1, x2) of bfloat16 numbers with low <= |x| < high: bfloat16 [M, 2]."""
    if not 0 < low < high < np.inf:
        raise errors.InputError(f"binade_keys: got {low} to {high}, wanted 0 < low < high")
    numbers = np.arange(0x7F80, dtype=np.uint16).view(jnp.bfloat16)
    wide = numbers.astype(np.float32)
    numbers = numbers[(wide >= low) & (wide < high)]
    numbers = np.concatenate([-numbers[::-1], numbers])
    return np.stack([np.repeat(numbers, numbers.size), np.tile(numbers, numbers.size)], axis=1)


def pair_codes(k_MxH: np.ndarray) -> np.ndarray:
    """Returns one integer per key of a single bfloat16 pair, equal where all bits are: uint32 [M]."""
    if k_MxH.ndim != 2 or k_MxH.shape[1] != 2 or k_MxH.dtype != jnp.bfloat16:
        raise errors.ConfigError(f"k_MxH: got {k_MxH.dtype}{k_MxH.shape}, wanted bfloat16 (M, 2)")
    half_Mx2 = np.ascontiguousarray(k_MxH).view(np.uint16).astype(np.uint32)
    return half_Mx2[:, 0] << 16 | half_Mx2[:, 1]


def optimal_decoder_accuracy(stored_M: np.ndarray, wanted_M: np.ndarray) -> int:
    """Counts how many of M keys the best function of the stored one maps to the wanted one.

    Math: the sum over stored values of the count of the most frequent wanted value. Where wanted is the key before
      rotation, it is the number of distinct stored values.
    Exact: a count. No function does better on these keys, whatever it knows besides.

    Args:
      stored_M, wanted_M: integer codes of the keys at both positions.

    Raises:
      ConfigError: lengths differ.
    """
    if stored_M.shape != wanted_M.shape or stored_M.ndim != 1:
        raise errors.ConfigError(f"codes: got shapes {stored_M.shape} and {wanted_M.shape}, wanted one, (M,)")
    if not stored_M.size:
        return 0
    joint = stored_M.astype(np.uint64) << np.uint64(32) | wanted_M.astype(np.uint64)
    values, counts = np.unique(joint, return_counts=True)
    stored = values >> np.uint64(32)
    starts = np.flatnonzero(np.concatenate([[True], stored[1:] != stored[:-1]]))
    return int(np.maximum.reduceat(counts, starts).sum())
