"""Random models: the same bits always, sensible sizes, cuts that keep the layer pattern, and URIs that are refused."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from kvgraft_jax import errors
from kvgraft_jax.gemma import model
from kvgraft_jax.gemma.weights import layout, random_init
from tests import checkpoints


@pytest.fixture(scope="module")
def made() -> model.Model:
    return model.load_model(checkpoints.URI, "float32")


def _mix(word: int) -> int:
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        word = (word ^ word >> shift) * factor & 0xFFFFFFFF
    return word ^ word >> 16


@pytest.mark.parametrize(
    "path", ["embedder/embedding", "layer_3/attention/o_proj/kernel", "layer_0/attention/q_norm/scale"]
)
def test_values_follow_the_formula(made, path):
    (parameter,) = [p for p in layout.parameters(made.config) if p.path == path]
    array = np.asarray(checkpoints.leaves(made.params)[path]).reshape(-1)
    key = int.from_bytes(hashlib.sha256(f"3/{path}".encode()).digest()[:8], "little")
    bound = 0.25 if parameter.is_scale else (3 / parameter.stored_shape[-1]) ** 0.5
    for index in (0, 1, 31, array.size - 1):
        bits = _mix((_mix(index ^ key & 0xFFFFFFFF) + (key >> 32)) & 0xFFFFFFFF)
        wanted = np.float32((bits >> 8) - (1 << 23)) * np.float32(bound * 2.0**-23)
        assert array[index] == wanted


def test_same_digest_in_another_process(made):
    code = f"from kvgraft_jax.gemma import model; print(model.load_model({made.uri!r}, 'float32').digest)"
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == made.digest


def test_bits_do_not_depend_on_the_program_around_them(made):
    (parameter,) = [p for p in layout.parameters(made.config) if p.path == "layer_0/mlp/up_proj/kernel"]
    key = int.from_bytes(hashlib.sha256(f"3/{parameter.path}".encode()).digest()[:8], "little")
    step = np.float32((3 / 64) ** 0.5 * 2.0**-23)
    words = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)

    def scaled_sum(low, high):
        array = random_init._uniform(low, high, step, parameter.shape, np.dtype(np.float32))
        return array, (array * array).sum()

    inside, _ = jax.jit(scaled_sum)(*words)
    assert np.array_equal(inside, made.params["layer_0"]["mlp"]["up_proj"]["kernel"])


def test_bfloat16_is_float32_rounded_and_seeds_differ(made):
    bf16 = checkpoints.leaves(model.load_model(checkpoints.URI).params)
    for path, array in checkpoints.leaves(made.params).items():
        assert np.array_equal(bf16[path], np.asarray(array).astype(checkpoints.BF16)), path
    assert model.load_model(checkpoints.URI.replace("seed=3", "seed=4"), "float32").digest != made.digest


def test_scales(made):
    leaves = checkpoints.leaves(made.params)
    for parameter in layout.parameters(made.config):
        array = np.asarray(leaves[parameter.path], np.float64)
        wanted = 0.25 / 3**0.5 if parameter.is_scale else parameter.stored_shape[-1] ** -0.5
        assert abs(array.std() / wanted - 1) < 0.25 and abs(array.mean()) < 4 * wanted / array.size**0.5, parameter.path
    arrays = [np.asarray(array).reshape(-1)[:32] for path, array in leaves.items()]
    assert len({array.tobytes() for array in arrays}) == len(arrays)


def test_cuts(made):
    config = made.config
    assert config.layer_kinds == ("sliding",) * 5 + ("full", "sliding")
    assert (config.vocab_size, config.embed_dim, config.hidden_dim, config.num_heads) == (97, 64, 96, 4)
    assert (config.full.num_kv_heads, config.full.head_dim, config.sliding.window) == (2, 32, 5)
    assert config.full.rotary.scale == 8.0 and config.query_scale == 32**-0.5 and config.full.window is None
    big = random_init.cut(model.configurations.get("gemma-3-27b"), head_dim=64)
    assert big.query_scale == 168**-0.5


@pytest.mark.parametrize(
    "uri",
    [
        None,
        "",
        "random",
        "random:",
        "gemma-3-270m",
        "file:/x",
        "random:gemma-3-270",
        "random:gemma-3-270m?sed=1",
        "random:gemma-3-270m?seed",
        "random:gemma-3-270m?seed=1&seed=2",
        "random:gemma-3-270m?layers=0",
        "random:gemma-3-270m?layers=19",
        "random:gemma-3-270m?layers=-1",
        "random:gemma-3-270m?layers=1.5",
        "random:gemma-3-270m?seed=\u0663",
        "random:gemma-3-270m?heads=4&kv_heads=3",
        "random:gemma-3-270m?head_dim=7",
    ],
)
def test_uris_that_are_refused(uri):
    with pytest.raises(errors.ConfigError):
        model.load_model(uri)


@pytest.mark.parametrize("dtype", ["float16", "int8", "f32", ""])
def test_dtypes_that_are_refused(dtype):
    with pytest.raises(errors.ConfigError, match="overflow" if dtype == "float16" else "dtype") as caught:
        model.load_model(checkpoints.URI, dtype)
    assert "bfloat16" in str(caught.value)
