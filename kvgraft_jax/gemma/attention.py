"""Attention in two passes over K/V blocks that lie at absolute positions, and the layer that wires it.

First pass: maximum and sum of the exponentials over the blocks. Second pass: probabilities, rounded to the model
dtype as in the reference model, times values, accumulated in float32 and rounded once. Logits are kept between the
passes where a window bounds their number, and else computed again, so no buffer grows with the cache. A block without a
visible key is an exact identity in both passes, so neither the cache's size nor the rows beyond the valid ones touch a
bit.
"""

from __future__ import annotations

from flax import linen as nn
import jax
from jax import lax
import jax.numpy as jnp

from kvgraft_jax.gemma import cache as cache_lib
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma import layers
from kvgraft_jax.gemma import rotary as rotary_lib

MASKED = -1e30  # finite: exp(MASKED - MASKED) is 1, where infinities would give NaN


def visible(query_T: jax.Array, slot_S: jax.Array, end: jax.Array, window: int | None) -> jax.Array:
    """Tells which slots a query may see: earlier or own position, written, and inside the window.

    Args:
      query_T: int32 [T] positions of the queries.
      slot_S: int32 [S] slots, which are the positions of the keys.
      end: int32 scalar; slots from here on are unwritten, or written by idle lanes.
      window: keys a query sees, itself included; None means all.

    Returns:
      bool [T, S].
    """
    distance_TxS = query_T[:, None] - slot_S[None, :]
    seen_TxS = (distance_TxS >= 0) & (slot_S < end)[None, :]
    return seen_TxS if window is None else seen_TxS & (distance_TxS < window)


def query_key(q_KxGxTxH: jax.Array, k_SxKxH: jax.Array) -> jax.Array:
    """Multiplies every query with the keys of its head: float32 [K, G, T, S].

    With a single key/value head they are a product of two matrices. Written with a head axis of one, XLA's CPU backend
    would transpose the keys, block by block, in every step.
    """
    num_kv_heads, num_groups, num_lanes, head_dim = q_KxGxTxH.shape
    if num_kv_heads > 1:
        return layers.dot("KGTH,SKH->KGTS", q_KxGxTxH, k_SxKxH)
    products = layers.dot("TH,SH->TS", q_KxGxTxH.reshape(-1, head_dim), k_SxKxH[:, 0])
    return products.reshape(1, num_groups, num_lanes, -1)


def weighted_values(p_KxGxTxS: jax.Array, v_SxKxH: jax.Array) -> jax.Array:
    """Sums the values of every head, weighted by the probabilities: float32 [K, G, T, H]; see `query_key`."""
    num_kv_heads, num_groups, num_lanes, num_slots = p_KxGxTxS.shape
    if num_kv_heads > 1:
        return layers.dot("KGTS,SKH->KGTH", p_KxGxTxS, v_SxKxH)
    sums = layers.dot("TS,SH->TH", p_KxGxTxS.reshape(-1, num_slots), v_SxKxH[:, 0])
    return sums.reshape(1, num_groups, num_lanes, -1)


