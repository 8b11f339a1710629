"""One benchmark from beginning to end: memory, parts, then all contenders in turns, then the curve."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import functools
import os
import pathlib
import time
import typing

import numpy as np

from experiments import harness
from experiments import scratch as scratch_lib
from experiments.bench import claims as claims_lib
from experiments.bench import export, report, timing
from experiments.bench import memory as memory_lib
from experiments.bench import ours as ours_lib
from experiments.bench import peer as peer_lib
import kvgraft_jax as kg
from kvgraft_jax import digest, progress
from kvgraft_jax import engine as engine_lib
from kvgraft_jax import pin as pin_lib

_Result = typing.TypeVar("_Result")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the benchmark reads from a configuration.

    Attributes:
      model, dtype: as for `load_model`.
      capacity, shapes, kv_block: of the engine; no shapes and a block of 0 mean its defaults.
      sequences, sequence_tokens: how many decode together, and how long each is before that.
      prompt_tokens: a short text: prefill of it, decode after it.
      context_tokens: a long text: prefill of it, deposit, graft.
      question_tokens: what is asked after the context.
      decode_tokens: greedy decode steps.
      step_starts: positions at which a single step is timed.
      repeats: turns of everything that a claim rests on, after the first.
      memory_tokens: prefill before the last look at resident memory; 0 leaves memory out.
      widths, kv_blocks: of further engines, which make the curves.
      curve_decode_tokens, curve_repeats: decode steps and turns of each of them.
      peer_threads: of torch.
    """

    model: str
    dtype: str
    capacity: int
    shapes: tuple[int, ...]
    kv_block: int
    sequences: int
    sequence_tokens: int
    prompt_tokens: int
    context_tokens: int
    question_tokens: int
    decode_tokens: int
    step_starts: tuple[int, ...]
    repeats: int
    memory_tokens: int
    widths: tuple[int, ...]
    kv_blocks: tuple[int, ...]
    curve_decode_tokens: int
    curve_repeats: int
    peer_threads: int

    def __post_init__(self):
        one_or_more = "sequences", "question_tokens", "decode_tokens", "repeats", "curve_decode_tokens", "curve_repeats"
        limits = [(name, getattr(self, name), 1, None) for name in (*one_or_more, "peer_threads")]
        limits += [
            ("prompt_tokens", self.prompt_tokens, 1, self.context_tokens),
            ("sequence_tokens", self.sequence_tokens, 1, self.prompt_tokens),
            ("capacity", self.capacity, self.context_tokens + self.question_tokens, None),
            ("capacity", self.capacity, self.prompt_tokens + self.decode_tokens, None),
            *(("step_starts", self.capacity - start, max(self.shapes, default=2), None) for start in self.step_starts),
            ("memory_tokens", self.memory_tokens, 0, self.capacity),
            *(("step_starts", start, 0, self.capacity) for start in self.step_starts),
        ]
        for name, got, low, high in limits:
            if got < low or high is not None and got > high:
                raise kg.ConfigError(f"{name}: got {got}, wanted {low} {'or more' if high is None else f'to {high}'}")

    @property
    def block(self) -> int:
        """Slots of a K/V block, the engine's default put in."""
        return self.kv_block or engine_lib.DEFAULT_KV_BLOCK

    @property
    def curve_shapes(self) -> tuple[tuple[tuple[int, ...] | None, int], ...]:
        """Widths and K/V block of every further engine, none twice."""
        shapes = [((width,), self.block) for width in self.widths]
        return tuple(dict.fromkeys([*shapes, *((self.shapes or None, block) for block in self.kv_blocks)]))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run leaves behind.

    Attributes:
      measured: every figure.
      pin: of the engine.
      token_ids: context and question.
      state_digest: of the context's artifact.
      peer: what the worker ran; None without peers.
      load_average: of the machine, before and after.
    """

    measured: report.Measured
    pin: pin_lib.Pin
    token_ids: Sequence[int]
    state_digest: str
    peer: peer_lib.Description | None
    load_average: Mapping[str, float]


def run(settings: Settings, model: kg.Model, out: pathlib.Path, peers_python: pathlib.Path | None) -> harness.Findings:
    """Measures everything that the settings ask for.

    Args:
      settings: what to measure.
      model: the model of the settings.
      out: for scratch files, which are removed.
      peers_python: interpreter with the peers' requirements; None measures only our side.

    Raises:
      ConfigError: the peers cannot run, or sizes that the model or engine does not accept.
    """
    if model.mesh is not None:
        raise kg.ConfigError("--mesh: the benchmark measures one device, as its peers and its memory figures do")
    load_before = os.getloadavg()[0]
    if load_before > 0.5:
        _say(f"others use this machine (load average {load_before:.1f}), which slows some contenders more than others")
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(scratch_lib.folder(out))
        peer = None
        if peers_python is not None:
            _say("transformers: loading the same weights")
            export.export(model, scratch / "export")
            peer = stack.enter_context(peer_lib.Transformers(peers_python, scratch / "export", settings.peer_threads))
        outcome = _measure(settings, model, scratch, peer, load_before)
    return _findings(model, outcome)


def _measure(
    settings: Settings,
    model: kg.Model,
    scratch: pathlib.Path,
    peer: peer_lib.Transformers | None,
    load_before: float,
) -> Outcome:
    """Measures memory, one-time work, parts, tasks and the curve of widths."""
    once_s: dict[str, float] = {}
    memory = None
    if settings.memory_tokens:
        _say("resident memory, in processes of their own")
        memory = memory_lib.measure(settings.model, settings.dtype, settings.capacity, settings.memory_tokens)
        once_s["load_model"] = memory.load_s
    engine, once_s["Engine"] = _once(lambda: _engine(model, settings, settings.shapes or None))
    _, once_s["Engine.pin"] = _once(lambda: engine.pin)
    texts = ours_lib.texts(model, settings.prompt_tokens, settings.context_tokens, settings.question_tokens)
    ours = ours_lib.Ours(engine, texts, settings.decode_tokens, scratch)
    _say("parts of prefill, deposit and graft")
    parts = ours.parts(settings.step_starts, settings.repeats)
    artifact = ours.load()
    tasks = {}
    for task, contenders in _contenders(engine, ours, settings, scratch, peer).items():
        _say(f"{task}: {'; '.join(contenders)}; {settings.repeats} turns each")
        tasks[task] = timing.take_turns(contenders, settings.repeats)
    measured = report.Measured(
        tokens={
            claims_lib.PREFILL_PROMPT: settings.prompt_tokens,
            claims_lib.PREFILL_CONTEXT: settings.context_tokens,
            claims_lib.FIRST_TOKEN: settings.context_tokens + settings.question_tokens,
            claims_lib.DECODE: settings.decode_tokens,
            claims_lib.DECODE_MANY: settings.sequences * settings.decode_tokens,
        },
        tasks=tasks,
        parts=parts,
        once_s=once_s,
        artifact_bytes={"arrays": artifact.nbytes, "files": ours.disk_bytes()},
        memory=memory,
        curve=tuple(_curve_point(model, settings, *shape, scratch) for shape in settings.curve_shapes),
        num_sequences=settings.sequences,
        next_tokens=_next_tokens(engine, texts, peer),
    )
    return Outcome(
        measured,
        engine.pin,
        [*texts.context, *texts.question],
        artifact.state_digest,
        None if peer is None else peer.description,
        {"before": load_before, "after": os.getloadavg()[0]},
    )


def _findings(model: kg.Model, outcome: Outcome) -> harness.Findings:
    figures = {**report.figures(outcome.measured), "load average": outcome.load_average}
    if outcome.peer is not None:
        figures["peer"] = {**outcome.peer.versions, "threads": outcome.peer.threads}
    return harness.Findings(
        holds=outcome.measured.holds,
        figures=figures,
        pin=outcome.pin,
        inputs={"weights_sha256": model.digest, "token_ids_sha256": digest.json_digest(outcome.token_ids)},
        outputs={"state_sha256": outcome.state_digest},
        rows=report.rows(outcome.measured),
    )


def _next_tokens(engine: kg.Engine, texts: ours_lib.Texts, peer: peer_lib.Transformers | None) -> dict[str, int]:
    """Returns the greedy token after the prompt, by contender; empty without peers."""
    if peer is None:
        return {}
    ours = {claims_lib.OURS: int(np.argmax(engine.prefill(texts.prompt).logits))}
    return ours | {_name(dtype): peer.next_token(dtype, texts.prompt) for dtype in peer_lib.DTYPES}


def _engine(model: kg.Model, settings: Settings, shapes: tuple[int, ...] | None) -> kg.Engine:
    return kg.Engine(
        model, capacity=settings.capacity, shapes=shapes, kv_block=settings.block, rows=max(settings.sequences, 1)
    )


def _contenders(
    engine: kg.Engine,
    ours: ours_lib.Ours,
    settings: Settings,
    scratch: pathlib.Path,
    peer: peer_lib.Transformers | None,
) -> dict[str, dict[str, Callable[[], float]]]:
    """Lists, for each task, what each contender does; ours comes first."""
    texts = ours.texts
    prompts = ours_lib.prompts(engine.model, settings.sequences, settings.sequence_tokens)
    prompt, states = engine.prefill(texts.prompt), engine.prefill_many(prompts)
    one_width = ours_lib.Ours(_engine(engine.model, settings, (10,)), texts, settings.decode_tokens, scratch)
    one_width_prompt = one_width.read(texts.prompt)
    library = ours_lib.LibraryOrder(engine, texts.prompt, settings.decode_tokens)
    tasks = {
        claims_lib.PREFILL_PROMPT: {
            claims_lib.OURS: lambda: ours.prefill_s(texts.prompt),
            claims_lib.ONE_WIDTH: lambda: one_width.prefill_s(texts.prompt),
            claims_lib.LIBRARY_ORDER: library.prefill_s,
        },
        claims_lib.PREFILL_CONTEXT: {
            claims_lib.OURS: lambda: ours.prefill_s(texts.context),
            claims_lib.ONE_WIDTH: lambda: one_width.prefill_s(texts.context),
            claims_lib.GRAFT: ours.graft_s,
        },
        claims_lib.FIRST_TOKEN: {claims_lib.OURS: ours.graft_and_answer_s},
        claims_lib.DECODE: {
            claims_lib.OURS: lambda: ours.decode_s(prompt),
            claims_lib.ONE_WIDTH: lambda: one_width.decode_s(one_width_prompt),
            claims_lib.LIBRARY_ORDER: library.decode_s,
        },
        claims_lib.DECODE_MANY: {claims_lib.OURS: lambda: ours.decode_many_s(states)},
    }
    if peer is not None:
        read = {
            claims_lib.PREFILL_PROMPT: texts.prompt,
            claims_lib.PREFILL_CONTEXT: texts.context,
            claims_lib.FIRST_TOKEN: texts.context + texts.question,
        }
        for dtype in peer_lib.DTYPES:
            for task, token_ids in read.items():
                tasks[task][_name(dtype)] = functools.partial(peer.prefill, dtype, token_ids)
            for cache in peer_lib.CACHES:
                for task, given in ((claims_lib.DECODE, [texts.prompt]), (claims_lib.DECODE_MANY, prompts)):
                    decode = functools.partial(peer.decode, dtype, cache, given, settings.decode_tokens)
                    tasks[task][f"{_name(dtype)}, {cache} cache"] = decode
    return tasks


def _curve_point(
    model: kg.Model, settings: Settings, shapes: tuple[int, ...] | None, kv_block: int, scratch: pathlib.Path
) -> report.CurvePoint:
    prompt_tokens, decoded = settings.prompt_tokens, settings.curve_decode_tokens
    engine = kg.Engine(model, capacity=prompt_tokens + decoded, shapes=shapes, kv_block=kv_block)
    _say(f"widths {engine.shapes}, K/V block {kv_block}")
    texts = ours_lib.texts(model, prompt_tokens, prompt_tokens, 1)
    ours = ours_lib.Ours(engine, texts, decoded, scratch)
    first_call_s = ours.prefill_s(texts.prompt[:1])
    state = engine.prefill(texts.prompt)
    contenders = {"prefill": lambda: ours.prefill_s(texts.prompt), "decode": lambda: ours.decode_s(state)}
    timings = timing.take_turns(contenders, settings.curve_repeats)
    prefill_s, decode_s = timings["prefill"].median_s, timings["decode"].median_s
    return report.CurvePoint(engine.shapes, kv_block, prompt_tokens / prefill_s, decoded / decode_s, first_call_s)


def _name(dtype: str) -> str:
    return f"transformers {dtype}"


def _once(work: Callable[[], _Result]) -> tuple[_Result, float]:
    """Runs `work`; returns its result and its seconds."""
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start


def _say(stage: str) -> None:
    progress.say(f"bench: {stage}")
