"""Writes a model's parameters as a Hugging Face checkpoint, so that a peer runs the very same weights."""

from __future__ import annotations

import json
import pathlib

import numpy as np
from safetensors import numpy as safetensors_numpy

from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma import parameters as parameters_lib
from kvgraft_jax.runtime import model as model_lib


def export(model: model_lib.Model, directory: pathlib.Path) -> None:
    """Writes config.json and model.safetensors, in the model's dtype, without tokenizer files.

    Exact: bit-exact: loading `hf:directory` gives the same weight digest.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_document(model.config), indent=1))
    named = {f"model.{name}": array for name, array in tensors(model).items()}
    safetensors_numpy.save_file(named, directory / "model.safetensors", metadata={"format": "pt"})


def tensors(model: model_lib.Model) -> dict[str, np.ndarray]:
    """Returns the weights under their public names, in their stored shapes."""
    leaves, found = parameters_lib.whole(model.config, model.params), {}
    for parameter in parameters_lib.parameters(model.config):
        array = leaves[parameter.path]
        if parameter.matrices:
            array = array.reshape(parameter.matrices, parameter.stored_shape[-1], -1).swapaxes(1, 2)
        found[parameter.name] = np.ascontiguousarray(array.reshape(parameter.stored_shape))
    return found


def config_document(config: config_lib.GemmaConfig) -> dict[str, object]:
    """Returns the config.json of a Gemma 3 text model."""

    def rotary(attention: config_lib.AttentionConfig) -> dict[str, str | float]:
        scaling = {"rope_type": "default"}
        if attention.rotary.scale != 1:
            scaling = {"rope_type": "linear", "factor": attention.rotary.scale}
        return {**scaling, "rope_theta": attention.rotary.base}

    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.hidden_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.full.num_kv_heads,
        "head_dim": config.full.head_dim,
        "query_pre_attn_scalar": round(config.query_scale**-2),
        "sliding_window": config.sliding.window,
        "max_position_embeddings": config.max_positions,
        "layer_types": [f"{kind}_attention" for kind in config.layer_kinds],
        "rope_parameters": {
            "sliding_attention": rotary(config.sliding),
            "full_attention": rotary(config.full),
        },
        "rms_norm_eps": config.norm_eps,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "pad_token_id": config.pad_id,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.stop_ids),
    }
