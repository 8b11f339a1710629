"""Attention in two passes over K/V blocks that lie at absolute positions, and the layer that wires it.

First pass: maximum and sum of the exponentials over the blocks. Second pass: probabilities, rounded to the model
dtype as in the reference model, times values, accumulated in float32 and rounded once. Logits are kept between the
passes where a window bounds their number, and else computed again, so no buffer grows with the cache. A block without a
visible key is an exact identity in both passes, so neither the cache's size nor the rows beyond the valid ones touch a
bit.
"""

from __future__ import annotations

import dataclasses
import functools

from flax import linen as nn
import jax
from jax import lax
import jax.numpy as jnp

from kvgraft_jax.gemma import cache as cache_lib
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma import layers, products
from kvgraft_jax.gemma import rotary as rotary_lib

MASKED = -1e30  # finite: exp(MASKED - MASKED) is 1, where infinities would give NaN


def visible(query_T: jax.Array, slot_S: jax.Array, window: int | None) -> jax.Array:
    """Tells which slots a query may see: those of its own and earlier positions, inside the window.

    Args:
      query_T: int32 [T] positions of the queries.
      slot_S: int32 [S] positions of the keys.
      window: keys a query sees, itself included; None means all.

    Returns:
      bool [T, S].
    """
    distance_TxS = query_T[:, None] - slot_S[None, :]
    return (distance_TxS >= 0) if window is None else (distance_TxS >= 0) & (distance_TxS < window)


def query_key(q_KxGxTxH: jax.Array, k_SxKxH: jax.Array) -> jax.Array:
    """Multiplies every query with the keys of its head: float32 [K, G, T, S].

    With a single key/value head they are a product of two matrices. Written with a head axis of one, XLA's CPU backend
    would transpose the keys, block by block, in every step. Where a head's keys are a large matrix, products of parts
    of the head width are added in order.
    """
    num_kv_heads, num_groups, num_lanes, head_dim = q_KxGxTxH.shape
    total_KxGxTxS = None
    for part in _parts(head_dim, k_SxKxH):
        q_part_KxGxTxH, k_part_SxKxH = q_KxGxTxH[..., part], k_SxKxH[..., part]
        if num_kv_heads > 1:
            logits_KxGxTxS = products.dot("KGTH,SKH->KGTS", q_part_KxGxTxH, k_part_SxKxH)
        else:
            q_TxH = q_part_KxGxTxH.reshape(num_groups * num_lanes, -1)
            logits_TxS = products.dot_rows("TH,SH->TS", q_TxH, k_part_SxKxH[:, 0])
            logits_KxGxTxS = logits_TxS.reshape(1, num_groups, num_lanes, -1)
        total_KxGxTxS = logits_KxGxTxS if total_KxGxTxS is None else total_KxGxTxS + logits_KxGxTxS
    return total_KxGxTxS


def weighted_values(p_KxGxTxS: jax.Array, v_SxKxH: jax.Array) -> jax.Array:
    """Sums the values of every head, weighted by the probabilities: float32 [K, G, T, H]; see `query_key`."""
    num_kv_heads, num_groups, num_lanes, num_slots = p_KxGxTxS.shape
    parts_KxGxTxH = []
    for part in _parts(v_SxKxH.shape[-1], v_SxKxH):
        v_part_SxKxH = v_SxKxH[..., part]
        if num_kv_heads > 1:
            parts_KxGxTxH.append(products.dot("KGTS,SKH->KGTH", p_KxGxTxS, v_part_SxKxH))
        else:
            sums_TxH = products.dot_rows("TS,SH->TH", p_KxGxTxS.reshape(-1, num_slots), v_part_SxKxH[:, 0])
            parts_KxGxTxH.append(sums_TxH.reshape(1, num_groups, num_lanes, -1))
    return parts_KxGxTxH[0] if len(parts_KxGxTxH) == 1 else jnp.concatenate(parts_KxGxTxH, axis=-1)


