"""A deposit moved to another position of a real model: what changes, and how much of it is the graft's doing?

Of each text the document is deposited at positions 0, 1, ... and moved by d; then its tail is read. Everything is
compared with a context fresh at d: the engine's own program, given rotary tables whose rows begin at d. Beside it
stands a probe in which nothing is grafted: the context fresh at d against the one fresh at 0. What the probe shows is
the model's own sensitivity to its positions, for which no way to move a deposit is to blame.

Three ways: stored keys rotated by d; stored keys turned back to 0 and rotated anew; keys kept from before rotation
and rotated where they go. Values are copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses
import pathlib

import numpy as np

from experiments import corpus as corpus_lib
from experiments import harness
from experiments.relocation import plots as relocation_plots
from experiments.relocation import real_keys, relocated
from experiments.rotary_exactness import parts as rotary_parts
import kvgraft_jax as kg
from kvgraft_jax import digest, errors, progress
from kvgraft_jax.gemma import rotary as rotary_lib
from kvgraft_jax.grafting import manifest
from kvgraft_jax.relocation import keys
from kvgraft_jax.runtime import step as step_lib


@dataclasses.dataclass(frozen=True)
class Settings:
    """What this experiment reads from a configuration.

    Attributes:
      model, dtype: as for `load_model`; the claim is about this dtype.
      other_dtypes: run too, to tell apart what the dtype does.
      seed: of the texts.
      shapes, kv_block: of the engine.
      document_tokens: lengths of the documents; below the window they do not fill it, above they do.
      documents: texts of each length.
      tail_tokens: read after the document; logits of all of them are compared.
      shifts: d, 0 among them.
      small_shift: the largest d that counts as small.
    """

    model: str
    dtype: str
    other_dtypes: tuple[str, ...]
    seed: int
    shapes: tuple[int, ...]
    kv_block: int
    document_tokens: tuple[int, ...]
    documents: int
    tail_tokens: int
    shifts: tuple[int, ...]
    small_shift: int

    def __post_init__(self):
        if not set(self.dtypes) <= set(step_lib.DTYPES) or len(set(self.dtypes)) < len(self.dtypes):
            raise errors.ConfigError(f"dtype, other_dtypes: got {self.dtypes}, wanted some of {step_lib.DTYPES}")
        for field, low in (("document_tokens", 1), ("documents", 1), ("tail_tokens", 1), ("seed", 0)):
            value = getattr(self, field)
            if min(value, default=0) < low if isinstance(value, tuple) else value < low:
                raise errors.ConfigError(f"{field}: got {value}, wanted {low} or more")
        if sorted({0, *self.shifts}) != list(self.shifts) or not 0 < self.shifts[-1] < 1 << 20:
            raise errors.ConfigError(f"shifts: got {self.shifts}, wanted 0 and then rising ones up to {(1 << 20) - 1}")

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Of all runs."""
        return self.dtype, *self.other_dtypes


@dataclasses.dataclass(frozen=True)
class Cell:
    """What the texts of one line have in common."""

    dtype: str
    document_tokens: int
    window: str
    shift: int
    way: str


@dataclasses.dataclass(frozen=True, eq=False)
class Measurement:
    """One text moved by one shift in one way.

    Attributes:
      exact: how its state was labelled.
      graft: the moved deposit against the context fresh there.
      probe: the context fresh at 0 against it.
    """

    exact: bool
    graft: relocated.Difference
    probe: relocated.Difference


