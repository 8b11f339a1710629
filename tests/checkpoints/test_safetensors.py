"""Safetensors directories: every prefix, key spelling and shard layout gives the same model; bad ones are refused."""

from __future__ import annotations

import json
import pathlib

import jax
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from kvgraft_jax import errors
from kvgraft_jax.checkpoints import assemble, load
from kvgraft_jax.checkpoints.hf import config as huggingface_config
from tests import small_checkpoints

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "gemma3.npz"
VISION = {
    "vision_tower.encoder.layer.0.weight": np.zeros((3, 2), np.float32),
    "model.vision_tower.ids": np.zeros(4, np.int64),
    "multi_modal_projector.mm_input_projection_weight": np.ones((2, 2), np.float32),
}


made, tensors = small_checkpoints.made, small_checkpoints.tensors


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model."])
def test_same_model_from_every_layout(tmp_path, monkeypatch, made, tensors, prefix, shards):
    monkeypatch.setattr(assemble, "_CHUNK_ELEMENTS", 500)  # many row blocks for each tensor
    config_json = (small_checkpoints.new_config if shards == 1 else small_checkpoints.old_config)(made.config)
    extra = {} if prefix == "model." else VISION
    uri = small_checkpoints.write_safetensors(tmp_path / "m", config_json, tensors, prefix, shards, extra)
    loaded = load.load_model(uri)
    assert loaded.config.document() == made.config.document()
    assert loaded.digest == made.digest
    assert loaded.tokenizer is None and loaded.chat is None
    ours, theirs = small_checkpoints.leaves(loaded), small_checkpoints.leaves(made)
    assert ours.keys() == theirs.keys()
    for path, array in ours.items():
        assert array.dtype == theirs[path].dtype and np.array_equal(array, theirs[path]), path


