"""A benchmark's figures as the harness writes and prints them: flat mappings, and one row per measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses

from experiments.bench import claims as claims_lib
from experiments.bench import memory as memory_lib
from experiments.bench import timing

Mappings = dict[str, dict[str, str | int | float | bool]]

WANTED_REPEATS = 5


@dataclasses.dataclass(frozen=True)
class CurvePoint:
    """Other widths of steps: tokens a second, and the seconds of the first step, which compiles it."""

    shapes: tuple[int, ...]
    kv_block: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    first_call_s: float

    @property
    def name(self) -> str:
        """Returns widths and K/V block in words."""
        return f"widths {', '.join(map(str, self.shapes))}; block {self.kv_block}"


@dataclasses.dataclass(frozen=True)
class Measured:
    """Everything that one benchmark measured.

    Attributes:
      tokens: what each task reads or decodes.
      tasks: timings of every contender, by task.
      parts: timings of our side, by part.
      once_s: seconds of what happens once in a process, by name.
      artifact_bytes: of the context's artifact, by what they are.
      memory: None where it was not measured.
      curve: other shapes of the step.
      num_sequences: that decode together.
      next_tokens: greedy next token after the prompt, by contender: the same work gives the same token, save for ties.
    """

    tokens: Mapping[str, int]
    tasks: Mapping[str, claims_lib.Timings]
    parts: Mapping[str, timing.Timing]
    once_s: Mapping[str, float]
    artifact_bytes: Mapping[str, int]
    memory: memory_lib.Memory | None
    curve: Sequence[CurvePoint]
    num_sequences: int
    next_tokens: Mapping[str, int]

    @property
    def claims(self) -> tuple[claims_lib.Claim, ...]:
        """Returns what the figures have to reach."""
        return claims_lib.claims(self.tasks, self.memory, self.num_sequences)

    @property
    def holds(self) -> bool:
        """Returns whether every figure that was measured is as wanted."""
        return all(claim.holds for claim in self.claims if claim.got is not None)

    @property
    def repeats(self) -> int:
        """Turns that the medians of the tasks are taken over."""
        return len(self.tasks[claims_lib.DECODE][claims_lib.OURS].runs_s)


def figures(measured: Measured) -> Mappings:
    """Makes the tables at the top: wanted and got, then speeds, then where time and memory go."""
    found: Mappings = {
        claim.name: {"wanted": claim.wanted, "got": "not measured"}
        if claim.got is None
        else {"wanted": claim.wanted, "got": round(claim.got, 2), "ok": claim.holds}
        for claim in measured.claims
    }
    found["medians of"] = {"turns after the first": measured.repeats}
    if measured.repeats < WANTED_REPEATS:
        found["medians of"]["note"] = f"fewer than the {WANTED_REPEATS} that a claim should rest on"
    for task, contenders in measured.tasks.items():
        count = measured.tokens[task]
        found[f"{task}: tokens/s"] = {name: _rounded(count / t.median_s) for name, t in contenders.items()}
    parts_ms = {name: 1e3 * part.median_s for name, part in measured.parts.items()}
    read_ms = 1e3 * measured.tasks[claims_lib.PREFILL_CONTEXT][claims_lib.OURS].median_s
    deposit_ms = {"prefill": read_ms, "capture": parts_ms["capture"], "save_artifact": parts_ms["save_artifact"]}
    graft_ms = {name: parts_ms[name] for name in ("load_artifact", "graft", "question")}
    found["deposit of the context: ms"] = _all_rounded({"all": sum(deposit_ms.values()), **deposit_ms})
    found["graft and question: ms"] = _all_rounded({"all": sum(graft_ms.values()), **graft_ms})
    found["artifact of the context: bytes"] = dict(measured.artifact_bytes)
    found["parts: ms"] = _all_rounded(parts_ms)
    found["first calls: ms"] = _all_rounded(
        {name: 1e3 * part.first_s for name, part in measured.parts.items()}
        | {name: 1e3 * seconds for name, seconds in measured.once_s.items()}
    )
    if measured.memory is not None:
        found["resident memory above initialised jax: MB"] = _memory_mb(measured.memory)
    for kind in ("prefill_tokens_per_s", "decode_tokens_per_s", "first_call_s"):
        points = {point.name: _rounded(getattr(point, kind)) for point in measured.curve}
        if points:
            found[f"by shape of the step: {kind}"] = points
    if measured.next_tokens:
        found["next token after the prompt"] = dict(measured.next_tokens)
    return found


def rows(measured: Measured) -> list[dict[str, str | int | float]]:
    """Returns one row per contender and task, and per part."""
    found = []
    for task, contenders in measured.tasks.items():
        for name, timing_ in contenders.items():
            found.append(_row(task, name, measured.tokens[task], timing_))
    return found + [_row(name, claims_lib.OURS, 0, timing_) for name, timing_ in measured.parts.items()]


def _row(task: str, contender: str, num_tokens: int, timing_: timing.Timing) -> dict[str, str | int | float]:
    return {
        "task": task,
        "contender": contender,
        "tokens": num_tokens or "",
        "tokens_per_s": _rounded(num_tokens / timing_.median_s) if num_tokens else "",
        "median_s": timing_.median_s,
        "min_s": min(timing_.runs_s),
        "max_s": max(timing_.runs_s),
        "first_call_s": timing_.first_s,
    }


def _memory_mb(memory: memory_lib.Memory) -> dict[str, int]:
    phases = {"loading": memory.loading, "engine and first step": memory.engine, "prefill": memory.prefill}
    found = {}
    for name, phase in phases.items():
        found |= {f"{name}, peak": phase.peak_bytes, f"{name}, at the end": phase.resident_bytes}
    found |= {"weights": memory.weights_bytes, "cache": memory.cache_bytes, "initialised jax": memory.base_bytes}
    return {name: round(size / 1e6) for name, size in found.items()}


def _all_rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: _rounded(value) for name, value in values.items()}


def _rounded(value: float) -> float:
    """Rounds to four digits; more would be noise."""
    return float(f"{value:.4g}")
