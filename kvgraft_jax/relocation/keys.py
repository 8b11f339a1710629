"""Keys at a position, and four ways to move a stored key to another one; which elements come out different.

Every step is one call of the same compiled rotation, the engine's, so "fresh" means the same program at the same shape.
Importing this module sets the XLA flags that exactness needs, so import it before jax starts a backend.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvgraft_jax import determinism, errors, notation
from kvgraft_jax.gemma import rotary as rotary_lib
from kvgraft_jax.relocation import bits
from kvgraft_jax.relocation import tables as tables_lib

determinism.configure()

REROTATE, UNROTATE, SNAP, LINEAR = "rerotate", "unrotate", "snap", "linear"
METHODS = (REROTATE, UNROTATE, SNAP, LINEAR)

_DTYPES = ("bfloat16", "float32")


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How keys are rotated and stored.

    Attributes:
      name: for tables.
      raw: dtype of keys before rotation.
      arithmetic: dtype in which table entries, products and sums are rounded.
      stored: dtype of keys after rotation.
    """

    name: str
    raw: str
    arithmetic: str
    stored: str

    def __post_init__(self):
        for field in ("raw", "arithmetic", "stored"):
            if getattr(self, field) not in _DTYPES:
                raise errors.ConfigError(f"{field}: got {getattr(self, field)!r}, wanted one of {_DTYPES}")


ENGINE_BF16 = Scheme("engine bf16", "bfloat16", "bfloat16", "bfloat16")
ENGINE_F32 = Scheme("engine f32", "float32", "float32", "float32")
BF16_WIDE = Scheme("bf16, f32 arithmetic", "bfloat16", "float32", "bfloat16")
F32_OF_BF16 = Scheme("f32 of bf16 keys", "bfloat16", "float32", "float32")
SCHEMES = (ENGINE_BF16, BF16_WIDE, ENGINE_F32, F32_OF_BF16)


def scheme(name: str) -> Scheme:
    """Returns the scheme called `name`; `ConfigError` lists the known names otherwise."""
    for candidate in SCHEMES:
        if candidate.name == name:
            return candidate
    raise errors.ConfigError(f"scheme: got {name!r}, wanted one of {', '.join(s.name for s in SCHEMES)}")


def fresh_key(
    k_raw_TxH: jax.Array, table: tables_lib.Table, position_T: np.ndarray | int, scheme: Scheme = ENGINE_BF16
) -> jax.Array:
    """Rotates keys to their positions, as fresh computation stores them.

    Exact: bit-equal to the engine's keys under `ENGINE_BF16` and `ENGINE_F32`.

    Args:
      k_raw_TxH: [T, H] keys before rotation, in the scheme's raw dtype.
      table: the encoding's table.
      position_T: one position for all keys, or one for each.
      scheme: arithmetic and storage.

    Returns:
      [T, H] in the scheme's stored dtype.

    Raises:
      ConfigError: shape or dtype.
      InputError: a NaN, or a position outside the table.
    """
    check_keys("k_raw_TxH", k_raw_TxH, table, scheme.raw)
    return _rotate_by(k_raw_TxH, table.rows(position_T), scheme.arithmetic, scheme.stored)


def rerotated_key(
    k_rot_TxH: jax.Array, table: tables_lib.Table, shift_T: np.ndarray | int, scheme: Scheme = ENGINE_BF16
) -> jax.Array:
    """Rotates stored keys by a shift (negative: backwards); one shift for all keys or one for each.

    Exact: no claim; see `mismatch_bound`.
    Args, Returns, Raises: as `fresh_key`, with keys in the scheme's stored dtype.
    """
    check_keys("k_rot_TxH", k_rot_TxH, table, scheme.stored)
    return _rotate_by(k_rot_TxH, table.rows(shift_T), scheme.arithmetic, scheme.stored)