def test_golden_weights_and_configuration(tmp_path):
    golden = np.load(GOLDEN)
    stored = {name.removeprefix("w/"): golden[name] for name in golden.files if name.startswith("w/")}
    uri = small_checkpoints.write_safetensors(tmp_path, json.loads(str(golden["hf_config_json"])), stored, prefix="")
    loaded = load.load_model(uri, "float32")
    assert loaded.config.query_scale == 24**-0.5 and loaded.config.full.rotary.scale == 8.0
    assert loaded.config.layer_kinds == ("sliding",) * 5 + ("full", "sliding")
    q_DxNxH, o_NxHxD = (small_checkpoints.leaves(loaded)[f"layer_1/attention/{name}_proj/kernel"] for name in "qo")
    q_stored, o_stored = (stored[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qo")
    assert np.array_equal(q_DxNxH[:, 3, 5], q_stored[3 * 16 + 5])
    assert np.array_equal(o_NxHxD[3, 5], o_stored[:, 3 * 16 + 5])
    bf16 = load.load_model(uri, "bfloat16")
    assert bf16.digest != loaded.digest
    table = stored["model.embed_tokens.weight"].astype(small_checkpoints.BF16)
    assert np.array_equal(small_checkpoints.leaves(bf16)["embedder/embedding"], table)


@pytest.mark.parametrize("stored_dtype", [np.float16, np.float32])
def test_other_stored_dtypes(tmp_path, made, tensors, stored_dtype):
    cast = {name: array.astype(stored_dtype) for name, array in tensors.items()}
    loaded = load.load_model(
        small_checkpoints.write_safetensors(tmp_path, small_checkpoints.new_config(made.config), cast)
    )
    if stored_dtype == np.float32:
        assert loaded.digest == made.digest
    table = cast["embed_tokens.weight"].astype(np.float32).astype(small_checkpoints.BF16)
    assert np.array_equal(small_checkpoints.leaves(loaded)["embedder/embedding"], table)


def test_digest_sees_one_ulp_and_the_dtype(tmp_path, made, tensors):
    changed = dict(tensors)
    down = changed["layers.6.mlp.down_proj.weight"].copy()
    down.view(np.uint16)[2, 3] ^= 1
    changed["layers.6.mlp.down_proj.weight"] = down
    config_json = small_checkpoints.new_config(made.config)
    assert load.load_model(small_checkpoints.write_safetensors(tmp_path, config_json, changed)).digest != made.digest


def test_tied_head_is_accepted_and_another_is_not(tmp_path, made, tensors):
    config_json = small_checkpoints.new_config(made.config)
    table = tensors["embed_tokens.weight"]
    uri = small_checkpoints.write_safetensors(tmp_path / "a", config_json, tensors | {"lm_head.weight": table.copy()})
    assert load.load_model(uri).digest == made.digest
    other = table.copy()
    other.view(np.uint16)[-1, -1] ^= 1
    uri = small_checkpoints.write_safetensors(tmp_path / "b", config_json, tensors | {"lm_head.weight": other})
    with pytest.raises(errors.WeightsError, match="lm_head.weight differs from embed_tokens.weight"):
        load.load_model(uri)


def test_one_error_lists_all_tensors(tmp_path, made, tensors):
    wrong = dict(tensors)
    del wrong["layers.0.mlp.up_proj.weight"], wrong["norm.weight"]
    wrong["layers.0.self_attn.v_norm.weight"] = np.zeros(32, np.float32)
    wrong["layers.3.self_attn.k_proj.weight"] = np.zeros((65, 64), np.float32)
    uri = small_checkpoints.write_safetensors(tmp_path, small_checkpoints.new_config(made.config), wrong)
    with pytest.raises(errors.WeightsError) as caught:
        load.load_model(uri)
    for line in (
        "4 tensor(s)",
        "missing: layers.0.mlp.up_proj.weight, wanted shape (96, 64)",
        "missing: norm.weight",
        "unexpected: layers.0.self_attn.v_norm.weight",
        "wrong shape: layers.3.self_attn.k_proj.weight: got (65, 64), wanted (64, 64)",
    ):
        assert line in str(caught.value)


def _header(header: object, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def _entry(dtype: str, shape: list, begin: int, end: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "0 bytes"),
        (b"\x80\x02}q\x00.", "bytes"),
        (b"GGUF" + bytes(60), "declares"),
        ((1 << 43).to_bytes(8, "little") + b"{}", "declares"),
        (_header(b"[1]"), "wanted an object"),
        (_header(b'{"a": 1, "a": 2}'), "repeated keys"),
        (_header(b"[" * 100_000), "JSON"),
        (_header({"a": {"dtype": "F32"}}), "data_offsets"),
        (_header({"a": _entry("F32", [1 << 41], 0, 1 << 43)}), "truncated"),
        (_header({"a": _entry("F32", [2], 0, 4)}, bytes(4)), "do not hold shape"),
        (_header({"a": _entry("F32", [1], 4, 8)}, bytes(8)), "starts at byte"),
        (_header({"a": _entry("F32", [-1], 0, 4)}, bytes(4)), "data_offsets"),
        (_header({"a": _entry("F32", [1], 0, 4)}, bytes(5)), "truncated"),
    ],
)
def test_broken_files_are_refused(tmp_path, made, content, reason):
    (tmp_path / "config.json").write_text(json.dumps(small_checkpoints.new_config(made.config)))
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(errors.WeightsError, match="model.safetensors.*") as caught:
        load.load_model(f"hf:{tmp_path}")
    assert reason in str(caught.value)


def test_truncated_at_every_boundary(tmp_path, made, tensors):
    uri = small_checkpoints.write_safetensors(tmp_path, small_checkpoints.new_config(made.config), tensors)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    header = int.from_bytes(whole[:8], "little")
    for size in (4, 8, 8 + header // 2, 8 + header, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(errors.WeightsError, match="model.safetensors"):
            load.load_model(uri)


def test_directories_without_their_files(tmp_path, made, tensors):
    with pytest.raises(errors.WeightsError, match="there is no such directory; wanted a directory with config.json"):
        load.load_model(f"hf:{tmp_path / 'none'}")
    with pytest.raises(errors.WeightsError, match="config.json"):
        load.load_model(f"hf:{tmp_path}")
    (tmp_path / "config.json").write_text(json.dumps(small_checkpoints.new_config(made.config)))
    with pytest.raises(errors.WeightsError, match="neither model.safetensors nor"):
        load.load_model(f"hf:{tmp_path}")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(errors.WeightsError, match="wanted one in the same directory"):
        load.load_model(f"hf:{tmp_path}")
    index.write_text(json.dumps({"weight_map": {"a": "a.safetensors"}}))
    with pytest.raises(errors.WeightsError, match="a.safetensors: does not exist"):
        load.load_model(f"hf:{tmp_path}")
    safetensors_numpy.save_file({"b": np.zeros(1, np.float32)}, tmp_path / "a.safetensors")
    with pytest.raises(errors.WeightsError, match="disagrees"):
        load.load_model(f"hf:{tmp_path}")


def test_a_single_file_beside_an_index(tmp_path, made, tensors):
    config_json = small_checkpoints.new_config(made.config)
    uri = small_checkpoints.write_safetensors(tmp_path, config_json, tensors, shards=2)
    small_checkpoints.write_safetensors(tmp_path, config_json, tensors)
    with pytest.raises(errors.WeightsError, match="model.safetensors beside .*index.json.*; remove one of the two"):
        load.load_model(uri)
    index = tmp_path / "model.safetensors.index.json"
    names = safetensors_numpy.load_file(tmp_path / "model.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    assert load.load_model(uri).digest == made.digest
    index.unlink()
    assert load.load_model(uri).digest == made.digest


def test_missing_keys_mean_class_defaults():
    config = huggingface_config.parse_config({"model_type": "gemma3_text", "pad_token_id": None}, "x")
    assert (config.vocab_size, config.embed_dim, config.hidden_dim, config.num_layers) == (262_208, 2304, 9216, 26)
    assert (config.num_heads, config.full.num_kv_heads, config.full.head_dim) == (8, 4, 256)
    assert (config.sliding.window, config.query_scale, config.max_positions) == (4096, 1 / 16, 131_072)
    assert (config.sliding.rotary.base, config.full.rotary.base, config.full.rotary.scale) == (1e4, 1e6, 1.0)
    assert (config.stop_ids, config.pad_id, config.bos_id) == ((1,), 0, 2)
    assert [layer for layer, kind in enumerate(config.layer_kinds) if kind == "full"] == [5, 11, 17, 23]


def test_stop_tokens_of_generation_config(tmp_path, made, tensors):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 106]}))
    uri = small_checkpoints.write_safetensors(tmp_path, small_checkpoints.new_config(made.config), tensors)
    assert load.load_model(uri).config.stop_ids == (1, 106)
    assert load.load_model(uri).config.suppress_ids == ()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gemma2"}, "'gemma2'"),
        ({"model_type": "gemma3", "text_config": None}, "text_config"),
        ({"attn_logit_softcapping": 50.0, "num_experts": 8}, "num_experts = 8; attn_logit_softcapping: got 50.0"),
        ({"hidden_activation": "silu"}, "hidden_activation: got 'silu'"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings: got False"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 1}}, "beta_fast"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
        ({"rope_theta": "1e6"}, "rope_theta"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["chunked_attention"] * 26}, "layer_types"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({"hidden_size": "640"}, "hidden_size"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: got 0.0, wanted a number above 0"),
        ({"rope_theta": 1.0, "vocab_size": None}, "rotary base: got 1.0"),
        ({"head_dim": True}, "head_dim"),
        ({"sliding_window": None}, "sliding_window"),
        ({"eos_token_id": ["1"]}, "eos_token_id"),
    ],
)
def test_configurations_that_would_give_other_numbers(change, named):
    with pytest.raises(errors.ConfigError) as caught:
        huggingface_config.parse_config({"model_type": "gemma3_text"} | change, "x")
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gemma4_vision"}, "'gemma4_vision'"),
        ({"model_type": "gemma4", "text_config": [1]}, "text_config: got [1]"),
        ({"model_type": "gemma4", "text_config": {"model_type": "gemma3_text"}}, "'gemma3_text'"),
        ({"model_type": "gemma4", "text_config": {}, "quantization_config": {"bits": 4}}, "quantization_config"),
        (
            {"model_type": "gemma4", "text_config": {}, "rope_scaling": {"factor": 2.0}},
            "rope_scaling = {'factor': 2.0}",
        ),
        ({"model_type": "gemma4", "text_config": {}, "head_dim": 128}, "head_dim = 128 beside text_config"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention: got 'all'"),
        ({"query_pre_attn_scalar": 256}, "unknown key query_pre_attn_scalar = 256"),
        ({"attention_k_eq_v": 1}, "attention_k_eq_v: got 1"),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": "2"}, "num_global_key_value_heads: got '2'"),
        ({"final_logit_softcapping": "30"}, "final_logit_softcapping: got '30'"),
        ({"num_kv_shared_layers": 30}, "num_kv_shared_layers: got 30, wanted 0 to 29"),
        ({"enable_moe_block": True}, "missing num_experts; missing top_k_experts; missing moe_intermediate_size"),
        ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5}, "top_k_experts: got 5, wanted 1 to 4"),
        ({"per_layer_config": {"05": {"head_dim": 512}}}, "full layers differ among themselves"),
        ({"per_layer_config": {"05": {"head_dim": 512}, "5": {}}}, "per_layer_config: got {'5': {}}"),
        ({"per_layer_config": {"30": {"head_dim": 512}}}, "per_layer_config: got {'30'"),
        ({"per_layer_config": {"5": {"sliding_window": 4}}}, "sliding_window"),
        ({"per_layer_config": [1]}, "per_layer_config"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}, "new_field": 1}, "new_field = 1; rope_para"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "full_attention: got type 'yarn'"),
        ({"rope_parameters": {"sliding_attention": {"partial_rotary_factor": 0.5}}}, "partial_rotary_factor"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 2}}},
            "rotary fraction: got 2.0",
        ),
        ({"model_type": "gemma4_unified_text", "enable_moe_block": True}, "enable_moe_block: got True"),
        ({"model_type": "gemma4_unified_text", "hidden_size_per_layer_input": 256}, "per_layer_input: got 256"),
    ],
)
def test_gemma_4_configurations_that_would_give_other_numbers(change, named):
    with pytest.raises(errors.ConfigError) as caught:
        huggingface_config.parse_config({"model_type": "gemma4_text"} | change, "x")
    assert named in str(caught.value)


