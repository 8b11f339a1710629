"""The work that is measured on our side, each piece through the public calls and ended by a synchronisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import os
import pathlib

import jax
import numpy as np

from experiments import corpus as corpus_lib
from experiments.bench import timing
import kvgraft_jax as kg
from kvgraft_jax import engine as engine_lib
from kvgraft_jax.gemma import cache as cache_lib
from kvgraft_jax.runtime import state as state_lib
from kvgraft_jax.runtime import step as step_lib


@dataclasses.dataclass(frozen=True)
class Texts:
    """What is read, as token ids.

    Attributes:
      prompt: a short text, the beginning of the context.
      context: a long text.
      question: what is asked after it.
    """

    prompt: list[int]
    context: list[int]
    question: list[int]


def texts(model: kg.Model, prompt_tokens: int, context_tokens: int, question_tokens: int) -> Texts:
    """Takes texts of these lengths from the corpus."""
    token_ids = list(corpus_lib.tokenize(model).sample(0, context_tokens + question_tokens))
    return Texts(token_ids[:prompt_tokens], token_ids[:context_tokens], token_ids[context_tokens:])


class Ours:
    """One engine and the texts that it is measured on."""

    def __init__(self, engine: engine_lib.Engine, texts: Texts, decoded: int, directory: pathlib.Path):
        """Args:
        engine: its capacity holds everything that is read and decoded.
        texts: what it reads.
        decoded: greedy decode steps.
        directory: where artifacts go.
        """
        self.texts = texts
        self._engine, self._decoded, self._directory = engine, decoded, directory
        self._artifact_id = ""
        self._num_deposits = 0

    def prefill_s(self, token_ids: Sequence[int]) -> float:
        """Measures the seconds until a fresh context has read the tokens and has its next logits."""
        return timing.timed(lambda: _arrays(self._engine.prefill(token_ids)))

    def decode_s(self, prompt: state_lib.State) -> float:
        """Measures the seconds of greedy decode steps after a prompt, which is not counted."""
        return timing.timed(
            lambda: _arrays(self._engine.generate(prompt, max_new_tokens=self._decoded, stop_ids=())[1])
        )

    def capture(self, state: state_lib.State) -> kg.Artifact:
        """Captures an artifact that differs from all earlier ones."""
        self._num_deposits += 1
        return self._engine.capture(state, provenance={"deposit": self._num_deposits})

    def save(self, artifact: kg.Artifact) -> None:
        """Deposits it; what is loaded from now on is this one."""
        self._artifact_id = kg.save_artifact(artifact, self._directory)

    def load(self) -> kg.Artifact:
        """Loads the artifact that was saved last, with every byte verified."""
        return kg.load_artifact(self._directory, self._artifact_id)

    def graft_s(self) -> float:
        """Measures the seconds from the artifact's files to a fresh context with its rows, verification included."""
        return timing.timed(lambda: _arrays(self._engine.graft(self.load())))

    def graft_and_answer_s(self) -> float:
        """Measures the seconds from the artifact's files to the first token after the question."""
        return timing.timed(
            lambda: int(self._engine.extend(self._engine.graft(self.load()), self.texts.question).logits.argmax())
        )

    def disk_bytes(self) -> int:
        """Returns the bytes of all files of the artifact that was saved last."""
        return sum(path.stat().st_size for path in self._files())

    def parts(self, step_starts: Sequence[int], repeats: int) -> dict[str, timing.Timing]:
        """Measures the same work by part, in an order in which each first call compiles only what its part needs."""
        engine, runner = self._engine, self._engine.runner
        found = {f"step at {start}": timing.measure(self._step(start), repeats) for start in step_starts}
        hidden_TxD = self._step(0)().hidden_TxD
        found["head"] = timing.measure(lambda: runner.programs.head(runner.params, hidden_TxD, np.int32(0)), repeats)
        state = engine.prefill(self.texts.context)
        found["copy_cache"] = timing.measure(lambda: step_lib.copy_cache(state.cache), repeats)
        captured = []
        found["capture"] = timing.measure(lambda: captured.append(self.capture(state)), repeats)
        found["save_artifact"] = timing.measure(lambda: self.save(captured.pop()), repeats)
        found["load_artifact"] = timing.measure(self.load, repeats)
        found["load_artifact, files not in memory"] = timing.take_turns({"load": self._cold_load_s}, repeats)["load"]
        artifact = self.load()
        found["graft"] = timing.measure(lambda: _arrays(engine.graft(artifact)), repeats)
        grafted = engine.graft(artifact)
        found["question"] = timing.measure(lambda: _arrays(engine.extend(grafted, self.texts.question)), repeats)
        return found

    def _step(self, start: int) -> Callable[[], step_lib.StepResult]:
        """Makes one step with a token in every lane, on a cache that it passes from call to call."""
        runner, config = self._engine.runner, self._engine.step_config
        cache = config.make_cache(self._engine.capacity)
        (read,) = step_lib.cut(self.texts.context[: config.width], start, config.width)

        def step() -> step_lib.StepResult:
            nonlocal cache
            result = runner.programs.step(runner.params, runner.tables, cache, read.tokens_T, read.start, read.count)
            cache = result.cache
            return result

        jax.block_until_ready(cache)
        return step

    def _cold_load_s(self) -> float:
        for path in self._files():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return timing.timed(self.load)

    def _files(self) -> list[pathlib.Path]:
        return [path for path in (self._directory / self._artifact_id).rglob("*") if path.is_file()]


def _arrays(state: state_lib.State) -> tuple[cache_lib.Cache, jax.Array]:
    return state.cache, state.logits
