"""The work that is measured on our side, each piece through the public calls and ended by a synchronisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import contextlib
import dataclasses
import os
import pathlib

import jax

from experiments import corpus as corpus_lib
from experiments.bench import timing
from experiments.width_invariance import detectors
import kvgraft_jax as kg
from kvgraft_jax import engine as engine_lib
from kvgraft_jax.gemma import cache as cache_lib
from kvgraft_jax.runtime import run as run_lib
from kvgraft_jax.runtime import sampling
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


def prompts(model: kg.Model, count: int, num_tokens: int) -> list[list[int]]:
    """Takes several texts of one length from the corpus."""
    corpus = corpus_lib.tokenize(model)
    return [list(corpus.sample(seed, num_tokens)) for seed in range(count)]


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

    def read(self, token_ids: Sequence[int]) -> state_lib.State:
        """Reads tokens into a fresh context."""
        return self._engine.prefill(token_ids)

    def prefill_s(self, token_ids: Sequence[int]) -> float:
        """Measures the seconds until a fresh context has read the tokens and has its next logits."""
        return timing.timed(lambda: _arrays(self._engine.prefill(token_ids)))

    def decode_s(self, prompt: state_lib.State) -> float:
        """Measures the seconds of greedy decode steps after a prompt, which is not counted."""
        return timing.timed(
            lambda: _arrays(self._engine.generate(prompt, max_new_tokens=self._decoded, stop_ids=())[1])
        )

    def decode_many_s(self, prompts: Sequence[state_lib.State]) -> float:
        """Measures the seconds of greedy decode steps after several prompts together, which are not counted."""
        return timing.timed(
            lambda: [
                _arrays(state)
                for _, state in self._engine.generate_many(prompts, max_new_tokens=self._decoded, stop_ids=())
            ]
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
        widths = {"step of 1 token": engine.shapes[0], "widest step": engine.shapes[-1]}
        found = {
            f"{name} at {start}": timing.measure(
                self._step(start, width, 1 if name.endswith("token") else width), repeats
            )
            for name, width in widths.items()
            for start in step_starts
        }
        hidden_TxD = self._step(0, engine.shapes[0], 1)().hidden_TxD
        found["head"] = timing.measure(lambda: runner.heads(hidden_TxD, [0]), repeats)
        state = engine.prefill(self.texts.context)
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

    def _step(self, start: int, width: int, num_tokens: int) -> Callable[[], step_lib.StepResult]:
        """Makes a step of `num_tokens` tokens, on a cache that it passes from call to call."""
        runner, config = self._engine.runner, self._engine.step_config
        cache = config.make_cache(config.num_blocks(self._engine.capacity))
        table = [range(cache.num_blocks)]
        piece = step_lib.Piece(0, start, tuple(self.texts.context[:num_tokens]))

        def step() -> step_lib.StepResult:
            nonlocal cache
            result = runner.step(cache, [piece], table, width)
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


class LibraryOrder:
    """The same steps with sums and products in the order that XLA's library chooses, and no engine around them.

    An engine would refuse: bits depend on the width here.
    """

    def __init__(self, engine: engine_lib.Engine, prompt: Sequence[int], decoded: int):
        """Args:
        engine: whose widths, tables and weights are used.
        prompt: what is read.
        decoded: greedy decode steps.
        """
        self._prompt, self._decoded = tuple(prompt), decoded
        self._blocks = engine.step_config.num_blocks(engine.capacity)
        with contextlib.ExitStack() as stack:
            for put_back in detectors.CAUSES.values():
                params = stack.enter_context(put_back(engine.model))
            programs = step_lib.Programs(engine.step_config)
            self._runner = dataclasses.replace(engine.runner, programs=programs, params=params, prepare=None)
            self.prefill_s()  # Traced and compiled while the causes are in place.
            self.decode_s()

    def prefill_s(self) -> float:
        """Measures the seconds until the prompt is read and its next logits are there."""
        cache = self._runner.programs.config.make_cache(self._blocks)
        return timing.timed(lambda: self._read(cache, self._prompt, 0)[1])

    def decode_s(self) -> float:
        """Measures the seconds of greedy decode steps after the prompt, which is not counted."""
        cache, logits_V = self._read(self._runner.programs.config.make_cache(self._blocks), self._prompt, 0)

        def decode() -> jax.Array:
            nonlocal cache, logits_V
            for index in range(self._decoded):
                token_id = sampling.argmax(logits_V, ())
                cache, logits_V = self._read(cache, (token_id,), len(self._prompt) + index)
            return logits_V

        jax.block_until_ready(logits_V)
        return timing.timed(decode)

    def _read(self, cache: cache_lib.Cache, token_ids: Sequence[int], start: int) -> tuple[cache_lib.Cache, jax.Array]:
        result = run_lib.run(self._runner, cache, token_ids, start)
        return result.cache, run_lib.next_logits(self._runner, result)


def _arrays(state: state_lib.State) -> tuple[tuple[cache_lib.CacheBlock, ...], jax.Array]:
    return state.blocks, state.logits
