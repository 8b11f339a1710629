"""Key pairs that show what a stored key has lost: where two keys become one, where they stay two, what that decides.

A key pair is four integers (i, X, M, E): two keys that agree except on rotary pair i, where one is
(X / 128, M / 2^(8 + E)) and the other has the next bfloat16 away from zero as its second coordinate. If they are one
key once stored at p, and two at p', no function of the key stored at p gives the one of p'.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses

import numpy as np

from kvgraft_jax import errors, notation
from kvgraft_jax.gemma import rotary as rotary_lib
from kvgraft_jax.relocation import encodings

REAL, REFERENCE, HF_BF16 = "real", "reference", "hf-bf16"
RULES = (REAL, REFERENCE, HF_BF16)
MAX_POSITIONS = 1 << 18

_FRACTION_BITS = 52 - 7  # Of a float64, those that a bfloat16 does not have.
_HALF = 1 << (_FRACTION_BITS - 1)


@dataclasses.dataclass(frozen=True)
class Codes:
    """What is certain of M key pairs at S positions; neither is where implementations may differ.

    Attributes:
      merged_MxS: bool [M, S], the two keys are stored as one.
      parted_MxS: bool [M, S], they are stored as two.
    """

    merged_MxS: np.ndarray
    parted_MxS: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Rotations:
    """cosine and sine of S positions, float64 [S], and the error for each unit of |x1| + |x2|."""

    cos_S: np.ndarray
    sin_S: np.ndarray
    error_S: np.ndarray


def collision_codes(encoding: encodings.Encoding, rule: str, key_pairs_Mx4: np.ndarray, num_positions: int) -> Codes:
    """Tells where the two keys of each key pair are certainly stored as one, and where certainly as two.

    Math: 'real' admits every program whose values, before they are rounded to bfloat16, are within
      (|x1| + |x2|) (2^-21 + 2^-22 p w) of the real rotation, without the second term on pair 0; 'reference' binds the
      angle to RN32(p RN32(w)) and drops that term; 'hf-bf16' is the engine's bfloat16 `rotate`, which leaves no choice.
    Exact: float64 with margins on the safe side: what is certain here is certain in exact arithmetic. Position 0 turns
      nothing, so there every key pair is parted.

    Args:
      encoding: which rotary encoding.
      rule: one of `RULES`.
      key_pairs_Mx4: integers [M, 4].
      num_positions: S.

    Raises:
      ConfigError: unknown rule, a shape, S below 2 or above 2^18, or a key pair that is none.
    """
    if rule not in RULES:
        raise errors.ConfigError(f"angle rule: got {rule!r}, wanted one of {RULES}")
    if not 2 <= num_positions <= MAX_POSITIONS:
        raise errors.ConfigError(f"num_positions: got {num_positions}, wanted 2 to {MAX_POSITIONS}")
    notation.check_shape("key_pairs_Mx4", key_pairs_Mx4, (None, 4))
    _check_key_pairs(encoding, key_pairs_Mx4)
    merged_MxS = np.zeros((len(key_pairs_Mx4), num_positions), bool)
    parted_MxS = np.zeros_like(merged_MxS)
    for pair in np.unique(key_pairs_Mx4[:, 0]):
        rotations = _rotations(encoding, rule, int(pair), num_positions)
        for m in np.flatnonzero(key_pairs_Mx4[:, 0] == pair):
            _, first, significand, exponent = (int(item) for item in key_pairs_Mx4[m])
            x1, unit = first / 128, 2.0 ** -(8 + exponent)
            x2, next_x2 = significand * unit, (significand + (1 if significand > 0 else -1)) * unit
            merged_MxS[m], parted_MxS[m] = _compare(rotations, rule, x1, x2, next_x2)
    merged_MxS[:, 0], parted_MxS[:, 0] = False, True
    return Codes(merged_MxS, parted_MxS)


def num_confused(codes: Codes) -> int:
    """Counts how many ordered pairs of a position p from 1 and another one p' no key pair tells apart."""
    return sum(int(confused_S.sum()) for _, confused_S in _confused(codes))


def _confused(codes: Codes) -> Iterator[tuple[int, np.ndarray]]:
    """Yields every position p from 1, and which other positions no key pair tells apart from it."""
    num_positions = codes.merged_MxS.shape[1]
    parted_MxQ = np.packbits(codes.parted_MxS, axis=1)
    for position in range(1, num_positions):
        parted_Q = np.bitwise_or.reduce(parted_MxQ[codes.merged_MxS[:, position]], axis=0)
        confused_S = np.unpackbits(~parted_Q, count=num_positions).view(bool)
        confused_S[position] = False
        yield position, confused_S


