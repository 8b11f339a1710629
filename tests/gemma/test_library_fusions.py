"""What XLA's CPU backend gives to its library is a product, or a maximum, which has one value in any order.

Where operands or results are large, the backend hands a `reduce` over, together with what stands around it, and the
library rounds that in its own way. So nothing that rounds may stand there but a product.
"""

from __future__ import annotations

from collections.abc import Callable
import re

import jax
import jax.numpy as jnp
import pytest

from kvgraft_jax.gemma import attention, configurations, layers, products
from kvgraft_jax.gemma import cache as cache_lib

KV_BLOCK = 128
HEADS = sorted(
    {
        (model.num_heads, kind.attention.num_kv_heads, kind.attention.head_dim, kind.attention.window)
        for model in map(configurations.get, ("gemma-3-270m", "gemma-3-27b", "gemma-4-e2b", "gemma-4-26b-a4b"))
        for kind in model.kinds
    },
    key=str,
)


def handed_over(apply: Callable, *shapes: jax.ShapeDtypeStruct) -> set[frozenset[str]]:
    """Returns the operations of each piece of a compiled program that is the library's."""
    text = jax.jit(apply).lower(*shapes).compile().as_text()
    bodies = dict(re.findall(r"^%?([\w.\-]+) \(.*?\{\n(.*?)^\}", text, re.M | re.S))
    called = re.findall(r"kind=kCustom, calls=%?([\w.\-]+)", text)
    found = {frozenset(re.findall(r"= .*? ([a-z][\w\-]*)\(", bodies[name])) - {"parameter"} for name in called}
    assert all(found)
    return found


def shape(*axes: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(axes, dtype)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the library is that of the CPU backend")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("num_lanes", [33, 256])
@pytest.mark.parametrize("num_heads, num_kv_heads, head_dim, window", HEADS)
def test_attention_hands_over_products_and_maxima(num_heads, num_kv_heads, head_dim, window, num_lanes, dtype):
    def attend(q_rot_TxNxH, positions_T, own_T, first, last, table_J, rows_JxSxKxH):
        queries = attention.Queries(q_rot_TxNxH, positions_T, own_T, first, last, table_J)
        layer = cache_lib.LayerCache(rows_JxSxKxH, rows_JxSxKxH)
        return attention.block_attention(queries, layer, scale=0.06, window=window, kv_block=KV_BLOCK)

    stored = {"bfloat16": "uint16", "float32": "float32"}[dtype]
    found = handed_over(
        attend,
        shape(num_lanes, num_heads, head_dim, dtype=dtype),
        shape(num_lanes, dtype="int32"),
        shape(num_lanes, dtype="bool"),
        *[shape(dtype="int32")] * 2,
        shape(4, dtype="int32"),
        shape(4, KV_BLOCK, num_kv_heads, head_dim, dtype=stored),
    )
    assert any("dot" in piece for piece in found)
    assert all("dot" in piece or piece <= {"constant", "maximum", "reduce"} for piece in found)
    assert not any(piece & {"add", "subtract", "multiply", "divide", "exponential"} for piece in found)


@pytest.mark.parametrize("apply", [products.softmax, products.row_sum, products.exp, layers.gelu])
def test_sums_exponentials_and_activations_hand_nothing_over(apply):
    assert not handed_over(apply, shape(256, 128))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the library is that of the CPU backend")
def test_an_exponential_in_the_library_is_seen():
    def plain(x: jax.Array) -> jax.Array:
        return products.exp(x - jnp.max(x, axis=-1, keepdims=True))

    assert any("exponential" in piece for piece in handed_over(plain, shape(256, 128)))
