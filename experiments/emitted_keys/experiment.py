"""Keys that a real model emits, moved to other positions: how often are they the fresh ones by luck?

That some keys cannot be moved is proved; which keys a trained model emits is a question to the model. Texts are read,
every layer's keys are taken before rotation, stored at their positions, moved by d, and compared with fresh ones: by
rotary pair, and as whole heads. Then all keys are put at one position, and counted is what the best function of the
stored key that could exist would still get wrong at another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses
import functools
import itertools
import operator
import pathlib

import jax
import jax.numpy as jnp
from matplotlib import figure as figure_lib
import numpy as np

from experiments import corpus as corpus_lib
from experiments import harness
from experiments.relocation import real_keys
from experiments.rotary_exactness import parts as rotary_parts
import kvgraft_jax as kg
from kvgraft_jax import digest, errors, progress
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.grafting import rows as rows_lib
from kvgraft_jax.relocation import bits, decoders, keys, tables

COPY = "copy"
METHODS = (keys.REROTATE, keys.UNROTATE)
SCHEME = keys.ENGINE_BF16


@dataclasses.dataclass(frozen=True)
class Settings:
    """What this experiment reads from a configuration.

    Attributes:
      model, dtype: as for `load_model`; bfloat16.
      shapes, kv_block: of the engine.
      texts, text_tokens: how many and how long; they follow each other in the corpus.
      min_keys: keys that each attention kind shall have emitted.
      shifts: d, 0 among them.
      best_position, best_shifts: where keys are put for the best function, and by which d they are moved from there.
        It is asked about `min_keys` of each attention kind, of all its layers.
    """

    model: str
    dtype: str
    shapes: tuple[int, ...]
    kv_block: int
    texts: int
    text_tokens: int
    min_keys: int
    shifts: tuple[int, ...]
    best_position: int
    best_shifts: tuple[int, ...]

    def __post_init__(self):
        if self.dtype != SCHEME.stored:
            raise errors.ConfigError(f"dtype: got {self.dtype!r}, wanted {SCHEME.stored}, of whose keys this counts")
        for field, low in (("texts", 1), ("text_tokens", 2), ("min_keys", 1), ("best_position", 1)):
            if getattr(self, field) < low:
                raise errors.ConfigError(f"{field}: got {getattr(self, field)}, wanted {low} or more")
        for field, first in (("shifts", {0}), ("best_shifts", set())):
            shifts = getattr(self, field)
            if not shifts or sorted({*shifts, *first}) != list(shifts) or not 0 < shifts[-1] < 1 << 20:
                raise errors.ConfigError(f"{field}: got {shifts}, wanted rising ones, up to {(1 << 20) - 1}")

    @property
    def num_positions(self) -> int:
        """Of the tables."""
        return 1 + max(self.text_tokens + self.shifts[-1], self.best_position + self.best_shifts[-1])


@dataclasses.dataclass(frozen=True, eq=False)
class Luck:
    """What came back of N keys; numbers of several layers add up.

    Attributes:
      keys: N.
      elements: of N H.
      signs: elements that differ in nothing but the sign of a zero.
      pair_R: keys whose pair came back in both elements, by pair.
      heads: keys that came back whole.
      most_pairs: of the key that came closest, pairs that came back.
    """

    keys: int
    elements: int
    signs: int
    pair_R: np.ndarray
    heads: int
    most_pairs: int

    @property
    def differences(self) -> int:
        """Elements that did not come back, those with another sign of zero among them."""
        return 2 * len(self.pair_R) * self.keys - self.elements

    def __add__(self, other: Luck) -> Luck:
        return Luck(
            self.keys + other.keys,
            self.elements + other.elements,
            self.signs + other.signs,
            self.pair_R + other.pair_R,
            self.heads + other.heads,
            max(self.most_pairs, other.most_pairs),
        )


def compare(found_TxH: jax.Array, fresh_TxH: jax.Array) -> Luck:
    """Counts which elements, pairs and heads are the fresh ones in every bit."""
    is_equal_TxH = np.asarray(bits.bit_equal(found_TxH, fresh_TxH))
    first_TxR, second_TxR = np.split(is_equal_TxH, 2, axis=1)
    pairs_TxR = first_TxR & second_TxR
    return Luck(
        keys=len(is_equal_TxH),
        elements=int(is_equal_TxH.sum()),
        signs=int((~is_equal_TxH & np.asarray(found_TxH == fresh_TxH)).sum()),
        pair_R=pairs_TxR.sum(axis=0),
        heads=int(pairs_TxR.all(axis=1).sum()),
        most_pairs=int(pairs_TxR.sum(axis=1).max()),
    )


def plan_texts(corpus: corpus_lib.Corpus, num_texts: int, num_tokens: int) -> list[tuple[int, ...]]:
    """Returns begin of text and then the next tokens of the corpus, each used once.

    Raises:
      InputError: the corpus is shorter.
    """
    stream = itertools.chain.from_iterable(corpus.documents)
    texts = [(corpus.bos_id, *itertools.islice(stream, num_tokens - 1)) for _ in range(num_texts)]
    if len(texts[-1]) < num_tokens:
        total = sum(map(len, corpus.documents))
        raise errors.InputError(
            f"texts, text_tokens: got {num_texts} of {num_tokens}, but the corpus has only {total} tokens"
        )
    return texts


def run(settings: Settings, model: kg.Model, out: pathlib.Path) -> harness.Findings:
    """Reads the texts, then moves the keys of each attention kind."""
    corpus = corpus_lib.tokenize(model)
    texts = plan_texts(corpus, settings.texts, settings.text_tokens)
    engine = kg.Engine(model, capacity=settings.text_tokens, shapes=settings.shapes, kv_block=settings.kv_block)
    kinds = model.config.kinds
    for kind in kinds:
        emitted = len(kind.layers) * kind.attention.num_kv_heads * settings.texts * (settings.text_tokens - 1)
        if emitted < settings.min_keys:
            raise errors.ConfigError(f"min_keys: {kind.name} layers emit {emitted} keys, wanted {settings.min_keys}")
    raw = [real_keys.raw_keys(engine, text) for text in progress.each(texts, description="texts", unit="text")]
    unlike_the_step = _unlike_the_step(engine, texts[0], raw[0])
    rows, best_rows, from_0, pair_tables = [], [], [], {}
    for kind in kinds:
        table = real_keys.make_table(kind.attention, settings.num_positions)
        found: dict[tuple[int, str], Luck] = {}
        for layer in progress.each(kind.layers, description=kind.name, unit="layer"):
            k_raw_BxTxKxH = np.stack([layers[layer] for layers in raw])
            for move, luck in _move(settings, table, k_raw_BxTxKxH[:, 1:]):
                found[move] = found[move] + luck if move in found else luck
            from_0.append(_from_0(settings, table, k_raw_BxTxKxH[:, 0]))
        rows += [_row(kind.name, *move, luck) for move, luck in found.items()]
        pair_tables[kind.name] = {shift: luck for (shift, method), luck in found.items() if method == keys.REROTATE}
        best_rows += _best(settings, kind, table, raw)
    checks = _checks(rows, best_rows, unlike_the_step, [lucks[0] for lucks in pair_tables.values()], from_0)
    _plot(pair_tables, out / "pairs.png")
    moved = [row for row in rows if row["shift"]]
    return harness.Findings(
        holds=all(check["holds"] for check in checks),
        figures={
            "keys": {kind: next(iter(lucks.values())).keys for kind, lucks in pair_tables.items()},
            "whole_keys_back_by_luck": sum(row["heads_equal"] for row in moved),
            "keys_that_a_rotation_by_0_changes": {
                kind: lucks[0].keys - lucks[0].heads for kind, lucks in pair_tables.items()
            },
            "signs_of_zero_lost_from_position_0": sum(luck.signs for luck in from_0),
        },
        pin=engine.pin,
        inputs={
            "weights_sha256": model.digest,
            "corpus_sha256": corpus.sha256,
            "token_ids_sha256": digest.json_digest(texts),
        },
        outputs={
            "keys_sha256": digest.json_digest([digest.array_digest(k_raw) for layers in raw for k_raw in layers]),
            "rows_sha256": digest.json_digest([rows, best_rows]),
        },
        rows=rows,
        checks=checks,
        tables={
            "the best function: what it gets wrong at least": best_rows,
            **{f"{kind}: keys that come back, by pair": _pair_rows(lucks) for kind, lucks in pair_tables.items()},
        },
    )


def _unlike_the_step(engine: kg.Engine, text: Sequence[int], k_raw: Sequence[np.ndarray]) -> int:
    """Counts elements in which a text's rotated keys differ from those that the engine's step left in the cache."""
    state, count = engine.prefill(text), 0
    for index, kind in enumerate(engine.model.config.kinds):
        table = real_keys.make_table(kind.attention, len(text))
        position_T = np.repeat(np.arange(len(text)), kind.attention.num_kv_heads)
        held_Lx2xTxKxH = rows_lib.read_rows(state.blocks, index, 0, len(text), engine.step_config.jnp_dtype)
        for layer, held_TxKxH in zip(kind.layers, held_Lx2xTxKxH[:, 0], strict=True):
            k_raw_TxH = jnp.asarray(k_raw[layer].reshape(-1, kind.attention.head_dim))
            k_rot_TxH = np.asarray(keys.fresh_key(k_raw_TxH, table, position_T, SCHEME))
            count += int((k_rot_TxH.view(np.uint16) != held_TxKxH.reshape(k_rot_TxH.shape).view(np.uint16)).sum())
    return count


def _move(settings: Settings, table: tables.Table, k_raw_BxTxKxH: np.ndarray) -> Iterator[tuple[tuple[int, str], Luck]]:
    """Measures every shift by every method for keys of positions 1, 2, ...; at shift 0 the plain copy too."""
    num_texts, num_tokens, num_kv_heads, head_dim = k_raw_BxTxKxH.shape
    k_raw_TxH = jnp.asarray(k_raw_BxTxKxH.reshape(-1, head_dim))
    position_T = np.tile(np.repeat(np.arange(1, num_tokens + 1), num_kv_heads), num_texts)
    k_rot_TxH = keys.fresh_key(k_raw_TxH, table, position_T, SCHEME)
    for shift in settings.shifts:
        fresh_TxH = keys.fresh_key(k_raw_TxH, table, position_T + shift, SCHEME)
        if shift == 0:
            yield (shift, COPY), compare(k_rot_TxH, fresh_TxH)
        for method in METHODS:
            moved_TxH = keys.moved_key(k_rot_TxH, table, position_T, position_T + shift, SCHEME, method)
            yield (shift, method), compare(moved_TxH, fresh_TxH)


def _from_0(settings: Settings, table: tables.Table, k_raw_BxKxH: np.ndarray) -> Luck:
    """Measures keys stored at position 0, which were not rotated yet, after rotation by every shift."""
    k_raw_TxH = jnp.asarray(k_raw_BxKxH.reshape(-1, k_raw_BxKxH.shape[-1]))
    k_rot_TxH = keys.fresh_key(k_raw_TxH, table, 0, SCHEME)
    lucks = [
        compare(keys.rerotated_key(k_rot_TxH, table, shift, SCHEME), keys.fresh_key(k_raw_TxH, table, shift, SCHEME))
        for shift in settings.shifts
    ]
    return functools.reduce(operator.add, lucks)


def _best(
    settings: Settings, kind: config_lib.LayerKind, table: tables.Table, raw: Sequence[Sequence[np.ndarray]]
) -> list[dict]:
    """Bounds every function of the stored key from below, pair by pair: keys that merge here and part elsewhere."""
    every = [layers[layer].reshape(-1, kind.attention.head_dim) for layer in kind.layers for layers in raw]
    every_TxH = np.concatenate(every)
    k_raw_TxH = jnp.asarray(every_TxH[:: len(every_TxH) // settings.min_keys][: settings.min_keys])
    stored_TxR = _pair_codes(k_raw_TxH, table, settings.best_position)
    rows = []
    for shift in settings.best_shifts:
        wanted_TxR = _pair_codes(k_raw_TxH, table, settings.best_position + shift)
        wrong_R = np.array(
            [
                len(stored_TxR) - decoders.optimal_decoder_accuracy(stored_T, wanted_T)
                for stored_T, wanted_T in zip(stored_TxR.T, wanted_TxR.T, strict=True)
            ]
        )
        row = {"kind": kind.name, "position": settings.best_position, "shift": shift, "keys": len(stored_TxR)}
        row |= {"pairs": len(wrong_R), "pairs_with_a_loss": int((wrong_R > 0).sum())}
        rows.append(
            row | {"wrong_mean_percent": _percent(wrong_R.mean(), len(stored_TxR)), "wrong": int(wrong_R.sum())}
        )
    return rows


def _pair_codes(k_raw_TxH: jax.Array, table: tables.Table, position: int) -> np.ndarray:
    """Returns one integer per key and pair, of keys rotated to one position: uint32 [T, R]."""
    k_rot_TxH = np.asarray(keys.fresh_key(k_raw_TxH, table, position, SCHEME))
    k_rot_TxRx2 = np.stack(np.split(k_rot_TxH, 2, axis=1), axis=-1)
    return decoders.pair_codes(k_rot_TxRx2.reshape(-1, 2)).reshape(k_rot_TxRx2.shape[:2])


def _row(kind: str, shift: int, method: str, luck: Luck) -> dict:
    """Makes one row of the results. In `heads_expected_log10` a pair that never came back counts as once."""
    share_R = np.maximum(luck.pair_R, 1) / luck.keys
    return {
        "kind": kind,
        "shift": shift,
        "method": method,
        "keys": luck.keys,
        "elements_equal_percent": _percent(luck.elements, 2 * luck.keys * len(share_R)),
        "signs_of_zero": luck.signs,
        "pair_least_percent": _percent(luck.pair_R.min(), luck.keys),
        "pair_median_percent": _percent(np.median(luck.pair_R), luck.keys),
        "pair_most_percent": _percent(luck.pair_R.max(), luck.keys),
        "heads_equal": luck.heads,
        "heads_expected_log10": round(float(np.log10(share_R).sum()), 1),
        "closest_key_pairs": luck.most_pairs,
        "pairs": len(share_R),
    }


def _pair_rows(lucks: dict[int, Luck]) -> list[dict]:
    """Makes one row per pair and shift."""
    num_pairs = len(next(iter(lucks.values())).pair_R)
    return [
        {"pair": pair, **{f"d = {shift}": int(luck.pair_R[pair]) for shift, luck in lucks.items()}}
        for pair in range(num_pairs)
    ]


def _percent(part: float, whole: float) -> float:
    return round(100 * float(part) / float(whole), 4)


def _checks(
    rows: list[dict], best_rows: list[dict], unlike_the_step: int, rotated_by_0: list[Luck], from_0: list[Luck]
) -> list[dict]:
    check = rotary_parts.check
    own = [row for row in rows if row["method"] == COPY]
    turned = [row for row in rows if row["shift"] == 0 and row["method"] == keys.UNROTATE]
    moved = [row for row in rows if row["shift"]]
    by_0, lost = (sum(luck.differences - luck.signs for luck in lucks) for lucks in (rotated_by_0, from_0))
    return [
        check("keys of the first text, rotated: elements unlike the engine's", unlike_the_step, "= 0"),
        check("d = 0, copied: keys that are not whole", sum(row["keys"] - row["heads_equal"] for row in own), "= 0"),
        check("other d: keys that come back whole", sum(row["heads_equal"] for row in moved), "= 0"),
        check("d = 0, turned back and anew: most percent of elements", _most(turned), "< 100"),
        check("d = 0, rotated by 0: elements that differ in more than the sign of a zero", by_0, "= 0"),
        check("stored at position 0: elements that differ in more than the sign of a zero, any d", lost, "= 0"),
        check("best function: fewest wrong pairs of keys", min(row["wrong"] for row in best_rows), "> 0"),
    ]


def _most(rows: list[dict]) -> float:
    return max(row["elements_equal_percent"] for row in rows)


def _plot(pair_tables: dict[str, dict[int, Luck]], path: pathlib.Path) -> None:
    """Plots the share of keys that come back, by rotary pair: one panel per attention kind, one line per shift."""
    figure = figure_lib.Figure(figsize=(6 * len(pair_tables), 4.5), layout="constrained")
    panels = figure.subplots(1, len(pair_tables), squeeze=False, sharey=True)[0]
    for axes, (kind, lucks) in zip(panels, pair_tables.items(), strict=True):
        for number, (shift, luck) in enumerate(lucks.items()):
            share_R = 100 * luck.pair_R / luck.keys
            axes.plot(share_R, color=f"C{number}", linewidth=1, label=f"d = {shift:,}: {luck.heads:,} whole")
        axes.set(xlabel="rotary pair", title=f"{kind}: {luck.keys:,} keys, rotated by d")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=7, loc="lower center", ncols=2)
    panels[0].set_ylabel("percent of keys whose pair is the fresh one")
    figure.savefig(path, dpi=110)


EXPERIMENT = harness.Experiment(
    "emitted_keys",
    "A key that the model emits is the fresh one at its own position, copied, and at no other by luck.",
    Settings,
    run,
)
