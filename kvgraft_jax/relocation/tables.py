"""Cosines and sines of one encoding on the host, and their rows by position or shift."""

from __future__ import annotations

import dataclasses

import numpy as np

from kvgraft_jax import errors
from kvgraft_jax.gemma import rotary as rotary_lib
from kvgraft_jax.relocation import encodings


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """Rotations by 0..S-1 positions in one encoding.

    Attributes:
      encoding: which.
      rule: how its frequencies were rounded; see `rotary_frequencies`.
      cos_SxR, sin_SxR: float32 [S, R] on the host.
    """

    encoding: encodings.Encoding
    rule: str
    cos_SxR: np.ndarray
    sin_SxR: np.ndarray

    @property
    def num_positions(self) -> int:
        """S."""
        return self.cos_SxR.shape[0]

    def rows(self, position_T: np.ndarray | int) -> Rows:
        """Returns the rows of some positions; for a negative position the sine is negated.

        Args:
          position_T: integers, -S + 1 to S - 1: one, or [T].

        Raises:
          InputError: no integer, or outside the table.
        """
        position_T = np.atleast_1d(np.asarray(position_T))
        if position_T.ndim != 1 or position_T.dtype.kind not in "iu":
            raise errors.InputError(
                f"positions: got {position_T.dtype}{position_T.shape}, wanted an integer or a list of them"
            )
        outside = np.flatnonzero(np.abs(position_T) >= self.num_positions)
        if outside.size:
            raise errors.InputError(
                f"position: got {position_T[outside[0]]}, but the table has 0 to {self.num_positions - 1}; "
                "make a longer one"
            )
        cos_TxR, sin_TxR = self.cos_SxR[np.abs(position_T)], self.sin_SxR[np.abs(position_T)]
        return Rows(cos_TxR, np.where(position_T[:, None] < 0, -sin_TxR, sin_TxR))


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Rotations of T keys, or of one for all.

    Attributes:
      cos_TxR, sin_TxR: float32 [T, R] on the host.
    """

    cos_TxR: np.ndarray
    sin_TxR: np.ndarray


def make_table(encoding: encodings.Encoding, num_positions: int, *, rule: str = rotary_lib.ENGINE_RULE) -> Table:
    """Makes the table of S positions, as the engine does before it rounds to the model dtype.

    Exact: bit-equal to the engine's table under `ENGINE_RULE`.

    Raises:
      ConfigError: unknown rule, or S below 1 or above 2^24.
    """
    cos_SxR, sin_SxR = rotary_lib.rotary_tables_f32(encoding.frequencies(rule), num_positions)
    return Table(encoding, rule, cos_SxR, sin_SxR)
