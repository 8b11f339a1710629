"""Which of DeepMind's arrays holds each parameter: its name, its axes, and their order in the public tensor.

A name here is a path without wrappers and without a last "/w", which one layout has and another has not:
`layer_3/attn/q_einsum`. The axes go by the letters of `notation`; 2 is a pair (key and value, or gate and
up).
"""

from __future__ import annotations

import dataclasses

from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma import parameters as parameters_lib


@dataclasses.dataclass(frozen=True)
class Place:
    """Where one public tensor lies in a DeepMind checkpoint.

    Attributes:
      array: name of the array.
      array_shape: its shape; without the leading axis where layers are stacked.
      part: index on the first axis, where the array holds a pair; None for the whole array.
      order: axes of that, permuted so that a reshape to `shape` gives the public tensor.
      shape: stored shape of the public tensor.
      is_optional: whether the model does without it.
    """

    array: str
    array_shape: tuple[int, ...]
    part: int | None
    order: tuple[int, ...]
    shape: tuple[int, ...]
    is_optional: bool


@dataclasses.dataclass(frozen=True)
class _Row:
    array: str
    axes: str
    order: str
    part: int | None = None


_TOP = {
    parameters_lib.EMBEDDING_NAME: _Row("embedder/input_embedding", "VD", "VD"),
    "norm.weight": _Row("final_norm/scale", "D", "D"),
    "embed_tokens_per_layer.weight": _Row("embedder/per_layer_embeddings", "ULP", "ULP"),
    "per_layer_model_projection.weight": _Row("embedder/per_layer_model_projection", "DLP", "LPD"),
    "per_layer_projection_norm.weight": _Row("embedder/per_layer_projection_norm/scale", "P", "P"),
}
_LAYER = {
    "self_attn.q_proj.weight": _Row("attn/q_einsum", "NDH", "NHD"),
    "self_attn.k_proj.weight": _Row("attn/kv_einsum", "2KDH", "KHD", 0),
    "self_attn.v_proj.weight": _Row("attn/kv_einsum", "2KDH", "KHD", 1),
    "self_attn.o_proj.weight": _Row("attn/attn_vec_einsum", "NHD", "DNH"),
    "self_attn.q_norm.weight": _Row("attn/query_norm/scale", "H", "H"),
    "self_attn.k_norm.weight": _Row("attn/key_norm/scale", "H", "H"),
    "input_layernorm.weight": _Row("pre_attention_norm/scale", "D", "D"),
    "post_attention_layernorm.weight": _Row("post_attention_norm/scale", "D", "D"),
    "pre_feedforward_layernorm.weight": _Row("pre_ffw_norm/scale", "D", "D"),
    "post_feedforward_layernorm.weight": _Row("post_ffw_norm/scale", "D", "D"),
    "mlp.gate_proj.weight": _Row("mlp/gating_einsum", "2FD", "FD", 0),
    "mlp.up_proj.weight": _Row("mlp/gating_einsum", "2FD", "FD", 1),
    "mlp.down_proj.weight": _Row("mlp/linear", "FD", "DF"),
    "per_layer_input_gate.weight": _Row("per_layer_input_gate", "DP", "PD"),
    "per_layer_projection.weight": _Row("per_layer_projection", "PD", "DP"),
    "post_per_layer_input_norm.weight": _Row("post_per_layer_input_norm/scale", "D", "D"),
    "layer_scalar": _Row("skip_scale", "1", "1"),
}
_GEMMA3 = {
    "self_attn.q_norm.weight": _Row("attn/_query_norm/scale", "H", "H"),
    "self_attn.k_norm.weight": _Row("attn/_key_norm/scale", "H", "H"),
}
_VALUES_ARE_KEYS = {"self_attn.k_proj.weight": _Row("attn/k_einsum", "KDH", "KHD")}
# Where there are experts, DeepMind's `mlp` is they, and `mlp2` the dense layer; the norms are numbered likewise.
_EXPERTS = {
    "experts.gate_up_proj": _Row("mlp/gating_einsum", "E2XD", "E2XD"),
    "experts.down_proj": _Row("mlp/linear", "EXD", "EDX"),
    "router.proj.weight": _Row("mlp/router_logits", "DE", "ED"),
    "router.scale": _Row("mlp/router_scale", "D", "D"),
    "router.per_expert_scale": _Row("mlp/per_expert_scale", "E", "E"),
    "mlp.gate_proj.weight": _Row("mlp2/gating_einsum", "2FD", "FD", 0),
    "mlp.up_proj.weight": _Row("mlp2/gating_einsum", "2FD", "FD", 1),
    "mlp.down_proj.weight": _Row("mlp2/linear", "FD", "DF"),
    "pre_feedforward_layernorm.weight": _Row("pre_ffw2_norm/scale", "D", "D"),
    "pre_feedforward_layernorm_2.weight": _Row("pre_ffw_norm/scale", "D", "D"),
    "post_feedforward_layernorm_1.weight": _Row("post_ffw2_norm/scale", "D", "D"),
    "post_feedforward_layernorm_2.weight": _Row("post_ffw1_norm/scale", "D", "D"),
}


def places(config: config_lib.GemmaConfig) -> dict[str, Place]:
    """Says where every parameter of `config` lies, by public name; tensors that exist but are not read are optional."""
    needed = {parameter.name: parameter.stored_shape for parameter in parameters_lib.parameters(config)}
    unused = parameters_lib.unused_shapes(config)
    return {name: _place(config, name, shape, name in unused) for name, shape in (needed | unused).items()}


def _place(config: config_lib.GemmaConfig, name: str, shape: tuple[int, ...], is_optional: bool) -> Place:
    layer, prefix, row = 0, "", _TOP.get(name)
    if row is None:
        _, number, below = name.split(".", 2)
        layer, prefix = int(number), f"layer_{number}/"
        row = _rows(config, layer)[below]
    sizes = _sizes(config, layer)
    axes = row.axes if row.part is None else row.axes[1:]
    return Place(
        array=prefix + row.array,
        array_shape=tuple(sizes[axis] for axis in row.axes),
        part=row.part,
        order=tuple(axes.index(axis) for axis in row.order),
        shape=shape,
        is_optional=is_optional,
    )


def _rows(config: config_lib.GemmaConfig, layer: int) -> dict[str, _Row]:
    rows = dict(_LAYER)
    if config.norm_plus_one:
        rows |= _GEMMA3
    if config.attention(layer).values_are_keys:
        rows |= _VALUES_ARE_KEYS
    if config.experts is not None:
        rows |= _EXPERTS
    return rows


def _sizes(config: config_lib.GemmaConfig, layer: int) -> dict[str, int]:
    attention = config.attention(layer)
    sizes = {
        "1": 1,
        "2": 2,
        "D": config.embed_dim,
        "F": config.feedforward_dim(layer),
        "H": attention.head_dim,
        "K": attention.num_kv_heads,
        "L": config.num_layers,
        "N": config.num_heads,
        "V": config.vocab_size,
    }
    if config.experts is not None:
        sizes |= {"E": config.experts.num_experts, "X": config.experts.hidden_dim}
    if config.per_layer is not None:
        sizes |= {"P": config.per_layer.dim, "U": config.per_layer.vocab_size}
    return sizes
