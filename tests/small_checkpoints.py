"""Writes small checkpoints in every format from one set of weights, for the tests of the loaders."""

from __future__ import annotations

from collections.abc import Mapping
import json
import pathlib

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from experiments.bench import export
from kvgraft_jax.checkpoints import load
from kvgraft_jax.checkpoints.gguf import file as gguf_file
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma import parameters as parameters_lib
from kvgraft_jax.runtime import model as model_lib

URI = "random:gemma-3-4b?layers=7&vocab=97&embed=64&hidden=96&heads=4&kv_heads=2&head_dim=32&window=5&seed=3"
_SMALL = "vocab=97&embed=64&hidden=96&heads=4&kv_heads=2&head_dim=32&window=5&seed=3"
SMALL_URIS = {
    "gemma-3-270m": f"random:gemma-3-270m?layers=7&{_SMALL}",
    "gemma-3-1b": f"random:gemma-3-1b?layers=3&{_SMALL}",
    "gemma-3-4b": f"random:gemma-3-4b?layers=7&{_SMALL}",
    "gemma-3-12b": f"random:gemma-3-12b?layers=6&{_SMALL}",
    "gemma-3-27b": f"random:gemma-3-27b?layers=6&{_SMALL}",
    "gemma-4-e2b": f"random:gemma-4-e2b?layers=10&per_layer=8&{_SMALL}",
    "gemma-4-e4b": f"random:gemma-4-e4b?layers=12&per_layer=8&{_SMALL}",
    "gemma-4-12b": f"random:gemma-4-12b?layers=6&{_SMALL}",
    "gemma-4-31b": f"random:gemma-4-31b?layers=6&{_SMALL}".replace("kv_heads=2", "kv_heads=4"),
    "gemma-4-26b-a4b": f"random:gemma-4-26b-a4b?layers=6&experts=12&{_SMALL}",
}
BF16 = np.dtype(jnp.bfloat16)


def leaves(model: model_lib.Model) -> dict[str, np.ndarray]:
    """Returns the parameters by path, each in one piece."""
    return parameters_lib.whole(model.config, model.params)


stored = export.tensors


@pytest.fixture(scope="module")
def made() -> model_lib.Model:
    """Returns a small model, from a seed."""
    return load.load_model(URI)


@pytest.fixture(scope="module")
def tensors(made: model_lib.Model) -> dict[str, np.ndarray]:
    """Its weights under their public names."""
    return export.tensors(made)


def new_config(config: config_lib.GemmaConfig) -> dict:
    """config.json with today's keys."""
    return export.config_document(config) | {"eos_token_id": [1]}


def gemma4_config(config: config_lib.GemmaConfig) -> dict:
    """config.json of a Gemma 4 as in the official files, inside that of a multimodal model."""
    is_unified = config.name == "gemma-4-12b"
    per_layer, experts = config.per_layer, config.experts
    text = new_config(config) | {
        "model_type": "gemma4_unified_text" if is_unified else "gemma4_text",
        "num_key_value_heads": config.sliding.num_kv_heads,
        "num_global_key_value_heads": config.full.num_kv_heads if config.full.values_are_keys else None,
        "head_dim": config.sliding.head_dim,
        "global_head_dim": config.full.head_dim,
        "attention_k_eq_v": config.full.values_are_keys,
        "num_kv_shared_layers": config.num_kv_shared_layers,
        "use_double_wide_mlp": config.shared_hidden_dim is not None,
        "final_logit_softcapping": config.final_softcap,
        "attention_bias": False,
        "use_bidirectional_attention": "vision" if config.full.values_are_keys else None,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        },
    }
    del text["query_pre_attn_scalar"], text["architectures"]
    if not is_unified:
        text |= {
            "hidden_size_per_layer_input": per_layer.dim if per_layer else 0,
            "vocab_size_per_layer_input": per_layer.vocab_size if per_layer else 262_144,
            "enable_moe_block": experts is not None,
            "num_experts": experts.num_experts if experts else None,
            "top_k_experts": experts.top_k if experts else None,
            "expert_intermediate_size": experts.hidden_dim if experts else None,
        }
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4_unified" if is_unified else "gemma4",
        "text_config": text,
        "vision_config": {"hidden_size": 8},
        "audio_config": None,
        "image_token_id": 258_880,
        "eos_token_id": [1],
        "tie_word_embeddings": True,
    }


def gemma4_saved_again(config: config_lib.GemmaConfig) -> dict:
    """Returns the same as a text model that was saved again: overrides for each full layer, with padded numbers."""
    text = gemma4_config(config)["text_config"]
    del text["global_head_dim"], text["num_global_key_value_heads"]
    if config.experts is not None:
        text["moe_intermediate_size"] = text.pop("expert_intermediate_size")
    own = {"head_dim": config.full.head_dim, "num_key_value_heads": config.full.num_kv_heads}
    full = [layer for layer, kind in enumerate(config.layer_kinds) if kind == config_lib.FULL]
    width = len(str(config.num_layers - 1))
    return text | {"per_layer_config": {f"{layer:0{width}}": own for layer in full}}


def unused(config: config_lib.GemmaConfig) -> dict[str, np.ndarray]:
    """Returns the keys and values of layers that share, as some exports hold them."""
    found = {}
    for layer in range(config.num_kv_layers, config.num_layers):
        heads, width = config.attention(layer).num_kv_heads, config.attention(layer).head_dim
        found[f"layers.{layer}.self_attn.k_norm.weight"] = np.ones(width, BF16)
        for side in "kv":
            shape = (heads * width, config.embed_dim)
            found[f"layers.{layer}.self_attn.{side}_proj.weight"] = np.ones(shape, BF16)
    return found


