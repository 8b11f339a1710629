"""Keys at other positions: at which shifts are they the fresh ones to the last bit, and what is lost at the others?

The sweep stores random keys at a position, moves them by every method, and counts the bits that differ from fresh ones,
by encoding, storage and shift. The parts around it (`rotary_parts`) are exhaustive or exact: which operations copy,
which tabulated rotations compose, what the best decoder could give back, and what a shift of all positions does to
logits and values. Every statement is a line of the result: what was found, and what was wanted.
"""

from __future__ import annotations

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from experiments import harness
from experiments.rotary_exactness import pairs as rotary_pairs
from experiments.rotary_exactness import parts as rotary_parts
from experiments.rotary_exactness import plots as rotary_plots
import kvgraft_jax as kg
from kvgraft_jax import digest, errors, progress
from kvgraft_jax.relocation import bits, collisions, encodings, keys, laws, tables

KV_BLOCK = 32
_ROUNDOFF = {"bfloat16": 2.0**-8, "float32": 2.0**-24}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What this experiment reads from a configuration.

    Attributes:
      model, dtype: as for `load_model`; of the model whose values are looked at.
      seed: of keys and text.
      encodings, schemes: names.
      num_keys: keys per encoding.
      num_positions: length of the tables.
      moves: (position, shift) that every method tries.
      swept_position: from here keys are rotated by 0 and by all powers of two, both ways.
      f32_positions, bf16_positions: of the tables whose compositions are counted.
      program_shifts, program_positions: shifts and positions that the engine's float32 program decides.
      row_positions: of the tables whose rows are compared.
      text_tokens: length of the text.
      value_shifts: by how much its positions are shifted.
    """

    model: str
    dtype: str
    seed: int
    encodings: tuple[str, ...]
    schemes: tuple[str, ...]
    num_keys: int
    num_positions: int
    moves: tuple[tuple[int, ...], ...]
    swept_position: int
    f32_positions: int
    bf16_positions: int
    program_shifts: int
    program_positions: int
    row_positions: int
    text_tokens: int
    value_shifts: tuple[int, ...]

    def __post_init__(self):
        for name in self.encodings:
            encodings.get(name)
        for name in self.schemes:
            keys.scheme(name)
        if not self.encodings or not self.schemes:
            raise errors.ConfigError("encodings, schemes: got none, wanted one or more of each")
        for field in ("num_keys", "f32_positions", "bf16_positions", "text_tokens", "swept_position"):
            if getattr(self, field) < 1:
                raise errors.ConfigError(f"{field}: got {getattr(self, field)}, wanted 1 or more")
        if not 2048 <= self.num_positions <= 1 << 20:
            raise errors.ConfigError(f"num_positions: got {self.num_positions}, wanted 2,048 to {1 << 20}")
        for field in ("program_shifts", "program_positions", "row_positions"):
            if not 2 <= getattr(self, field) <= collisions.MAX_POSITIONS:
                raise errors.ConfigError(f"{field}: got {getattr(self, field)}, wanted 2 to {collisions.MAX_POSITIONS}")
        if self.swept_position >= self.num_positions:
            raise errors.ConfigError(f"swept_position: got {self.swept_position}, wanted below num_positions")
        for move in self.moves:
            if len(move) != 2 or not 0 <= move[0] < self.num_positions > sum(move) >= 0 != move[1]:
                raise errors.ConfigError(
                    f"moves: got {move}, wanted a position and a shift that is not 0, within {self.num_positions}"
                )
        if 0 not in self.value_shifts or not 0 <= min(self.value_shifts) <= max(self.value_shifts) < 1 << 20:
            raise errors.ConfigError(
                f"value_shifts: got {self.value_shifts}, wanted 0 and others up to {(1 << 20) - 1}"
            )
        if self.seed < 0:
            raise errors.ConfigError(f"seed: got {self.seed}, wanted 0 or more")

    @property
    def swept_shifts(self) -> tuple[int, ...]:
        """0 and the powers of two that stay in the table, both ways."""
        powers = [1 << n for n in range(20)]
        back = [-power for power in powers if power <= self.swept_position]
        onward = [power for power in powers if self.swept_position + power < self.num_positions]
        return (*reversed(back), 0, *onward)


def run(settings: Settings, model: kg.Model, out: pathlib.Path) -> harness.Findings:
    """Runs the sweep, then the parts, then the checks and plots."""
    longest = max(settings.value_shifts) + settings.text_tokens
    engine = kg.Engine(model, capacity=longest, kv_block=KV_BLOCK)
    rows, swept, raw = [], {}, {}
    for name in progress.each(settings.encodings, description="encodings", unit="encoding"):
        encoding = encodings.get(name)
        table = tables.make_table(encoding, settings.num_positions)
        raw[name] = _keys(settings, encoding)
        for scheme in map(keys.scheme, settings.schemes):
            k_raw_TxH = raw[name].astype(scheme.raw)
            swept[name, scheme.name] = keys.mismatch_by_pair(
                k_raw_TxH, table, settings.swept_position, settings.swept_shifts, scheme
            )
            rows += _swept_rows(settings, encoding, scheme, swept[name, scheme.name])
            rows += _moved_rows(settings, encoding, scheme, k_raw_TxH, table)
    parts = rotary_parts.measure(
        settings.f32_positions,
        settings.bf16_positions,
        settings.seed,
        engine,
        settings.text_tokens,
        settings.value_shifts,
    )
    found_tables, checks = rotary_pairs.measure(
        settings.program_shifts, settings.program_positions, settings.row_positions, settings.seed
    )
    checks = [*_checks(rows), *parts.checks, *checks]
    rotary_plots.draw(settings.swept_position, settings.swept_shifts, swept, settings.num_keys, parts, out)
    own = [row for row in rows if row["shift"] == 0]
    return harness.Findings(
        holds=all(check["holds"] for check in checks),
        figures={
            "own_position_mismatches": sum(row["different"] for row in own),
            "own_position_elements": sum(row["elements"] for row in own),
        },
        pin=engine.pin,
        inputs={
            "weights_sha256": model.digest,
            "token_ids_sha256": digest.json_digest(parts.token_ids),
            "keys_sha256": digest.json_digest([digest.array_digest(np.asarray(k_raw)) for k_raw in raw.values()]),
        },
        outputs={"rows_sha256": digest.json_digest(rows), "checks_sha256": digest.json_digest(checks)},
        rows=rows,
        checks=checks,
        tables={**parts.tables, **found_tables},
    )


def _keys(settings: Settings, encoding: encodings.Encoding) -> jax.Array:
    rng = np.random.default_rng([settings.seed, encoding.head_dim])
    return jnp.asarray(rng.standard_normal((settings.num_keys, encoding.head_dim), np.float32))


def _swept_rows(
    settings: Settings, encoding: encodings.Encoding, scheme: keys.Scheme, counts: np.ndarray
) -> list[dict]:
    return [
        _row(settings, encoding, scheme, keys.REROTATE if shift else "copy", settings.swept_position, shift, by_pair)
        for shift, by_pair in zip(settings.swept_shifts, counts, strict=True)
    ]


def _moved_rows(
    settings: Settings, encoding: encodings.Encoding, scheme: keys.Scheme, k_raw_TxH: jax.Array, table: tables.Table
) -> list[dict]:
    """Measures every move by every method that differs from the others in this scheme."""
    rows = []
    for position, shift in settings.moves:
        k_rot_TxH = keys.fresh_key(k_raw_TxH, table, position, scheme)
        fresh_TxH = keys.fresh_key(k_raw_TxH, table, position + shift, scheme)
        bound_R = laws.mismatch_bound(
            encoding.frequencies(),
            position,
            shift,
            stored_roundoff=_ROUNDOFF[scheme.stored],
            arithmetic_roundoff=_ROUNDOFF[scheme.arithmetic],
        )
        for method in keys.METHODS:
            if method == keys.SNAP and scheme.raw == scheme.arithmetic:
                continue  # There is nothing to round: it is `unrotate`.
            moved_TxH = keys.moved_key(k_rot_TxH, table, position, position + shift, scheme, method)
            is_equal_TxH = np.asarray(bits.bit_equal(moved_TxH, fresh_TxH))
            by_pair = (~is_equal_TxH).sum(axis=0).reshape(2, -1).sum(axis=0)
            heads_equal = int(is_equal_TxH.all(axis=1).sum())
            pair_equal_R = is_equal_TxH.reshape(len(is_equal_TxH), 2, -1).all(axis=1).mean(axis=0)
            log10_head = round(float(np.log10(pair_equal_R).sum()), 1) if pair_equal_R.all() else None
            excess = None
            if method == keys.REROTATE:
                off_TxH = np.asarray(moved_TxH, np.float64) - np.asarray(fresh_TxH, np.float64)
                scaled_TxR = rotary_parts.pair_norm(off_TxH) / (rotary_parts.pair_norm(k_raw_TxH) * bound_R)
                excess = round(float(scaled_TxR.max()), 4)
            rows.append(
                _row(settings, encoding, scheme, method, position, shift, by_pair, heads_equal, log10_head, excess)
            )
    return rows


def _row(
    settings: Settings,
    encoding: encodings.Encoding,
    scheme: keys.Scheme,
    method: str,
    position: int,
    shift: int,
    by_pair: np.ndarray,
    heads_equal: int | None = None,
    log10_head: float | None = None,
    error_of_bound: float | None = None,
) -> dict:
    """One line of the results; elements are those of pairs that rotate.

    `log10_head_equal` is the logarithm of the chance that a whole head comes back, if its pairs did so independently;
    None where one of them never did.
    """
    rotated = encoding.num_rotated_pairs
    elements, different = 2 * rotated * settings.num_keys, int(by_pair[:rotated].sum())
    return {
        "encoding": encoding.name,
        "scheme": scheme.name,
        "method": method,
        "position": position,
        "shift": shift,
        "elements": elements,
        "different": different,
        "percent": round(100 * different / elements, 4),
        "unrotated_different": int(by_pair[rotated:].sum()),
        "heads_equal": heads_equal,
        "log10_head_equal": log10_head,
        "error_of_bound": error_of_bound,
    }


def _checks(rows: list[dict]) -> list[dict]:
    """Checks what the sweep says about own position, other positions and the exceptions."""
    moved = [row for row in rows if row["shift"] and row["position"]]
    turned = [row for row in moved if row["method"] != keys.SNAP]
    from_0 = [
        row for row in rows if row["position"] == 0 and row["method"] in (keys.REROTATE, keys.UNROTATE, keys.SNAP)
    ]
    wide = [row for row in moved if row["scheme"] == keys.F32_OF_BF16.name and row["method"] == keys.SNAP]
    bounds = [row["error_of_bound"] for row in rows if row["error_of_bound"] is not None]
    check = rotary_parts.check
    found = [
        check("T1 own position: elements that differ", sum(r["different"] for r in rows if not r["shift"]), "= 0"),
        check("T2 moves that leave every element as it is", sum(not row["different"] for row in turned), "= 0"),
        check("E2 unrotated pairs: elements that differ", sum(row["unrotated_different"] for row in rows), "= 0"),
    ]
    if from_0:
        found.append(check("E1 from position 0: elements that differ", sum(r["different"] for r in from_0), "= 0"))
    if wide:
        share = sum(row["different"] for row in wide) / sum(row["elements"] for row in wide)
        found.append(check("E4 f32 of bf16 keys, snapped: share that differs", share, "< 0.0001"))
    if bounds:
        found.append(check("largest error as a share of its bound", max(bounds), "<= 1"))
    return found


EXPERIMENT = harness.Experiment(
    "rotary_exactness",
    "Stored keys equal fresh ones in every bit at their own position and, but for the named exceptions, at no other.",
    Settings,
    run,
)