def run(settings: Settings, model: kg.Model, out: pathlib.Path) -> harness.Findings:
    """Measures every dtype, text, shift and way, then makes the checks."""
    corpus = corpus_lib.tokenize(model)
    rng = np.random.default_rng(settings.seed)
    texts = [
        corpus.sample(int(rng.integers(len(corpus.documents))), tokens + settings.tail_tokens)
        for tokens in settings.document_tokens
        for _ in range(settings.documents)
    ]
    cells: dict[Cell, list[Measurement]] = {}
    pins, refusals = {}, 0
    for dtype in settings.dtypes:
        held = model if dtype == settings.dtype else kg.load_model(settings.model, dtype)
        engine = kg.Engine(held, capacity=max(map(len, texts)), shapes=settings.shapes, kv_block=settings.kv_block)
        pins[dtype] = engine.pin
        for text in progress.each(texts, description=dtype, unit="text"):
            for cell, measurement in _measure(settings, engine, text):
                cells.setdefault(cell, []).append(measurement)
        refusals += sum(_refuses(engine, texts[0], shift) for shift in settings.shifts if shift)
    rows = [_row(settings, model, cell, group) for cell, group in cells.items()]
    key_rows, value_rows = (_layer_rows(cells, side) for side in (0, 1))
    checks = _checks(settings, rows, key_rows, value_rows, refusals)
    relocation_plots.draw(rows, settings.shifts, out / "relocation.png")
    return harness.Findings(
        holds=all(check["holds"] for check in checks),
        figures={
            "own_position_bits": sum(row["k_bits"] + row["v_bits"] for row in rows if row["shift"] == 0),
            **{f"kl_nats_mean_{dtype}": _means(rows, dtype) for dtype in settings.dtypes},
            **{f"pin_id_{dtype}": pins[dtype].id for dtype in settings.other_dtypes},
        },
        pin=pins[settings.dtype],
        inputs={
            "weights_sha256": model.digest,
            "corpus_sha256": corpus.sha256,
            "token_ids_sha256": digest.json_digest(texts),
        },
        outputs={"rows_sha256": digest.json_digest(rows), "layers_sha256": digest.json_digest([key_rows, value_rows])},
        rows=rows,
        checks=checks,
        tables={
            "mean KL, nats, by dtype, window and size of d": _attribution(settings, rows),
            "bits of keys that differ, by layer": key_rows,
            "bits of values that differ, by layer": value_rows,
        },
    )


def _measure(settings: Settings, engine: kg.Engine, text: Sequence[int]) -> Iterator[tuple[Cell, Measurement]]:
    document, tail = text[: -settings.tail_tokens], text[-settings.tail_tokens :]
    window = engine.model.config.sliding.window
    fills = "full" if window and len(document) >= window else "not full"
    artifact = engine.capture(engine.prefill(document), policy=manifest.ALL_ROWS)
    k_raw = real_keys.raw_keys(engine, document)
    num_positions = settings.shifts[-1] + engine.capacity
    tables = rotary_lib.make_tables(engine.model.config, num_positions, engine.step_config.jnp_dtype)
    at_0 = None
    for shift in settings.shifts:
        runner = relocated.shifted(engine, tables, shift)
        fresh = relocated.fresh(engine, runner, document, tail)
        at_0 = at_0 or fresh
        probe = relocated.difference(fresh, at_0)
        for way in relocated.WAYS:
            state = relocated.relocated(engine, artifact, k_raw, shift, way)
            found = relocated.read_on(engine, runner, state, tail)
            cell = Cell(engine.model.dtype, len(document), fills, shift, way)
            yield cell, Measurement(state.exact, relocated.difference(fresh, found), probe)


def _row(settings: Settings, model: kg.Model, cell: Cell, group: list[Measurement]) -> dict:
    """Makes one row of the results from the texts of a cell."""
    config = model.config
    heads = [config.attention(layer) for layer in range(config.num_kv_layers)]
    elements = cell.document_tokens * len(group) * sum(head.num_kv_heads * head.head_dim for head in heads)
    bits_2, elements_2 = (
        np.sum([getattr(one.graft, name).sum(axis=0) for one in group], axis=0) for name in ("bits_Lx2", "elements_Lx2")
    )
    width = 16 if cell.dtype == "bfloat16" else 32
    found = {
        "exact": all(one.exact for one in group),
        "k_bits": int(bits_2[0]),
        "v_bits": int(bits_2[1]),
        "kv_bits_percent": round(100 * float(bits_2.sum()) / (2 * width * elements), 4),
        "k_elements_percent": round(100 * float(elements_2[0]) / elements, 4),
        "v_elements_percent": round(100 * float(elements_2[1]) / elements, 4),
    }
    for prefix, who in (("", "graft"), ("probe_", "probe")):
        differences = [getattr(one, who) for one in group]
        kl_nats = np.concatenate([difference.kl_nats_T for difference in differences])
        found[f"{prefix}kl_nats_mean"] = _rounded(kl_nats.mean())
        found[f"{prefix}kl_nats_max"] = _rounded(kl_nats.max())
        found[f"{prefix}argmax_agree"] = sum(difference.argmax_agree for difference in differences)
    return {**dataclasses.asdict(cell), **found, "tokens_compared": settings.tail_tokens * len(group)}