def unrotated_key(
    k_rot_TxH: jax.Array, table: tables_lib.Table, position_T: np.ndarray | int, scheme: Scheme = ENGINE_BF16
) -> jax.Array:
    """Rotates stored keys back to position 0, in the dtype of the arithmetic: not rounded to the raw dtype.

    Exact: no claim.
    Args, Returns, Raises: as `fresh_key`, with keys in the scheme's stored dtype.
    """
    check_keys("k_rot_TxH", k_rot_TxH, table, scheme.stored)
    back_T = -np.asarray(position_T)
    return _rotate_by(k_rot_TxH, table.rows(back_T), scheme.arithmetic, scheme.arithmetic)


def reencoded_key(
    k_rot_TxH: jax.Array,
    table: tables_lib.Table,
    position_T: np.ndarray | int,
    target_T: np.ndarray | int,
    scheme: Scheme = ENGINE_BF16,
) -> jax.Array:
    """Rotates stored keys back from `position_T` and on to `target_T`, without rounding to the raw dtype in between.

    Exact: no claim.
    Args, Returns, Raises: as `unrotated_key`.
    """
    k_raw_TxH = unrotated_key(k_rot_TxH, table, position_T, scheme)
    return _rotate_by(k_raw_TxH, table.rows(target_T), scheme.arithmetic, scheme.stored)


def snapped_key(
    k_rot_TxH: jax.Array,
    table: tables_lib.Table,
    position_T: np.ndarray | int,
    target_T: np.ndarray | int,
    scheme: Scheme = ENGINE_BF16,
) -> jax.Array:
    """Rotates stored keys back from `position_T`, rounds to the raw dtype, and rotates to `target_T`.

    Exact: no claim; where the storage is wider than the raw keys this recovers nearly all of them.
    Args, Returns, Raises: as `unrotated_key`.
    """
    k_raw_TxH = unrotated_key(k_rot_TxH, table, position_T, scheme).astype(scheme.raw)
    return _rotate_by(k_raw_TxH, table.rows(target_T), scheme.arithmetic, scheme.stored)


def linearly_moved_key(
    k_rot_TxH: jax.Array,
    table: tables_lib.Table,
    position_T: np.ndarray | int,
    target_T: np.ndarray | int,
    scheme: Scheme = ENGINE_BF16,
) -> jax.Array:
    """Multiplies stored keys by the linear map that takes `position_T` to `target_T` in this table; rounds once.

    Math: z' / z for table entries z = c + i s and z' = c' + i s': what a re-rotation without errors of its own gives.
    Exact: within 2^-48 of the linear map before the rounding, which passes through float32.
    Args, Returns, Raises: as `unrotated_key`.
    """
    check_keys("k_rot_TxH", k_rot_TxH, table, scheme.stored)
    arithmetic = jnp.dtype(scheme.arithmetic)
    from_TxR, to_TxR = (
        rows.cos_TxR.astype(arithmetic).astype(np.float64) + 1j * rows.sin_TxR.astype(arithmetic).astype(np.float64)
        for rows in map(table.rows, (position_T, target_T))
    )
    first_TxR, second_TxR = np.split(np.asarray(k_rot_TxH).astype(np.float64), 2, axis=1)
    moved_TxR = (first_TxR + 1j * second_TxR) * (to_TxR / from_TxR)
    moved_TxH = np.concatenate([moved_TxR.real, moved_TxR.imag], axis=1).astype(np.float32)
    return jnp.asarray(moved_TxH).astype(scheme.stored)


def moved_key(
    k_rot_TxH: jax.Array,
    table: tables_lib.Table,
    position_T: np.ndarray | int,
    target_T: np.ndarray | int,
    scheme: Scheme = ENGINE_BF16,
    method: str = REROTATE,
) -> jax.Array:
    """Moves stored keys of `position_T` to `target_T` by one of `METHODS`; one position for all keys or for each.

    Raises:
      ConfigError: unknown method; otherwise as `fresh_key`.
    """
    if method == REROTATE:
        return rerotated_key(k_rot_TxH, table, target_T - position_T, scheme)
    if method == UNROTATE:
        return reencoded_key(k_rot_TxH, table, position_T, target_T, scheme)
    if method == SNAP:
        return snapped_key(k_rot_TxH, table, position_T, target_T, scheme)
    if method == LINEAR:
        return linearly_moved_key(k_rot_TxH, table, position_T, target_T, scheme)
    raise errors.ConfigError(f"method: got {method!r}, wanted one of {METHODS}")


