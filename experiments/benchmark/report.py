"""A benchmark's figures as data and as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses

from experiments.benchmark import claims as claims_lib
from experiments.benchmark import memory as memory_lib
from experiments.benchmark import ours as ours_lib
from experiments.benchmark import peer as peer_lib
from experiments.benchmark import timing


@dataclasses.dataclass(frozen=True)
class CurvePoint:
    """One shape of the step: tokens a second, and the seconds of the first step, which compiles it."""

    width: int
    kv_block: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    first_call_s: float


@dataclasses.dataclass(frozen=True)
class Artifact:
    """Bytes of the context's artifact: of its arrays, and of all its files."""

    array_bytes: int
    disk_bytes: int


@dataclasses.dataclass(frozen=True)
class Figures:
    """Everything that one benchmark measured.

    Attributes:
      sizes: tokens of everything.
      once_s: seconds of what happens once in a process, by name.
      parts: timings of our side, by part.
      tasks: timings of every contender, by task.
      artifact: of the context.
      memory: None where it was not measured.
      curve: other shapes of the step.
      peer: what the contenders were compared with; None where nothing was.
      next_tokens: greedy next token after the prompt, by contender: the same work gives the same token, save for ties.
    """

    sizes: ours_lib.Sizes
    once_s: Mapping[str, float]
    parts: Mapping[str, timing.Timing]
    tasks: Mapping[str, claims_lib.Timings]
    artifact: Artifact
    memory: memory_lib.Memory | None
    curve: Sequence[CurvePoint]
    peer: peer_lib.Description | None
    next_tokens: Mapping[str, int]

    @property
    def claims(self) -> tuple[claims_lib.Claim, ...]:
        """What the figures have to reach."""
        return claims_lib.claims(self.tasks, self.memory)

    def tokens(self, task: str) -> int:
        """How many tokens a task reads or decodes."""
        sizes = self.sizes
        return {
            claims_lib.PREFILL_PROMPT: sizes.prompt,
            claims_lib.PREFILL_CONTEXT: sizes.context,
            claims_lib.DECODE: sizes.decoded,
            claims_lib.FIRST_TOKEN: sizes.context + sizes.question,
        }[task]

    def document(self) -> dict[str, object]:
        """As plain JSON data."""
        tasks = {
            task: {
                name: {"tokens_per_s": self.tokens(task) / timing_.median_s, **timing_.document()}
                for name, timing_ in contenders.items()
            }
            for task, contenders in self.tasks.items()
        }
        return {
            "sizes": dataclasses.asdict(self.sizes),
            "claims": [
                {"name": claim.name, "wanted": claim.wanted, "got": claim.got, "ok": claim.holds}
                for claim in self.claims
            ],
            "tasks": tasks,
            "parts": {name: timing_.document() for name, timing_ in self.parts.items()},
            "once_s": dict(self.once_s),
            "artifact": dataclasses.asdict(self.artifact),
            "memory": dataclasses.asdict(self.memory) if self.memory else None,
            "curve": [dataclasses.asdict(point) for point in self.curve],
            "peer": dataclasses.asdict(self.peer) if self.peer else None,
            "next_tokens": dict(self.next_tokens),
        }


@dataclasses.dataclass(frozen=True)
class Table:
    """A titled table of text cells."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(figures: Figures) -> tuple[Table, ...]:
    """The figures for people: what was wanted first, then where the time and the memory go."""
    found = [
        Table(
            "Wanted and got",
            ("ratio", "wanted", "got", "ok"),
            tuple((c.name, c.wanted, f"{c.got:.2f}", "yes" if c.holds else "NO") for c in figures.claims),
        ),
        Table(
            "Speed",
            ("task", "contender", "tokens", "median s", "tokens/s", "first call s"),
            tuple(
                (
                    task,
                    name,
                    str(figures.tokens(task)),
                    f"{timing_.median_s:.3f}",
                    f"{figures.tokens(task) / timing_.median_s:,.1f}",
                    f"{timing_.first_s:.3f}",
                )
                for task, contenders in figures.tasks.items()
                for name, timing_ in contenders.items()
            ),
        ),
        Table(
            "Parts",
            ("part", "median ms", "first call ms"),
            tuple(
                (name, f"{1e3 * timing_.median_s:.1f}", f"{1e3 * timing_.first_s:.1f}")
                for name, timing_ in figures.parts.items()
            )
            + tuple((f"{name} (once)", "", f"{1e3 * seconds:.1f}") for name, seconds in figures.once_s.items()),
        ),
        Table(
            "Artifact of the context",
            ("", "bytes"),
            (
                ("arrays", f"{figures.artifact.array_bytes:,}"),
                ("files on disk", f"{figures.artifact.disk_bytes:,}"),
            ),
        ),
    ]
    if figures.memory is not None:
        found.append(_memory_table(figures.memory))
    if figures.curve:
        found.append(
            Table(
                "Shapes of the step",
                ("width", "K/V block", "prefill tokens/s", "decode tokens/s", "first call s"),
                tuple(
                    (
                        str(point.width),
                        str(point.kv_block),
                        f"{point.prefill_tokens_per_s:,.1f}",
                        f"{point.decode_tokens_per_s:.2f}",
                        f"{point.first_call_s:.2f}",
                    )
                    for point in figures.curve
                ),
            )
        )
    return tuple(found)


def _memory_table(memory: memory_lib.Memory) -> Table:
    phases = (("loading", memory.loading), ("engine, first step", memory.engine), ("prefill", memory.prefill))
    return Table(
        "Resident memory above a process that only initialised jax",
        ("", "peak MB", "at the end MB"),
        (
            *((name, f"{p.peak_bytes / 1e6:.0f}", f"{p.resident_bytes / 1e6:.0f}") for name, p in phases),
            ("of which weights", "", f"{memory.weights_bytes / 1e6:.0f}"),
            ("of which cache", "", f"{memory.cache_bytes / 1e6:.0f}"),
            ("that process itself", "", f"{memory.base_bytes / 1e6:.0f}"),
        ),
    )
