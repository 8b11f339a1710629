"""The pieces every block is made of: linear layers, scaling, RMSNorm, embedding and feed-forward layer.

Flax initialises every parameter with zeros: weights come from a checkpoint, or from `checkpoints.random`.
"""

from __future__ import annotations

import math

from flax import linen as nn
import jax
from jax import lax
import jax.numpy as jnp

from kvgraft_jax.gemma import products


def scale_by(x: jax.Array, scale: float) -> jax.Array:
    """Multiplies x by a float32 scalar and rounds once (jax would round a bare Python scalar to bfloat16 first)."""
    return (x.astype(jnp.float32) * jnp.float32(scale)).astype(x.dtype)


def softcap(x: jax.Array, cap: float) -> jax.Array:
    """Computes cap tanh(x / cap), with each of the three steps rounded to x's dtype."""
    bounded = jnp.tanh(scale_by(x, 1.0 / cap).astype(jnp.float32)).astype(x.dtype)
    return scale_by(bounded, cap)


def scale_rows(rows: jax.Array) -> jax.Array:
    """Multiplies rows of an embedding table, [..., D], by sqrt(D), itself first rounded to the table's dtype."""
    return rows * jnp.asarray(math.sqrt(rows.shape[-1]), jnp.float32).astype(rows.dtype)


def gelu(x: jax.Array) -> jax.Array:
    """Computes GELU in its tanh form (arXiv 1606.08415), computed in float32, rounded once to x's dtype."""
    return nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)


class Linear(nn.Module):
    """A matrix product with a kernel of any rank, no bias: float32 accumulation, one rounding to x's dtype.

    Input axes but the first are summed over with the first axes of the kernel; its others are the output's. As
    matrices, both lie in memory as they are: for an einsum of three axes XLA would copy the kernel in every step.

    The parameter is a tuple: the kernel in chunks of its first axis (`products.product`).

    Attributes:
      shape: shape of the kernel.
    """

    shape: tuple[int, ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        num_lanes, num_summed = x.shape[0], x.ndim - 1
        kernel = self.param("kernel", self._zeros, num_summed, x.dtype)
        out_shape = self.shape[num_summed:]
        x_TxD = x.reshape(num_lanes, -1)
        chunks = tuple(chunk.reshape(-1, math.prod(out_shape)) for chunk in kernel)
        return products.product(x_TxD, chunks).astype(x.dtype).reshape(num_lanes, *out_shape)

    def _zeros(self, _, num_summed: int, dtype: jnp.dtype) -> tuple[jax.Array, ...]:
        sizes = products.chunk_sizes(self.shape[0], math.prod(self.shape[1:num_summed]))
        return tuple(jnp.zeros((size, *self.shape[1:]), dtype) for size in sizes)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last axis; float32 inside, one rounding at the end.

    Math: y = x (mean(x^2) + eps)^(-1/2) g (arXiv 1910.07467), g being 1 + w, w, or 1.

    Attributes:
      eps: epsilon.
      plus_one: multiply by 1 + w instead of w.
      has_weight: False leaves the weight out.
    """

    eps: float
    plus_one: bool = False
    has_weight: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        mean_square = products.row_sum(lax.square(wide))[..., None] / jnp.float32(x.shape[-1])
        # Not lax.rsqrt, which on x86 begins with an approximation that differs from vendor to vendor; the barrier keeps
        # XLA from putting it back. A square root and a division are correctly rounded everywhere.
        root = lax.optimization_barrier(jnp.sqrt(mean_square + jnp.float32(self.eps)))
        normed = wide * (jnp.float32(1) / root)
        if self.has_weight:
            gain = self.param("scale", nn.initializers.zeros_init(), (x.shape[-1],), x.dtype).astype(jnp.float32)
            gain = jnp.float32(1) + gain if self.plus_one else gain
            normed = normed * gain.reshape((1,) * (x.ndim - 1) + (-1,))
        return normed.astype(x.dtype)


class Embedder(nn.Module):
    """The token table, shared by the input embedding and the output head.

    Attributes:
      vocab_size: V.
      embed_dim: D.
      dtype: model dtype.
    """

    vocab_size: int
    embed_dim: int
    dtype: jnp.dtype

    def setup(self):
        self.embedding = self.param("embedding", self._zeros)

    def _zeros(self, _) -> tuple[jax.Array, ...]:
        """Returns chunks [V, D_i] of the table."""
        sizes = products.chunk_sizes(self.embed_dim)
        return tuple(jnp.zeros((self.vocab_size, size), self.dtype) for size in sizes)

    def encode(self, tokens_T: jax.Array) -> jax.Array:
        """Returns embeddings [T, D] times sqrt(D), the square root itself rounded to the model dtype first."""
        rows = [jnp.take(chunk, tokens_T, axis=0, mode="clip") for chunk in self.embedding]
        return scale_rows(jnp.concatenate(rows, axis=1))

    def decode(self, hidden_TxD: jax.Array) -> jax.Array:
        """Computes logits [T, V] in the model dtype."""
        return products.product_with_rows(hidden_TxD, self.embedding).astype(self.dtype)


class FeedForward(nn.Module):
    """Gated feed-forward layer: down(gelu(gate(x)) * up(x)).

    Attributes:
      embed_dim: D.
      hidden_dim: F.
    """

    embed_dim: int
    hidden_dim: int

    def setup(self):
        self.gate_proj = Linear((self.embed_dim, self.hidden_dim))
        self.up_proj = Linear((self.embed_dim, self.hidden_dim))
        self.down_proj = Linear((self.hidden_dim, self.embed_dim))

    def __call__(self, x_TxD: jax.Array) -> jax.Array:
        return self.down_proj(gelu(self.gate_proj(x_TxD)) * self.up_proj(x_TxD))
