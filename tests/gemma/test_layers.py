"""The roundings of single layers, one operation at a time in NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kvgraft_jax.gemma import layers, products

BF16 = np.dtype(jnp.bfloat16)


def random(*shape: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(0).standard_normal(shape) * scale).astype(BF16)


def test_scaled_rounds_once_from_a_float32_scalar():
    x = random(4096)
    found = np.asarray(jax.jit(lambda x: layers.scale_by(x, 2**-0.5))(x))
    wanted = (x.astype(np.float32) * np.float32(2**-0.5)).astype(BF16)
    np.testing.assert_array_equal(found.view(np.uint16), wanted.view(np.uint16))
    weak = (x * np.array(2**-0.5, BF16)).view(np.uint16)
    assert (found.view(np.uint16) != weak).any()


def test_softcap_rounds_after_each_of_three_steps():
    x = random(4096, scale=40.0)
    found = np.asarray(jax.jit(lambda x: layers.softcap(x, 30.0))(x))
    third = (x.astype(np.float32) * np.float32(1 / 30)).astype(BF16)
    wide = np.asarray(jnp.tanh(jnp.asarray(third, jnp.float32))).astype(BF16).astype(np.float32)
    np.testing.assert_array_equal(found, (wide * np.float32(30)).astype(BF16))
    assert np.abs(found.astype(np.float32)).max() <= 30


def test_rms_norm_multiplies_by_one_plus_weight_before_its_only_rounding():
    x, scale = random(8, 64), random(64, scale=0.3)
    norm = layers.RMSNorm(1e-6, plus_one=True)
    found = np.asarray(jax.jit(norm.apply)({"params": {"scale": scale}}, x))
    wide = x.astype(np.float64)
    wanted = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * (1 + scale.astype(np.float64))
    ulps = found.view(np.int16).astype(int) - wanted.astype(np.float32).astype(BF16).view(np.int16)
    assert np.abs(ulps).max() <= 1 and np.mean(ulps == 0) > 0.99


def test_rms_norm_uses_correctly_rounded_operations():
    """In float32 every step is one NumPy operation, which no approximate reciprocal square root would equal."""
    x = np.random.default_rng(1).standard_normal((4096, 1)).astype(np.float32)
    found = np.asarray(
        jax.jit(layers.RMSNorm(0.0, plus_one=True).apply)({"params": {"scale": np.zeros(1, np.float32)}}, x)
    )
    np.testing.assert_array_equal(found, x * (np.float32(1) / np.sqrt(x * x)))


def test_dot_accumulates_in_float32_and_leaves_rounding_to_the_caller():
    a, b = random(16, 2048), random(2048, 16)
    found = np.asarray(jax.jit(lambda a, b: products.dot("TF,FD->TD", a, b))(a, b))
    wanted = a.astype(np.float64) @ b.astype(np.float64)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-4)


def test_embedding_scale_is_rounded_to_the_dtype_first():
    table = random(10, 1280)
    embedder = layers.Embedder(10, 1280, BF16)
    params = {"embedding": tuple(np.split(table, len(products.chunk_sizes(1280)), axis=1))}
    found = embedder.apply({"params": params}, np.array([3], np.int32), method=embedder.encode)
    np.testing.assert_array_equal(np.asarray(found)[0], table[3] * np.array(35.75, BF16))