def _layer_rows(cells: dict[Cell, list[Measurement]], side: int) -> list[dict]:
    """Returns, per cell, the bits that differ in each layer's keys (side 0) or values (side 1)."""
    rows = []
    for cell, group in cells.items():
        if side == 0 or cell.way == relocated.WAYS[0]:
            names = dataclasses.asdict(cell) if side == 0 else {**dataclasses.asdict(cell), "way": "copy"}
            bits_L = np.sum([one.graft.bits_Lx2[:, side] for one in group], axis=0)
            rows.append(names | {f"layer_{layer}": count for layer, count in enumerate(bits_L.tolist())})
    return rows


def _refuses(engine: kg.Engine, text: Sequence[int], shift: int) -> bool:
    """Tells whether the engine refuses to graft elsewhere, and to deposit a state that was moved anyway."""
    artifact = engine.capture(engine.prefill(text[:1]), policy=manifest.ALL_ROWS)
    state = relocated.relocated(engine, artifact, real_keys.raw_keys(engine, text[:1]), shift, keys.REROTATE)
    try:
        engine.graft(artifact, position=shift)
    except errors.InputError:
        try:
            engine.capture(state)
        except errors.CaptureError:
            return not state.exact
    return False


def _checks(
    settings: Settings, rows: list[dict], key_rows: list[dict], value_rows: list[dict], refusals: int
) -> list[dict]:
    check = rotary_parts.check
    own = [row for row in rows if row["shift"] == 0]
    moved = [row for row in rows if row["shift"] and row["dtype"] == settings.dtype]
    labels = sum(row["exact"] != (row["k_bits"] + row["v_bits"] == 0) for row in rows)
    disagree = sum(row["tokens_compared"] - row["argmax_agree"] for row in own)
    prerotary = sum(row["layer_0"] for row in key_rows if row["way"] == relocated.PREROTARY)
    wanted = (len(settings.shifts) - 1) * len(settings.dtypes)
    return [
        check("d = 0: bits of keys and values that differ", sum(row["k_bits"] + row["v_bits"] for row in own), "= 0"),
        check("d = 0: largest KL divergence", max(row["kl_nats_max"] for row in own), "= 0"),
        check("d = 0: next tokens that differ", disagree, "= 0"),
        check("other d: fewest bits that differ", min(row["k_bits"] + row["v_bits"] for row in moved), "> 0"),
        check("other d: smallest mean KL divergence", min(row["kl_nats_mean"] for row in moved), "> 0"),
        check("layer 0, keys kept before rotation: bits that differ at any d", prerotary, "= 0"),
        check("layer 0, values: bits that differ at any d", sum(row["layer_0"] for row in value_rows), "= 0"),
        check("labels of exact or inexact that the bits contradict", labels, "= 0"),
        check("refused: a graft at d, and to deposit what was moved by d", refusals, f"= {wanted}"),
    ]


def _means(rows: list[dict], dtype: str) -> dict[str, float]:
    """Returns the mean KL of each way and of the probe, over every d but 0."""
    moved = [row for row in rows if row["shift"] and row["dtype"] == dtype]
    means = {way: np.mean([row["kl_nats_mean"] for row in moved if row["way"] == way]) for way in relocated.WAYS}
    means["probe"] = np.mean([row["probe_kl_nats_mean"] for row in moved])
    return {name: _rounded(mean) for name, mean in means.items()}


def _attribution(settings: Settings, rows: list[dict]) -> list[dict]:
    """Returns the means by dtype, window and size of d: which of the three makes the difference?"""
    cells: dict[tuple[str, str, str], list[dict]] = {}
    for row in rows:
        if row["shift"]:
            size = "small" if row["shift"] <= settings.small_shift else "large"
            cells.setdefault((row["dtype"], row["window"], size), []).append(row)
    return [
        {"dtype": dtype, "window": window, "d": size, **_means(group, dtype)}
        for (dtype, window, size), group in cells.items()
    ]


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


EXPERIMENT = harness.Experiment(
    "relocation",
    "A deposit is exact in every bit at its own position, whichever way its keys were kept, and at no other.",
    Settings,
    run,
)
