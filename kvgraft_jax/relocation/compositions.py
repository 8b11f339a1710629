"""Products of tabulated rotations, decided exactly: norms, depths, and which tables compose R_a R_b = R_(a+b).

All arguments are host arrays of float32 or bfloat16 values; float64 holds their products without rounding.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from kvgraft_jax import errors

_FLOAT64_BITS = 53


@dataclasses.dataclass(frozen=True, eq=False)
class Compositions:
    """Products of two rotations of one pair that a table may hold exactly; M of them.

    Attributes:
      pair_M: which rotary pair.
      first_M, second_M: positions a and b, a >= b >= 1 where the two turn the same way.
      turns_back_M: whether the second rotation is R_(-b); then a > b.
    """

    pair_M: np.ndarray
    first_M: np.ndarray
    second_M: np.ndarray
    turns_back_M: np.ndarray

    @property
    def target_M(self) -> np.ndarray:
        """a + b, or a - b."""
        return np.where(self.turns_back_M, self.first_M - self.second_M, self.first_M + self.second_M)

    @property
    def orders_M(self) -> np.ndarray:
        """In how many orders a product stands for itself: 2 for R_a R_b with a > b, else 1."""
        return np.where(self.turns_back_M | (self.first_M == self.second_M), 1, 2)


def unit_norm_defect(cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Computes c^2 + s^2 - 1.

    Exact: zero if and only if the norm is 1, otherwise the real number rounded once.

    Args:
      cos, sin: float32 or bfloat16 values in [-1, 1], of one shape.

    Returns:
      float64, of their shape.
    """
    wide = np.abs(np.asarray(cos, np.float64)), np.abs(np.asarray(sin, np.float64))
    larger, smaller = np.maximum(*wide), np.minimum(*wide)
    # The larger is above 1/2 in any rotation, so its square is a multiple of 2^-50 and the difference has no rounding.
    return (larger * larger - 1.0) + smaller * smaller


def dyadic_depth(values: np.ndarray) -> np.ndarray:
    """Returns the least m >= 0 for which 2^m x is an integer.

    Args:
      values: finite floats, up to float64.

    Returns:
      int32, of their shape.
    """
    fraction, exponent = np.frexp(np.asarray(values, np.float64))
    whole = np.abs(np.ldexp(fraction, _FLOAT64_BITS)).astype(np.int64)
    trailing = np.bitwise_count((whole & -whole) - 1).astype(np.int32)  # 64 for zero.
    return np.where(whole == 0, 0, np.maximum(_FLOAT64_BITS - trailing - exponent, 0)).astype(np.int32)


