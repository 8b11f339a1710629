"""Routed experts: each token goes through the few feed-forward layers that its router chooses, beside the dense one."""

from __future__ import annotations

from flax import linen as nn
import jax
from jax import lax
import jax.numpy as jnp

from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma import layers, products


class Router(nn.Module):
    """Chooses experts and their weights for every token.

    Math: p = softmax(proj(norm(x) s D^(-1/2))) over all experts; the top_k largest, divided by their sum, times the
      chosen experts' own scale. Of experts with equal p those with the lowest numbers are chosen, as `lax.top_k` does.

    Attributes:
      config: the experts.
      eps: epsilon of the norm, which has no weight.
    """

    config: config_lib.ExpertsConfig
    eps: float

    @nn.compact
    def __call__(self, x_TxD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Chooses the experts of every token of x [T, D]: bool [T, E], and their weights, float32 [T, E]."""
        num_experts, embed_dim = self.config.num_experts, x_TxD.shape[-1]
        scale_D = self.param("scale", nn.initializers.zeros_init(), (embed_dim,), x_TxD.dtype)
        expert_scale_E = self.param("per_expert_scale", nn.initializers.zeros_init(), (num_experts,), x_TxD.dtype)
        z_TxD = layers.RMSNorm(self.eps, has_weight=False)(x_TxD) * scale_D[None]
        z_TxD = layers.scale_by(z_TxD, embed_dim**-0.5)
        logits_TxE = layers.Linear((embed_dim, num_experts), name="proj")(z_TxD)
        p_TxE = products.softmax(logits_TxE.astype(jnp.float32))
        top_TxC, chosen_TxC = lax.top_k(p_TxE, self.config.top_k)
        top_TxC = top_TxC / products.row_sum(top_TxC)[..., None] * expert_scale_E.astype(jnp.float32)[chosen_TxC]
        is_chosen_TxCxE = chosen_TxC[..., None] == jnp.arange(num_experts)[None, None]
        weight_TxE = jnp.sum(jnp.where(is_chosen_TxCxE, top_TxC[..., None], 0.0), axis=1)  # Each is chosen once.
        return jnp.any(is_chosen_TxCxE, axis=1), weight_TxE


class Experts(nn.Module):
    """The chosen experts' outputs, weighted and added.

    Exact: for finite values a token's result depends only on its own row: it is the sum over its experts in rising
      order, each rounded to the model dtype, whatever experts the other lanes chose.

    Attributes:
      config: the experts.
    """

    config: config_lib.ExpertsConfig

    @nn.compact
    def __call__(
        self, x_TxD: jax.Array, is_chosen_TxE: jax.Array, weight_TxE: jax.Array, is_live_T: jax.Array
    ) -> jax.Array:
        """Applies the experts that the router chose to x [T, D] of the live lanes, bool [T]. Returns [T, D]."""
        num_experts, hidden_dim, embed_dim = self.config.num_experts, self.config.hidden_dim, x_TxD.shape[-1]
        dtype = x_TxD.dtype

        def chunks(length: int, width: int) -> tuple[jax.Array, ...]:
            sizes = products.chunk_sizes(length)
            return tuple(jnp.zeros((num_experts, size, width), dtype) for size in sizes)

        gate_up = self.param("gate_up", lambda _: chunks(embed_dim, 2 * hidden_dim))
        down = self.param("down", lambda _: chunks(hidden_dim, embed_dim))

        def apply(x_TxD: jax.Array, stack: tuple[jax.Array, ...], expert: jax.Array) -> jax.Array:
            return products.product(x_TxD, tuple(chunk_ExDxF[expert] for chunk_ExDxF in stack)).astype(dtype)

        is_used_E = jnp.any(is_chosen_TxE & is_live_T[:, None], axis=0)
        (used_E,) = jnp.nonzero(is_used_E, size=num_experts, fill_value=0)

        def add_expert(expert: jax.Array, out_TxD: jax.Array) -> jax.Array:
            gate_TxF, up_TxF = jnp.split(apply(x_TxD, gate_up, expert), 2, axis=1)
            y_TxD = apply(layers.gelu(gate_TxF) * up_TxF, down, expert)
            part_TxD = (y_TxD.astype(jnp.float32) * weight_TxE[:, expert][:, None]).astype(dtype)
            return jnp.where(is_chosen_TxE[:, expert][:, None], out_TxD + part_TxD, out_TxD)

        def add_used(index: jax.Array, out_TxD: jax.Array) -> jax.Array:
            # The condition always holds. XLA moves nothing out of it, such as a conversion of the whole stack.
            expert = used_E[index]
            return lax.cond(is_used_E[expert], add_expert, lambda _, out_TxD: out_TxD, expert, out_TxD)

        return lax.fori_loop(0, jnp.sum(is_used_E), add_used, jnp.zeros_like(x_TxD))
