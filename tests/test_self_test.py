"""The self-test: executables that compute otherwise are another pin; bits that depend on the cut are refused."""

from __future__ import annotations

from collections.abc import Callable
import ctypes
import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from kvgraft_jax import engine as engine_lib
from kvgraft_jax import errors, self_test
from kvgraft_jax import pin as pin_lib
from kvgraft_jax.gemma import layers as layers_lib
from kvgraft_jax.runtime import sampling as sampling_lib
from kvgraft_jax.runtime import step as step_lib
from tests import tiny

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def programs_of_its_own():
    """Drops programs in which a test has planted something, so that no later test meets them."""
    yield
    step_lib.programs.cache_clear()


def build(capacity: int = 64, shapes: tuple[int, ...] = (tiny.WIDTH,)) -> engine_lib.Engine:
    """Returns an engine of the small model with programs that no other test has run."""
    step_lib.programs.cache_clear()
    return tiny.engine.__wrapped__(capacity=capacity, shapes=shapes)


def plant_head(engine: engine_lib.Engine) -> None:
    """Has the engine's head flip the lowest bit of one logit."""
    head = engine.runner.programs.head

    def other(params, hidden_TxD, lanes_B):
        first_V, *rest = head(params, hidden_TxD, lanes_B)
        bits_V = np.array(first_V).view(np.uint32)
        bits_V[7] ^= 1
        return jax.device_put(bits_V.view(np.float32)), *rest

    other.lower = head.lower
    engine.runner.programs.head = other


def plant_step(engine: engine_lib.Engine, position: int, is_wrong: Callable[[np.ndarray], bool]) -> None:
    """Has the engine's step flip the lowest bit of the value that it writes at a position, if its live lanes say so."""
    step = engine.runner.programs.step

    def other(params, tables, cache, lanes):
        result = step(params, tables, cache, lanes)
        if isinstance(lanes.live_T, jax.core.Tracer):  # For its text, which stays that of the step.
            return result
        positions_T, live_T = np.asarray(lanes.positions_T), np.asarray(lanes.live_T)
        if position not in positions_T[live_T == 1] or not is_wrong(live_T):
            return result
        layers = list(result.cache.layers)
        v_JxSxKxH = np.array(layers[3].v_JxSxKxH)
        v_JxSxKxH[0, position, 0, 0] ^= 1
        layers[3] = dataclasses.replace(layers[3], v_JxSxKxH=jax.device_put(v_JxSxKxH))
        return dataclasses.replace(result, cache=dataclasses.replace(result.cache, layers=tuple(layers)))

    engine.runner.programs.step = other


def test_the_pin_is_equal_at_every_capacity_and_width():
    assert build(16).pin == build(1024, (3, 32)).pin == tiny.engine().pin


def test_every_executable_is_tested_once_before_its_first_use(monkeypatch):
    measured, measure = [], self_test.measure
    monkeypatch.setattr(self_test, "measure", lambda runner, sizes: measured.append(sizes) or measure(runner, sizes))
    engine = build(32, tiny.SHAPES)
    assert not measured
    engine.prefill([1])
    engine.score([1])
    narrow, wide = self_test.Sizes(2, 2, 1), self_test.Sizes(tiny.WIDTH, 2, 1)
    assert engine.pin and measured == [narrow]
    engine.prefill(tiny.tokens(tiny.WIDTH))
    assert measured == [narrow, wide]
    many = self_test.Sizes(2, 2 * tiny.ROWS, tiny.ROWS)
    engine.prefill_many([[1], [2]])
    assert measured == [narrow, wide, many]
    larger = self_test.Sizes(2, 3, 1)
    for capacity in (32, 48, 32, 48):
        engine = tiny.engine.__wrapped__(capacity=capacity)
        engine.generate(engine.prefill([1]), max_new_tokens=1)
    assert measured == [narrow, wide, many, larger]


def test_an_executable_that_computes_otherwise_is_another_pin():
    good, planted = build(), build()
    artifact = good.capture(good.prefill([1, 2, 3]))
    plant_head(planted)
    assert [difference.field for difference in pin_lib.diff(good.pin, planted.pin)] == ["self_test"]
    with pytest.raises(errors.PinMismatch) as caught:
        planted.graft(artifact)
    assert caught.value.fields == ("self_test",)


@pytest.fixture
def forgotten_draws():
    """Forgets before and after a test what the program that draws gave."""
    sampling_lib._fixed_draws.cache_clear()
    yield
    sampling_lib._fixed_draws.cache_clear()


@pytest.mark.usefixtures("forgotten_draws")
@pytest.mark.parametrize("left_out", ["temperature", "top_k", "top_p"])
def test_an_executable_that_draws_otherwise_is_another_pin(left_out, monkeypatch):
    good, program = build().pin, sampling_lib._draw.__wrapped__
    sampling_lib._fixed_draws.cache_clear()

    def _draw(logits_V, is_allowed_V, position, temperature, top_k, top_p, *seed):
        given = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        given[left_out] = np.float32(1 if left_out == "temperature" else np.inf)
        return program(logits_V, is_allowed_V, position, *given.values(), *seed)

    monkeypatch.setattr(sampling_lib, "_draw", jax.jit(_draw))
    assert [difference.field for difference in pin_lib.diff(good, build().pin)] == ["self_test"]


