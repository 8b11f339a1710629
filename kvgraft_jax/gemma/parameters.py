"""Which parameters a configuration has: path in the tree, shape, public name, and the shape in which it is stored.

Paths follow Flax linen (`layer_0/attention/q_proj/kernel`), names the public safetensors files without their prefix
(`layers.0.self_attn.q_proj.weight`). A kernel is stored as a matrix [out, in]; in the tree it is the transpose,
reshaped. Everything else lies as it is stored.

What a product sums over is cut into chunks (`products.chunk_sizes`), so such a leaf of the tree is a tuple of arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import math

import jax
import numpy as np

from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma import products

Leaf = jax.Array | tuple[jax.Array, ...]
Params = dict[str, "Leaf | Params"]

EMBEDDING_NAME = "embed_tokens.weight"
HEAD_NAME = "lm_head.weight"

_NORMS = {
    "pre_attention_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "pre_feedforward_norm": "pre_feedforward_layernorm",
    "post_feedforward_norm": "post_feedforward_layernorm",
}


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter of the model.

    Attributes:
      path: place in the tree, joined with "/".
      shape: its shape in the tree.
      name: its public name.
      stored_shape: its shape in a checkpoint.
      matrices: how many matrices [out, in] the stored tensor is a stack of, each of which lies transposed in the tree;
        0 for a tensor that lies as it is stored.
      summed: the axes over which a product sums, of which the first is the one that is cut; empty without a product.
    """

    path: str
    shape: tuple[int, ...]
    name: str
    stored_shape: tuple[int, ...]
    matrices: int = 0
    summed: tuple[int, ...] = ()

    @property
    def is_scale(self) -> bool:
        """Returns whether this is the weight of an RMSNorm or another factor near 1, not a matrix."""
        return len(self.stored_shape) == 1

    @property
    def chunk_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the arrays that hold it in the tree: only its own where no product sums over it."""
        if not self.summed:
            return (self.shape,)
        axis, *others = self.summed
        unit = math.prod(self.shape[other] for other in others)
        sizes = products.chunk_sizes(self.shape[axis], unit)
        return tuple((*self.shape[:axis], size, *self.shape[axis + 1 :]) for size in sizes)

    def leaf(self, arrays: Sequence[jax.Array]) -> Leaf:
        """Returns the leaf of the tree that these arrays, of the shapes `chunk_shapes`, make up."""
        return tuple(arrays) if self.summed else arrays[0]

    def split(self, array: np.ndarray | jax.Array) -> list[np.ndarray | jax.Array]:
        """Returns the arrays of the shapes `chunk_shapes` in which a whole one lies in the tree."""
        if not self.summed:
            return [array]
        axis = self.summed[0]
        return products.split(array, axis, tuple(shape[axis] for shape in self.chunk_shapes))


def parameters(config: config_lib.GemmaConfig) -> tuple[Parameter, ...]:
    """Returns all parameters of a model, sorted by path."""
    D = config.embed_dim
    found = [
        Parameter("embedder/embedding", (config.vocab_size, D), EMBEDDING_NAME, (config.vocab_size, D), summed=(1,)),
        Parameter("final_norm/scale", (D,), "norm.weight", (D,)),
    ]
    if config.per_layer is not None:
        V, L, P = config.per_layer.vocab_size, config.num_layers, config.per_layer.dim
        path = "per_layer_embedder"
        found += [
            Parameter(f"{path}/embedding", (V, L, P), "embed_tokens_per_layer.weight", (V, L * P)),
            Parameter(f"{path}/proj/kernel", (D, L, P), "per_layer_model_projection.weight", (L * P, D), 1, (0,)),
            Parameter(f"{path}/norm/scale", (P,), "per_layer_projection_norm.weight", (P,)),
        ]
    for layer in range(config.num_layers):
        for p in (*_attention(config, layer), *_feedforward(config, layer)):
            path, name = f"layer_{layer}/{p.path}", f"layers.{layer}.{p.name}"
            found.append(dataclasses.replace(p, path=path, name=name))
    return tuple(sorted(found, key=lambda parameter: parameter.path))


def unused_shapes(config: config_lib.GemmaConfig) -> dict[str, tuple[int, ...]]:
    """Returns the tensors that some exports hold and no model reads: keys and values of layers that share."""
    unused = {}
    for layer in range(config.num_kv_layers, config.num_layers):
        for parameter in _keys_and_values(config, layer):
            unused[f"layers.{layer}.{parameter.name}"] = parameter.stored_shape
    return unused


def _kernel(
    path: str, shape: tuple[int, ...], name: str, stored_shape: tuple[int, int], summed: tuple[int, ...] = (0,)
) -> Parameter:
    return Parameter(f"{path}/kernel", shape, f"{name}.weight", stored_shape, 1, summed)


def _scale(path: str, size: int, name: str) -> Parameter:
    return Parameter(f"{path}/scale", (size,), f"{name}.weight", (size,))


def _attention(config: config_lib.GemmaConfig, layer: int) -> list[Parameter]:
    D, N, H = config.embed_dim, config.num_heads, config.attention(layer).head_dim
    found = [
        _kernel("attention/q_proj", (D, N, H), "self_attn.q_proj", (N * H, D)),
        _kernel("attention/o_proj", (N, H, D), "self_attn.o_proj", (D, N * H), (0, 1)),
        _scale("attention/q_norm", H, "self_attn.q_norm"),
        *(_scale(path, D, name) for path, name in _NORMS.items()),
    ]
    return found + (_keys_and_values(config, layer) if layer < config.num_kv_layers else [])


def _keys_and_values(config: config_lib.GemmaConfig, layer: int) -> list[Parameter]:
    D, attention = config.embed_dim, config.attention(layer)
    K, H = attention.num_kv_heads, attention.head_dim
    sides = ("k",) if attention.values_are_keys else ("k", "v")
    return [
        _scale("attention/k_norm", H, "self_attn.k_norm"),
        *(_kernel(f"attention/{s}_proj", (D, K, H), f"self_attn.{s}_proj", (K * H, D)) for s in sides),
    ]


def _feedforward(config: config_lib.GemmaConfig, layer: int) -> list[Parameter]:
    D, F = config.embed_dim, config.feedforward_dim(layer)
    found = [
        _kernel("mlp/gate_proj", (D, F), "mlp.gate_proj", (F, D)),
        _kernel("mlp/up_proj", (D, F), "mlp.up_proj", (F, D)),
        _kernel("mlp/down_proj", (F, D), "mlp.down_proj", (D, F)),
    ]
    if config.experts is not None:
        E, F = config.experts.num_experts, config.experts.hidden_dim
        found += [
            _kernel("router/proj", (D, E), "router.proj", (E, D)),
            Parameter("router/scale", (D,), "router.scale", (D,)),
            Parameter("router/per_expert_scale", (E,), "router.per_expert_scale", (E,)),
            Parameter("experts/gate_up", (E, D, 2 * F), "experts.gate_up_proj", (E, 2 * F, D), E, (1,)),
            Parameter("experts/down", (E, F, D), "experts.down_proj", (E, D, F), E, (1,)),
            _scale("post_dense_norm", D, "post_feedforward_layernorm_1"),
            _scale("pre_experts_norm", D, "pre_feedforward_layernorm_2"),
            _scale("post_experts_norm", D, "post_feedforward_layernorm_2"),
        ]
    if config.per_layer is not None:
        P = config.per_layer.dim
        found += [
            _kernel("per_layer_input/gate", (D, P), "per_layer_input_gate", (P, D)),
            _kernel("per_layer_input/proj", (P, D), "per_layer_projection", (D, P)),
            _scale("per_layer_input/norm", D, "post_per_layer_input_norm"),
        ]
    if config.layer_scalar:
        found.append(Parameter("layer_scalar", (1,), "layer_scalar", (1,)))
    return found


def nest(leaves: Mapping[str, Leaf]) -> Params:
    """Returns the nested tree of `{path: leaf}`."""
    tree: Params = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def whole(config: config_lib.GemmaConfig, params: Params) -> dict[str, np.ndarray]:
    """Returns every parameter by path, in one piece on the host.

    Exact: bit-exact copy.
    """
    found = {}
    for parameter in parameters(config):
        leaf = params
        for name in parameter.path.split("/"):
            leaf = leaf[name]
        if parameter.summed:
            leaf = np.concatenate([np.asarray(chunk) for chunk in leaf], axis=parameter.summed[0])
        found[parameter.path] = np.asarray(leaf)
    return found