def _parts(head_dim: int, rows_SxKxH: jax.Array) -> list[slice]:
    """Cuts the head width into parts in which a head's rows are a matrix small enough to have one order of sums."""
    most = products.MOST_ELEMENTS.get(rows_SxKxH.dtype.name, rows_SxKxH.size)
    width = max(16, most // rows_SxKxH.shape[0])
    return [slice(start, min(start + width, head_dim)) for start in range(0, head_dim, width)]


@dataclasses.dataclass(frozen=True)
class Queries:
    """Queries of one sequence, in some or all lanes of a step.

    Attributes:
      q_rot_TxNxH: [T, N, H].
      positions_T: int32 [T].
      own_T: bool [T]; the other lanes belong to other sequences, and their results mean nothing.
      first, last: int32 scalars, the lowest and highest position of its own lanes.
      table_J: int32 [J], the cache block of each block of its positions.
    """

    q_rot_TxNxH: jax.Array
    positions_T: jax.Array
    own_T: jax.Array
    first: jax.Array
    last: jax.Array
    table_J: jax.Array


def block_attention(
    queries: Queries, layer: cache_lib.LayerCache, *, scale: float, window: int | None, kv_block: int
) -> jax.Array:
    """Computes causal attention of the lanes of one sequence over its written slots in one layer.

    Math: softmax(scale q k^T + mask) v, with the softmax in float32 and every other step rounded to the model dtype.
    Exact: where all values of its tokens are finite, a lane's result depends on its own query and its visible rows
      alone, bit for bit: not on the number of lanes, on other lanes, on unwritten slots, or on where blocks lie.

    Args:
      queries: the lanes; G queries for each key/value head, and with G = 1 two lanes or more.
      layer: keys and values, rows of these lanes written already.
      scale: multiplies the logits.
      window: sliding window, or None.
      kv_block: slots per block.

    Returns:
      [T, N, H] in q's dtype.
    """
    dtype = queries.q_rot_TxNxH.dtype
    num_lanes, num_heads, head_dim = queries.q_rot_TxNxH.shape
    num_kv_heads = layer.k_rot_JxSxKxH.shape[2]
    q_KxGxTxH = queries.q_rot_TxNxH.reshape(num_lanes, num_kv_heads, -1, head_dim).transpose(1, 2, 0, 3)
    oldest = jnp.maximum(queries.first - (window - 1), 0) if window else jnp.zeros_like(queries.first)
    first_block, last_block = oldest // kv_block, queries.last // kv_block + 1

    def slots(block):
        """Returns the positions of a block, and which of them each lane sees."""
        slot_S = block * kv_block + jnp.arange(kv_block, dtype=jnp.int32)
        seen_TxS = visible(queries.positions_T, slot_S, window) & queries.own_T[:, None]
        return slot_S, seen_TxS[None, None]

    def scores(block):
        """Computes the masked logits of one block's keys."""
        _, seen_1x1xTxS = slots(block)
        k_rot_SxKxH = cache_lib.read_block(layer.k_rot_JxSxKxH, queries.table_J[block], dtype)
        logits_KxGxTxS = query_key(q_KxGxTxH, k_rot_SxKxH).astype(dtype)
        return jnp.where(seen_1x1xTxS, layers.scale_by(logits_KxGxTxS, scale).astype(jnp.float32), MASKED)

    def first_pass(block, carry):
        max_KxGxT, sum_KxGxT, kept_JxKxGxTxS = carry
        logits_KxGxTxS, (_, seen_1x1xTxS) = scores(block), slots(block)
        new_max_KxGxT = jnp.maximum(max_KxGxT, jnp.max(logits_KxGxTxS, axis=-1))
        exp_KxGxTxS = jnp.where(seen_1x1xTxS, products.exp(logits_KxGxTxS - new_max_KxGxT[..., None]), 0.0)
        rescaled_KxGxT = sum_KxGxT * products.exp((max_KxGxT - new_max_KxGxT)[..., None])[..., 0]
        if window:
            kept_JxKxGxTxS = lax.dynamic_update_index_in_dim(kept_JxKxGxTxS, logits_KxGxTxS, block - first_block, 0)
        return new_max_KxGxT, rescaled_KxGxT + products.row_sum(exp_KxGxTxS), kept_JxKxGxTxS

    def second_pass(block, out_KxGxTxH):
        slot_S, seen_1x1xTxS = slots(block)
        if window:
            logits_KxGxTxS = lax.dynamic_index_in_dim(kept_JxKxGxTxS, block - first_block, 0, keepdims=False)
        else:
            logits_KxGxTxS = scores(block)
        p_KxGxTxS = products.exp(logits_KxGxTxS - max_KxGxT[..., None]) / sum_KxGxT[..., None]
        p_KxGxTxS = jnp.where(seen_1x1xTxS, p_KxGxTxS, 0.0).astype(dtype)
        readable_S = (slot_S >= oldest) & (slot_S <= queries.last)
        v_SxKxH = cache_lib.read_block(layer.v_JxSxKxH, queries.table_J[block], dtype)
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


def lanes_attention(
    q_rot_TxNxH: jax.Array,
    layer: cache_lib.LayerCache,
    lanes: cache_lib.Lanes,
    *,
    scale: float,
    window: int | None,
    kv_block: int,
) -> jax.Array:
    """Computes attention of every live lane over the slots of its own row; idle lanes get zeros.

    Lanes that are alone in their row attend one by one, stretches of a row one stretch at a time, so the work follows
    the keys that live lanes see. A step of few lanes has no program for stretches.

    Exact: as `block_attention`: a lane's result does not depend on the lanes of other rows either.

    Args:
      q_rot_TxNxH: [T, N, H].
      layer: keys and values, rows of all lanes written already.
      lanes: of the step.
      scale, window, kv_block: as for `block_attention`.

    Returns:
      [T, N, H] in q's dtype.
    """
    num_lanes, num_heads, _ = q_rot_TxNxH.shape
    copies = 2 if num_heads == layer.k_rot_JxSxKxH.shape[2] else 1  # A product with a single row has another order.
    attend = functools.partial(block_attention, layer=layer, scale=scale, window=window, kv_block=kv_block)

    def single(index, out_TxNxH):
        lane = lanes.singles_T[index]
        q_1xNxH = lax.dynamic_slice_in_dim(q_rot_TxNxH, lane, 1)
        position, table_J = lanes.positions_T[lane], lanes.table_BxJ[lanes.rows_T[lane]]
        queries = Queries(
            jnp.concatenate([q_1xNxH] * copies), jnp.full(copies, position), jnp.ones(copies, bool), position, position,
            table_J,
        )  # fmt: skip
        return lax.dynamic_update_slice_in_dim(out_TxNxH, attend(queries)[:1], lane, 0)

    def piece(index, out_TxNxH):
        first_lane, count = lanes.pieces_Tx2[index]
        last_lane, lane_T = first_lane + count - 1, jnp.arange(num_lanes, dtype=jnp.int32)
        own_T = (lane_T >= first_lane) & (lane_T <= last_lane)
        first, last = lanes.positions_T[first_lane], lanes.positions_T[last_lane]
        table_J = lanes.table_BxJ[lanes.rows_T[first_lane]]
        found_TxNxH = attend(Queries(q_rot_TxNxH, lanes.positions_T, own_T, first, last, table_J))
        return jnp.where(own_T[:, None, None], found_TxNxH, out_TxNxH)

    out_TxNxH = lax.fori_loop(0, lanes.counts_3[1], single, jnp.zeros_like(q_rot_TxNxH))
    if num_lanes < cache_lib.FEWEST_FOR_PIECES:
        return out_TxNxH
    return lax.fori_loop(0, lanes.counts_3[2], piece, out_TxNxH)


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
        lanes: cache_lib.Lanes,
    ) -> tuple[jax.Array, cache_lib.LayerCache]:
        """Attends to the written slots; a layer that owns keys and values writes them first.

        Args:
          x_TxD: [T, D].
          rotary: the rotary rows of the lanes' positions.
          layer: the cache of this layer, or of the one whose keys and values it reads.
          lanes: of the step.

        Returns:
          [T, D], and the cache.
        """
        q_rot_TxNxH = rotary_lib.rotate(self.q_norm(self.q_proj(x_TxD)), rotary.cos_TxR, rotary.sin_TxR)
        if self.owns_kv:
            k_raw_TxKxH = self.k_proj(x_TxD)
            v_TxKxH = k_raw_TxKxH if self.attention.values_are_keys else self.v_proj(x_TxD)
            v_TxKxH = self.v_norm(v_TxKxH) if self.config.value_norm else v_TxKxH
            k_rot_TxKxH = rotary_lib.rotate(self.k_norm(k_raw_TxKxH), rotary.cos_TxR, rotary.sin_TxR)
            layer = cache_lib.write_rows(layer, k_rot_TxKxH, v_TxKxH, lanes)
        out_TxNxH = lanes_attention(
            q_rot_TxNxH,
            layer,
            lanes,
            scale=self.config.query_scale,
            window=self.attention.window,
            kv_block=self.kv_block,
        )
        return self.o_proj(out_TxNxH), layer