def test_missing_keys_mean_class_defaults_of_gemma_4():
    config = huggingface_config.parse_config({"model_type": "gemma4", "text_config": {}}, "x")
    assert (config.vocab_size, config.embed_dim, config.hidden_dim, config.num_layers) == (262_144, 2304, 9216, 30)
    assert (config.num_heads, config.sliding.num_kv_heads, config.full.num_kv_heads) == (8, 4, 4)
    assert (config.sliding.head_dim, config.full.head_dim, config.sliding.window) == (256, 512, 512)
    assert (config.max_positions, config.final_softcap, config.experts) == (131_072, None, None)
    assert (config.per_layer.vocab_size, config.per_layer.dim, config.full.values_are_keys) == (262_144, 256, False)
    assert (config.full.rotary.base, config.full.rotary.fraction, config.sliding.rotary.base) == (1e6, 0.25, 1e4)
    unified = huggingface_config.parse_config({"model_type": "gemma4_unified", "text_config": {}}, "x")
    assert (unified.per_layer, unified.sliding.window, unified.max_positions) == (None, 1024, 262_144)


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "gemma4_unified"])
def test_keys_of_the_text_beside_it(family):
    text = {"hidden_size": 64, "num_hidden_layers": 6}
    harmless = {
        "architectures": ["Gemma"],
        "boi_token_index": 255_999,
        "bos_token_id": 2,
        "dtype": "bfloat16",
        "eos_token_id": [1, 106],
        "image_token_id": 3,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "pad_token_id": 7,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "vision_config": {"hidden_size": 8},
    }
    document = {"model_type": family, "text_config": text} | harmless
    config = huggingface_config.parse_config(document, "x")
    assert huggingface_config.parse_config(document | text, "x") == config and config.pad_id == 0
    wrong = {
        "attention_bias": True,
        "hidden_size": 65,
        "query_pre_attn_scalar": 168,
        "rope_parameters": {},
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "rope_theta": 1e5,
        "sliding_window": 8,
    }
    with pytest.raises(errors.ConfigError) as caught:
        huggingface_config.parse_config(document | wrong, "x")
    for key, value in wrong.items():
        assert f"{key} = {value!r} beside text_config" in str(caught.value)


