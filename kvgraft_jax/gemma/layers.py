"""The pieces every block is made of: rounded matrix products, scaling, RMSNorm, embedding and feed-forward layer.

Flax initialises every parameter with zeros: weights come from a checkpoint, or from `weights.random_init`.
"""

from __future__ import annotations

import math

from flax import linen as nn
import jax
from jax import lax
import jax.numpy as jnp


def dot(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiplies matrices, accumulated in float32; the caller decides when to round.

    Args:
      equation: einsum string in the repository's letters.
      a, b: operands of one dtype, bfloat16 or float32.

    Returns:
      float32.
    """
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=jnp.float32)


def scale_by(x: jax.Array, scale: float) -> jax.Array:
    """Multiplies x by a float32 scalar and rounds once (jax would round a bare Python scalar to bfloat16 first)."""
    return (x.astype(jnp.float32) * jnp.float32(scale)).astype(x.dtype)


def softcap(x: jax.Array, cap: float) -> jax.Array:
    """Computes cap tanh(x / cap), with each of the three steps rounded to x's dtype."""
    bounded = jnp.tanh(scale_by(x, 1.0 / cap).astype(jnp.float32)).astype(x.dtype)
    return scale_by(bounded, cap)


def look_up(table: jax.Array, tokens_T: jax.Array) -> jax.Array:
    """Gathers rows of a table [V, ..., D] and multiplies by sqrt(D), itself first rounded to the table's dtype."""
    scale = jnp.asarray(math.sqrt(table.shape[-1]), jnp.float32).astype(table.dtype)
    return jnp.take(table, tokens_T, axis=0, mode="clip") * scale


def gelu(x: jax.Array) -> jax.Array:
    """Computes GELU in its tanh form (arXiv 1606.08415), computed in float32, rounded once to x's dtype."""
    return nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)


class Linear(nn.Module):
    """A matrix product with a kernel of any rank, no bias: float32 accumulation, one rounding to x's dtype.

    Input axes but the first are summed over with the first axes of the kernel; its others are the output's. As
    matrices, both lie in memory as they are: for an einsum of three axes XLA would copy the kernel in every step.

    Attributes:
      shape: shape of the kernel.
    """

    shape: tuple[int, ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", nn.initializers.zeros_init(), self.shape, x.dtype)
        num_lanes, out_shape = x.shape[0], self.shape[x.ndim - 1 :]
        x_TxD = x.reshape(num_lanes, -1)
        out_TxF = dot("TD,DF->TF", x_TxD, kernel.reshape(x_TxD.shape[1], -1)).astype(x.dtype)
        return out_TxF.reshape(num_lanes, *out_shape)


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
        mean_square = jnp.mean(lax.square(wide), axis=-1, keepdims=True)
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
        shape = (self.vocab_size, self.embed_dim)
        self.embedding_VxD = self.param("embedding", nn.initializers.zeros_init(), shape, self.dtype)

    def encode(self, tokens_T: jax.Array) -> jax.Array:
        """Returns embeddings [T, D] times sqrt(D), the square root itself rounded to the model dtype first."""
        return look_up(self.embedding_VxD, tokens_T)

    def decode(self, hidden_TxD: jax.Array) -> jax.Array:
        """Computes logits [T, V] in the model dtype."""
        return dot("TD,VD->TV", hidden_TxD, self.embedding_VxD).astype(self.dtype)


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
