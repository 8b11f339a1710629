"""Rotary frequencies and tables against arithmetic done another way, and the rotation against its definition."""

from __future__ import annotations

from decimal import Decimal, localcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvgraft_jax import errors
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma import configurations, rotary

ROTARY = config_lib.RotaryConfig(1e4)


def exact_frequencies(head_dim: int, base: int, scale: int) -> list[float]:
    """base^(-2i/H) / scale with 40 digits, rounded once to float32."""
    with localcontext() as context:
        context.prec = 40
        values = [1 / (Decimal(base) ** (Decimal(2 * i) / head_dim) * scale) for i in range(head_dim // 2)]
    return [float(np.float32(value)) for value in values]


@pytest.mark.parametrize(("head_dim", "base", "scale"), [(256, 10_000, 1), (256, 1_000_000, 8), (16, 10_000, 1)])
def test_correct_rule_rounds_once(head_dim, base, scale):
    found_R = rotary.rotary_frequencies(head_dim, config_lib.RotaryConfig(base, scale), rule="correct")
    np.testing.assert_array_equal(found_R, np.array(exact_frequencies(head_dim, base, scale), np.float32))


def test_reference_rule_is_within_one_ulp_and_differs():
    correct_R = rotary.rotary_frequencies(256, ROTARY, rule="correct")
    reference_R = rotary.rotary_frequencies(256, ROTARY)
    ulps_R = reference_R.view(np.int32) - correct_R.view(np.int32)
    assert np.abs(ulps_R).max() == 1 and reference_R.dtype == np.float32


def test_tables_are_rounded_once():
    frequency_R = rotary.rotary_frequencies(16, ROTARY)
    cos_SxR, sin_SxR = rotary.rotary_tables_f32(frequency_R, 300)
    assert cos_SxR.shape == (300, 8) and cos_SxR.dtype == np.float32
    angle = np.float32(np.float32(299) * frequency_R[1])
    assert cos_SxR[299, 1] == np.float32(np.cos(np.float64(angle)))
    assert sin_SxR[299, 1] == np.float32(np.sin(np.float64(angle)))
    assert (cos_SxR[0] == 1).all() and (sin_SxR[0] == 0).all()


@pytest.mark.parametrize(("head_dim", "rule"), [(7, "reference"), (0, "reference"), (8, "other")])
def test_bad_arguments(head_dim, rule):
    with pytest.raises(errors.ConfigError):
        rotary.rotary_frequencies(head_dim, ROTARY, rule=rule)


@pytest.mark.parametrize("num_positions", [0, (1 << 24) + 1])
def test_positions_outside_float32(num_positions):
    with pytest.raises(errors.ConfigError, match="num_positions"):
        rotary.rotary_tables_f32(np.ones(1, np.float32), num_positions)


@pytest.mark.parametrize("base", [1.0, 0.5, -2.0])
def test_bad_base(base):
    with pytest.raises(errors.ConfigError, match="rotary base"):
        config_lib.RotaryConfig(base)


def test_rotation_rounds_products_and_sum_in_bfloat16():
    """Every product and the sum rounded to bfloat16, as numpy does it one operation at a time."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 3, 16)).astype(jnp.bfloat16)
    cos_SxR, sin_SxR = rotary.rotary_tables_f32(rotary.rotary_frequencies(16, ROTARY), 5)
    cos, sin = cos_SxR.astype(jnp.bfloat16), sin_SxR.astype(jnp.bfloat16)
    found = jax.jit(rotary.rotate)(x, cos, sin)
    x1, x2, c, s = x[..., :8], x[..., 8:], cos[:, None], sin[:, None]
    wanted = np.concatenate([x1 * c - x2 * s, x2 * c + x1 * s], axis=-1)
    np.testing.assert_array_equal(np.asarray(found).view(np.uint16), wanted.view(np.uint16))


@pytest.mark.parametrize("position", [0, 1023, 1 << 17])
def test_the_digest_of_the_tables_sees_a_row_that_another_library_makes(position, monkeypatch):
    config = configurations.get("gemma-3-270m")
    before, cos_sin = rotary.tables_digest(config), rotary._cos_sin

    def other(position_Tx1, frequency_R):
        cos_TxR, sin_TxR = cos_sin(position_Tx1, frequency_R)
        return np.where(position_Tx1 == position, np.nextafter(np.float32(cos_TxR), np.float32(2)), cos_TxR), sin_TxR

    assert rotary.tables_digest(config) == before
    monkeypatch.setattr(rotary, "_cos_sin", other)
    assert rotary.tables_digest(config) != before
