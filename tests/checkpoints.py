"""Writes small checkpoints in every format from one set of weights, for the tests of the loaders."""

from __future__ import annotations

from collections.abc import Mapping
import json
import pathlib

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from experiments.benchmark import export
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma import model
from kvgraft_jax.gemma.weights import gguf_file, layout

URI = "random:gemma-3-4b?layers=7&vocab=97&embed=64&hidden=96&heads=4&kv_heads=2&head_dim=32&window=5&seed=3"
BF16 = np.dtype(jnp.bfloat16)


def leaves(params: layout.Params) -> dict[str, jax.Array]:
    """The parameters by path."""
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    return {"/".join(key.key for key in path): leaf for path, leaf in flat}


@pytest.fixture(scope="module")
def made() -> model.Model:
    """A small model, from a seed."""
    return model.load_model(URI)


@pytest.fixture(scope="module")
def tensors(made: model.Model) -> dict[str, np.ndarray]:
    """Its weights under their public names."""
    return export.tensors(made)


def new_config(config: config_lib.GemmaConfig) -> dict:
    """config.json with today's keys."""
    return export.config_document(config) | {"eos_token_id": [1]}


def old_config(config: config_lib.GemmaConfig) -> dict:
    """The same with the keys of the first release, inside the wrapper of a multimodal model."""
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
    """A directory as on the Hub; returns its URI."""
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


def write_gguf(
    path: pathlib.Path,
    config: config_lib.GemmaConfig,
    tensors: Mapping[str, np.ndarray],
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: Mapping[str, object] | None = None,
) -> str:
    """A GGUF file with every matrix in `kind` and the norms as float32, shifted by one; returns its URI."""
    writer = gguf.GGUFWriter(path, "gemma3")
    values = {
        "gemma3.context_length": config.max_positions,
        "gemma3.embedding_length": config.embed_dim,
        "gemma3.block_count": config.num_layers,
        "gemma3.feed_forward_length": config.hidden_dim,
        "gemma3.attention.head_count": config.num_heads,
        "gemma3.attention.head_count_kv": config.full.num_kv_heads,
        "gemma3.attention.key_length": config.full.head_dim,
        "gemma3.attention.value_length": config.full.head_dim,
        "gemma3.attention.layer_norm_rms_epsilon": config.norm_eps,
        "gemma3.attention.sliding_window": config.sliding.window,
        "gemma3.rope.freq_base": config.full.rotary.base,
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": config.full.rotary.scale,
    } | (metadata or {})
    for key, value in values.items():
        if value is None:
            continue
        add = {str: writer.add_string, float: writer.add_float32, bool: writer.add_bool, int: writer.add_uint32}
        add.get(type(value), writer.add_array)(key, value)
    for name, array in tensors.items():
        as_float = array.astype(np.float32)
        if name.endswith("norm.weight"):
            writer.add_tensor(gguf_name(name), as_float + np.float32(1))
        else:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(as_float, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return f"gguf:{path}"


def gguf_name(name: str) -> str:
    """The name of a tensor in GGUF."""
    tops = {public: name for name, public in gguf_file._TOP.items()}
    if name in tops:
        return tops[name]
    blocks = {public: name for name, public in gguf_file._BLOCK.items()}
    _, layer, rest = name.split(".", 2)
    return f"blk.{layer}.{blocks[rest.removesuffix('.weight')]}.weight"
