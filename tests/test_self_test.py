"""The self-test: executables that compute otherwise are another pin; bits that depend on the cut are refused."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
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
from kvgraft_jax.runtime import step as step_lib
from tests import tiny

ROOT = pathlib.Path(__file__).parents[1]


def build(capacity: int = 64) -> engine_lib.Engine:
    """Returns an engine of the small model with programs that no other test has run."""
    step_lib.programs.cache_clear()
    return engine_lib.Engine(tiny.model(), capacity=capacity, width=tiny.WIDTH, kv_block=tiny.KV_BLOCK)


def plant_head(engine: engine_lib.Engine) -> None:
    """Has the engine's head flip the lowest bit of one logit."""
    head = engine.runner.programs.head

    def other(params, hidden_TxD, lane):
        first_V, *rest = head(params, hidden_TxD, lane)
        bits_V = np.array(first_V).view(np.uint32)
        bits_V[7] ^= 1
        return jax.device_put(bits_V.view(np.float32)), *rest

    other.lower = head.lower
    engine.runner.programs.head = other


def plant_step(engine: engine_lib.Engine) -> None:
    """Has the engine's step flip the lowest bit of a value at position 0 if all its lanes hold tokens."""
    step = engine.runner.programs.step

    def other(params, tables, cache, tokens_T, start, count):
        result = step(params, tables, cache, tokens_T, start, count)
        if (int(start), int(count)) != (0, tiny.WIDTH):
            return result
        layers = list(result.cache.layers)
        v_SxKxH = np.array(layers[3].v_SxKxH)
        v_SxKxH[0, 0, 0] ^= 1
        layers[3] = dataclasses.replace(layers[3], v_SxKxH=jax.device_put(v_SxKxH))
        return dataclasses.replace(result, cache=dataclasses.replace(result.cache, layers=tuple(layers)))

    engine.runner.programs.step = other


def test_the_pin_is_equal_at_every_capacity():
    assert build(16).pin == build(64).pin == build(1024).pin == tiny.engine().pin


def test_every_capacity_is_tested_once(monkeypatch):
    measured, measure = [], self_test.measure
    monkeypatch.setattr(self_test, "measure", lambda runner: measured.append(runner.num_slots) or measure(runner))
    engine = build(64)
    assert not measured
    engine.prefill([1])
    engine.score([1])
    assert engine.pin and measured == [64 + tiny.WIDTH]
    make = functools.partial(engine_lib.Engine, tiny.model(), width=tiny.WIDTH, kv_block=tiny.KV_BLOCK)
    for capacity in (64, 96, 64, 96):
        make(capacity=capacity).prefill([1])
    assert measured == [64 + tiny.WIDTH, 96 + tiny.WIDTH]


def test_an_executable_that_computes_otherwise_is_another_pin():
    good, planted = build(), build()
    artifact = good.capture(good.prefill([1, 2, 3]))
    plant_head(planted)
    assert [difference.field for difference in pin_lib.diff(good.pin, planted.pin)] == ["self_test"]
    with pytest.raises(errors.PinMismatch) as caught:
        planted.graft(artifact)
    assert caught.value.fields == ("self_test",)


def test_bits_that_depend_on_the_cut_are_refused_before_a_result():
    engine = build()
    plant_step(engine)
    message = "of them one at a time, leave different bits: the value of layer 3 at position 0."
    for call in (lambda: engine.prefill([1]), lambda: engine.score([1]), lambda: engine.pin):
        # Position 0 is read in a step of all lanes in one schedule and of some in the other.
        with pytest.raises(errors.DeterminismError, match=message):
            call()


def test_no_result_comes_before_the_self_test(monkeypatch):
    state = tiny.engine().prefill([1, 2])
    artifact = tiny.engine().capture(state)

    def refuse(*_):
        raise errors.DeterminismError("refused")

    monkeypatch.setattr(self_test, "result", refuse)
    engine = engine_lib.Engine(tiny.model(), capacity=tiny.CAPACITY, width=tiny.WIDTH, kv_block=tiny.KV_BLOCK)
    calls = (
        lambda: engine.prefill([1]),
        lambda: engine.extend(state, [1]),
        lambda: engine.generate(state),
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
        other = engine_lib.Engine(tiny.model(), capacity=64, width=tiny.WIDTH, kv_block=tiny.KV_BLOCK).pin
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
        code = f"import json; from tests import test_self_test as t; print(json.dumps(t.measured({eps!r})))"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def step(cache: str) -> pathlib.Path:
        (path,) = (tmp_path / cache).glob("jit__step-*-cache")
        return path

    own, other = run("1e-6", "own"), run("1e-3", "other")
    assert run("1e-6", "own") == own
    shutil.copyfile(step("other"), step("own"))
    planted = run("1e-6", "own")
    assert planted["program"] == own["program"] != other["program"]
    assert planted.pop("self_test") != own.pop("self_test") and planted == own
