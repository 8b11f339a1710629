"""What the figures of a benchmark have to reach, and whether they do."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses

from experiments.bench import memory as memory_lib
from experiments.bench import timing

OURS = "kvgraft_jax"
GRAFT = "kvgraft_jax, graft from disk"
ONE_WIDTH = "kvgraft_jax, all steps 10 lanes wide"
LIBRARY_ORDER = "kvgraft_jax, sums and products in the library's order"

# Tasks: what the contenders of one comparison do.
PREFILL_PROMPT = "prefill of the prompt"
PREFILL_CONTEXT = "prefill of the context"
DECODE = "decode"
DECODE_MANY = "decode, many sequences"
FIRST_TOKEN = "first token after context and question"

Timings = Mapping[str, timing.Timing]


@dataclasses.dataclass(frozen=True)
class Claim:
    """One figure against the one that is wanted.

    Attributes:
      name: what is compared with what.
      got: the figure; None where it was not measured.
      limit: what is wanted.
      is_minimum: `got` must reach `limit`; otherwise it must not exceed it.
    """

    name: str
    got: float | None
    limit: float
    is_minimum: bool = True

    @property
    def holds(self) -> bool:
        """Returns whether the figure was measured and is as wanted."""
        if self.got is None:
            return False
        return self.got >= self.limit if self.is_minimum else self.got <= self.limit

    @property
    def wanted(self) -> str:
        """Limit with its direction."""
        return f"{'>=' if self.is_minimum else '<='} {self.limit:g}"


def best_peer_s(timings: Timings) -> float | None:
    """Returns the median seconds of the fastest peer; None where none took part."""
    return min((timings[name].median_s for name in timings if not name.startswith(OURS)), default=None)


def claims(tasks: Mapping[str, Timings], memory: memory_lib.Memory | None, num_sequences: int) -> tuple[Claim, ...]:
    """Returns every claim; ratios are how many times faster the first named is.

    Args:
      tasks: timings of the contenders, by task.
      memory: None where it was not measured.
      num_sequences: that decode together.
    """
    context, decode, many = tasks[PREFILL_CONTEXT], tasks[DECODE], tasks[DECODE_MANY]
    graft_s, decode_s = context[GRAFT].median_s, decode[OURS].median_s
    together = num_sequences * decode_s / many[OURS].median_s
    slower = [tasks[task][OURS].median_s / tasks[task][LIBRARY_ORDER].median_s for task in (PREFILL_PROMPT, DECODE)]
    found = [
        Claim("graft from disk / own prefill of the context", context[OURS].median_s / graft_s, 20),
        Claim("decode / own with one width of 10", decode[ONE_WIDTH].median_s / decode_s, 1.3),
        Claim(f"{num_sequences} sequences decoded together / one, tokens", together, 4),
        Claim("time with sums of one order / in the library's order", max(slower), 1.15, is_minimum=False),
    ]
    for task, ours_s, name, limit in (
        (DECODE, decode_s, "decode / best peer", 1.3),
        (DECODE_MANY, many[OURS].median_s, f"decode of {num_sequences} sequences / best peer's batch of them", 1),
        (PREFILL_PROMPT, tasks[PREFILL_PROMPT][OURS].median_s, "prefill of the prompt / best peer", 0.75),
        (PREFILL_CONTEXT, context[OURS].median_s, "prefill of the context / best peer", 0.9),
        (PREFILL_CONTEXT, graft_s, "graft from disk / best peer's prefill of the context", 8),
        (FIRST_TOKEN, tasks[FIRST_TOKEN][OURS].median_s, "first token, graft included / best peer reading it all", 14),
    ):
        peer_s = best_peer_s(tasks[task])
        found.append(Claim(name, None if peer_s is None else peer_s / ours_s, limit))
    loading, running = (memory.loading_in_weights, memory.running_in_weights) if memory else (None, None)
    return (
        *found,
        Claim("peak memory while loading / weights", loading, 2, is_minimum=False),
        Claim("resident memory afterwards, less cache / weights", running, 1.5, is_minimum=False),
    )
