"""What theory says about keys that are rotated on: a bound on the error, and the share of elements that differ."""

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


def mismatch_expectation(angle: np.ndarray) -> np.ndarray:
    """Predicts the share of elements that differ after rotation by a generic angle, all numbers in one binade.

    Math: with c >= s >= 0 the larger and smaller of |cos| and |sin|, E|c e1 - s e2| = c/4 + s^2/(12 c) for roundings
      e1, e2 uniform in [-1/2, 1/2]. From 0.25 at angles near 0 (but not at 0) down to 0.2357 at an eighth of a turn.
    Exact: no claim; a law for keys spread over many units of the last place.

    Args:
      angle: radians, any shape.

    Returns:
      float64, of its shape.
    """
    parts = np.abs(np.cos(angle)), np.abs(np.sin(angle))
    larger, smaller = np.maximum(*parts), np.minimum(*parts)
    return larger / 4 + smaller**2 / (12 * larger)


def small_angle_expectation(sin_shift: float, partner: np.ndarray, unit: np.ndarray) -> float:
    """Predicts the share of elements that differ after rotation by an angle so small that few roundings change.

    Math: the mean of dist(t, Z) over elements, t = |sin(d w)| |partner| / unit.
    Exact: no claim.

    Args:
      sin_shift: sine of the angle of the shift.
      partner: the other element of each pair.
      unit: distance from each element to the next number of its dtype.
    """
    t = np.abs(sin_shift) * np.abs(np.asarray(partner, np.float64)) / np.asarray(unit, np.float64)
    return float(np.abs(t - np.rint(t)).mean())
