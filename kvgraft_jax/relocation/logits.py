"""What a shift of all positions does downstream: to attention logits, and to the values of deeper layers."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from kvgraft_jax import errors, notation
from kvgraft_jax.gemma import rotary as rotary_lib
from kvgraft_jax.relocation import bits, keys
from kvgraft_jax.relocation import tables as tables_lib
from kvgraft_jax.runtime import run as run_lib


@dataclasses.dataclass(frozen=True, eq=False)
class LogitShift:
    """Logits q k of T pairs of a query and a key, at their positions and all moved by one shift.

    Attributes:
      before_T, after_T: float64, dot products of the stored vectors, unscaled.
    """

    before_T: np.ndarray
    after_T: np.ndarray

    @property
    def difference_T(self) -> np.ndarray:
        """after - before."""
        return self.after_T - self.before_T

    def num_equal(self, dtype: str) -> int:
        """Counts how many logits are the same once rounded to `dtype`."""
        rounded = (jnp.asarray(x.astype(np.float32)).astype(dtype) for x in (self.before_T, self.after_T))
        return int(bits.bit_equal(*rounded).sum())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ShiftedTables:
    """The engine's rotary tables with every position moved by `shift`: position p turns by p + shift.

    Attributes:
      tables: that reach every position moved.
      shift: int32 scalar.
    """

    tables: rotary_lib.RotaryTables
    shift: jax.Array

    def rows(self, kind: str, positions_T: jax.Array) -> rotary_lib.RotaryRows:
        """Returns the rows as `RotaryTables.rows` does, for positions before the shift."""
        return self.tables.rows(kind, positions_T + self.shift)


def logit_shift_difference(
    q_raw_TxH: jax.Array,
    k_raw_TxH: jax.Array,
    table: tables_lib.Table,
    query_position_T: np.ndarray,
    key_position_T: np.ndarray,
    shift: int,
    scheme: keys.Scheme = keys.ENGINE_BF16,
) -> LogitShift:
    """Computes logits before and after all positions move by `shift`; only in the reals are they equal.

    Args:
      q_raw_TxH, k_raw_TxH: [T, H] before rotation, in the scheme's raw dtype.
      table: the encoding's table.
      query_position_T, key_position_T: positions before the shift.
      shift: d.
      scheme: arithmetic and storage.

    Raises:
      ConfigError, InputError: as `fresh_key`.
    """
    notation.check_shape("q_raw_TxH", q_raw_TxH, tuple(k_raw_TxH.shape))

    def logits(moved: int) -> np.ndarray:
        q_rot_TxH = keys.fresh_key(q_raw_TxH, table, query_position_T + moved, scheme)
        k_rot_TxH = keys.fresh_key(k_raw_TxH, table, key_position_T + moved, scheme)
        wide = (np.asarray(x).astype(np.float64) for x in (q_rot_TxH, k_rot_TxH))
        return np.einsum("TH,TH->T", *wide)

    return LogitShift(logits(0), logits(shift))


def layer_value_shift_difference(runner: run_lib.Runner, token_ids: Sequence[int], shift: int) -> np.ndarray:
    """Counts the elements of each layer's values that change when all positions of a text move by `shift`.

    Nothing is grafted and no left context is there: it is the model's own sensitivity to its positions.

    Exact: 0 for shift 0, and for layer 0 at any shift.

    Args:
      runner: an engine's.
      token_ids: the text.
      shift: d, 0 or more; the runner's tables reach the last token moved by it.

    Returns:
      int32, one per layer that owns values.

    Raises:
      InputError: a token or position outside.
    """
    config, num_positions = runner.programs.config, runner.num_positions
    planned = run_lib.plan_tokens(token_ids, config.model.vocab_size)
    run_lib.plan_capacity(0, len(planned), num_positions, "tokens")
    most = num_positions - len(planned)
    if not 0 <= shift <= most:
        raise errors.InputError(f"shift: got {shift}, wanted 0 to {most}, where the tables end")

    def values(moved: int) -> list[np.ndarray]:
        tables = ShiftedTables(runner.tables, jnp.int32(moved))
        shifted = dataclasses.replace(runner, tables=tables, prepare=None)
        cache = run_lib.run(shifted, config.make_cache(config.num_blocks(len(planned))), planned, 0).cache
        held = [np.asarray(layer.v_JxSxKxH) for layer in cache.layers]
        return [v.reshape(-1, *v.shape[2:])[: len(planned)].view(config.jnp_dtype) for v in held]

    counts = [bits.bit_difference_count(a, b) for a, b in zip(values(0), values(shift), strict=True)]
    return np.asarray(counts, np.int32)
