"""One benchmark from beginning to end: memory, parts, then all contenders in turns, then the curve."""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import dataclasses
import functools
import pathlib
import sys
import tempfile
import time
import typing

import numpy as np

from experiments.benchmark import claims as claims_lib
from experiments.benchmark import export, report, timing
from experiments.benchmark import memory as memory_lib
from experiments.benchmark import ours as ours_lib
from experiments.benchmark import peer as peer_lib
import kvgraft_jax as kg
from kvgraft_jax import engine as engine_lib

_Result = typing.TypeVar("_Result")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure, and how often.

    Attributes:
      model, dtype: for `load_model`.
      capacity, width, kv_block: of the engine; 0 means its default.
      sizes: of the texts.
      step_starts: positions at which a single step is timed.
      repeats: turns of everything that a claim rests on, after the first.
      measures_memory: whether resident memory is measured, in processes of its own.
      widths, kv_blocks: of further engines, which make the curves.
      curve_decoded, curve_repeats: decode steps and turns of each of them.
      peer_threads: of torch.
    """

    model: str
    dtype: str
    capacity: int
    width: int
    kv_block: int
    sizes: ours_lib.Sizes
    step_starts: tuple[int, ...]
    repeats: int
    measures_memory: bool
    widths: tuple[int, ...]
    kv_blocks: tuple[int, ...]
    curve_decoded: int
    curve_repeats: int
    peer_threads: int

    def __post_init__(self):
        sizes = self.sizes
        needed = max(sizes.context + sizes.question, sizes.prompt + sizes.decoded)
        wanted = {
            "repeats": (self.repeats, 1, None),
            "curve_repeats": (self.curve_repeats, 1, None),
            "curve_decode_tokens": (self.curve_decoded, 1, None),
            "peer_threads": (self.peer_threads, 1, None),
            "prompt_tokens": (sizes.prompt, 1, sizes.context),
            "question_tokens": (sizes.question, 1, None),
            "decode_tokens": (sizes.decoded, 1, None),
            "capacity": (self.capacity, needed, None),
            **{f"step_starts[{i}]": (start, 0, self.capacity) for i, start in enumerate(self.step_starts)},
        }
        for name, (got, low, high) in wanted.items():
            if got < low or high is not None and got > high:
                raise kg.ConfigError(f"{name}: got {got}, wanted {low} {f'to {high}' if high else 'or more'}")


def run(settings: Settings, peers_python: pathlib.Path | None) -> report.Figures:
    """Measures everything that the settings ask for.

    Args:
      settings: what to measure.
      peers_python: interpreter with the peers' requirements; None measures our side alone.

    Raises:
      ConfigError: the peers cannot run, or sizes that the model or engine does not accept.
    """
    sizes, once_s = settings.sizes, {}
    memory = None
    if settings.measures_memory:
        _say("resident memory, in processes of its own")
        memory = memory_lib.measure(settings.model, settings.dtype, settings.capacity, sizes.prompt)
    _say("model and engine")
    model, once_s["load_model"] = _once(lambda: kg.load_model(settings.model, dtype=settings.dtype))
    engine, once_s["Engine"] = _once(
        lambda: kg.Engine(
            model, capacity=settings.capacity, width=_width(settings.width), kv_block=_kv_block(settings.kv_block)
        )
    )
    _, once_s["Engine.pin"] = _once(lambda: engine.pin)
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvgraft-bench-")))
        ours = ours_lib.Ours(engine, sizes, folder)
        _say("parts of prefill, deposit and graft")
        parts = ours.parts(settings.step_starts, settings.repeats)
        artifact = report.Artifact(ours.load().nbytes, ours.disk_bytes())
        peer = None
        if peers_python is not None:
            _say("transformers: loading the same weights")
            export.export(model, folder / "export")
            peer = stack.enter_context(peer_lib.Transformers(peers_python, folder / "export", settings.peer_threads))
        tasks, next_tokens = {}, {}
        for task, contenders in _contenders(engine, ours, sizes, peer).items():
            _say(f"{task}: {', '.join(contenders)}; {settings.repeats} turns each")
            tasks[task] = timing.take_turns(contenders, settings.repeats)
        if peer is not None:
            next_tokens[claims_lib.OURS] = int(np.argmax(engine.prefill(ours.prompt).logits))
            next_tokens |= {_name(dtype): peer.next_token(dtype, ours.prompt) for dtype in peer_lib.DTYPES}
        curve = tuple(_curve_point(model, settings, *shape, folder) for shape in _curve_shapes(settings))
        description = peer.description if peer else None
        return report.Figures(sizes, once_s, parts, tasks, artifact, memory, curve, description, next_tokens)


def _contenders(
    engine: kg.Engine, ours: ours_lib.Ours, sizes: ours_lib.Sizes, peer: peer_lib.Transformers | None
) -> dict[str, dict[str, Callable[[], float]]]:
    """By task, what each contender does; ours first."""
    everything = ours.context + ours.question
    prompt = engine.prefill(ours.prompt)
    tasks = {
        claims_lib.PREFILL_PROMPT: {claims_lib.OURS: lambda: ours.prefill_s(ours.prompt)},
        claims_lib.PREFILL_CONTEXT: {
            claims_lib.OURS: lambda: ours.prefill_s(ours.context),
            claims_lib.GRAFT: ours.graft_s,
        },
        claims_lib.FIRST_TOKEN: {claims_lib.OURS: ours.graft_and_answer_s},
        claims_lib.DECODE: {claims_lib.OURS: lambda: ours.decode_s(prompt)},
    }
    if peer is not None:
        texts = {
            claims_lib.PREFILL_PROMPT: ours.prompt,
            claims_lib.PREFILL_CONTEXT: ours.context,
            claims_lib.FIRST_TOKEN: everything,
        }
        for dtype in peer_lib.DTYPES:
            for task, token_ids in texts.items():
                tasks[task][_name(dtype)] = functools.partial(peer.prefill, dtype, token_ids)
            for cache in peer_lib.CACHES:
                decode = functools.partial(peer.decode, dtype, cache, ours.prompt, sizes.decoded)
                tasks[claims_lib.DECODE][f"{_name(dtype)}, {cache} cache"] = decode
    return tasks


def _curve_shapes(settings: Settings) -> tuple[tuple[int, int], ...]:
    """(width, kv_block) of every point, none twice."""
    widths = [(width, settings.kv_block) for width in settings.widths]
    kv_blocks = [(settings.width, kv_block) for kv_block in settings.kv_blocks]
    return tuple(dict.fromkeys((_width(width), _kv_block(kv_block)) for width, kv_block in widths + kv_blocks))


def _curve_point(
    model: kg.Model, settings: Settings, width: int, kv_block: int, folder: pathlib.Path
) -> report.CurvePoint:
    _say(f"width {width}, K/V block {kv_block}")
    prompt, decoded = settings.sizes.prompt, settings.curve_decoded
    engine = kg.Engine(model, capacity=prompt + decoded, width=width, kv_block=kv_block)
    ours = ours_lib.Ours(engine, ours_lib.Sizes(prompt, prompt, 1, decoded), folder)
    first_call_s = ours.prefill_s(ours.prompt[:1])
    prefill = timing.take_turns({"": lambda: ours.prefill_s(ours.prompt)}, settings.curve_repeats)[""]
    state = engine.prefill(ours.prompt)
    decode = timing.take_turns({"": lambda: ours.decode_s(state)}, settings.curve_repeats)[""]
    return report.CurvePoint(width, kv_block, prompt / prefill.median_s, decoded / decode.median_s, first_call_s)


def _width(width: int) -> int:
    return width or engine_lib.DEFAULT_WIDTH


def _kv_block(kv_block: int) -> int:
    return kv_block or engine_lib.DEFAULT_KV_BLOCK


def _name(dtype: str) -> str:
    return f"transformers {dtype}"


def _once(work: Callable[[], _Result]) -> tuple[_Result, float]:
    """What `work` returns, and its seconds."""
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start


def _say(stage: str) -> None:
    print(f"bench: {stage}", file=sys.stderr, flush=True)