def mismatch_by_pair(
    k_raw_TxH: jax.Array,
    table: tables_lib.Table,
    position: int,
    shifts: Sequence[int],
    scheme: Scheme = ENGINE_BF16,
    method: str = REROTATE,
) -> np.ndarray:
    """Counts the elements in which moved keys differ from fresh ones, by shift and pair.

    At shift 0 the stored key itself is compared: restoring at the own position is a copy, not a rotation.

    Args:
      k_raw_TxH: [T, H] keys before rotation, in the scheme's raw dtype.
      table: the encoding's table.
      position: p, where the keys are stored.
      shifts: d; every p + d is a position of the table.
      scheme, method: as for `moved_key`.

    Returns:
      int32 [len(shifts), R], each 0 to 2T.

    Raises:
      ConfigError, InputError: as `fresh_key`; all shifts are checked before any compute.
    """
    for shift in shifts:
        if position < 0 or position + shift < 0:
            raise errors.InputError(f"positions: got {position} and shift {shift}, wanted both ends 0 or more")
        table.rows(np.array([position, shift, position + shift]))
    k_rot_TxH = fresh_key(k_raw_TxH, table, position, scheme)
    counts = []
    for shift in shifts:
        wanted_TxH = fresh_key(k_raw_TxH, table, position + shift, scheme)
        found_TxH = moved_key(k_rot_TxH, table, position, position + shift, scheme, method) if shift else k_rot_TxH
        counts.append(np.asarray(bits.bit_difference_count(found_TxH, wanted_TxH, axis=0)))
    half = table.encoding.num_pairs
    by_element = np.asarray(counts, np.int32).reshape(-1, 2, half)
    return by_element.sum(axis=1, dtype=np.int32)


def check_keys(name: str, k_TxH: jax.Array, table: tables_lib.Table, dtype: str) -> None:
    """Raises unless the keys are [T, H], of this dtype, and free of NaN.

    Raises:
      ConfigError: shape or dtype.
      InputError: a NaN.
    """
    notation.check_shape(name, k_TxH, (None, table.encoding.head_dim))
    if k_TxH.dtype != jnp.dtype(dtype):
        raise errors.ConfigError(f"{name}: got {k_TxH.dtype}, wanted {dtype}")
    if bool(jnp.isnan(k_TxH).any()):
        raise errors.InputError(f"{name}: holds NaN, which no rotation keeps; wanted numbers")


def _rotate_by(k_TxH: jax.Array, rows: tables_lib.Rows, arithmetic: str, stored: str) -> jax.Array:
    cos_TxR, sin_TxR = (jnp.asarray(x.astype(jnp.dtype(arithmetic))) for x in (rows.cos_TxR, rows.sin_TxR))
    if cos_TxR.shape[0] not in (1, k_TxH.shape[0]):
        raise errors.ConfigError(f"position_T: got {cos_TxR.shape[0]} positions for {k_TxH.shape[0]} keys")
    return _rotate(k_TxH, cos_TxR, sin_TxR, arithmetic, stored)


@functools.partial(jax.jit, static_argnames=("arithmetic", "stored"))
def _rotate(k_TxH: jax.Array, cos_TxR: jax.Array, sin_TxR: jax.Array, arithmetic: str, stored: str) -> jax.Array:
    k_TxH = k_TxH.astype(arithmetic)
    k_TxNxH = k_TxH[:, None] if cos_TxR.shape[0] == k_TxH.shape[0] else k_TxH[None]
    return rotary_lib.rotate(k_TxNxH, cos_TxR, sin_TxR).reshape(k_TxH.shape).astype(stored)
