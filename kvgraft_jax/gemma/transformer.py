"""The decoder: blocks of attention and feed-forward layer between embedding and final norm (Flax linen)."""

from __future__ import annotations

from flax import linen as nn
import jax
import jax.numpy as jnp

from kvgraft_jax.gemma import attention as attention_lib
from kvgraft_jax.gemma import cache as cache_lib
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma import experts as experts_lib
from kvgraft_jax.gemma import layers
from kvgraft_jax.gemma import per_layer as per_layer_lib
from kvgraft_jax.gemma import rotary as rotary_lib


class Block(nn.Module):
    """One layer: attention, then feed-forward, each normed before and after and added to the residual stream.

    Attributes:
      config: the decoder.
      index: number of this layer.
      dtype: model dtype.
      kv_block: slots per attention block.
    """

    config: config_lib.GemmaConfig
    index: int
    dtype: jnp.dtype
    kv_block: int

    def setup(self):
        config, eps, plus_one = self.config, self.config.norm_eps, self.config.norm_plus_one
        owns_kv = self.index < config.num_kv_layers
        self.pre_attention_norm = layers.RMSNorm(eps, plus_one)
        self.attention = attention_lib.Attention(config, config.attention(self.index), owns_kv, self.kv_block)
        self.post_attention_norm = layers.RMSNorm(eps, plus_one)
        self.pre_feedforward_norm = layers.RMSNorm(eps, plus_one)
        self.mlp = layers.FeedForward(config.embed_dim, config.feedforward_dim(self.index))
        self.post_feedforward_norm = layers.RMSNorm(eps, plus_one)
        if config.experts is not None:
            self.router = experts_lib.Router(config.experts, eps)
            self.experts = experts_lib.Experts(config.experts)
            self.post_dense_norm = layers.RMSNorm(eps, plus_one)
            self.pre_experts_norm = layers.RMSNorm(eps, plus_one)
            self.post_experts_norm = layers.RMSNorm(eps, plus_one)
        if config.per_layer is not None:
            self.per_layer_input = per_layer_lib.PerLayerInput(config.embed_dim, config.per_layer.dim, eps)
        if config.layer_scalar:
            self.layer_scalar = self.param("layer_scalar", nn.initializers.zeros_init(), (1,), self.dtype)

    def __call__(
        self,
        x_TxD: jax.Array,
        rotary: rotary_lib.RotaryRows,
        layer: cache_lib.LayerCache,
        vector_TxP: jax.Array | None,
        start: jax.Array,
        count: jax.Array,
    ) -> tuple[jax.Array, cache_lib.LayerCache]:
        """Runs the layer over T lanes.

        Args:
          x_TxD: [T, D], the stream.
          rotary, layer, start, count: as for `Attention`.
          vector_TxP: [T, P], what the token adds to this layer; None where the model has no such vectors.

        Returns:
          [T, D], and the cache.
        """
        with jax.named_scope("attention"):
            branch_TxD, layer = self.attention(self.pre_attention_norm(x_TxD), rotary, layer, start, count)
            x_TxD = x_TxD + self.post_attention_norm(branch_TxD)
        with jax.named_scope("feedforward"):
            x_TxD = x_TxD + self.post_feedforward_norm(self._feedforward(x_TxD, count))
        if vector_TxP is not None:
            with jax.named_scope("per_layer_input"):
                x_TxD = self.per_layer_input(x_TxD, vector_TxP)
        if self.config.layer_scalar:
            x_TxD = x_TxD * self.layer_scalar[None]
        return x_TxD, layer

    def _feedforward(self, x_TxD: jax.Array, count: jax.Array) -> jax.Array:
        dense_TxD = self.mlp(self.pre_feedforward_norm(x_TxD))
        if self.config.experts is None:
            return dense_TxD
        is_chosen_TxE, weight_TxE = self.router(x_TxD)
        routed_TxD = self.experts(self.pre_experts_norm(x_TxD), is_chosen_TxE, weight_TxE, count)
        return self.post_dense_norm(dense_TxD) + self.post_experts_norm(routed_TxD)


class Transformer(nn.Module):
    """A Gemma text decoder over T consecutive positions and an explicit cache.

    `__call__` and `head` are separate because most steps of a prefill need no logits. With
    `mutable=["intermediates"]` the hidden states are collected under "hidden_TxD": the scaled embeddings, then the
    residual stream after each layer.

    Attributes:
      config: the decoder.
      dtype: bfloat16 or float32, of parameters, activations and cache.
      kv_block: slots per attention block.
    """

    config: config_lib.GemmaConfig
    dtype: jnp.dtype
    kv_block: int

    def setup(self):
        config = self.config
        self.embedder = layers.Embedder(config.vocab_size, config.embed_dim, self.dtype)
        self.layer = [Block(config, index, self.dtype, self.kv_block) for index in range(config.num_layers)]
        self.final_norm = layers.RMSNorm(config.norm_eps, config.norm_plus_one)
        if config.per_layer is not None:
            self.per_layer_embedder = per_layer_lib.PerLayerEmbedder(
                config.per_layer.vocab_size, config.num_layers, config.per_layer.dim, config.norm_eps
            )

    def __call__(
        self,
        tokens_T: jax.Array,
        tables: rotary_lib.RotaryTables,
        cache: cache_lib.Cache,
        start: jax.Array,
        count: jax.Array,
    ) -> tuple[jax.Array, cache_lib.Cache]:
        """Runs T lanes at positions start..start+T-1, of which the first `count` hold tokens.

        Args:
          tokens_T: int32 [T]; idle lanes may hold anything.
          tables: rotary tables of at least start + T positions.
          cache: slots 0..start-1 written; start + T slots or more.
          start, count: int32 scalars.

        Returns:
          Hidden states [T, D] after the final norm, and the cache with rows start..start+T-1 written.
        """
        num_lanes = tokens_T.shape[0]
        rows = {kind: tables.rows(kind, start, num_lanes) for kind in (config_lib.SLIDING, config_lib.FULL)}
        vectors_TxLxP = None
        with jax.named_scope("embed"):
            x_TxD = self.embedder.encode(tokens_T)
            if self.config.per_layer is not None:
                vectors_TxLxP = self.per_layer_embedder(x_TxD, tokens_T)
        self.sow("intermediates", "hidden_TxD", x_TxD)
        layer_caches = list(cache.layers)
        for index, block in enumerate(self.layer):
            owner = self.config.kv_layer(index)
            vector_TxP = None if vectors_TxLxP is None else vectors_TxLxP[:, index]
            rotary = rows[self.config.layer_kinds[index]]
            x_TxD, layer_caches[owner] = block(x_TxD, rotary, layer_caches[owner], vector_TxP, start, count)
            self.sow("intermediates", "hidden_TxD", x_TxD)
        return self.final_norm(x_TxD), cache_lib.Cache(tuple(layer_caches))

    def head(self, hidden_TxD: jax.Array) -> jax.Array:
        """Computes next-token logits: float32 [T, V], holding values of the model dtype."""
        with jax.named_scope("head"):
            logits_TxV = self.embedder.decode(hidden_TxD)
            if self.config.final_softcap is not None:
                logits_TxV = layers.softcap(logits_TxV, self.config.final_softcap)
            return logits_TxV.astype(jnp.float32)
