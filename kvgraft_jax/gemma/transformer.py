"""The decoder: blocks of attention and feed-forward layer between embedding and final norm (Flax linen)."""

from __future__ import annotations

import dataclasses

from flax import linen as nn
import jax
from jax import lax
import jax.numpy as jnp

from kvgraft_jax.gemma import attention as attention_lib
from kvgraft_jax.gemma import cache as cache_lib
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma import layers
from kvgraft_jax.gemma import rotary as rotary_lib


class Block(nn.Module):
    """One layer: attention, then feed-forward, each normed before and after and added to the residual stream.

    Attributes:
      config: the decoder.
      attention_config: this layer's attention kind.
      kv_block: slots per attention block.
    """

    config: config_lib.GemmaConfig
    attention_config: config_lib.AttentionConfig
    kv_block: int

    def setup(self):
        eps = self.config.norm_eps
        self.pre_attention_norm = layers.RMSNorm(eps)
        self.attention = attention_lib.Attention(self.config, self.attention_config, self.kv_block)
        self.post_attention_norm = layers.RMSNorm(eps)
        self.pre_feedforward_norm = layers.RMSNorm(eps)
        self.mlp = layers.FeedForward(self.config.embed_dim, self.config.hidden_dim)
        self.post_feedforward_norm = layers.RMSNorm(eps)

    def __call__(
        self,
        x_TxD: jax.Array,
        table_TxR: rotary_lib.RotaryTable,
        layer: cache_lib.LayerCache,
        start: jax.Array,
        count: jax.Array,
    ) -> tuple[jax.Array, cache_lib.LayerCache]:
        with jax.named_scope("attention"):
            branch_TxD, layer = self.attention(self.pre_attention_norm(x_TxD), table_TxR, layer, start, count)
            x_TxD = x_TxD + self.post_attention_norm(branch_TxD)
        with jax.named_scope("feedforward"):
            x_TxD = x_TxD + self.post_feedforward_norm(self.mlp(self.pre_feedforward_norm(x_TxD)))
        return x_TxD, layer


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
        self.layer = [Block(config, config.attention(index), self.kv_block) for index in range(config.num_layers)]
        self.final_norm = layers.RMSNorm(config.norm_eps)

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
        rows = {
            kind: rotary_lib.RotaryTable(
                lax.dynamic_slice_in_dim(table.cos_SxR, start, num_lanes),
                lax.dynamic_slice_in_dim(table.sin_SxR, start, num_lanes),
            )
            for kind, table in ((config_lib.SLIDING, tables.sliding), (config_lib.FULL, tables.full))
        }
        with jax.named_scope("embed"):
            x_TxD = self.embedder.encode(tokens_T)
        self.sow("intermediates", "hidden_TxD", x_TxD)
        new_layers = []
        for block, kind, layer in zip(self.layer, self.config.layer_kinds, cache.layers, strict=True):
            x_TxD, layer = block(x_TxD, rows[kind], layer, start, count)
            self.sow("intermediates", "hidden_TxD", x_TxD)
            new_layers.append(layer)
        return self.final_norm(x_TxD), dataclasses.replace(cache, layers=tuple(new_layers))

    def head(self, hidden_TxD: jax.Array) -> jax.Array:
        """Next-token logits, float32 [T, V] holding values of the model dtype."""
        with jax.named_scope("head"):
            logits_TxV = self.embedder.decode(hidden_TxD)
            if self.config.final_softcap is not None:
                logits_TxV = layers.softcapped(logits_TxV, self.config.final_softcap)
            return logits_TxV.astype(jnp.float32)
