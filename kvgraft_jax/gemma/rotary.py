"""Rotary position encoding: frequencies and tables on the host, in one rule; the rotation itself as a pure function.

Tables are computed once with numpy and passed into every jitted function. Computed inside, XLA rewrites the division
in the angle differently from program to program, and equal positions would get unequal keys.
"""

from __future__ import annotations

import dataclasses

import jax
from jax import sharding
import jax.numpy as jnp
import numpy as np

from kvgraft_jax import digest, errors
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma import sharding as sharding_lib

REFERENCE, CORRECT = "reference", "correct"
RULES = (REFERENCE, CORRECT)
ENGINE_RULE = REFERENCE

_DIGEST_POSITIONS = np.concatenate([np.arange(1024), *(np.arange(16) + (1 << power) for power in range(10, 18))])
_BLOCK_ELEMENTS = 1 << 16  # Elements of a table computed together; they fit a processor's cache.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RotaryTable:
    """Cosines and sines of one attention kind for positions 0..S-1, in the model dtype.

    Attributes:
      cos_SxR, sin_SxR: [S, R]; R = H / 2 pairs, pair i couples elements i and i + R of a head.
    """

    cos_SxR: jax.Array
    sin_SxR: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RotaryRows:
    """The rows of a table for T positions.

    Attributes:
      cos_TxR, sin_TxR: [T, R] in the model dtype.
    """

    cos_TxR: jax.Array
    sin_TxR: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RotaryTables:
    """One table per attention kind."""

    sliding: RotaryTable
    full: RotaryTable

    def rows(self, kind: str, positions_T: jax.Array) -> RotaryRows:
        """Returns the rows of T positions for one attention kind."""
        table = self.sliding if kind == config_lib.SLIDING else self.full
        return RotaryRows(
            *(jnp.take(table_SxR, positions_T, axis=0, mode="clip") for table_SxR in (table.cos_SxR, table.sin_SxR))
        )


def rotary_frequencies(head_dim: int, rotary: config_lib.RotaryConfig, *, rule: str = ENGINE_RULE) -> np.ndarray:
    """Computes the angle per position of each rotary pair.

    Math: f_i = base^(-2i/H) / scale (RoFormer, arXiv 2104.09864, eq. 15; linear scaling as in Gemma 3's report) for
      the first fraction * R pairs, 0 for the others. The exponent's denominator is the whole head width.
    Exact: 'reference' rounds where the released models' reference code does: RN32(RN32(1 / RN32(base^(2i/H))) / scale),
      the power taken in float64. 'correct' rounds the real number once.

    Args:
      head_dim: H, even.
      rotary: base and scale.
      rule: one of `RULES`; the engine uses `ENGINE_RULE`.

    Returns:
      float32 [R], radians per position.

    Raises:
      ConfigError: odd head width or unknown rule.
    """
    if head_dim <= 0 or head_dim % 2:
        raise errors.ConfigError(f"head_dim: got {head_dim}, wanted an even number above 0")
    if rule not in RULES:
        raise errors.ConfigError(f"rotary rule: got {rule!r}, wanted one of {RULES}")
    exponent_R = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    power_R = np.float64(rotary.base) ** exponent_R
    if rule == CORRECT:
        frequency_R = (1.0 / (power_R * rotary.scale)).astype(np.float32)
    else:
        frequency_R = np.float32(1) / power_R.astype(np.float32) / np.float32(rotary.scale)
    frequency_R[int(rotary.fraction * head_dim // 2) :] = 0
    return frequency_R


def rotary_tables_f32(frequency_R: np.ndarray, num_positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Computes the cosine and sine of position times frequency.

    Exact: the angle is RN32(position * frequency); its cosine and sine are taken in float64 and rounded once.

    Args:
      frequency_R: float32 [R].
      num_positions: S; at most 2^24, up to which every position is a float32.

    Returns:
      float32 [S, R] twice: cosine, sine.
    """
    if not 0 < num_positions <= 1 << 24:
        raise errors.ConfigError(f"num_positions: got {num_positions}, wanted 1 to {1 << 24}")
    cos_SxR, sin_SxR = (np.empty((num_positions, len(frequency_R)), np.float32) for _ in range(2))
    position_Sx1 = np.arange(num_positions, dtype=np.float32)[:, None]
    rows = max(1, _BLOCK_ELEMENTS // len(frequency_R))
    for start in range(0, num_positions, rows):
        block = slice(start, start + rows)
        cos_SxR[block], sin_SxR[block] = _cos_sin(position_Sx1[block], frequency_R)
    return cos_SxR, sin_SxR


def _cos_sin(position_Tx1: np.ndarray, frequency_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    wide_TxR = (position_Tx1 * frequency_R).astype(np.float64)
    return np.cos(wide_TxR), np.sin(wide_TxR)


def make_tables(
    config: config_lib.GemmaConfig, num_positions: int, dtype: jnp.dtype, mesh: sharding.Mesh | None = None
) -> RotaryTables:
    """Makes the tables of both attention kinds, in the model dtype, on the default device or the whole mesh."""

    def table(attention: config_lib.AttentionConfig) -> RotaryTable:
        frequency_R = rotary_frequencies(attention.head_dim, attention.rotary)
        cos_SxR, sin_SxR = rotary_tables_f32(frequency_R, num_positions)
        place = sharding_lib.whole(mesh)
        return RotaryTable(*(jax.device_put(array_SxR.astype(dtype), place) for array_SxR in (cos_SxR, sin_SxR)))

    return RotaryTables(sliding=table(config.sliding), full=table(config.full))


def tables_digest(config: config_lib.GemmaConfig) -> str:
    """Returns the SHA-256 (hex) of rows of both tables, as they are before they are rounded to the model dtype.

    The rows are those of the first 1,024 positions and of 16 from every power of two up to 2^17: hosts whose arithmetic
    or mathematical library differs may part at large angles only.
    """
    digests = []
    for attention in (config.sliding, config.full):
        frequency_R = rotary_frequencies(attention.head_dim, attention.rotary)
        tables = _cos_sin(_DIGEST_POSITIONS[:, None].astype(np.float32), frequency_R)
        digests.append([digest.array_digest(table_TxR.astype(np.float32)) for table_TxR in tables])
    return digest.json_digest(digests)


def tables_bytes(config: config_lib.GemmaConfig, num_positions: int, dtype: jnp.dtype) -> int:
    """Returns the bytes that tables of `make_tables` take on every device."""
    return num_positions * (config.sliding.head_dim + config.full.head_dim) * dtype.itemsize


def rotate(x_TxNxH: jax.Array, cos_TxR: jax.Array, sin_TxR: jax.Array) -> jax.Array:
    """Rotates each pair (i, i + R) of every head by its position's angle.

    Math: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin).
    Exact: in bfloat16 both products and their sum are each rounded to bfloat16, as in the reference model; in
      float32 the compiler may fuse a product into the sum.

    Args:
      x_TxNxH: [T, N, H] queries or keys (any number of heads).
      cos_TxR, sin_TxR: [T, R] rows of the table for these positions, in x's dtype.

    Returns:
      [T, N, H], dtype of x.
    """
    x1_TxNxR, x2_TxNxR = jnp.split(x_TxNxH, 2, axis=-1)
    cos_Tx1xR, sin_Tx1xR = cos_TxR[:, None, :], sin_TxR[:, None, :]
    return jnp.concatenate(
        [x1_TxNxR * cos_Tx1xR - x2_TxNxR * sin_Tx1xR, x2_TxNxR * cos_Tx1xR + x1_TxNxR * sin_Tx1xR], axis=-1
    )
