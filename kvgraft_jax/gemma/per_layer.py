"""Per-layer embeddings: a vector for every layer from token and context, and how a layer adds it to its stream."""

from __future__ import annotations

from flax import linen as nn
import jax
import jax.numpy as jnp

from kvgraft_jax.gemma import layers, products


class PerLayerEmbedder(nn.Module):
    """Computes the vectors of all layers once, before the first.

    Math: (norm(proj(x) D^(-1/2)) + table[token] P^(1/2)) 2^(-1/2), x the scaled embeddings.

    Attributes:
      vocab_size: rows of the table.
      num_layers: L.
      dim: P, width per layer.
      eps: epsilon of the norm.
    """

    vocab_size: int
    num_layers: int
    dim: int
    eps: float

    @nn.compact
    def __call__(self, x_TxD: jax.Array, tokens_T: jax.Array) -> jax.Array:
        """Computes the vectors [T, L, P] of scaled embeddings [T, D] and tokens int32 [T]."""
        embed_dim = x_TxD.shape[-1]
        shape = (self.vocab_size, self.num_layers, self.dim)
        table_VxLxP = self.param("embedding", nn.initializers.zeros_init(), shape, x_TxD.dtype)
        project = layers.Linear((embed_dim, self.num_layers, self.dim), name="proj")
        context_TxLxP = layers.scale_by(project(x_TxD), embed_dim**-0.5)
        context_TxLxP = layers.RMSNorm(self.eps, name="norm")(context_TxLxP)
        rows_TxLxP = layers.scale_rows(jnp.take(table_VxLxP, tokens_T, axis=0, mode="clip"))
        return layers.scale_by(products.add_rounded(context_TxLxP, rows_TxLxP), 2**-0.5)


class PerLayerInput(nn.Module):
    """Adds a layer's own vector to the stream: x + norm(proj(gelu(gate(x)) * vector)).

    Attributes:
      embed_dim: D.
      dim: P.
      eps: epsilon of the norm.
    """

    embed_dim: int
    dim: int
    eps: float

    def setup(self):
        self.gate = layers.Linear((self.embed_dim, self.dim))
        self.proj = layers.Linear((self.dim, self.embed_dim))
        self.norm = layers.RMSNorm(self.eps)

    def __call__(self, x_TxD: jax.Array, vector_TxP: jax.Array) -> jax.Array:
        """Adds what this layer's vectors [T, P] give to the stream [T, D]."""
        return x_TxD + self.norm(self.proj(layers.gelu(self.gate(x_TxD)) * vector_TxP))
