"""Comparing states: every kind of difference is told from the others, and KL has its closed form."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kvgraft_jax.gemma import cache as cache_lib
from kvgraft_jax.grafting import compare
from tests import tiny


def test_kl_in_closed_form():
    """Two outcomes with odds e^a and e^b: KL has a closed form."""
    p, q = 1 / (1 + np.exp(-1.0)), 1 / (1 + np.exp(0.5))
    wanted = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
    assert compare.kl_nats(np.array([1.0, 0.0]), np.array([-0.5, 0.0])) == pytest.approx(wanted, rel=1e-12)
    assert compare.kl_nats(np.array([3.0, 1.0]), np.array([3.0, 1.0])) == 0.0


def test_comparison_tells_what_differs():
    engine = tiny.engine()
    a = engine.prefill(tiny.tokens(30))
    logits_V = np.array(a.logits)
    best = int(np.argmax(logits_V))
    logits_V.view(np.uint32)[(best + 1) % 512] ^= 1
    last_bit = compare.compare(a, dataclasses.replace(a, logits=jnp.array(logits_V)))
    assert (last_bit.logits_equal, last_bit.kv_equal, last_bit.argmax_agree) == (False, True, True)
    assert last_bit.max_abs_logit_diff > 0 and not last_bit.equal and "DIFFERENT" in repr(last_bit)
    logits_V[best] -= 100
    other_token = compare.compare(a, dataclasses.replace(a, logits=jnp.array(logits_V)))
    assert not other_token.argmax_agree and other_token.kl_nats > 0
    first, (sliding, full) = a.blocks[0], a.blocks[1].kinds
    one_row = cache_lib.CacheBlock((sliding.at[0, 1, 29 - tiny.KV_BLOCK, 0, 0].add(1), full))
    moved = dataclasses.replace(a, blocks=(first, one_row))
    by_kv = compare.compare(a, moved)
    assert (by_kv.logits_equal, by_kv.kv_equal, by_kv.equal) == (True, False, False) and by_kv.kl_nats == 0.0
    renamed = compare.compare(a, dataclasses.replace(a, token_ids=(*a.token_ids[:-1], 7)))
    assert not renamed.tokens_equal and not renamed.equal
