"""Which parameters a configuration has: path in the tree, shape, public name, and the shape in which it is stored.

Paths follow Flax linen (`layer_0/attention/q_proj/kernel`), names the public safetensors files without their prefix
(`layers.0.self_attn.q_proj.weight`). A kernel is stored as a matrix [out, in]; in the tree it is the transpose,
reshaped. Everything else lies as it is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses

import jax

from kvgraft_jax.gemma import config as config_lib

Params = dict[str, "jax.Array | Params"]

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
      path: place in the tree, joined with "/"; the last part is "embedding", "kernel" or "scale".
      shape: its shape in the tree.
      name: its public name.
      stored_shape: its shape in a checkpoint.
    """

    path: str
    shape: tuple[int, ...]
    name: str
    stored_shape: tuple[int, ...]

    @property
    def is_kernel(self) -> bool:
        """Whether the tree holds the transpose of the stored matrix."""
        return self.path.endswith("/kernel")

    @property
    def is_scale(self) -> bool:
        """Whether this is the weight of an RMSNorm."""
        return self.path.endswith("/scale")


def parameters(config: config_lib.GemmaConfig) -> tuple[Parameter, ...]:
    """All parameters of a model, sorted by path."""
    D, F, N = config.embed_dim, config.hidden_dim, config.num_heads
    found = [
        Parameter("embedder/embedding", (config.vocab_size, D), EMBEDDING_NAME, (config.vocab_size, D)),
        Parameter("final_norm/scale", (D,), "norm.weight", (D,)),
    ]
    for layer in range(config.num_layers):
        path, name = f"layer_{layer}", f"layers.{layer}"
        K, H = config.attention(layer).num_kv_heads, config.attention(layer).head_dim
        kernels = (
            ("attention/q_proj", "self_attn.q_proj", (D, N, H), (N * H, D)),
            ("attention/k_proj", "self_attn.k_proj", (D, K, H), (K * H, D)),
            ("attention/v_proj", "self_attn.v_proj", (D, K, H), (K * H, D)),
            ("attention/o_proj", "self_attn.o_proj", (N, H, D), (D, N * H)),
            ("mlp/gate_proj", "mlp.gate_proj", (D, F), (F, D)),
            ("mlp/up_proj", "mlp.up_proj", (D, F), (F, D)),
            ("mlp/down_proj", "mlp.down_proj", (F, D), (D, F)),
        )
        found += [Parameter(f"{path}/{p}/kernel", s, f"{name}.{n}.weight", stored) for p, n, s, stored in kernels]
        found += [Parameter(f"{path}/{p}/scale", (D,), f"{name}.{n}.weight", (D,)) for p, n in _NORMS.items()]
        found += [
            Parameter(f"{path}/attention/{norm}/scale", (H,), f"{name}.self_attn.{norm}.weight", (H,))
            for norm in ("q_norm", "k_norm")
        ]
    return tuple(sorted(found, key=lambda parameter: parameter.path))


def nest(leaves: Mapping[str, jax.Array]) -> Params:
    """The nested tree of `{path: array}`."""
    tree: Params = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree
