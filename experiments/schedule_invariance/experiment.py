"""One text read in many random ways: do all leave the same bits, and would the check notice if they did not?

A schedule cuts the text anywhere, reads it in steps of several widths and some tokens one at a time, moves between
contexts of different capacity by graft, scatters blocks over the cache, and puts random tokens into idle lanes and
garbage into slots and blocks that hold no token. The hash of a schedule covers the
K/V rows that a next token sees and the logits at several positions. `detectors` then shows that computations which do
differ are found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import pathlib

from matplotlib import figure as figure_lib
import numpy as np

from experiments import corpus as corpus_lib
from experiments import harness, scratch
from experiments.schedule_invariance import detectors, schedules
import kvgraft_jax as kg
from kvgraft_jax import digest, errors, progress

_PLOTTED = 60


@dataclasses.dataclass(frozen=True)
class Settings:
    """What this experiment reads from a configuration.

    Attributes:
      model, dtype: as for `load_model`.
      seed: of text and schedules.
      shapes, kv_block: of every engine.
      schedules: how many.
      text_tokens: length of the text.
      capacities: of the contexts; each is compiled once.
      single_steps: every tenth schedule ends in this many single-token steps, or more.
    """

    model: str
    dtype: str
    seed: int
    shapes: tuple[int, ...]
    kv_block: int
    schedules: int
    text_tokens: int
    capacities: tuple[int, ...]
    single_steps: int

    def __post_init__(self):
        if self.schedules < 2:
            raise errors.ConfigError(f"schedules: got {self.schedules}, wanted 2 or more")
        if self.seed < 0:
            raise errors.ConfigError(f"seed: got {self.seed}, wanted 0 or more")
        if not 1 <= self.single_steps < self.text_tokens:
            raise errors.ConfigError(
                f"single_steps, text_tokens: got {self.single_steps}, {self.text_tokens}, "
                "wanted 1 <= single_steps < text_tokens"
            )
        if not self.capacities or min(self.capacities) < self.text_tokens:
            raise errors.ConfigError(
                f"capacities: got {self.capacities}, wanted one or more, each text_tokens = {self.text_tokens} or more"
            )


def run(settings: Settings, model: kg.Model, out: pathlib.Path) -> harness.Findings:
    """Draws and runs the schedules, then the detectors."""
    corpus = corpus_lib.tokenize(model)
    token_ids = corpus.sample(settings.seed, settings.text_tokens)
    checkpoints = place_checkpoints(settings, model.config.sliding.window)
    engines = {
        capacity: kg.Engine(model, capacity=capacity, shapes=settings.shapes, kv_block=settings.kv_block)
        for capacity in settings.capacities
    }
    engine = engines[settings.capacities[0]]
    drawn = [
        schedules.draw(
            number,
            settings.seed,
            settings.text_tokens,
            engine.shapes,
            settings.capacities,
            settings.single_steps,
        )
        for number in range(settings.schedules)
    ]
    rows, reference, difference = [], None, {}
    with scratch.folder(out) as store:
        for number, schedule in enumerate(progress.each(drawn, description="schedules", unit="schedule")):
            outcome = schedules.run(schedule, engines, token_ids, checkpoints, store)
            reference = reference or outcome
            rows.append(_row(number, schedule, outcome))
            if not difference and _differs(reference, outcome):
                notes = schedules.first_difference(reference, outcome, checkpoints)
                difference = {"schedule": number, **notes}
    tries = list(
        progress.each(
            detectors.run(engine, token_ids, checkpoints, reference),
            description="detectors",
            unit="try",
        )
    )
    figures = _figures(rows, drawn, tries)
    _plot(drawn, settings.text_tokens, out / "schedules.png")
    return harness.Findings(
        holds=figures["distinct_hashes"] == 1 == figures["distinct_full_hashes"] and all(figures["detectors"].values()),
        figures={**figures, "first_difference": difference},
        pin=engine.pin,
        inputs={
            "weights_sha256": model.digest,
            "corpus_sha256": corpus.sha256,
            "token_ids_sha256": digest.json_digest(token_ids),
            "schedules_sha256": digest.json_digest([dataclasses.asdict(schedule) for schedule in drawn]),
        },
        outputs={"state_sha256": rows[0]["sha256"], "rows_sha256": digest.json_digest(rows)},
        rows=rows,
        tries=tries,
    )


def place_checkpoints(settings: Settings, window: int | None) -> tuple[int, ...]:
    """Returns the positions whose logits are hashed: first, middle, last, and around a K/V block and the window."""
    last = settings.text_tokens - 1
    wanted = {0, settings.kv_block - 1, settings.kv_block, (window or 1) - 1, window or 0, last // 2}
    return tuple(sorted(position for position in wanted if position < last))


def _differs(a: schedules.Outcome, b: schedules.Outcome) -> bool:
    return a.sha256 != b.sha256 or bool(a.full_sha256 and b.full_sha256 and a.full_sha256 != b.full_sha256)


def _row(number: int, schedule: schedules.Schedule, outcome: schedules.Outcome) -> dict:
    pieces = [piece for leg in schedule.legs for piece in leg.pieces]
    return {
        "schedule": number,
        "contexts": " > ".join(f"{sum(leg.pieces)} in {leg.capacity}" for leg in schedule.legs),
        "pieces": len(pieces),
        "single_tokens": pieces.count(1),
        "trailing_singles": schedule.trailing_singles,
        "grafts": schedule.num_grafts,
        "policy": schedule.policy if schedule.num_grafts else "",
        "carrier": schedule.carrier if schedule.num_grafts else "",
        "garbage": schedule.garbage,
        "random_idle_lanes": schedule.random_idle_lanes,
        "sha256": outcome.sha256,
        "full_sha256": outcome.full_sha256,
    }


def _figures(rows: Sequence[dict], drawn: Sequence[schedules.Schedule], tries: Sequence[Mapping]) -> dict:
    names = dict.fromkeys(attempt["detector"] for attempt in tries)
    counts = {
        "grafted": sum(schedule.num_grafts > 0 for schedule in drawn),
        "grafts": sum(schedule.num_grafts for schedule in drawn),
        "through_disk": sum(row["carrier"] == schedules.DISK for row in rows),
        "windowed": sum(not row["full_sha256"] for row in rows),
        "with_garbage": sum(schedule.garbage != schedules.ZERO for schedule in drawn),
        "random_idle_lanes": sum(schedule.random_idle_lanes for schedule in drawn),
    }
    return {
        "schedules": len(rows),
        "distinct_hashes": len({row["sha256"] for row in rows}),
        "distinct_full_hashes": len({row["full_sha256"] for row in rows} - {""}),
        "detectors": {name: any(t["fired"] for t in tries if t["detector"] == name) for name in names},
        "kinds": counts,
        "trailing_singles_max": max(row["trailing_singles"] for row in rows),
    }


def _plot(drawn: Sequence[schedules.Schedule], num_tokens: int, path: pathlib.Path) -> None:
    """Plots the first schedules, one line each: a tick where a piece begins, a red bar at each graft."""
    figure = figure_lib.Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    shown = drawn[:_PLOTTED]
    cuts, grafts = [], []
    for schedule in shown:
        legs = [np.cumsum([0, *leg.pieces]) for leg in schedule.legs]
        offsets = np.cumsum([0, *(leg[-1] for leg in legs)])
        cuts.append(np.concatenate([leg + offset for leg, offset in zip(legs, offsets[:-1], strict=True)]))
        grafts.append(offsets[1:-1])
    lines = np.arange(len(shown))
    axes.eventplot(cuts, lineoffsets=lines, linelengths=0.6, linewidths=0.5, colors="tab:blue")
    axes.eventplot(grafts, lineoffsets=lines, linelengths=0.9, linewidths=2, colors="tab:red")
    axes.set(xlabel="position", ylabel="schedule", xlim=(-2, num_tokens + 2), title="Cuts (blue) and grafts (red)")
    axes.invert_yaxis()
    figure.savefig(path, dpi=120)


EXPERIMENT = harness.Experiment(
    "schedule_invariance",
    "Every schedule leaves the same bits in K/V rows and logits, and every detector reports a difference.",
    Settings,
    run,
)
