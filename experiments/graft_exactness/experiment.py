"""Fresh against grafted in a new process: are logits, K/V and every decode step equal to the last bit?

For each sample of n tokens the donor process deposits the first c, and computes all n in one context with cuts drawn
at random. A new process shares nothing with it but files: it loads the artifact, grafts it, reads the n - c tokens
that are left, and decodes. Its cache is one K/V block larger than the donor's, and all its steps are of the narrowest
width.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import json
import pathlib

from matplotlib import figure as figure_lib
import numpy as np

from experiments import corpus as corpus_lib
from experiments import harness
from experiments import scratch as scratch_lib
import kvgraft_jax as kg
from kvgraft_jax import digest, errors, progress
from kvgraft_jax.grafting import compare

RECIPIENT = "--recipient"

_JOB, _STORE, _LOGITS, _ANSWER = "job.json", "store", "logits.npy", "answer.json"
_HASHED = ("logits", "kv", "decode")
_MAX_PIECES = 6


@dataclasses.dataclass(frozen=True)
class Settings:
    """What this experiment reads from a configuration.

    Attributes:
      model, dtype: as for `load_model`.
      seed: of lengths, cuts and schedules.
      shapes, kv_block, capacity: of the donor's engine.
      samples: number of texts.
      min_tokens, max_tokens: length of a text.
      spread_tokens: longest text whose length is drawn, not given by a cut of special interest; above max_tokens it
        says nothing.
      decode_steps: greedy steps after each text.
    """

    model: str
    dtype: str
    seed: int
    shapes: tuple[int, ...]
    kv_block: int
    capacity: int
    samples: int
    min_tokens: int
    max_tokens: int
    spread_tokens: int
    decode_steps: int

    def __post_init__(self):
        if self.samples < 1:
            raise errors.ConfigError(f"samples: got {self.samples}, wanted 1 or more")
        if not 1 <= self.min_tokens <= min(self.max_tokens, self.spread_tokens):
            raise errors.ConfigError(
                f"min_tokens, max_tokens, spread_tokens: got {self.min_tokens}, {self.max_tokens}, "
                f"{self.spread_tokens}, wanted 1 <= min_tokens <= each of the others"
            )
        if self.decode_steps < 0 or self.seed < 0:
            raise errors.ConfigError(f"decode_steps, seed: got {self.decode_steps}, {self.seed}, wanted 0 or more")
        if self.max_tokens + self.decode_steps > self.capacity:
            raise errors.ConfigError(
                f"capacity: got {self.capacity}, wanted max_tokens + decode_steps = "
                f"{self.max_tokens + self.decode_steps} or more"
            )


@dataclasses.dataclass(frozen=True)
class Sample:
    """One text.

    Attributes:
      token_ids: all n.
      cut: c, how many of them the artifact holds.
      pieces: how the fresh context reads them; sum to n, and no piece ends at the cut.
    """

    token_ids: tuple[int, ...]
    cut: int
    pieces: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Hashes:
    """Hashes of one context: the text read, then decoded from.

    Attributes:
      logits, kv: SHA-256 of the next-token logits and the visible K/V rows.
      argmax: the next token.
      decode: SHA-256 of the logits of every step, then of the K/V rows at the end.
    """

    logits: str
    kv: str
    argmax: int
    decode: tuple[str, ...]


def plan_samples(settings: Settings, window: int | None, corpus: corpus_lib.Corpus) -> tuple[Sample, ...]:
    """Draws texts, cuts and schedules.

    Every second sample is cut where something changes, until all such places had their turn twice: after one or two
    tokens, around a K/V block, around the window w, one block behind it, and at 2 w + 3. The second time nothing
    follows the cut. The others have lengths spread evenly over the orders of magnitude, and a cut anywhere.
    """
    rng = np.random.default_rng(settings.seed)
    block, shortest, longest = settings.kv_block, settings.min_tokens, settings.max_tokens
    low, high = np.log(shortest), np.log(min(settings.spread_tokens, longest) + 1)
    around = [window - 1, window, window + 1, window + block + 1, 2 * window + 3] if window else []
    edges = [1, 2, block - 1, block, block + 1, *around]
    edges = [edge for edge in sorted(set(edges)) if 1 <= edge <= longest]
    samples = []
    for number in range(settings.samples):
        edge_round, which = divmod(number // 2, len(edges))
        is_edge = number % 2 == 0 and edge_round < 2
        if is_edge and edge_round == 0:
            cut = edges[which]
            length = max(shortest, min(longest, cut + int(rng.integers(1, 33))))
        elif is_edge:
            cut = length = max(shortest, edges[which])
        else:
            length = int(np.exp(rng.uniform(low, high)))
            cut = int(rng.integers(1, length + 1))
        inner = [place for place in range(1, length) if place != cut]
        num_cuts = min(len(inner), int(rng.integers(1, _MAX_PIECES)))
        places = [0, *sorted(rng.choice(inner, num_cuts, replace=False).tolist() if inner else []), length]
        token_ids = corpus.sample(int(rng.integers(len(corpus.documents))), length)
        samples.append(Sample(token_ids, cut, tuple(np.diff(places).tolist())))
    return tuple(samples)


def run(settings: Settings, model: kg.Model, out: pathlib.Path) -> harness.Findings:
    """Runs the donor, then the recipient in a new process, then the comparison."""
    corpus = corpus_lib.tokenize(model)
    window = model.config.sliding.window
    samples = plan_samples(settings, window, corpus)
    engine = kg.Engine(model, capacity=settings.capacity, shapes=settings.shapes, kv_block=settings.kv_block)
    with scratch_lib.folder(out) as scratch:
        artifact_ids, fresh = _donate(settings, engine, samples, scratch)
        pin, weights_sha256 = engine.pin, model.digest
        job = {
            "settings": dataclasses.asdict(settings),
            "mesh": 1 if model.mesh is None else model.mesh.size,
            "samples": [dataclasses.asdict(sample) for sample in samples],
            "artifact_ids": artifact_ids,
        }
        harness.write_text(scratch / _JOB, json.dumps(job))
        del engine, model  # The recipient needs their memory.
        harness.run_module("experiments.graft_exactness", RECIPIENT, str(scratch))
        answer = json.loads((scratch / _ANSWER).read_text())
    rows = [
        _row(number, sample, artifact_ids[number], fresh[number], answer["rows"][number])
        for number, sample in enumerate(samples)
    ]
    figures = _figures(rows)
    counts = ("logits_sha256_equal", "kv_sha256_equal", "decode_sha256_equal", "argmax_agree")
    holds = all(figures[name] == settings.samples for name in counts) and figures["kl_nats_max"] == 0.0
    _plot(rows, window, settings.kv_block, out / "samples.png")
    return harness.Findings(
        holds=holds,
        figures={**figures, "recipient_pin_id": answer["pin_id"]},
        pin=pin,
        inputs={
            "weights_sha256": weights_sha256,
            "corpus_sha256": corpus.sha256,
            "token_ids_sha256": digest.json_digest([sample.token_ids for sample in samples]),
        },
        outputs={
            "fresh_sha256": digest.json_digest([dataclasses.asdict(hashes) for hashes in fresh]),
            "grafted_sha256": digest.json_digest([row["hashes"] for row in answer["rows"]]),
            "rows_sha256": digest.json_digest(rows),
        },
        rows=rows,
    )


def recipient(scratch: pathlib.Path) -> int:
    """Runs the new process: loads, grafts, reads on, decodes; writes hashes, KL and argmax to a file; returns 0."""
    job = json.loads((scratch / _JOB).read_text())
    settings = Settings(**job["settings"] | {"shapes": tuple(job["settings"]["shapes"])})
    model = kg.load_model(settings.model, settings.dtype, mesh=kg.make_mesh(job["mesh"]))
    capacity = settings.capacity + settings.kv_block
    engine = kg.Engine(model, capacity=capacity, shapes=settings.shapes[:1], kv_block=settings.kv_block)
    logits_LxV = np.load(scratch / _LOGITS, mmap_mode="r")
    rows = []
    with_progress = progress.each(job["samples"], description="grafted", unit="sample")
    for sample, artifact_id, logits_V in zip(with_progress, job["artifact_ids"], logits_LxV, strict=True):
        try:
            state = engine.graft(kg.load_artifact(scratch / _STORE, artifact_id))
            tail = sample["token_ids"][sample["cut"] :]
            state = engine.extend(state, tail) if tail else state
            kl_nats = compare.kl_nats(logits_V, np.asarray(state.logits))
            hashes = dataclasses.asdict(_hashes(engine, state, settings.decode_steps))
            rows.append({"hashes": hashes, "kl_nats": kl_nats if np.isfinite(kl_nats) else None, "error": ""})
        except errors.KVGraftError as error:
            rows.append({"hashes": None, "kl_nats": None, "error": f"{type(error).__name__}: {error}"})
    harness.write_text(scratch / _ANSWER, json.dumps({"pin_id": engine.pin.id, "rows": rows}))
    return harness.HOLDS


def _donate(
    settings: Settings, engine: kg.Engine, samples: Sequence[Sample], scratch: pathlib.Path
) -> tuple[list[str], list[Hashes]]:
    """Returns artifact ids and hashes of the fresh contexts; writes artifacts and fresh logits to files."""
    shape = (len(samples), engine.model.config.vocab_size)
    logits_LxV = np.lib.format.open_memmap(scratch / _LOGITS, mode="w+", dtype=np.float32, shape=shape)
    artifact_ids, fresh = [], []
    for number, sample in enumerate(progress.each(samples, description="fresh", unit="sample")):
        donor = engine.prefill(sample.token_ids[: sample.cut])
        artifact = engine.capture(donor, provenance={"experiment": "graft_exactness", "sample": number})
        artifact_ids.append(kg.save_artifact(artifact, scratch / _STORE))
        state = _read_in_pieces(engine, sample)
        logits_LxV[number] = np.asarray(state.logits)
        fresh.append(_hashes(engine, state, settings.decode_steps))
    logits_LxV.flush()
    return artifact_ids, fresh


def _read_in_pieces(engine: kg.Engine, sample: Sample) -> kg.State:
    state, read = None, 0
    for piece in sample.pieces:
        token_ids = sample.token_ids[read : read + piece]
        state = engine.prefill(token_ids) if state is None else engine.extend(state, token_ids)
        read += piece
    return state


def _hashes(engine: kg.Engine, state: kg.State, decode_steps: int) -> Hashes:
    before = compare.hashes(state)
    steps: list[str] = []
    _, end = engine.generate(
        state,
        max_new_tokens=decode_steps,
        stop_ids=(),
        on_token=lambda _, logits_V: steps.append(compare.logits_sha256(np.asarray(logits_V))),
    )
    argmax = int(np.argmax(np.asarray(state.logits)))
    return Hashes(before.logits_sha256, before.kv_sha256, argmax, (*steps, compare.hashes(end).kv_sha256))


def _row(number: int, sample: Sample, artifact_id: str, fresh: Hashes, grafted: dict) -> dict:
    """Makes one row of the results, without hashes where the graft was refused."""
    hashes = Hashes("", "", -1, ()) if grafted["hashes"] is None else Hashes(**grafted["hashes"])
    steps = tuple(hashes.decode)
    return {
        "sample": number,
        "tokens": len(sample.token_ids),
        "cut": sample.cut,
        "fresh_pieces": len(sample.pieces),
        "token_ids_sha256": digest.json_digest(sample.token_ids),
        "artifact_id": artifact_id,
        "fresh_logits_sha256": fresh.logits,
        "grafted_logits_sha256": hashes.logits,
        "fresh_kv_sha256": fresh.kv,
        "grafted_kv_sha256": hashes.kv,
        "fresh_decode_sha256": digest.json_digest(fresh.decode),
        "grafted_decode_sha256": digest.json_digest(steps),
        "decode_hashes_equal": sum(a == b for a, b in zip(fresh.decode, steps, strict=False)),
        "kl_nats": grafted["kl_nats"],
        "argmax_agree": fresh.argmax == hashes.argmax,
        "error": grafted["error"],
    }


def _figures(rows: Sequence[dict]) -> dict:
    equal = {
        f"{what}_sha256_equal": sum(row[f"fresh_{what}_sha256"] == row[f"grafted_{what}_sha256"] for row in rows)
        for what in _HASHED
    }
    kl_nats = [row["kl_nats"] for row in rows]
    return {
        "samples": len(rows),
        **equal,
        "kl_nats_max": None if None in kl_nats else max(kl_nats),
        "argmax_agree": sum(row["argmax_agree"] for row in rows),
        "tokens_mean": round(sum(row["tokens"] for row in rows) / len(rows), 1),
        "tokens_max": max(row["tokens"] for row in rows),
        "full_hits": sum(row["tokens"] == row["cut"] for row in rows),
    }


def _plot(rows: Sequence[dict], window: int | None, kv_block: int, path: pathlib.Path) -> None:
    """Plots length and cut of every sample, with the window and the K/V blocks; a difference is red."""
    figure = figure_lib.Figure(figsize=(6, 5), layout="constrained")
    axes = figure.subplots()
    longest = max(row["tokens"] for row in rows)
    for block in range(kv_block, longest, kv_block):
        axes.axvline(block, color="0.9", linewidth=1, zorder=0)
    if window:
        axes.axvline(window, color="0.5", linestyle="--", label=f"sliding window {window}", zorder=0)

    def is_equal(row: dict) -> bool:
        return all(row[f"fresh_{what}_sha256"] == row[f"grafted_{what}_sha256"] for what in _HASHED)

    for label, colour, wanted in (("equal in every bit", "tab:blue", True), ("DIFFERENT", "tab:red", False)):
        chosen = [row for row in rows if is_equal(row) == wanted]
        if chosen:
            cuts, lengths = [row["cut"] for row in chosen], [row["tokens"] for row in chosen]
            axes.scatter(cuts, lengths, s=16, color=colour, label=label)
    axes.set(xlabel="tokens in the artifact", ylabel="tokens of the text", title="Fresh against grafted")
    axes.legend()
    figure.savefig(path, dpi=120)


EXPERIMENT = harness.Experiment(
    "graft_exactness",
    "A grafted context equals a fresh one in every bit of logits, visible K/V rows and decode steps.",
    Settings,
    run,
)