def _check_key_pairs(encoding: encodings.Encoding, key_pairs_Mx4: np.ndarray) -> None:
    if key_pairs_Mx4.dtype.kind not in "iu":
        raise errors.ConfigError(f"key_pairs_Mx4: got {key_pairs_Mx4.dtype}, wanted integers")
    pair_M, first_M, significand_M, exponent_M = np.asarray(key_pairs_Mx4, np.int64).T
    fits_M = (0 <= pair_M) & (pair_M < encoding.num_rotated_pairs) & (128 <= first_M) & (first_M < 256)
    fits_M &= (128 <= abs(significand_M)) & (abs(significand_M) < 255) & (0 <= exponent_M) & (exponent_M < 16)
    if not fits_M.all():
        raise errors.ConfigError(
            f"key pair: got {key_pairs_Mx4[np.argmin(fits_M)].tolist()}, wanted [i, X, M, E] with "
            f"0 <= i < {encoding.num_rotated_pairs}, 128 <= X < 256, 128 <= |M| < 255, 0 <= E < 16"
        )


def _rotations(encoding: encodings.Encoding, rule: str, pair: int, num_positions: int) -> _Rotations:
    position_S = np.arange(num_positions, dtype=np.float64)
    if rule == REAL:
        frequency = encoding.rotary.base ** (-2 * pair / encoding.head_dim) / encoding.rotary.scale
        angle_S = position_S * frequency
    else:
        frequency_R = encoding.frequencies(rotary_lib.REFERENCE)[pair : pair + 1]
        angle_S = (position_S.astype(np.float32) * frequency_R).astype(np.float64)
    if rule == HF_BF16:
        cos_Sx1, sin_Sx1 = rotary_lib.rotary_tables_f32(frequency_R, num_positions)
        zero_S = np.zeros(num_positions)
        return _Rotations(_round(cos_Sx1[:, 0].astype(np.float64)), _round(sin_Sx1[:, 0].astype(np.float64)), zero_S)
    error_S = 2.0**-21 + 2.0**-40 + angle_S * 2.0**-51  # The last two are this computation's own.
    if rule == REAL and pair:
        error_S += angle_S * 2.0**-22
    return _Rotations(np.cos(angle_S), np.sin(angle_S), error_S)


def _compare(rotations: _Rotations, rule: str, x1: float, x2: float, next_x2: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns where keys merge and where they part: bool [S] each."""
    cos_S, sin_S = rotations.cos_S, rotations.sin_S
    if rule == HF_BF16:
        near, far = (
            (_round(_round(x1 * cos_S) - _round(y * sin_S)), _round(_round(y * cos_S) + _round(x1 * sin_S)))
            for y in (x2, next_x2)
        )
        merged_S = (near[0] == far[0]) & (near[1] == far[1])
        return merged_S, ~merged_S
    error_S = (x1 + abs(next_x2)) * rotations.error_S
    merged_S, parted_S = True, False
    for one_S, other_S in (
        (x1 * cos_S - x2 * sin_S, x1 * cos_S - next_x2 * sin_S),
        (x2 * cos_S + x1 * sin_S, next_x2 * cos_S + x1 * sin_S),
    ):
        low_S, high_S = np.minimum(one_S, other_S), np.maximum(one_S, other_S)
        merged_S &= _cell(low_S - error_S) == _cell(high_S + error_S)
        parted_S |= _cell(low_S + error_S) < _cell(high_S - error_S)
    return merged_S, parted_S


def _cell(value_S: np.ndarray) -> np.ndarray:
    """Numbers the bfloat16 that a float64 rounds to, in rising order; ties go away from zero."""
    cell_S = (np.abs(value_S).view(np.int64) + _HALF) >> _FRACTION_BITS
    return np.where(value_S < 0, -cell_S, cell_S)


def _round(value_S: np.ndarray) -> np.ndarray:
    """Rounds float64 to the nearest bfloat16, ties to even; the result is float64."""
    bits_S = value_S.view(np.int64)
    bits_S = (bits_S + (_HALF - 1) + (bits_S >> _FRACTION_BITS & 1)) >> _FRACTION_BITS << _FRACTION_BITS
    return bits_S.view(np.float64)
