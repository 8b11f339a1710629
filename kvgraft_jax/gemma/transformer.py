"""The decoder: blocks of attention and feed-forward layer between embedding and final norm (Flax linen)."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses

from flax import linen as nn
import jax
import jax.numpy as jnp

from kvgraft_jax.gemma import attention as attention_lib
from kvgraft_jax.gemma import cache as cache_lib
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma import experts as experts_lib
from kvgraft_jax.gemma import layers, products
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

    @property
    def form(self) -> tuple[str, bool, int]:
        """Returns what tells layers apart: those of one form are one program, called with other parameters."""
        config, index = self.config, self.index
        return config.layer_kinds[index], index < config.num_kv_layers, config.feedforward_dim(index)

    def __call__(
        self,
        x_TxD: jax.Array,
        rotary: rotary_lib.RotaryRows,
        layer: cache_lib.LayerCache,
        vector_TxP: jax.Array | None,
        lanes: cache_lib.Lanes,
    ) -> tuple[jax.Array, cache_lib.LayerCache]:
        """Runs the layer over T lanes.

        Args:
          x_TxD: [T, D], the stream.
          rotary, layer, lanes: as for `Attention`.
          vector_TxP: [T, P], what the token adds to this layer; None where the model has no such vectors.

        Returns:
          [T, D], and the cache.
        """
        with jax.named_scope("attention"):
            branch_TxD, layer = self.attention(self.pre_attention_norm(x_TxD), rotary, layer, lanes)
            x_TxD = x_TxD + self.post_attention_norm(branch_TxD)
        with jax.named_scope("feedforward"):
            x_TxD = x_TxD + self.post_feedforward_norm(self._feedforward(x_TxD, lanes.live_T > 0))
        if vector_TxP is not None:
            with jax.named_scope("per_layer_input"):
                x_TxD = self.per_layer_input(x_TxD, vector_TxP)
        if self.config.layer_scalar:
            x_TxD = x_TxD * self.layer_scalar[None]
        return x_TxD, layer

    def _feedforward(self, x_TxD: jax.Array, is_live_T: jax.Array) -> jax.Array:
        dense_TxD = self.mlp(self.pre_feedforward_norm(x_TxD))
        if self.config.experts is None:
            return dense_TxD
        is_chosen_TxE, weight_TxE = self.router(x_TxD)
        routed_TxD = self.experts(self.pre_experts_norm(x_TxD), is_chosen_TxE, weight_TxE, is_live_T)
        return products.add_rounded(self.post_dense_norm(dense_TxD), self.post_experts_norm(routed_TxD))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Embedded:
    """What the layers of a step start from.

    Attributes:
      x_TxD: [T, D], the scaled embeddings.
      rotary: rows of the rotary tables, by attention kind.
      vectors_TxP: for each layer [T, P], what the token adds to it; None where the model has no such vectors.
    """

    x_TxD: jax.Array
    rotary: Mapping[str, rotary_lib.RotaryRows]
    vectors_TxP: tuple[jax.Array | None, ...]


class Transformer(nn.Module):
    """A Gemma text decoder over the T lanes of a step and an explicit cache.

    `__call__` runs `embed`, the layers and `finish`. `head` is separate because most steps of a prefill need no logits.

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
        self, lanes: cache_lib.Lanes, tables: rotary_lib.RotaryTables, cache: cache_lib.Cache
    ) -> tuple[jax.Array, cache_lib.Cache]:
        """Runs T lanes.

        Args:
          lanes: tokens, positions and rows.
          tables: rotary tables that reach every position.
          cache: every earlier position of the lanes' rows written.

        Returns:
          Hidden states [T, D] after the final norm, and the cache with the rows of all live lanes written.
        """
        embedded, caches = self.embed(lanes, tables), list(cache.layers)
        x_TxD = embedded.x_TxD
        for index, block in enumerate(self.layer):
            owner, rotary = self.config.kv_layer(index), embedded.rotary[self.config.layer_kinds[index]]
            x_TxD, caches[owner] = block(x_TxD, rotary, caches[owner], embedded.vectors_TxP[index], lanes)
        return self.finish(x_TxD), cache_lib.Cache(tuple(caches))

    def embed(self, lanes: cache_lib.Lanes, tables: rotary_lib.RotaryTables) -> Embedded:
        """Looks up what the layers start from; the arguments are those of `__call__`."""
        rotary = {kind: tables.rows(kind, lanes.positions_T) for kind in (config_lib.SLIDING, config_lib.FULL)}
        vectors_TxP = (None,) * self.config.num_layers
        with jax.named_scope("embed"):
            x_TxD = self.embedder.encode(lanes.tokens_T)
            if self.config.per_layer is not None:
                vectors_TxLxP = self.per_layer_embedder(x_TxD, lanes.tokens_T)
                vectors_TxP = tuple(vectors_TxLxP[:, index] for index in range(self.config.num_layers))
        return Embedded(x_TxD, rotary, vectors_TxP)

    def finish(self, x_TxD: jax.Array) -> jax.Array:
        """Norms the residual stream after the last layer: hidden states [T, D]."""
        return self.final_norm(x_TxD)

    def head(self, hidden_TxD: jax.Array) -> jax.Array:
        """Computes next-token logits: float32 [T, V], holding values of the model dtype."""
        with jax.named_scope("head"):
            logits_TxV = self.embedder.decode(hidden_TxD)
            if self.config.final_softcap is not None:
                logits_TxV = layers.softcap(logits_TxV, self.config.final_softcap)
            return logits_TxV.astype(jnp.float32)