def block_attention(
    q_rot_TxNxH: jax.Array,
    layer: cache_lib.LayerCache,
    start: jax.Array,
    count: jax.Array,
    *,
    scale: float,
    window: int | None,
    kv_block: int,
) -> jax.Array:
    """Computes causal attention of T lanes over the written slots of one layer.

    Math: softmax(scale q k^T + mask) v, with the softmax in float32 and every other step rounded to the model dtype.
    Exact: where all values of its tokens are finite, a lane's result depends on its own query and its visible rows
      alone, bit for bit: not on other lanes, on unwritten slots, or on the number of slots.

    Args:
      q_rot_TxNxH: [T, N, H] queries at positions start..start+T-1.
      layer: keys and values, rows of these T positions written already.
      start: int32 scalar.
      count: int32 scalar; lanes from here on are idle.
      scale: multiplies the logits.
      window: sliding window, or None.
      kv_block: slots per block.

    Returns:
      [T, N, H] in q's dtype.
    """
    dtype = q_rot_TxNxH.dtype
    num_lanes, num_heads, head_dim = q_rot_TxNxH.shape
    num_kv_heads = layer.k_rot_SxKxH.shape[1]
    q_KxGxTxH = q_rot_TxNxH.reshape(num_lanes, num_kv_heads, -1, head_dim).transpose(1, 2, 0, 3)
    query_T = start + jnp.arange(num_lanes, dtype=jnp.int32)
    end = start + count
    oldest = jnp.maximum(start - (window - 1), 0) if window else jnp.zeros_like(start)
    first_block, last_block = oldest // kv_block, (end - 1) // kv_block + 1

    def slots(block):
        """Returns the slots of a block, and which of them each lane sees."""
        slot_S = block * kv_block + jnp.arange(kv_block, dtype=jnp.int32)
        return slot_S, visible(query_T, slot_S, end, window)[None, None]

    def scores(block):
        """Computes the masked logits of one block's keys."""
        _, seen_1x1xTxS = slots(block)
        k_rot_SxKxH = cache_lib.read_slots(layer.k_rot_SxKxH, block * kv_block, kv_block, dtype)
        logits_KxGxTxS = query_key(q_KxGxTxH, k_rot_SxKxH).astype(dtype)
        return jnp.where(seen_1x1xTxS, layers.scale_by(logits_KxGxTxS, scale).astype(jnp.float32), MASKED)

    def first_pass(block, carry):
        max_KxGxT, sum_KxGxT, kept_JxKxGxTxS = carry
        logits_KxGxTxS, (_, seen_1x1xTxS) = scores(block), slots(block)
        new_max_KxGxT = jnp.maximum(max_KxGxT, jnp.max(logits_KxGxTxS, axis=-1))
        exp_KxGxTxS = jnp.where(seen_1x1xTxS, jnp.exp(logits_KxGxTxS - new_max_KxGxT[..., None]), 0.0)
        rescaled_KxGxT = sum_KxGxT * jnp.exp(max_KxGxT - new_max_KxGxT)
        if window:
            kept_JxKxGxTxS = lax.dynamic_update_index_in_dim(kept_JxKxGxTxS, logits_KxGxTxS, block - first_block, 0)
        return new_max_KxGxT, rescaled_KxGxT + jnp.sum(exp_KxGxTxS, axis=-1), kept_JxKxGxTxS

    def second_pass(block, out_KxGxTxH):
        slot_S, seen_1x1xTxS = slots(block)
        if window:
            logits_KxGxTxS = lax.dynamic_index_in_dim(kept_JxKxGxTxS, block - first_block, 0, keepdims=False)
        else:
            logits_KxGxTxS = scores(block)
        p_KxGxTxS = jnp.exp(logits_KxGxTxS - max_KxGxT[..., None]) / sum_KxGxT[..., None]
        p_KxGxTxS = jnp.where(seen_1x1xTxS, p_KxGxTxS, 0.0).astype(dtype)
        readable_S = (slot_S >= oldest) & (slot_S < end)
        v_SxKxH = cache_lib.read_slots(layer.v_SxKxH, block * kv_block, kv_block, dtype)
        v_SxKxH = jnp.where(readable_S[:, None, None], v_SxKxH, jnp.zeros((), dtype))  # 0 x NaN is NaN
        return out_KxGxTxH + weighted_values(p_KxGxTxS, v_SxKxH)

    heads_lanes = q_KxGxTxH.shape[:3]
    # The number of blocks that a window and the lanes' own positions can touch. Without a window nothing is kept.
    num_kept = (window + num_lanes - 2) // kv_block + 2 if window else 0
    empty = (
        jnp.full(heads_lanes, MASKED, jnp.float32),
        jnp.zeros(heads_lanes, jnp.float32),
        jnp.zeros((num_kept, *heads_lanes, kv_block), jnp.float32),
    )
    max_KxGxT, sum_KxGxT, kept_JxKxGxTxS = lax.fori_loop(first_block, last_block, first_pass, empty)
    nothing = jnp.zeros((*heads_lanes, head_dim), jnp.float32)
    out_KxGxTxH = lax.fori_loop(first_block, last_block, second_pass, nothing)
    return out_KxGxTxH.astype(dtype).transpose(2, 0, 1, 3).reshape(num_lanes, num_heads, head_dim)


class Attention(nn.Module):
    """Grouped-query attention: project, norm, rotate, write to the cache, attend, project back.

    Attributes:
      config: the decoder.
      attention: this layer's attention kind.
      owns_kv: False for a layer that reads another one's keys and values.
      kv_block: slots per block.
    """

    config: config_lib.GemmaConfig
    attention: config_lib.AttentionConfig
    owns_kv: bool
    kv_block: int

    def setup(self):
        embed_dim, num_heads = self.config.embed_dim, self.config.num_heads
        num_kv_heads, head_dim = self.attention.num_kv_heads, self.attention.head_dim
        self.q_proj = layers.Linear((embed_dim, num_heads, head_dim))
        self.o_proj = layers.Linear((num_heads, head_dim, embed_dim))
        eps, plus_one = self.config.norm_eps, self.config.norm_plus_one
        self.q_norm = layers.RMSNorm(eps, plus_one)
        if not self.owns_kv:
            return
        self.k_proj = layers.Linear((embed_dim, num_kv_heads, head_dim))
        self.k_norm = layers.RMSNorm(eps, plus_one)
        if not self.attention.values_are_keys:
            self.v_proj = layers.Linear((embed_dim, num_kv_heads, head_dim))
        if self.config.value_norm:
            self.v_norm = layers.RMSNorm(eps, has_weight=False)

    def __call__(
        self,
        x_TxD: jax.Array,
        rotary: rotary_lib.RotaryRows,
        layer: cache_lib.LayerCache,
        start: jax.Array,
        count: jax.Array,
    ) -> tuple[jax.Array, cache_lib.LayerCache]:
        """Attends to the written slots; a layer that owns keys and values writes them first.

        Args:
          x_TxD: [T, D].
          rotary: the rotary rows of these T positions.
          layer: the cache of this layer, or of the one whose keys and values it reads.
          start, count: int32 scalars.

        Returns:
          [T, D], and the cache.
        """
        q_rot_TxNxH = rotary_lib.rotate(self.q_norm(self.q_proj(x_TxD)), rotary.cos_TxR, rotary.sin_TxR)
        if self.owns_kv:
            k_raw_TxKxH = self.k_proj(x_TxD)
            v_TxKxH = k_raw_TxKxH if self.attention.values_are_keys else self.v_proj(x_TxD)
            v_TxKxH = self.v_norm(v_TxKxH) if self.config.value_norm else v_TxKxH
            k_rot_TxKxH = rotary_lib.rotate(self.k_norm(k_raw_TxKxH), rotary.cos_TxR, rotary.sin_TxR)
            layer = cache_lib.write_rows(layer, k_rot_TxKxH, v_TxKxH, start)
        out_TxNxH = block_attention(
            q_rot_TxNxH,
            layer,
            start,
            count,
            scale=self.config.query_scale,
            window=self.attention.window,
            kv_block=self.kv_block,
        )
        return self.o_proj(out_TxNxH), layer
