"""One text read in steps of many widths: do all leave the same bits, and would the check notice if they did not?

The text is read once in steps of each single width, and then by plans that mix widths and numbers of live lanes at
random. A hash covers every K/V row of every layer and the logits at several positions. `sizes` does the same for the
true widths of other configurations, with random weights and few layers; `detectors` shows that the two causes by which
bits came to depend on the width are found when they are put back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import gc
import pathlib
import warnings

from experiments import corpus as corpus_lib
from experiments import harness
from experiments import scratch as scratch_lib
from experiments.width_invariance import detectors, readings, sizes
import kvgraft_jax as kg
from kvgraft_jax import digest, errors, host_memory, progress
from kvgraft_jax.runtime import step as step_lib

_DETECTOR_TOKENS = 256


@dataclasses.dataclass(frozen=True)
class Settings:
    """What this experiment reads from a configuration.

    Attributes:
      model, dtype: as for `load_model`.
      seed: of text and plans.
      kv_block: of the engine.
      width_shapes: widths of steps, rising; there is a plan for each of them by itself.
      width_plans: how many further plans mix them at random.
      width_tokens: length of the text.
      configurations: URIs of random models of other sizes, which are read likewise; may be none.
      configuration_shapes: the widths for these.
      configuration_tokens: length of their text.
      configuration_kv_block: slots of their K/V blocks.
    """

    model: str
    dtype: str
    seed: int
    kv_block: int
    width_shapes: tuple[int, ...]
    width_plans: int
    width_tokens: int
    configurations: tuple[str, ...]
    configuration_shapes: tuple[int, ...]
    configuration_tokens: int
    configuration_kv_block: int

    def __post_init__(self):
        for name in ("width_shapes", "configuration_shapes"):
            try:
                shapes = step_lib.plan_shapes(getattr(self, name))
            except errors.ConfigError as error:
                raise errors.ConfigError(f"{name}: {error}") from None
            if len(shapes) < 2:
                raise errors.ConfigError(f"{name}: got {shapes}, wanted two widths or more to compare")
        if self.width_plans < 1:
            raise errors.ConfigError(f"width_plans: got {self.width_plans}, wanted 1 or more")
        if self.seed < 0:
            raise errors.ConfigError(f"seed: got {self.seed}, wanted 0 or more")
        for name, shapes in (("width_tokens", self.width_shapes), ("configuration_tokens", self.configuration_shapes)):
            if getattr(self, name) < shapes[-1]:
                raise errors.ConfigError(
                    f"{name}: got {getattr(self, name)}, wanted {shapes[-1]} or more, so that the widest step is full"
                )


def run(settings: Settings, model: kg.Model, out: pathlib.Path) -> harness.Findings:
    """Reads the text by every plan, then runs the detectors, then the other sizes."""
    corpus = corpus_lib.tokenize(model)
    token_ids = corpus.sample(settings.seed, settings.width_tokens)
    checkpoints = readings.place_checkpoints(len(token_ids), settings.kv_block, model.config.sliding.window)
    engine = _engine(settings, model)
    runner = dataclasses.replace(engine.runner, prepare=None)  # A difference is to be found here, not refused there.
    plans = [readings.single(width, len(token_ids)) for width in settings.width_shapes]
    plans += [
        readings.draw(number, settings.seed, settings.width_shapes, len(token_ids))
        for number in range(settings.width_plans)
    ]
    rows, reference, difference = [], None, {}
    for number, plan in enumerate(progress.each(plans, description="plans", unit="plan")):
        outcome = readings.read(runner, model.digest, plan, token_ids, checkpoints)
        reference = reference or outcome
        rows.append(_row(number, plan, outcome))
        if not difference and outcome.sha256 != reference.sha256:
            where = readings.first_difference(reference, outcome, checkpoints)
            difference = {"plan": number, "name": plan.name, "where": where}
    text = token_ids[:_DETECTOR_TOKENS]
    tries = list(
        progress.each(
            detectors.run(model, settings.kv_block, settings.width_shapes, text), description="detectors", unit="try"
        )
    )
    devices = 1 if model.mesh is None else model.mesh.size
    pin, weights_sha256, probe_agrees = engine.pin, model.digest, engine.step_config.width is None
    del engine, runner, model, reference, outcome  # The other sizes need their memory.
    table = _measure_sizes(settings, devices, out)
    figures = _figures(settings, plans, rows, tries, table)
    return harness.Findings(
        holds=figures["distinct_hashes"] == 1
        and not figures["refused"]
        and probe_agrees
        and all(figures["detectors"].values())
        and all(row["holds"] for row in table),
        figures={**figures, "probe_agrees": probe_agrees, "first_difference": difference},
        pin=pin,
        inputs={
            "weights_sha256": weights_sha256,
            "corpus_sha256": corpus.sha256,
            "token_ids_sha256": digest.json_digest(token_ids),
            "plans_sha256": digest.json_digest([dataclasses.asdict(plan) for plan in plans]),
        },
        outputs={"state_sha256": rows[0]["sha256"], "rows_sha256": digest.json_digest(rows)},
        rows=rows,
        tries=tries,
        tables={"configurations": table},
    )


def _measure_sizes(settings: Settings, devices: int, out: pathlib.Path) -> list[dict]:
    """Returns a row for each of the other sizes."""
    gc.collect()
    host_memory.trim()
    with scratch_lib.folder(out) as scratch:
        return [
            sizes.measure(
                sizes.Job(
                    uri=uri,
                    dtype=settings.dtype,
                    devices=devices,
                    kv_block=settings.configuration_kv_block,
                    shapes=settings.configuration_shapes,
                    num_tokens=settings.configuration_tokens,
                    seed=settings.seed,
                ),
                scratch,
            )
            for uri in progress.each(settings.configurations, description="configurations", unit="model")
        ]


def _engine(settings: Settings, model: kg.Model) -> kg.Engine:
    """Makes the engine; where its probe finds that widths matter here, it warns, and the result says so."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", errors.KVGraftWarning)
        return kg.Engine(
            model, capacity=settings.width_tokens, shapes=settings.width_shapes, kv_block=settings.kv_block
        )


def _row(number: int, plan: readings.Plan, outcome: readings.Outcome) -> dict:
    return {
        "plan": number,
        "name": plan.name,
        "widths": " ".join(map(str, plan.widths)),
        "steps": len(plan.steps),
        "partly_idle_steps": sum(live < width for width, live in plan.steps),
        "random_idle_lanes": plan.idle_seed is not None,
        "sha256": outcome.sha256,
    }


def _figures(
    settings: Settings,
    plans: Sequence[readings.Plan],
    rows: Sequence[Mapping],
    tries: Sequence[Mapping],
    table: Sequence[Mapping],
) -> dict:
    by_width = dict.fromkeys(map(str, settings.width_shapes), 0)
    for plan in plans:
        for width, live in plan.steps:
            by_width[str(width)] += live
    return {
        "shapes": list(settings.width_shapes),
        "plans": len(rows),
        "distinct_hashes": len({row["sha256"] for row in rows}),
        "refused": sum(row["sha256"].startswith("refused") for row in rows),
        "detectors": {name: any(t["fired"] for t in tries if t["detector"] == name) for name in detectors.CAUSES},
        "tokens": settings.width_tokens,
        "tokens_by_width": by_width,
        "configurations_equal": sum(row["holds"] for row in table),
    }


EXPERIMENT = harness.Experiment(
    "width_invariance",
    "Steps of every width, and any mixture of them, leave the same bits in all K/V rows and logits; every detector "
    "reports a difference.",
    Settings,
    run,
)
