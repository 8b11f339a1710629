"""Random models: the same bits always, sensible sizes, cuts that keep the layer pattern, and URIs that are refused."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from kvgraft_jax import device_memory, errors
from kvgraft_jax.checkpoints import load
from kvgraft_jax.checkpoints import random as random_lib
from kvgraft_jax.gemma import parameters as parameters_lib
from kvgraft_jax.runtime import model as model_lib
from tests import small_checkpoints


@pytest.fixture(scope="module")
def made() -> model_lib.Model:
    return load.load_model(small_checkpoints.URI, "float32")


def _mix(word: int) -> int:
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        word = (word ^ word >> shift) * factor & 0xFFFFFFFF
    return word ^ word >> 16


@pytest.mark.parametrize(
    "path", ["embedder/embedding", "layer_3/attention/o_proj/kernel", "layer_0/attention/q_norm/scale"]
)
def test_values_follow_the_formula(made, path):
    (parameter,) = [p for p in parameters_lib.parameters(made.config) if p.path == path]
    array = np.asarray(small_checkpoints.leaves(made)[path]).reshape(-1)
    key = int.from_bytes(hashlib.sha256(f"3/{path}".encode()).digest()[:8], "little")
    bound = 0.25 if parameter.is_scale else (3 / parameter.stored_shape[-1]) ** 0.5
    for index in (0, 1, 31, array.size - 1):
        bits = _mix((_mix(index ^ key & 0xFFFFFFFF) + (key >> 32)) & 0xFFFFFFFF)
        wanted = np.float32((bits >> 8) - (1 << 23)) * np.float32(bound * 2.0**-23)
        assert array[index] == wanted


def test_same_digest_in_another_process(made):
    code = f"from kvgraft_jax.checkpoints import load; print(load.load_model({made.uri!r}, 'float32').digest)"
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == made.digest


def test_bits_do_not_depend_on_the_program_around_them(made):
    (parameter,) = [p for p in parameters_lib.parameters(made.config) if p.path == "layer_0/mlp/up_proj/kernel"]
    key = int.from_bytes(hashlib.sha256(f"3/{parameter.path}".encode()).digest()[:8], "little")
    step = np.float32((3 / 64) ** 0.5 * 2.0**-23)
    words = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)

    def scaled_sum(low, high):
        array = random_lib._uniform(low, high, np.int32(0), step, parameter.shape, np.dtype(np.float32))
        return array, (array * array).sum()

    inside, _ = jax.jit(scaled_sum)(*words)
    assert np.array_equal(inside, small_checkpoints.leaves(made)[parameter.path])


def test_bfloat16_is_float32_rounded_and_seeds_differ(made):
    bf16 = small_checkpoints.leaves(load.load_model(small_checkpoints.URI))
    for path, array in small_checkpoints.leaves(made).items():
        assert np.array_equal(bf16[path], np.asarray(array).astype(small_checkpoints.BF16)), path
    assert load.load_model(small_checkpoints.URI.replace("seed=3", "seed=4"), "float32").digest != made.digest


def test_scales(made):
    leaves = small_checkpoints.leaves(made)
    for parameter in parameters_lib.parameters(made.config):
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
    big = random_lib.cut(load.configurations.get("gemma-3-27b"), head_dim=64)
    assert big.query_scale == 168**-0.5


def test_cuts_of_gemma_4():
    get, cut = load.configurations.get, random_lib.cut
    small = cut(get("gemma-4-31b"), layers=6, heads=8, kv_heads=8, head_dim=32, vocab=97)
    assert (small.full.head_dim, small.sliding.head_dim, small.full.num_kv_heads) == (64, 32, 2)
    assert small.full.values_are_keys and small.query_scale == 1.0 and small.full.rotary.fraction == 0.25
    experts = cut(get("gemma-4-26b-a4b"), hidden=96, experts=4).experts
    assert (experts.num_experts, experts.top_k, experts.hidden_dim) == (4, 4, 32)
    assert cut(get("gemma-4-26b-a4b"), experts=12).experts.top_k == 8
    e2b = cut(get("gemma-4-e2b"), vocab=97, per_layer=8, hidden=96)
    assert (e2b.per_layer.vocab_size, e2b.per_layer.dim, e2b.shared_hidden_dim) == (97, 8, 192)
    assert cut(get("gemma-4-12b"), vocab=258_883).suppress_ids == (258_882,)
    for name in load.configurations.CONFIGURATIONS:
        assert cut(get(name)) == get(name)


@pytest.mark.parametrize(
    ("name", "layers", "shared"),
    [("e2b", 35, 20), ("e2b", 20, 11), ("e2b", 10, 5), ("e2b", 7, 2), ("e2b", 5, 0), ("e2b", 1, 0), ("e4b", 12, 5)],
)
def test_cuts_keep_layers_to_share_with(name, layers, shared):
    config = random_lib.cut(load.configurations.get(f"gemma-4-{name}"), layers=layers)
    assert config.num_kv_shared_layers == shared
    assert all(config.layer_kinds[config.kv_layer(layer)] == config.layer_kinds[layer] for layer in range(layers))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gemma-4-e2b", "gemma-4-26b-a4b"])
def test_factors_lie_around_what_changes_nothing(name, dtype):
    loaded = load.load_model(small_checkpoints.SMALL_URIS[name], dtype)
    leaves = small_checkpoints.leaves(loaded)
    for parameter in parameters_lib.parameters(loaded.config):
        array = np.asarray(leaves[parameter.path], np.float64)
        if parameter.is_scale:
            assert array.min() >= 0.75 and array.max() <= 1.25, parameter.path
            assert array.size < 60 or abs(array.mean() - 1) < 0.1
        else:
            width = parameter.stored_shape[-1] if parameter.matrices else parameter.shape[-1]
            assert abs(array.std() / width**-0.5 - 1) < 0.25, parameter.path


def test_one_recipe_gives_one_model():
    uris = [small_checkpoints.SMALL_URIS["gemma-4-31b"].replace("31b", size) for size in ("31b", "12b")]
    assert len({load.load_model(uri).digest for uri in uris}) == 1


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded():
    with pytest.raises(errors.ResourceError) as caught:
        load.load_model("random:gemma-3-270m?vocab=2000000000")
    needed = 2 * (2_000_000_000 * 640 + 268_098_176 - 262_144 * 640)
    assert str(needed) in str(caught.value) and "bytes" in str(caught.value) and "free" in str(caught.value)
    assert 0 < device_memory.available(jax.local_devices()[0]) < needed


def test_the_limit_of_a_control_group_counts(tmp_path):
    inner = tmp_path / "outer" / "inner"
    old = tmp_path / "memory" / "box"
    for directory, names in ((inner, ("memory.max", "memory.current")), (inner.parent, ("memory.max",))):
        directory.mkdir(parents=True, exist_ok=True)
        for name, value in zip(names, ("5000", "1500"), strict=False):
            (directory / name).write_text(value + "\n")
    (inner / "memory.stat").write_text("anon 1200\ninactive_file 300\n")
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("900\n")
    (old / "memory.usage_in_bytes").write_text("1000\n")
    groups = tmp_path / "cgroup"
    groups.write_text("4:memory:/box\n3:cpuset:/box\n0::/outer/inner\n")
    assert device_memory.group_free_bytes(groups, tmp_path) == [-100, 3800]
    (inner / "memory.max").write_text("max\n")
    assert device_memory.group_free_bytes(groups, tmp_path) == [-100]
    assert device_memory.group_free_bytes(tmp_path / "none", tmp_path) == []


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
        "random:gemma-3-270m?layers=19",
        "random:gemma-3-270m?layers=-1",
        "random:gemma-3-270m?layers=1.5",
        "random:gemma-3-270m?seed=\u0663",
        "random:gemma-3-270m?heads=4&kv_heads=3",
        "random:gemma-3-270m?head_dim=7",
        *(f"random:gemma-3-270m?{cut}=0" for cut in load._CUTS),
        "random:gemma-3-270m?experts=4",
        "random:gemma-4-31b?per_layer=8",
        "random:gemma-4-e2b?per_layer=0",
        "random:gemma-4-26b-a4b?experts=0",
    ],
)
def test_uris_that_are_refused(uri):
    with pytest.raises(errors.ConfigError) as caught:
        load.load_model(uri)
    assert not str(uri).endswith("=0") or "got 0" in str(caught.value)


@pytest.mark.parametrize("dtype", ["float16", "int8", "f32", ""])
def test_dtypes_that_are_refused(dtype):
    with pytest.raises(errors.ConfigError, match="overflow" if dtype == "float16" else "dtype") as caught:
        load.load_model(small_checkpoints.URI, dtype)
    assert "bfloat16" in str(caught.value)