def rotation_depth(cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Returns the least m for which 2^m (c + i s) is a Gaussian integer: int32."""
    return np.maximum(dyadic_depth(cos), dyadic_depth(sin))


def exact_composition_candidates(cos_SxR: np.ndarray, sin_SxR: np.ndarray) -> Compositions:
    """Lists every product R_a R_b and R_a R_(-b) within a table that the depth does not rule out.

    Math: the depths of two rotations, where neither is 0, add up in their product but for at most 1 (T4 (c) of
      docs/rotary.md). So R_a R_b = R_t needs m(t) >= m(a) + m(b) - 1.
    Exact: no exact composition is left out, but for those with a depth of 0 (R_0 and quarter turns).

    Args:
      cos_SxR, sin_SxR: rows 0..S-1 of a table.

    Returns:
      The candidates, pair by pair.

    Raises:
      ConfigError: shapes that do not belong to a table.
    """
    if cos_SxR.ndim != 2 or cos_SxR.shape != sin_SxR.shape:
        raise errors.ConfigError(f"table: got {cos_SxR.shape} and {sin_SxR.shape}, wanted one shape [S, R]")
    depth_SxR = rotation_depth(cos_SxR, sin_SxR)
    found = [_pair_candidates(depth_SxR[:, pair]) for pair in range(depth_SxR.shape[1])]
    pair_M = np.repeat(np.arange(len(found)), [len(columns) for columns in found])
    first_M, second_M, back_M = np.concatenate([np.zeros((0, 3), np.int64), *found]).T
    return Compositions(pair_M, first_M, second_M, back_M.astype(bool))


def is_exact(cos_SxR: np.ndarray, sin_SxR: np.ndarray, compositions: Compositions) -> np.ndarray:
    """Tells which compositions hold exactly: bool [M].

    Exact: decided without rounding, for tables of float32 or bfloat16.
    """
    pair_M = compositions.pair_M

    def entries(position_M: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return cos_SxR[position_M, pair_M].astype(np.float64), sin_SxR[position_M, pair_M].astype(np.float64)

    (cos_a, sin_a), (cos_b, sin_b) = entries(compositions.first_M), entries(compositions.second_M)
    cos_t, sin_t = entries(compositions.target_M)
    sin_b = np.where(compositions.turns_back_M, -sin_b, sin_b)
    return _sums_to(cos_a * cos_b, -sin_a * sin_b, cos_t) & _sums_to(sin_a * cos_b, cos_a * sin_b, sin_t)


def _pair_candidates(depth_S: np.ndarray) -> np.ndarray:
    """Lists the candidates of one pair, [M, 3]: a, b, and whether b is negated.

    For every two depths i <= j the positions a of depth i meet either all b of depth j or all targets deep enough,
    whichever are fewer.
    """
    positions = [np.flatnonzero(depth_S == depth) for depth in range(depth_S.max() + 1)]
    found = []
    for i in range(1, len(positions)):
        for j in range(i, len(positions) - i + 1):
            if not positions[i].size or not positions[j].size:
                continue
            deep = np.concatenate(positions[i + j - 1 :])
            if deep.size < positions[j].size:
                found += _from_targets(depth_S, positions[i], deep, j)
            else:
                found += _from_factors(depth_S, positions[i], positions[j], i == j)
    return np.concatenate(found) if found else np.zeros((0, 3), np.int64)


def _from_factors(depth_S: np.ndarray, a: np.ndarray, b: np.ndarray, is_same: bool) -> list[np.ndarray]:
    a, b = (grid.ravel() for grid in np.meshgrid(a, b, indexing="ij"))
    need = depth_S[a] + depth_S[b] - 1
    first, second = np.maximum(a, b), np.minimum(a, b)
    once = a >= b if is_same else np.ones_like(a, bool)
    forward = once & (a + b < depth_S.size)
    forward[forward] = depth_S[(a + b)[forward]] >= need[forward]
    back = once & (first > second)
    back[back] = depth_S[(first - second)[back]] >= need[back]
    return [_columns(first, second, forward, False), _columns(first, second, back, True)]


def _from_targets(depth_S: np.ndarray, a: np.ndarray, targets: np.ndarray, depth: int) -> list[np.ndarray]:
    a, target = (grid.ravel() for grid in np.meshgrid(a, targets, indexing="ij"))
    is_same = depth_S[a] == depth
    found = []
    # a + b = t; a - b = t; b - a = t.
    for b, turns_back in ((target - a, False), (a - target, True), (target + a, True)):
        valid = (b >= 1) & (b < depth_S.size) & (target >= 1)
        valid[valid] = depth_S[b[valid]] == depth
        if turns_back:
            valid &= ~is_same | (a > b)
        else:
            valid &= ~is_same | (a >= b)
        found.append(_columns(np.maximum(a, b), np.minimum(a, b), valid, turns_back))
    return found


def _columns(first: np.ndarray, second: np.ndarray, keep: np.ndarray, turns_back: bool) -> np.ndarray:
    first, second = first[keep], second[keep]
    return np.stack([first, second, np.full_like(first, turns_back)], axis=1)


def _sums_to(a: np.ndarray, b: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Tells whether a + b = wanted in the reals; a and b are products without rounding."""
    total = a + b
    part = total - a
    lost = (a - (total - part)) + (b - part)  # Knuth's two-sum: a + b = total + lost.
    return (total == wanted) & (lost == 0)
