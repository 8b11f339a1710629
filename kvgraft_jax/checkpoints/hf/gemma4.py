"""Reads the text part of a Gemma 4 config.json, of the official files or saved again, into a `GemmaConfig`."""

from __future__ import annotations

from kvgraft_jax.checkpoints import fields as fields_lib
from kvgraft_jax.checkpoints.hf import layers as layers_lib
from kvgraft_jax.gemma import config as config_lib

_DEFAULT_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_EXPERT_KEYS = ("num_experts", "top_k_experts", "moe_intermediate_size", "expert_intermediate_size")
_PER_LAYER_KEYS = ("hidden_size_per_layer_input", "vocab_size_per_layer_input")


def parse(fields: fields_lib.Fields, name: str, is_unified: bool) -> config_lib.GemmaConfig:
    """Returns the configuration called `name`.

    Args:
      fields: the text part.
      name: name of the result.
      is_unified: it belongs to the class that reads images and audio without encoders; that one has other defaults,
        and neither experts nor per-layer embeddings.

    Raises:
      ConfigError: everything that this model does not compute, in one error.
    """
    layers_lib.check_fixed(fields)
    fields.only("use_bidirectional_attention", "vision", None, False)  # Among image tokens only.
    num_layers = fields.integer("num_hidden_layers", 30)
    kinds = layers_lib.layer_kinds(fields, num_layers, 6)[:-1] + (config_lib.FULL,)
    values_are_keys = fields.flag("attention_k_eq_v")
    heads = _heads(fields, kinds, values_are_keys)
    sliding, full = (
        layers_lib.rotary(
            fields,
            kind,
            layers_lib.rope_parameters(fields, kind, kinds) or dict(default),
            default["rope_theta"],
            ("default", "linear", "proportional"),
        )
        for kind, default in _DEFAULT_ROPES.items()
    )
    hidden_dim = fields.integer("intermediate_size", 9216)
    values = dict(
        vocab_size=fields.integer("vocab_size", 262_144),
        embed_dim=fields.integer("hidden_size", 2304),
        hidden_dim=hidden_dim,
        num_heads=fields.integer("num_attention_heads", 8),
        layer_kinds=kinds,
        final_softcap=layers_lib.softcap(fields),
        norm_eps=fields.real("rms_norm_eps", 1e-6),
        num_kv_shared_layers=fields.integer("num_kv_shared_layers", 0, may_be_null=True),
        shared_hidden_dim=2 * hidden_dim if fields.flag("use_double_wide_mlp") else None,
        max_positions=fields.integer("max_position_embeddings", 262_144 if is_unified else 131_072),
        pad_id=fields.integer("pad_token_id", 0, may_be_null=True),
        bos_id=fields.integer("bos_token_id", 2, may_be_null=True),
    )
    window = fields.integer("sliding_window", 1024 if is_unified else 512)
    if is_unified:
        fields.only("enable_moe_block", False, None)
        fields.only("hidden_size_per_layer_input", 0, None)
        fields.ignore((*_EXPERT_KEYS, *_PER_LAYER_KEYS))
    else:
        values |= dict(experts=_experts(fields), per_layer=_per_layer(fields))
    fields.check()
    return config_lib.GemmaConfig(
        name=name,
        sliding=config_lib.AttentionConfig(*heads[config_lib.SLIDING], sliding, window),
        full=config_lib.AttentionConfig(*heads[config_lib.FULL], full, values_are_keys=values_are_keys),
        query_scale=1.0,
        norm_plus_one=False,
        value_norm=True,
        layer_scalar=True,
        **values,
    )


def _heads(fields: fields_lib.Fields, kinds: tuple[str, ...], values_are_keys: bool) -> dict[str, tuple[int, int]]:
    """Reads key/value heads and head width of either attention kind."""
    usual = fields.integer("num_key_value_heads", 4), fields.integer("head_dim", 256)
    full = usual[0], fields.integer("global_head_dim", 512)
    key = "num_global_key_value_heads"
    if fields.take(key) is not None and values_are_keys:
        full = fields.integer(key), full[1]
    overrides = fields.take("per_layer_config")
    if overrides is None:
        return {config_lib.SLIDING: usual, config_lib.FULL: full}
    per_layer = _overrides(fields, overrides, len(kinds))
    found = {config_lib.SLIDING: usual, config_lib.FULL: usual}
    for kind in found:
        layers = [per_layer.get(layer, {}) for layer in range(len(kinds)) if kinds[layer] == kind]
        heads = {(entry.get("num_key_value_heads", usual[0]), entry.get("head_dim", usual[1])) for entry in layers}
        if len(heads) > 1:
            fields.problems.append(f"per_layer_config: {kind} layers differ among themselves; wanted all of them alike")
        elif heads:
            (found[kind],) = heads
    return found


def _overrides(fields: fields_lib.Fields, overrides: object, num_layers: int) -> dict[int, dict[str, int]]:
    """Returns the entries of `per_layer_config` by layer; its keys may have leading zeros."""
    found = {}
    for key, entry in overrides.items() if isinstance(overrides, dict) else [("", overrides)]:
        is_layer = key.isascii() and key.isdecimal() and int(key) < num_layers and int(key) not in found
        if (
            not is_layer
            or not isinstance(entry, dict)
            or set(entry) - {"head_dim", "num_key_value_heads"}
            or any(type(value) is not int for value in entry.values())
        ):
            fields.wrong("per_layer_config", {key: entry}, "a layer with its head_dim and num_key_value_heads")
        else:
            found[int(key)] = entry
    return found


def _experts(fields: fields_lib.Fields) -> config_lib.ExpertsConfig | None:
    if not fields.flag("enable_moe_block"):
        fields.ignore(_EXPERT_KEYS)
        return None
    widths = [key for key in _EXPERT_KEYS[2:] if fields.take(key) is not None] or ["moe_intermediate_size"]
    num_experts, top_k, *hidden_dims = (fields.integer(key) for key in (*_EXPERT_KEYS[:2], *widths))
    if len(set(hidden_dims)) > 1:
        fields.problems.append(f"{' and '.join(widths)}: got {hidden_dims}, wanted one width")
    if not 0 < top_k <= num_experts:
        fields.wrong("top_k_experts", top_k, f"1 to {num_experts}, the number of experts")
        return None
    return config_lib.ExpertsConfig(num_experts, top_k, hidden_dims[0])


def _per_layer(fields: fields_lib.Fields) -> config_lib.PerLayerConfig | None:
    width, rows = _PER_LAYER_KEYS
    vocab_size = fields.integer(rows, 262_144, may_be_null=True)
    if fields.values.get(width, 256) in (0, None):
        fields.ignore([width])
        return None
    return config_lib.PerLayerConfig(vocab_size, fields.integer(width, 256))
