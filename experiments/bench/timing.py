"""Timing: the first call apart from the rest, medians of the rest, and contenders that take turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import statistics
import time

import jax


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds that one piece of work took.

    Attributes:
      first_s: the first call, compilation and other one-time work included.
      runs_s: every later call, in order.
    """

    first_s: float
    runs_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """Steady state."""
        return statistics.median(self.runs_s)


REST_S = 0.5  # before each turn: threads of the contender before it spin on for a while when they have no work


def timed(work: Callable[[], object]) -> float:
    """Measures the seconds of one call, until the arrays in the pytree that it returns are ready."""
    start = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - start


def measure(work: Callable[[], object], repeats: int) -> Timing:
    """Times `work` once, and `repeats` times more."""
    return take_turns({"work": lambda: timed(work)}, repeats)["work"]


def take_turns(contenders: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, Timing]:
    """Runs every contender once, then `repeats` rounds in which each has one turn while the others wait.

    What disturbs the machine for longer than a round so disturbs all of them.

    Args:
      contenders: each does its work and returns the seconds that it took.
      repeats: rounds after the first.
    """
    runs_s: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(1 + repeats):
        for name, contend in contenders.items():
            if len(contenders) > 1:
                time.sleep(REST_S)
            runs_s[name].append(contend())
    return {name: Timing(seconds[0], tuple(seconds[1:])) for name, seconds in runs_s.items()}
