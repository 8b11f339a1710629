"""Every released configuration in every form of its checkpoint: one model; reference logits to the bit."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib

import numpy as np
import pytest

from kvgraft_jax import errors
from kvgraft_jax.checkpoints import assemble, load
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.runtime import model as model_lib
from tests import golden_cases, small_checkpoints

WIDTH = 32
GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
FAMILY4 = [name for name in small_checkpoints.SMALL_URIS if name.startswith("gemma-4")]
OTHER_MODALITIES = {
    name: np.zeros(3, np.float32)
    for name in (
        "model.vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight",
        "model.audio_tower.subsample_conv_projection.layer0.conv.weight",
        "model.embed_vision.embedding_projection.weight",
        "model.embed_audio.embedding_projection.weight",
        "model.vision_embedder.patch_ln1.weight",
    )
}


@functools.cache
def made(name: str) -> model_lib.Model:
    return load.load_model(small_checkpoints.SMALL_URIS[name])


@functools.cache
def tensors(name: str) -> dict[str, np.ndarray]:
    return small_checkpoints.stored(made(name))


def logits(loaded: model_lib.Model, tokens: np.ndarray) -> np.ndarray:
    """Logits [T, V], all tokens in one step."""
    program = golden_cases.shared_program(dataclasses.replace(loaded.config, name=""), loaded.dtype, WIDTH)
    return program.run(loaded.params, tokens, [(WIDTH, WIDTH)])[0]


@functools.cache
def made_logits(name: str) -> np.ndarray:
    return logits(made(name), np.arange(20) * 7 % 97)


def assert_same(loaded: model_lib.Model, name: str) -> None:
    wanted = made(name)
    assert loaded.config.document() == wanted.config.document()
    assert loaded.digest == wanted.digest
    tokens = np.arange(20) * 7 % 97
    ours = logits(loaded, tokens)
    assert np.isfinite(ours.astype(np.float32)).all() and len(np.unique(ours)) > 100
    assert np.array_equal(ours, made_logits(name))


@pytest.mark.parametrize("name", small_checkpoints.SMALL_URIS)
def test_official_safetensors(tmp_path, monkeypatch, name):
    monkeypatch.setattr(assemble, "_CHUNK_ELEMENTS", 500)  # many row blocks for each tensor
    config, family4 = made(name).config, name in FAMILY4
    config_json = small_checkpoints.gemma4_config(config) if family4 else small_checkpoints.new_config(config)
    prefix = "model.language_model." if family4 else "model."
    kept = tensors(name) | small_checkpoints.unused(config)
    uri = small_checkpoints.write_safetensors(tmp_path, config_json, kept, prefix, extra=OTHER_MODALITIES)
    assert_same(load.load_model(uri), name)


@pytest.mark.parametrize("name", FAMILY4)
def test_safetensors_saved_again_in_shards(tmp_path, name):
    config_json = small_checkpoints.gemma4_saved_again(made(name).config)
    head = {"lm_head.weight": tensors(name)["embed_tokens.weight"].copy()}
    uri = small_checkpoints.write_safetensors(tmp_path, config_json, tensors(name) | head, shards=3)
    loaded = load.load_model(uri)
    assert loaded.digest == made(name).digest and loaded.config.document() == made(name).config.document()


@pytest.mark.parametrize("name", small_checkpoints.SMALL_URIS)
def test_gguf(tmp_path, monkeypatch, name):
    monkeypatch.setattr(assemble, "_CHUNK_ELEMENTS", 500)
    config = made(name).config
    extra = small_checkpoints.rotary_divisors(config) | small_checkpoints.unused(config) if name in FAMILY4 else {}
    uri = small_checkpoints.write_gguf(tmp_path / "m.gguf", config, tensors(name) | extra)
    loaded = load.load_model(uri)
    if name == "gemma-3-27b":  # Known by its 62 layers, which a cut has not.
        own_scale = dataclasses.replace(loaded.config, query_scale=168**-0.5)
        loaded = dataclasses.replace(loaded, config=own_scale)
    assert_same(loaded, name)


def test_gguf_with_experts_in_two_tensors(tmp_path, monkeypatch):
    monkeypatch.setattr(assemble, "_CHUNK_ELEMENTS", 500)
    name, extra = "gemma-4-26b-a4b", small_checkpoints.rotary_divisors(made("gemma-4-26b-a4b").config)
    for kind in (small_checkpoints.gguf.GGMLQuantizationType.BF16, small_checkpoints.gguf.GGMLQuantizationType.F32):
        uri = small_checkpoints.write_gguf(
            tmp_path / "m.gguf", made(name).config, tensors(name) | extra, kind, split_experts=True
        )
        assert load.load_model(uri).digest == made(name).digest


def test_gguf_with_per_layer_embeddings_never_takes_keys_for_values(tmp_path):
    config = made("gemma-4-e2b").config
    full = [layer for layer in range(config.num_kv_layers) if config.layer_kinds[layer] == config_lib.FULL]
    lost = {f"layers.{layer}.self_attn.v_proj.weight" for layer in full}
    kept = {name: array for name, array in tensors("gemma-4-e2b").items() if name not in lost}
    uri = small_checkpoints.write_gguf(tmp_path / "m.gguf", config, kept | small_checkpoints.rotary_divisors(config))
    with pytest.raises(errors.WeightsError) as caught:
        load.load_model(uri)
    assert lost and all(f"missing: {name}" in str(caught.value) for name in lost)


@pytest.mark.parametrize("divisors", [None, np.ones(32, np.float32), np.ones(31, np.float32)])
def test_gguf_rotary_divisors_that_contradict(tmp_path, divisors):
    extra = {} if divisors is None else {"rope_freqs.weight": divisors}
    uri = small_checkpoints.write_gguf(tmp_path / "m.gguf", made("gemma-4-12b").config, tensors("gemma-4-12b") | extra)
    with pytest.raises(errors.WeightsError, match="rope_freqs.weight: got .* wanted 8 times 1, then 24 times 1e30"):
        load.load_model(uri)


def test_one_error_lists_all_tensors_of_experts(tmp_path):
    wrong, config = dict(tensors("gemma-4-26b-a4b")), made("gemma-4-26b-a4b").config
    del wrong["layers.0.router.scale"]
    wrong["layers.1.experts.down_proj"] = wrong["layers.1.experts.down_proj"][:-1]
    wrong["layers.2.experts.gate_up_proj.weight"] = wrong["layers.2.experts.gate_up_proj"]
    wrong["layers.5.self_attn.v_proj.weight"] = np.zeros((64, 64), np.float32)
    with pytest.raises(errors.WeightsError) as caught:
        load.load_model(
            small_checkpoints.write_safetensors(tmp_path / "m", small_checkpoints.gemma4_config(config), wrong)
        )
    for line in (
        "4 tensor(s)",
        "missing: layers.0.router.scale, wanted shape (64,)",
        "wrong shape: layers.1.experts.down_proj: got (11, 64, 32), wanted (12, 64, 32)",
        "unexpected: layers.2.experts.gate_up_proj.weight",
        "unexpected: layers.5.self_attn.v_proj.weight",
    ):
        assert line in str(caught.value)


def test_unused_tensors_are_checked_for_their_shape(tmp_path):
    config = made("gemma-4-e2b").config
    wrong = tensors("gemma-4-e2b") | {"layers.9.self_attn.k_norm.weight": np.zeros(32, np.float32)}
    with pytest.raises(errors.WeightsError, match=r"layers.9.self_attn.k_norm.weight: got \(32,\), wanted \(64,\)"):
        load.load_model(small_checkpoints.write_safetensors(tmp_path, small_checkpoints.gemma4_config(config), wrong))


@pytest.mark.parametrize("suffix", ["safetensors", "gguf"])
def test_files_cut_short(tmp_path, suffix):
    config, extra = made("gemma-4-e2b").config, small_checkpoints.rotary_divisors(made("gemma-4-e2b").config)
    if suffix == "gguf":
        uri = small_checkpoints.write_gguf(tmp_path / "model.gguf", config, tensors("gemma-4-e2b") | extra)
    else:
        uri = small_checkpoints.write_safetensors(
            tmp_path, small_checkpoints.gemma4_config(config), tensors("gemma-4-e2b")
        )
    path = tmp_path / f"model.{suffix}"
    whole = path.read_bytes()
    for size in (0, 9, len(whole) // 2, len(whole) - 64):
        path.write_bytes(whole[:size])
        with pytest.raises(errors.WeightsError, match=f"model.{suffix}"):
            load.load_model(uri)


@pytest.mark.parametrize("name", ["gemma3", "e2b", "31b", "12b", "26b"])
def test_golden_logits_through_the_loader(tmp_path, name):
    golden = np.load(GOLDEN / f"{name}.npz")
    stored = {key.removeprefix("w/"): golden[key] for key in golden.files if key.startswith("w/")}
    document = json.loads(str(golden["hf_config_json"]))
    loaded = load.load_model(small_checkpoints.write_safetensors(tmp_path, document, stored, prefix=""))
    assert loaded.config.layer_kinds == tuple(kind.removesuffix("_attention") for kind in document["layer_types"])
    assert np.array_equal(logits(loaded, golden["input_ids"].reshape(-1)), golden["logits_bf16"])


def test_golden_configurations(tmp_path):
    parsed = {}
    for name in ("e2b", "31b", "12b", "26b"):
        golden = np.load(GOLDEN / f"{name}.npz")
        document = json.loads(str(golden["hf_config_json"]))
        stored = {key.removeprefix("w/"): golden[key] for key in golden.files if key.startswith("w/")}
        uri = small_checkpoints.write_safetensors(tmp_path / name, document, stored, prefix="")
        parsed[name] = load.load_model(uri).config
    e2b, big = parsed["e2b"], parsed["31b"]
    assert big.document() == parsed["12b"].document()
    assert big.full == config_lib.AttentionConfig(1, 32, config_lib.RotaryConfig(1e6, fraction=0.25), None, True)
    assert big.sliding == config_lib.AttentionConfig(2, 16, config_lib.RotaryConfig(1e4), 5)
    assert e2b.full == config_lib.AttentionConfig(1, 32, config_lib.RotaryConfig(1e6, fraction=0.25))
    assert (e2b.num_kv_shared_layers, e2b.shared_hidden_dim, e2b.kv_layer(9)) == (5, 80, 4)
    assert e2b.per_layer == config_lib.PerLayerConfig(97, 8) and big.per_layer is None
    assert parsed["26b"].experts == config_lib.ExpertsConfig(8, 3, 24) and big.experts is None
    assert (big.query_scale, big.final_softcap, big.norm_plus_one, big.layer_scalar) == (1.0, 30.0, False, True)
