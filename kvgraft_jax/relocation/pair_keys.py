"""Single rotary pairs decided by the engine's own program: where re-rotation fails, and which neighbours it merges.

The compiled program is the judge, in either dtype, on the device at hand. Certificates, whose checker needs no
program, speak of keys that are stored in bfloat16; in float32 this is what decides.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from kvgraft_jax import errors, notation
from kvgraft_jax.relocation import bits, collisions, keys
from kvgraft_jax.relocation import tables as tables_lib

WITNESSES = ((1.0, 0.0), (1.0, 1.0), (3.0, 1.0))


def rerotation_witnesses(
    table: tables_lib.Table, num_shifts: int, scheme: keys.Scheme = keys.ENGINE_F32, *, max_tries: int = 16
) -> np.ndarray:
    """Finds for every shift 0 < |d| < n the number of positions until one of `WITNESSES` is rotated wrongly.

    A witness at p is a key that, stored at p and rotated by d, is not the fresh key of p + d. The first position
    that a shift admits is the larger of 1 and -d.
    Exact: decided by the bits that the compiled program gives.

    Args:
      table: of an encoding with a single pair.
      num_shifts: n.
      scheme: arithmetic and storage.
      max_tries: positions to try.

    Returns:
      int32 [Z], Z = 2 (n - 1): shifts 1, 2, ... and then -1, -2, ...; -1 where no position that was tried has a
      witness.

    Raises:
      ConfigError: an encoding with more than one pair.
      InputError: n below 2, or n + max_tries beyond the table.
    """
    if table.encoding.head_dim != 2:
        raise errors.ConfigError(f"head_dim: got {table.encoding.head_dim}, wanted 2: one pair decides")
    if not 2 <= num_shifts <= table.num_positions - max_tries:
        raise errors.InputError(
            f"num_shifts: got {num_shifts}, wanted 2 to {table.num_positions - max_tries}, so that sources and targets "
            f"are among the table's {table.num_positions} positions"
        )
    size_Z = np.arange(1, num_shifts)
    shift_Z = np.concatenate([size_Z, -size_Z])
    first_Z = np.maximum(1, -shift_Z)
    depth_Z = np.full(shift_Z.shape, -1, np.int32)
    k_raw_MxH = jnp.asarray(WITNESSES, jnp.dtype(scheme.raw))
    for depth in range(max_tries):
        open_Z = np.flatnonzero(depth_Z < 0)
        if not open_Z.size:
            break
        source_T, shift_T = (np.repeat(x_Z[open_Z], len(WITNESSES)) for x_Z in (first_Z + depth, shift_Z))
        k_raw_TxH = jnp.tile(k_raw_MxH, (open_Z.size, 1))
        k_rot_TxH = keys.fresh_key(k_raw_TxH, table, source_T, scheme)
        moved_TxH = keys.rerotated_key(k_rot_TxH, table, shift_T, scheme)
        fresh_TxH = keys.fresh_key(k_raw_TxH, table, source_T + shift_T, scheme)
        is_wrong_TxH = ~np.asarray(bits.bit_equal(moved_TxH, fresh_TxH))
        depth_Z[open_Z[is_wrong_TxH.reshape(open_Z.size, -1).any(axis=1)]] = depth
    return depth_Z


def random_keys(seed: int, count: int, head_dim: int) -> np.ndarray:
    """Draws keys whose pairs often merge with a neighbour: x1 in [1, 2), and |x2| in [1/8, 1).

    Returns:
      float32 [count, H]; H even.
    """
    rng = np.random.default_rng(seed)
    first_MxR, second_MxR = rng.uniform(1, 2, (2, count, head_dim // 2))
    second_MxR *= rng.choice((-1, 1), second_MxR.shape) * 2.0 ** -rng.integers(1, 4, second_MxR.shape)
    return np.concatenate([first_MxR, second_MxR], axis=1).astype(np.float32)


def neighbour_codes(
    k_raw_MxH: np.ndarray, table: tables_lib.Table, scheme: keys.Scheme = keys.ENGINE_F32
) -> collisions.Codes:
    """Tells where a key and its neighbour are stored as one, separately for every rotated pair.

    The neighbour of a pair is (x1, y), y the number next to x2 on the side away from zero. What is stored of a pair
    depends on that pair alone, so all pairs of a head are looked at together.
    Exact: decided by the bits that the compiled program gives; at position 0, which turns nothing, all are parted.

    Args:
      k_raw_MxH: [M, H] keys before rotation, normal numbers in the scheme's raw dtype.
      table: the encoding's table.
      scheme: arithmetic and storage.

    Returns:
      Codes of M R' key pairs, R' the rotated pairs of a head, at the table's positions.

    Raises:
      ConfigError, InputError: as `keys.fresh_key`.
    """
    notation.check_shape("k_raw_MxH", k_raw_MxH, (None, table.encoding.head_dim))
    num_pairs, num_positions = table.encoding.num_pairs, table.num_positions
    merged = []
    for near_H in np.asarray(k_raw_MxH):
        far_H = near_H.copy()
        far_H[num_pairs:].view(np.uint16 if far_H.itemsize == 2 else np.uint32)[:] += 1
        one_SxH, other_SxH = (
            keys.fresh_key(jnp.tile(jnp.asarray(k_H), (num_positions, 1)), table, np.arange(num_positions), scheme)
            for k_H in (near_H, far_H)
        )
        is_equal_Sx2xR = np.asarray(bits.bit_equal(one_SxH, other_SxH)).reshape(num_positions, 2, num_pairs)
        merged.append(is_equal_Sx2xR.all(axis=1).T[: table.encoding.num_rotated_pairs])
    merged_MxS = np.concatenate(merged)
    return collisions.Codes(merged_MxS, ~merged_MxS)
