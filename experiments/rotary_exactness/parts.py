"""The parts of the rotary study around its sweep: exhaustive counts, exact decisions, and what follows downstream."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import operator

import jax
import jax.numpy as jnp
import numpy as np

from experiments import check_certificate
import kvgraft_jax as kg
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma import rotary as rotary_lib
from kvgraft_jax.relocation import bits, compositions, decoders, encodings, keys, logits, tables, transports

PAIR0 = encodings.Encoding("pair 0", 2, config_lib.RotaryConfig(1e4))
DECODER_MOVES = ((0, 1000), (1, 0), (1, 2), (44, 45), (355, 0), (1000, 1001), (1000, 30_000))
FLIP_GAP = check_certificate.FLIP_GAP
PROGRAMS = (
    "host table, jitted",
    "host table, op by op",
    "p w in the program",
    "p / t in the program",
    "p / t op by op",
    "numpy float32",
)

_LOSSLESS = (0, 355)  # Positions at which no ordinary key of pair 0 is lost.
_FLIP_POSITIONS = 36_863
_DRIFT_PAIRS = (0, 1, 16, 64)
_RELATIONS = {"=": operator.eq, "<": operator.lt, "<=": operator.le, ">": operator.gt}


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """What the parts found; arrays are for the plots.

    Attributes:
      tables: name to lines of the result.
      checks: statements that hold or not.
      token_ids: the text whose values were looked at.
      drift: pair to (positions, errors), error of turned float32 keys in 2^-24 |k|.
      decoders: scheme to one row per `DECODER_MOVES`: share right for the best decoder, snap and re-rotation.
      flip: scheme to the logit gap at positions 0, 1, ...
      value_shifts, value_share: shifts, and share of elements that differ [shifts, L].
      program_differences: [P, P] elements that differ between programs, of `program_elements`.
    """

    tables: dict[str, list[dict]]
    checks: list[dict]
    token_ids: tuple[int, ...]
    drift: dict[int, tuple[np.ndarray, np.ndarray]]
    decoders: dict[str, np.ndarray]
    flip: dict[str, np.ndarray]
    value_shifts: tuple[int, ...]
    value_share: np.ndarray
    program_differences: np.ndarray
    program_elements: int


def check(name: str, found: float, wanted: str) -> dict:
    """One line of the result: `wanted` is a relation and a number, as in "= 0"."""
    relation, number = wanted.split()
    return {
        "check": name,
        "found": round(found, 9) if isinstance(found, float) else int(found),
        "wanted": wanted,
        "holds": bool(_RELATIONS[relation](found, float(number))),
    }


def measure(
    f32_positions: int,
    bf16_positions: int,
    seed: int,
    engine: kg.Engine,
    text_tokens: int,
    value_shifts: Sequence[int],
) -> Parts:
    """Runs every part.

    Args:
      f32_positions, bf16_positions: of the tables whose compositions are counted.
      seed: of keys and text.
      engine: of a small model.
      text_tokens: length of the text.
      value_shifts: of its positions.
    """
    found_tables, checks = {}, []
    found_tables["transports"], found = _transports()
    checks += found
    found_tables["compositions"], found = _compositions(f32_positions, bf16_positions)
    checks += found
    pair_table = tables.make_table(PAIR0, _FLIP_POSITIONS + 2)
    shares, found = _decoders(pair_table)
    checks += found
    found_tables["decoders: percent of ordinary keys of pair 0 that come back"] = [
        {"scheme": name, "stored_at": move[0], "wanted_at": move[1], "best": best, "snap": snap, "rerotate": turned}
        for name, rows in shares.items()
        for move, (best, snap, turned) in zip(DECODER_MOVES, (100 * rows).round(4).tolist(), strict=True)
    ]
    flip, found = _flips(pair_table)
    checks += found
    found_tables["logits: of 4096 pairs, how many a shift leaves alone"], found = _logits(seed)
    checks += found
    token_ids = tuple(np.random.default_rng(seed).integers(0, engine.model.config.vocab_size, text_tokens).tolist())
    value_counts, value_elements = _values(engine, token_ids, value_shifts)
    deeper = [count for shift, count in zip(value_shifts, value_counts[:, 1:], strict=True) if shift]
    checks += [
        check("T6 shift 0 or layer 0: values that change", value_counts[0].sum() + value_counts[:, 0].sum(), "= 0"),
        check("T6 deeper layers: fewest values that a shift changes", np.min(deeper), "> 0"),
    ]
    found_tables[f"values: of {value_elements} in each layer, how many a shift of all positions changes"] = [
        {"shift": shift, **{f"layer_{layer}": count for layer, count in enumerate(counts)}}
        for shift, counts in zip(value_shifts, value_counts.tolist(), strict=True)
    ]
    differences, program_elements = _programs(seed)
    found_tables[f"programs: of {program_elements} elements of keys at equal positions, how many differ"] = [
        {"program": name, **dict(zip(PROGRAMS, row, strict=True))}
        for name, row in zip(PROGRAMS, differences.tolist(), strict=True)
    ]
    checks.append(
        check("other programs than the engine's: elements that differ, fewest", differences[0, 1:].min(), "> 0")
    )
    return Parts(
        found_tables,
        checks,
        token_ids,
        _drift(seed),
        shares,
        flip,
        tuple(value_shifts),
        value_counts / value_elements,
        differences,
        program_elements,
    )


def _transports() -> tuple[list[dict], list[dict]]:
    changes = {transport.name: transports.count_changes(transport) for transport in transports.TRANSPORTS}
    copies = [changes[transport.name] for transport in transports.TRANSPORTS if transport.is_copy]
    lost = sum(c.subnormals + c.negative_zero + c.others for c in copies)
    return [{"transport": name, **dataclasses.asdict(c)} for name, c in changes.items()], [
        check("T1 copies: patterns that change, NaN aside", lost, "= 0"),
        check("T1 rotation by 0: patterns that change, NaN aside", changes["rotation by 0"].subnormals, "> 0"),
    ]


def _compositions(f32_positions: int, bf16_positions: int) -> tuple[list[dict], list[dict]]:
    rows, f32_exact, bf16_exact, units = [], 0, 0, 0
    for encoding in encodings.CERTIFIED:
        for dtype, num_positions in (("float32", f32_positions), ("bfloat16", bf16_positions)):
            table = tables.make_table(encoding, num_positions)
            rotated = slice(encoding.num_rotated_pairs)
            cos_SxR, sin_SxR = (x[:, rotated].astype(jnp.dtype(dtype)) for x in (table.cos_SxR, table.sin_SxR))
            found = compositions.exact_composition_candidates(cos_SxR, sin_SxR)
            is_exact_M = compositions.is_exact(cos_SxR, sin_SxR, found)
            exact, candidates = int(found.orders_M[is_exact_M].sum()), int(found.orders_M.sum())
            defect_SxR = np.abs(compositions.unit_norm_defect(cos_SxR[1:], sin_SxR[1:]))
            depth_SxR = compositions.rotation_depth(cos_SxR[1:], sin_SxR[1:])
            units += int((defect_SxR == 0).sum())
            f32_exact += exact * (dtype == "float32")
            bf16_exact += exact * (dtype == "bfloat16")
            rows.append(
                {
                    "encoding": encoding.name,
                    "table": dtype,
                    "positions": num_positions,
                    "entries": cos_SxR.size,
                    "norm_1_beyond_0": int((defect_SxR == 0).sum()),
                    "log2_largest_defect": round(float(np.log2(defect_SxR.max())), 2),
                    "depth_min": int(depth_SxR.min()),
                    "depth_max": int(depth_SxR.max()),
                    "candidates": candidates,
                    "exact": exact,
                }
            )
    return rows, [
        check("T4 entries of norm 1 beyond position 0", units, "= 0"),
        check("T4 exact compositions in float32 tables", f32_exact, "= 0"),
        check("E9 exact compositions in bfloat16 tables", bf16_exact, "> 0"),
    ]


def _decoders(table: tables.Table) -> tuple[dict[str, np.ndarray], list[dict]]:
    k_raw_MxH = jnp.asarray(decoders.binade_keys(0.25, 4.0))
    num_keys = k_raw_MxH.shape[0]
    shares, wrong, right = {}, 0, num_keys
    for scheme in (keys.ENGINE_BF16, keys.BF16_WIDE):
        rows = []
        for position, target in DECODER_MOVES:
            stored_MxH, wanted_MxH = (keys.fresh_key(k_raw_MxH, table, p, scheme) for p in (position, target))
            codes = (decoders.pair_codes(np.asarray(k_MxH)) for k_MxH in (stored_MxH, wanted_MxH))
            best = decoders.optimal_decoder_accuracy(*codes)
            moved = (
                keys.moved_key(stored_MxH, table, position, target, scheme, method)
                for method in (keys.SNAP, keys.REROTATE)
            )
            rows.append([best, *(int(bits.bit_equal(k_MxH, wanted_MxH).all(axis=1).sum()) for k_MxH in moved)])
            if position in _LOSSLESS:
                wrong += num_keys - best
            else:
                right = min(right, num_keys - best)
        shares[scheme.name] = np.array(rows) / num_keys
    return shares, [
        check("E1, E7 positions 0 and 355: ordinary keys of pair 0 that are lost", wrong, "= 0"),
        check("T5 other moves: ordinary keys of pair 0 that the best decoder gets wrong, fewest", right, "> 0"),
    ]


def _flips(table: tables.Table) -> tuple[dict[str, np.ndarray], list[dict]]:
    """Computes the gap of the logits for tokens at p and p + 1, query at p + 1: -0.0842 everywhere in the reals."""
    position_T = np.arange(_FLIP_POSITIONS)
    query, first, second = check_certificate.QUERY, check_certificate.KEY_FAR, check_certificate.KEY_NEAR

    def logit(key: tuple[int, int], key_position_T: np.ndarray, scheme: keys.Scheme) -> np.ndarray:
        q_TxH, k_TxH = (jnp.tile(jnp.asarray([x], jnp.bfloat16), (_FLIP_POSITIONS, 1)) for x in (query, key))
        return logits.logit_shift_difference(q_TxH, k_TxH, table, position_T + 1, key_position_T, 0, scheme).before_T

    gaps, rarest = {}, _FLIP_POSITIONS
    for scheme in (keys.ENGINE_BF16, keys.BF16_WIDE):
        gap_T = logit(first, position_T, scheme) - logit(second, position_T + 1, scheme)
        gaps[scheme.name] = gap_T
        rarest = min(rarest, int((gap_T >= FLIP_GAP).sum()), int((gap_T <= -FLIP_GAP).sum()))
    return gaps, [check("T6 positions at which either of two tokens takes all attention, fewest", rarest, "> 0")]


def _logits(seed: int) -> tuple[list[dict], list[dict]]:
    rng = np.random.default_rng(seed)
    table = tables.make_table(encodings.LOCAL256, 31_000)
    wide = rng.standard_normal((2, 4096, 256), np.float32)
    key_position_T = rng.integers(0, 400, 4096)
    query_position_T = key_position_T + rng.integers(0, 512, 4096)
    rows, bf16_equal = [], 0
    for scheme in (keys.ENGINE_BF16, keys.BF16_WIDE, keys.ENGINE_F32):
        q_raw_TxH, k_raw_TxH = (jnp.asarray(x).astype(scheme.raw) for x in wide)
        for shift in (1, 1000, 30_000):
            moved = logits.logit_shift_difference(
                q_raw_TxH, k_raw_TxH, table, query_position_T, key_position_T, shift, scheme
            )
            equal = {dtype: moved.num_equal(dtype) for dtype in ("float32", "bfloat16")}
            mean = np.abs(moved.difference_T).mean() / np.sqrt(table.encoding.head_dim)  # As attention scales them.
            rows.append({"scheme": scheme.name, "shift": shift, **equal, "mean_difference": float(f"{mean:.2e}")})
            bf16_equal += equal["float32"] * (scheme.stored == "bfloat16")
    return rows, [check("T3 float32 logits of bfloat16 keys that a shift leaves alone", bf16_equal, "< 10")]


def _values(engine: kg.Engine, token_ids: Sequence[int], shifts: Sequence[int]) -> tuple[np.ndarray, int]:
    """Changed values [shifts, L], and the number of elements of a layer."""
    sliding = engine.model.config.sliding
    counts = [logits.layer_value_shift_difference(engine.runner, token_ids, shift) for shift in shifts]
    return np.stack(counts), len(token_ids) * sliding.num_kv_heads * sliding.head_dim


def _drift(seed: int) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """99th percentile of |moved - fresh| / (2^-24 |k|) for float32 keys rotated by half their position.

    The largest of eight neighbouring moves: where the rounded angles happen to add up, the error is that of pair 0.
    """
    table = tables.make_table(encodings.LOCAL256, 120_200)
    k_raw_TxH = jnp.asarray(np.random.default_rng(seed).standard_normal((256, 256), np.float32))
    norm_TxR = pair_norm(k_raw_TxH)
    positions = np.unique(np.geomspace(8, 80_000, 25).astype(int))
    errors_SxR = []
    for first in map(int, positions):
        errors_NxR = []
        for neighbour in range(8):
            position, shift = first + neighbour, first // 2 + 13 * neighbour
            k_rot_TxH = keys.fresh_key(k_raw_TxH, table, position, keys.ENGINE_F32)
            moved_TxH = keys.rerotated_key(k_rot_TxH, table, shift, keys.ENGINE_F32)
            fresh_TxH = keys.fresh_key(k_raw_TxH, table, position + shift, keys.ENGINE_F32)
            error_TxR = pair_norm(np.asarray(moved_TxH, np.float64) - np.asarray(fresh_TxH, np.float64))
            errors_NxR.append(np.quantile(error_TxR / norm_TxR, 0.99, axis=0))
        errors_SxR.append(np.max(errors_NxR, axis=0) * 2.0**24)
    return {pair: (positions, np.array(errors_SxR)[:, pair]) for pair in _DRIFT_PAIRS}


def pair_norm(x_TxH: jax.Array | np.ndarray) -> np.ndarray:
    """Euclidean norm of every pair: float64 [T, R]."""
    return np.hypot(*np.split(np.asarray(x_TxH, np.float64), 2, axis=1))


def _programs(seed: int) -> tuple[np.ndarray, int]:
    """Elements in which float32 keys of positions 0, 1, ... differ between `PROGRAMS`; and how many there are."""
    table = tables.make_table(encodings.LOCAL256, 2048)
    frequency_R = encodings.LOCAL256.frequencies()
    timescale_R = (1e4 ** (np.arange(128) / 128)).astype(np.float32)
    position_T = np.arange(2048, dtype=np.float32)
    k_raw_TxNxH = jnp.asarray(np.random.default_rng(seed).standard_normal((2048, 1, 256), np.float32))
    jitted = jax.jit(rotary_lib.rotate)

    def multiplied(k_TxNxH: jax.Array, position_T: jax.Array, frequency_R: jax.Array) -> jax.Array:
        angle_TxR = position_T[:, None] * frequency_R[None]
        return rotary_lib.rotate(k_TxNxH, jnp.cos(angle_TxR), jnp.sin(angle_TxR))

    def divided(k_TxNxH: jax.Array, position_T: jax.Array) -> jax.Array:
        angle_TxR = position_T[:, None] / jnp.asarray(timescale_R)[None]  # A constant: the compiler may invert it.
        return rotary_lib.rotate(k_TxNxH, jnp.cos(angle_TxR), jnp.sin(angle_TxR))

    angle_TxR = position_T[:, None] * frequency_R[None]
    found = (
        jitted(k_raw_TxNxH, table.cos_SxR, table.sin_SxR),
        rotary_lib.rotate(k_raw_TxNxH, jnp.asarray(table.cos_SxR), jnp.asarray(table.sin_SxR)),
        jax.jit(multiplied)(k_raw_TxNxH, position_T, frequency_R),
        jax.jit(divided)(k_raw_TxNxH, position_T),
        divided(k_raw_TxNxH, jnp.asarray(position_T)),
        jitted(k_raw_TxNxH, np.cos(angle_TxR), np.sin(angle_TxR)),
    )
    return np.array([[int(bits.bit_difference_count(a, b)) for b in found] for a in found]), k_raw_TxNxH.size