def test_a_key_beside_the_text_part_may_repeat_the_value_in_use():
    document = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}, "vocab_size": 262_208}
    assert huggingface_config.parse_config(document | {"head_dim": 256}, "x").vocab_size == 262_208
    with pytest.raises(errors.ConfigError, match="vocab_size = 262144 beside text_config"):
        huggingface_config.parse_config(document | {"vocab_size": 262_144}, "x")


def test_global_heads_count_only_where_values_are_keys():
    document = {"model_type": "gemma4_text", "num_global_key_value_heads": 2}
    assert huggingface_config.parse_config(document, "x").full.num_kv_heads == 4
    tied = huggingface_config.parse_config(document | {"attention_k_eq_v": True}, "x")
    assert tied.full.num_kv_heads == 2 and tied.full.values_are_keys and not tied.sliding.values_are_keys


def test_the_last_layer_of_gemma_4_is_full():
    document = {"model_type": "gemma4_text", "num_hidden_layers": 8}
    names = ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 2
    for layer_types in (None, names):
        config = huggingface_config.parse_config(document | {"layer_types": layer_types}, "x")
        assert [layer for layer, kind in enumerate(config.layer_kinds) if kind == "full"] == [5, 7]


def test_rotary_factor_of_gemma_4():
    rope = {"rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 0.5, "factor": 2.0}
    ropes = {"full_attention": rope, "sliding_attention": {"rope_theta": 1e4}}
    document = {"model_type": "gemma4_text", "rope_parameters": ropes}
    rotary = huggingface_config.parse_config(document, "x").full.rotary
    assert (rotary.base, rotary.scale, rotary.fraction) == (1e5, 2.0, 0.5)


def test_special_tokens_of_generation_config_of_gemma_4():
    generation = {"eos_token_id": [1, 106, 50], "suppress_tokens": [258_883, 258_882], "top_k": 64}
    config = huggingface_config.parse_config({"model_type": "gemma4_text", "eos_token_id": 1}, "x", generation)
    assert (config.stop_ids, config.suppress_ids) == ((1, 106, 50), (258_883, 258_882))
    small = huggingface_config.parse_config({"model_type": "gemma4_text", "vocab_size": 258_883}, "x", generation)
    assert (small.stop_ids, small.suppress_ids) == ((1, 106, 50), (258_882,))
    with pytest.raises(errors.ConfigError, match="suppress_tokens"):
        huggingface_config.parse_config({"model_type": "gemma4_text"}, "x", {"suppress_tokens": ["a"]})


def test_the_loaded_arrays_do_not_follow_the_file(tmp_path, made, tensors):
    uri = small_checkpoints.write_safetensors(tmp_path, small_checkpoints.new_config(made.config), tensors)
    loaded = load.load_model(uri)
    (tmp_path / "model.safetensors").write_bytes(bytes(10))
    assert all(isinstance(array, jax.Array) for array in jax.tree.leaves(loaded.params))
    wanted = small_checkpoints.leaves(made)
    for path, array in small_checkpoints.leaves(loaded).items():
        assert np.array_equal(array, wanted[path]), path
