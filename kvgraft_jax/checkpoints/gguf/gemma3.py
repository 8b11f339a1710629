"""Reads the metadata of a Gemma 3 GGUF file into a `GemmaConfig`.

What it leaves out follows from the architecture: every sixth layer is full, sliding layers have rotary base 10000, a
rotary scaling factor without a type is linear, and the query scale is head_dim^-0.5, except in the 27B, which is known
by its 62 layers.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvgraft_jax.checkpoints import fields as fields_lib
from kvgraft_jax.checkpoints.gguf import header as gguf_header
from kvgraft_jax.checkpoints.gguf import layers as layers_lib
from kvgraft_jax.gemma import config as config_lib

_LAYERS_OF_27B = 62


def parse(
    fields: fields_lib.Fields, name: str, tensors: Mapping[str, gguf_header.StoredTensor]
) -> config_lib.GemmaConfig:
    """Reads configuration `name` from metadata without their prefix; `ConfigError` lists all that is wrong."""
    vocab_size = layers_lib.vocab_size(fields, tensors)
    layers, heads = fields.integer("block_count"), fields.integer("attention.head_count")
    kv_heads, head_dim = fields.integer("attention.head_count_kv"), fields.integer("attention.key_length")
    width, window = fields.integer("embedding_length"), fields.integer("attention.sliding_window")
    fields.only("attention.value_length", head_dim)
    fields.only("rope.dimension_count", head_dim)
    fields.only("attn_logit_softcapping", 0.0)
    fields.only("final_logit_softcapping", 0.0)
    fields.only("rope.scaling.type", "none", "linear")
    fields.ignore(["rope.scaling.factor"])
    scaling = fields.values.get("rope.scaling.type", "linear" if "rope.scaling.factor" in fields.values else "none")
    scale = layers_lib.decimal(fields.positive("rope.scaling.factor")) if scaling == "linear" else 1.0
    full_rotary = config_lib.RotaryConfig(layers_lib.rotary_base(fields, "rope.freq_base"), scale)
    local_rotary = config_lib.RotaryConfig(layers_lib.rotary_base(fields, "rope.freq_base_swa", 1e4))
    values = dict(
        hidden_dim=fields.integer("feed_forward_length"),
        layer_kinds=layers_lib.layer_kinds(fields, layers, 6),
        norm_eps=layers_lib.decimal(fields.real("attention.layer_norm_rms_epsilon")),
        max_positions=fields.integer("context_length"),
    )
    fields.check()
    return config_lib.GemmaConfig(
        name=name,
        vocab_size=vocab_size,
        embed_dim=width,
        num_heads=heads,
        sliding=config_lib.AttentionConfig(kv_heads, head_dim, local_rotary, window),
        full=config_lib.AttentionConfig(kv_heads, head_dim, full_rotary),
        query_scale=float(width // heads if layers == _LAYERS_OF_27B else head_dim) ** -0.5,
        **values,
    )
