"""What theory says about keys that are rotated on: a bound on the error."""

from __future__ import annotations

import numpy as np

from kvgraft_jax import errors


def mismatch_bound(
    frequency_R: np.ndarray, position: int, shift: int, *, stored_roundoff: float, arithmetic_roundoff: float
) -> np.ndarray:
    """Bounds |moved - fresh| / |k| of every pair, in the Euclidean norm, for keys rotated on from p to p + d.

    Math: 3 u + 12 v + 2^-22 w max(p, |d|, p + d): three roundings to the store (u), tables and products of three
      rotations (v), and the angle, whose rounding is not additive: RN(p w) + RN(d w) is not RN((p + d) w). The last
      term is 0 for pair 0 of an encoding without scale, where w = 1 and every angle is a whole number.
    Exact: an upper bound while |k| and its rotations stay above the smallest normal numbers.

    Args:
      frequency_R: [R] radians per position.
      position, shift: p and d.
      stored_roundoff: u, 2^-8 for bfloat16 and 2^-24 for float32.
      arithmetic_roundoff: v, likewise for the arithmetic and its tables.

    Returns:
      float64 [R].

    Raises:
      InputError: p or p + d below 0.
    """
    if position < 0 or position + shift < 0:
        raise errors.InputError(f"positions: got {position} and shift {shift}, wanted both ends 0 or more")
    wide_R = np.asarray(frequency_R, np.float64)
    exponent_R = np.frexp(wide_R)[0]
    turns_R = np.where(exponent_R == 0.5, 0.0, wide_R)  # A power of two multiplies without rounding.
    farthest = max(position, abs(shift), position + shift)
    return 3 * stored_roundoff + 12 * arithmetic_roundoff + 2.0**-22 * turns_R * farthest