def test_bits_that_depend_on_the_cut_are_refused_before_a_result():
    engine = build()
    # Position 8 is read in a step of all lanes in one schedule and of some in the other.
    plant_step(engine, 8, lambda live_T: live_T.all())
    message = "of them one at a time, leave different bits: the value of layer 3 at position 8."
    for call in (
        lambda: engine.prefill([1]),
        lambda: engine.prefill_many([[1]]),
        lambda: engine.score([1]),
        lambda: engine.warm_up(),
        lambda: engine.pin,
    ):
        with pytest.raises(errors.DeterminismError, match=message):
            call()


def test_widths_that_leave_other_bits_are_refused_before_a_result():
    engine = build(shapes=tiny.SHAPES)
    plant_step(engine, 5, lambda live_T: len(live_T) == tiny.WIDTH)
    assert engine.prefill([1]).length == 1  # A narrow step alone.
    message = r"steps of 8 lanes, 1 rows .* than steps of 2 lanes, .* use in a new process one width, shapes=\(8,\)"
    for call in (lambda: engine.prefill(tiny.tokens(9)), lambda: engine.warm_up()):
        with pytest.raises(errors.DeterminismError, match=message):
            call()


def test_no_result_comes_before_the_self_test(monkeypatch):
    state = tiny.engine().prefill([1, 2])
    artifact = tiny.engine().capture(state)

    def refuse(*_):
        raise errors.DeterminismError("refused")

    monkeypatch.setattr(self_test, "result", refuse)
    engine = tiny.engine.__wrapped__()
    calls = (
        lambda: engine.prefill([1]),
        lambda: engine.prefill_many([[1]]),
        lambda: engine.extend(state, [1]),
        lambda: engine.extend_many([state], [[1]]),
        lambda: engine.generate(state),
        lambda: engine.generate_many([state]),
        lambda: engine.warm_up(),
        lambda: engine.score([1]),
        lambda: engine.capture(state),
        lambda: engine.graft(artifact),
        lambda: engine.verify(artifact),
        lambda: engine.pin,
    )
    for call in calls:
        with pytest.raises(errors.DeterminismError, match="refused"):
            call()


def test_options_that_enter_the_programs_later_are_noticed(monkeypatch):
    """No option is known that enters these programs, so one that does is played by
    another activation."""
    engine = build()
    state, before = engine.prefill([1, 2]), engine.pin
    gelu = layers_lib.gelu
    monkeypatch.setattr(layers_lib, "gelu", lambda x: gelu(x) * 2)
    assert engine.pin == before  # Nothing has been traced anew.
    with jax.default_matmul_precision("highest"):
        for call in (lambda: engine.extend(state, [1]), lambda: engine.capture(state), lambda: engine.pin):
            with pytest.raises(errors.DeterminismError, match="options of jax were changed .* program"):
                call()
        other = tiny.engine.__wrapped__(capacity=64, shapes=(tiny.WIDTH,)).pin
        assert {d.field for d in pin_lib.diff(before, other)} == {"program.step", "self_test"}
    monkeypatch.undo()
    with jax.numpy_dtype_promotion("standard"):  # Traces anew, to the same program.
        assert engine.capture(engine.extend(state, [1])).pin == before
    assert engine.pin == before


def test_another_rounding_mode_is_refused():
    library = ctypes.CDLL("libm.so.6")
    engine, mode = build(), library.fegetround()
    upward = {"x86_64": 0x800, "aarch64": 0x400000}.get(os.uname().machine)
    if upward is None:
        pytest.skip("no number known for rounding upward")
    try:
        for wanted in (upward, 3 * upward if upward == 0x400000 else 0xC00):  # upward, towards zero
            assert library.fesetround(wanted) == 0
            for call in (lambda: engine.prefill([1]), build):
                with pytest.raises(errors.DeterminismError, match="rounding mode"):
                    call()
    finally:
        library.fesetround(mode)
    assert engine.prefill([1]).length == 1


def measured(eps: str) -> dict:
    """Pin and program of an engine; runs in a process of its own."""
    model = tiny.model()
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, norm_eps=float(eps)))
    return engine_lib.Engine(model, capacity=64, width=tiny.WIDTH, kv_block=tiny.KV_BLOCK).pin.document


def test_an_executable_planted_in_the_compilation_cache_is_another_pin(tmp_path):
    """The executable of a model with another epsilon stands under the name of this one's."""

    def run(eps: str, cache: str) -> dict:
        environment = dict(
            os.environ,
            JAX_COMPILATION_CACHE_DIR=str(tmp_path / cache),
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
            JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
        )
        code = "import json; from tests import no_thread_test, test_self_test as t\n"
        code += f"print(json.dumps(t.measured({eps!r})))"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def final_norm(cache: str) -> pathlib.Path:
        (path,) = (tmp_path / cache).glob("jit__finish-*-cache")
        return path

    own, other = run("1e-6", "own"), run("1e-3", "other")
    assert run("1e-6", "own") == own
    shutil.copyfile(final_norm("other"), final_norm("own"))
    planted = run("1e-6", "own")
    assert planted["program"] == own["program"] != other["program"]
    assert planted.pop("self_test") != own.pop("self_test") and planted == own
