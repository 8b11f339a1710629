"""Reads the metadata of a Gemma 4 GGUF file into a `GemmaConfig`.

What it leaves out follows from the architecture or the tensors: a quarter of the rotary pairs of full layers rotate
(the file repeats that in rope_freqs.weight), values are keys where the full layers have no value projection (never in
sizes with per-layer embeddings), and the 12B, which is known by its 48 layers, never generates the ends of an image or
of sound.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvgraft_jax.checkpoints import fields as fields_lib
from kvgraft_jax.checkpoints.gguf import header as gguf_header
from kvgraft_jax.checkpoints.gguf import layers as layers_lib
from kvgraft_jax.gemma import config as config_lib

_FRACTION = 0.25
_LAYERS_OF_12B = 48
_SUPPRESSED_BY_12B = (258_883, 258_882)


def parse(
    fields: fields_lib.Fields, name: str, tensors: Mapping[str, gguf_header.StoredTensor]
) -> config_lib.GemmaConfig:
    """Reads configuration `name` from metadata without their prefix; `ConfigError` lists all that is wrong."""
    vocab_size = layers_lib.vocab_size(fields, tensors)
    num_layers, shared = fields.integer("block_count"), fields.integer("attention.shared_kv_layers", 0)
    kinds = layers_lib.layer_kinds(fields, num_layers, None)
    num_owning = num_layers - shared
    is_full = [kind == config_lib.FULL for kind in kinds]
    kv_heads, full_kv_heads = _two(fields, "attention.head_count_kv", is_full)
    shares = [layer >= num_owning for layer in range(num_layers)]
    hidden_dim, shared_hidden_dim = _two(fields, "feed_forward_length", shares)
    full_width, width = fields.integer("attention.key_length"), fields.integer("attention.key_length_swa")
    for suffix, head_dim in (("", full_width), ("_swa", width)):
        fields.only(f"attention.value_length{suffix}", head_dim)
        fields.only(f"rope.dimension_count{suffix}", head_dim)
    fields.only("attn_logit_softcapping", 0.0)
    fields.only("rope.scaling.type", "none")
    full_rotary = config_lib.RotaryConfig(layers_lib.rotary_base(fields, "rope.freq_base"), fraction=_FRACTION)
    rotary = config_lib.RotaryConfig(layers_lib.rotary_base(fields, "rope.freq_base_swa", 1e4))
    window = fields.integer("attention.sliding_window")
    values = dict(
        embed_dim=fields.integer("embedding_length"),
        num_heads=fields.integer("attention.head_count"),
        final_softcap=layers_lib.decimal(fields.real("final_logit_softcapping", 0.0)) or None,
        norm_eps=layers_lib.decimal(fields.real("attention.layer_norm_rms_epsilon")),
        per_layer=_per_layer(fields, tensors, vocab_size),
        experts=_experts(fields),
        max_positions=fields.integer("context_length"),
    )
    fields.check()
    values_of = {f"blk.{i}.attn_v.weight" for i in range(num_owning) if is_full[i]}
    values_are_keys = values["per_layer"] is None and bool(values_of) and values_of.isdisjoint(tensors)
    is_12b = num_layers == _LAYERS_OF_12B
    return config_lib.GemmaConfig(
        name=name,
        vocab_size=vocab_size,
        hidden_dim=hidden_dim,
        shared_hidden_dim=None if shared_hidden_dim == hidden_dim else shared_hidden_dim,
        layer_kinds=kinds,
        sliding=config_lib.AttentionConfig(kv_heads, width, rotary, window),
        full=config_lib.AttentionConfig(full_kv_heads, full_width, full_rotary, values_are_keys=values_are_keys),
        query_scale=1.0,
        norm_plus_one=False,
        value_norm=True,
        layer_scalar=True,
        num_kv_shared_layers=shared,
        suppress_ids=tuple(token for token in _SUPPRESSED_BY_12B if is_12b and token < vocab_size),
        **values,
    )


def _two(fields: fields_lib.Fields, key: str, is_second: list[bool]) -> tuple[int, int]:
    """Reads the number under `key` for the first and the second group of layers, from one for all or one per layer."""
    value = fields.take(key)
    if not isinstance(value, np.ndarray):
        number = fields.integer(key)
        return number, number
    numbers = value.tolist() if value.shape == (len(is_second),) and value.dtype.kind in "iu" else []
    pairs = set(zip(is_second, numbers, strict=False))
    groups = [{number for second, number in pairs if second == which} for which in (False, True)]
    first, second = groups[0] or groups[1], groups[1] or groups[0]
    if len(first) != 1 or len(second) != 1:
        fields.wrong(key, value.tolist(), f"a number, or {len(is_second)} of them, alike in layers of one sort")
        return 1, 1
    return min(first), min(second)


def _per_layer(
    fields: fields_lib.Fields, tensors: Mapping[str, gguf_header.StoredTensor], vocab_size: int
) -> config_lib.PerLayerConfig | None:
    dim, table = fields.integer("embedding_length_per_layer_input", 0), tensors.get("per_layer_token_embd.weight")
    return config_lib.PerLayerConfig(table.shape[0] if table else vocab_size, dim) if dim else None


def _experts(fields: fields_lib.Fields) -> config_lib.ExpertsConfig | None:
    count = fields.integer("expert_count", 0)
    if not count:
        fields.ignore(["expert_used_count", "expert_feed_forward_length"])
        return None
    used, width = fields.integer("expert_used_count"), fields.integer("expert_feed_forward_length")
    if not 0 < used <= count:
        fields.wrong("expert_used_count", used, f"1 to {count}, the number of experts")
        return None
    return config_lib.ExpertsConfig(count, used, width)