def old_config(config: config_lib.GemmaConfig) -> dict:
    """Returns the same with the keys of the first release, inside the wrapper of a multimodal model."""
    text = new_config(config)
    del text["layer_types"], text["rope_parameters"], text["eos_token_id"]
    text |= {
        "rope_theta": config.full.rotary.base,
        "rope_local_base_freq": config.sliding.rotary.base,
        "rope_scaling": {"factor": config.full.rotary.scale, "rope_type": "linear"},
        "sliding_window_pattern": 6,
    }
    return {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 8}, "eos_token_id": [1]}


def write_safetensors(
    directory: pathlib.Path,
    config_json: dict,
    tensors: Mapping[str, np.ndarray],
    prefix: str = "model.",
    shards: int = 1,
    extra: Mapping[str, np.ndarray] | None = None,
) -> str:
    """Writes a directory as on the Hub; returns its URI."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_json))
    named = {name if name == "lm_head.weight" else prefix + name: array for name, array in tensors.items()}
    named |= extra or {}
    if shards == 1:
        safetensors_numpy.save_file(named, directory / "model.safetensors")
        return f"hf:{directory}"
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        names = sorted(named)[shard::shards]
        safetensors_numpy.save_file({name: named[name] for name in names}, directory / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return f"hf:{directory}"


def gguf_metadata(config: config_lib.GemmaConfig) -> dict[str, object]:
    """Returns the metadata of a GGUF file."""
    full, sliding = config.full, config.sliding
    values = {
        "context_length": config.max_positions,
        "embedding_length": config.embed_dim,
        "block_count": config.num_layers,
        "feed_forward_length": config.hidden_dim,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": full.num_kv_heads,
        "attention.key_length": full.head_dim,
        "attention.value_length": full.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "attention.sliding_window": sliding.window,
        "rope.freq_base": full.rotary.base,
    }
    if config.norm_plus_one:
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": full.rotary.scale}
        return {f"gemma3.{key}": value for key, value in values.items()}
    values |= {
        "attention.key_length_swa": sliding.head_dim,
        "attention.value_length_swa": sliding.head_dim,
        "attention.sliding_window_pattern": [kind == config_lib.SLIDING for kind in config.layer_kinds],
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": config.per_layer.dim if config.per_layer else 0,
        "rope.freq_base_swa": sliding.rotary.base,
        "rope.dimension_count": full.head_dim,
        "rope.dimension_count_swa": sliding.head_dim,
        "final_logit_softcapping": config.final_softcap,
    }
    if config.shared_hidden_dim is not None:
        values["feed_forward_length"] = [config.feedforward_dim(layer) for layer in range(config.num_layers)]
    if full.num_kv_heads != sliding.num_kv_heads:
        layers = range(config.num_layers)
        values["attention.head_count_kv"] = [config.attention(layer).num_kv_heads for layer in layers]
    if config.experts is not None:
        values |= {
            "expert_count": config.experts.num_experts,
            "expert_used_count": config.experts.top_k,
            "expert_feed_forward_length": config.experts.hidden_dim,
        }
    return {f"gemma4.{key}": value for key, value in values.items()}


def write_gguf(
    path: pathlib.Path,
    config: config_lib.GemmaConfig,
    tensors: Mapping[str, np.ndarray],
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: Mapping[str, object] | None = None,
    split_experts: bool = False,
) -> str:
    """Writes a GGUF file, matrices in `kind`, vectors as float32, norms of Gemma 3 shifted by one; returns its URI."""
    writer = gguf.GGUFWriter(path, "gemma3" if config.norm_plus_one else "gemma4")
    for key, value in (gguf_metadata(config) | (metadata or {})).items():
        if value is None:
            continue
        add = {str: writer.add_string, float: writer.add_float32, bool: writer.add_bool, int: writer.add_uint32}
        add.get(type(value), writer.add_array)(key, value)
    named = {}
    for name, array in tensors.items():
        if split_experts and name.endswith("experts.gate_up_proj"):
            stem = gguf_name(name).removesuffix("gate_up_exps.weight")
            named[f"{stem}gate_exps.weight"], named[f"{stem}up_exps.weight"] = np.split(array, 2, axis=1)
        else:
            named[gguf_name(name)] = array
    for name, array in named.items():
        as_float = np.ascontiguousarray(array.astype(np.float32))
        if array.ndim > 1:
            writer.add_tensor(name, gguf.quants.quantize(as_float, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, as_float + np.float32(config.norm_plus_one))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return f"gguf:{path}"


def rotary_divisors(config: config_lib.GemmaConfig) -> dict[str, np.ndarray]:
    """Returns the tensor in which a Gemma 4 GGUF file repeats which pairs of a full layer rotate."""
    pairs = config.full.head_dim // 2
    return {"rope_freqs.weight": np.where(np.arange(pairs) < pairs // 4, 1, 1e30).astype(np.float32)}


def gguf_name(name: str) -> str:
    """Returns the name of a tensor in GGUF; one that has no public name stays as it is."""
    tops = {public: name for name, public in gguf_file._TOP.items()}
    blocks = {public: name for name, public in gguf_file._BLOCK.items()}
    if not name.startswith("layers."):
        return tops.get(name, name)
    _, layer, rest = name.split(".", 2)
    return f"blk.{layer}.{blocks[rest]}"
