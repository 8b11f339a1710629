"""The parts of the rotary study in which the engine's float32 program is the judge, and the rows of its tables."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from experiments.rotary_exactness import parts as rotary_parts
from kvgraft_jax import progress
from kvgraft_jax.relocation import collisions, encodings, keys, pair_keys, tables

_DRAWS = 24
_TRIES = 16


def measure(num_shifts: int, num_positions: int, num_rows: int, seed: int) -> tuple[dict[str, list[dict]], list[dict]]:
    """Tables of the result by name, and checks.

    Args:
      num_shifts: re-rotation by d, 0 < |d| < num_shifts, in float32.
      num_positions: below which no function of a float32 key moves it.
      num_rows: of the tables whose rows are compared.
      seed: of keys.
    """
    shift_row = _shifts(num_shifts)
    decoder_rows, table_rows = [], []
    for encoding in progress.each(encodings.CERTIFIED, description="float32 program", unit="encoding"):
        decoder_rows.append(_decoder(encoding, num_positions, seed))
        table_rows += _rows(encoding, num_rows)
    undecided = sum(row["without_witness"] for row in decoder_rows)
    repeated = sum(row["rows"] - row["distinct_rows"] for row in table_rows)
    found = {
        "the engine's float32 program: re-rotation": [shift_row],
        "the engine's float32 program: pairs of positions p >= 1 and p' that some key pair tells apart": decoder_rows,
        "tables: rows of cosines and sines of all rotated pairs": table_rows,
    }
    return found, [
        rotary_parts.check("T2 engine float32: shifts without a witness", shift_row["without_witness"], "= 0"),
        rotary_parts.check("T5 engine float32: pairs of positions without a witness", undecided, "= 0"),
        rotary_parts.check("T4 whole rows of a table that are equal to another", repeated, "= 0"),
    ]


def _shifts(num_shifts: int) -> dict:
    table = tables.make_table(rotary_parts.PAIR0, num_shifts + _TRIES)
    depth_Z = pair_keys.rerotation_witnesses(table, num_shifts, max_tries=_TRIES)
    return {
        "shifts": depth_Z.size,
        "without_witness": int((depth_Z < 0).sum()),
        "with_one_at_the_first_position": int((depth_Z == 0).sum()),
        "farthest_after_the_first": int(depth_Z.max()),
    }


def _decoder(encoding: encodings.Encoding, num_positions: int, seed: int) -> dict:
    table = tables.make_table(encoding, num_positions)
    codes = pair_keys.neighbour_codes(pair_keys.random_keys(seed, _DRAWS, encoding.head_dim), table, keys.ENGINE_F32)
    return {
        "encoding": encoding.name,
        "key_pairs": len(codes.merged_MxS),
        "positions": num_positions,
        "ordered_pairs": (num_positions - 1) ** 2,
        "without_witness": collisions.num_confused(codes),
    }


def _rows(encoding: encodings.Encoding, num_rows: int) -> list[dict]:
    table = tables.make_table(encoding, num_rows)
    rotated = slice(encoding.num_rotated_pairs)
    both_Sx2R = np.concatenate([table.cos_SxR[:, rotated], table.sin_SxR[:, rotated]], axis=1)
    lines = []
    for dtype in ("float32", "bfloat16"):
        row_S = np.ascontiguousarray(both_Sx2R.astype(jnp.dtype(dtype)))
        row_S = row_S.view(np.dtype((np.void, row_S.itemsize * row_S.shape[1])))[:, 0]
        distinct = len(np.unique(row_S))
        pair_0 = len(np.unique(both_Sx2R[:, [0, encoding.num_rotated_pairs]].astype(jnp.dtype(dtype)), axis=0))
        line = {"encoding": encoding.name, "table": dtype, "rows": num_rows, "distinct_rows": distinct}
        lines.append(line | {"distinct_in_pair_0": pair_0})
    return lines
