"""Reads the text part of a Gemma 3 config.json, with its old and new keys, into a `GemmaConfig`."""

from __future__ import annotations

from kvgraft_jax.checkpoints import fields as fields_lib
from kvgraft_jax.checkpoints.hf import layers as layers_lib
from kvgraft_jax.gemma import config as config_lib

_BASES = {"sliding_attention": ("rope_local_base_freq", 1e4), "full_attention": ("rope_theta", 1e6)}


def parse(fields: fields_lib.Fields, name: str) -> config_lib.GemmaConfig:
    """Returns the configuration called `name`; `ConfigError` lists everything that this model does not compute."""
    layers_lib.check_fixed(fields)
    fields.only("use_bidirectional_attention", False, None)
    num_layers = fields.integer("num_hidden_layers", 26)
    heads = fields.integer("num_key_value_heads", 4), fields.integer("head_dim", 256)
    kinds = layers_lib.layer_kinds(fields, num_layers, _period(fields))
    sliding, full = (_rotary(fields, kind, kinds) for kind in _BASES)
    values = dict(
        vocab_size=fields.integer("vocab_size", 262_208),
        embed_dim=fields.integer("hidden_size", 2304),
        hidden_dim=fields.integer("intermediate_size", 9216),
        num_heads=fields.integer("num_attention_heads", 8),
        layer_kinds=kinds,
        query_scale=fields.positive("query_pre_attn_scalar", 256.0) ** -0.5,
        final_softcap=layers_lib.softcap(fields),
        norm_eps=fields.real("rms_norm_eps", 1e-6),
        max_positions=fields.integer("max_position_embeddings", 131_072),
        pad_id=fields.integer("pad_token_id", 0, may_be_null=True),
        bos_id=fields.integer("bos_token_id", 2, may_be_null=True),
    )
    window = fields.integer("sliding_window", 4096)
    fields.check()
    return config_lib.GemmaConfig(
        name=name,
        sliding=config_lib.AttentionConfig(*heads, sliding, window),
        full=config_lib.AttentionConfig(*heads, full),
        **values,
    )


def _period(fields: fields_lib.Fields) -> int:
    found = [fields.take(key) for key in ("sliding_window_pattern", "_sliding_window_pattern")]
    period = next((value for value in found if value is not None), 6)
    if type(period) is not int or period < 1:
        fields.wrong("sliding_window_pattern", period, "a number of layers")
        return 6
    return period


def _rotary(fields: fields_lib.Fields, kind: str, kinds: tuple[str, ...]) -> config_lib.RotaryConfig:
    """Returns the rotary encoding of a kind; where the old keys stand beside the new ones, they must say the same."""
    key, default = _BASES[kind]
    rope = layers_lib.rope_parameters(fields, kind, kinds)
    base, scaling = fields.take(key), fields.take("rope_scaling")
    old = {} if base is None else {"rope_theta": base}
    if kind == "full_attention" and scaling is not None:
        old |= layers_lib.rope_entry(fields, "rope_scaling", scaling, kind) or {}
    rope = dict(old) if rope is None else rope
    for name, value in old.items():
        wanted = rope.setdefault(name, value) if name == "rope_theta" else rope.get(name)
        if value != wanted:
            where = key if name == "rope_theta" else f"rope_scaling: {name}"
            fields.wrong(where, value, f"{wanted!r}, as rope_parameters say of {kind}")
    return layers_lib.rotary(fields, kind, rope, default, ("default", "linear"))
