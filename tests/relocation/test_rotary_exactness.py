"""The rotary study at reduced size: functions against their definitions, and the figures that are whole numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvgraft_jax import errors
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma import configurations
from kvgraft_jax.gemma import rotary as rotary_lib
from kvgraft_jax.relocation import bits, encodings, keys, tables


def gaussian(num_keys, head_dim, dtype="bfloat16", seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((num_keys, head_dim), np.float32)).astype(dtype)


def test_the_encodings_cover_every_layer_of_the_ten_models():
    used = {
        (attention.head_dim, attention.rotary)
        for config in configurations.CONFIGURATIONS.values()
        for attention in map(config.attention, range(config.num_layers))
    }
    assert len(configurations.CONFIGURATIONS) == 10 and used == {(e.head_dim, e.rotary) for e in encodings.ENCODINGS}
    assert len(used) == len(encodings.ENCODINGS)
    assert [encodings.get(e.name) for e in encodings.ENCODINGS] == list(encodings.ENCODINGS)
    rotated = {e.name: e.num_rotated_pairs for e in encodings.ENCODINGS}
    assert rotated.pop("global512p") == 64 and set(rotated.values()) == {128, 64}


@pytest.mark.parametrize(
    ("narrow", "wide"),
    [(encodings.LOCAL128, encodings.LOCAL256), (encodings.GLOBAL128_SCALE8, encodings.GLOBAL256_SCALE8)],
)
@pytest.mark.parametrize("rule", rotary_lib.RULES)
def test_a_head_of_128_turns_like_every_second_pair_of_256(narrow, wide, rule):
    np.testing.assert_array_equal(narrow.frequencies(rule), wide.frequencies(rule)[::2])


def test_what_is_no_encoding_is_refused():
    with pytest.raises(errors.ConfigError, match="wanted one of local256"):
        encodings.get("local257")
    with pytest.raises(errors.ConfigError, match="head_dim"):
        encodings.Encoding("odd", 255, config_lib.RotaryConfig(1e4))
    with pytest.raises(errors.ConfigError, match="base"):
        encodings.Encoding("low", 256, config_lib.RotaryConfig(0.5))


@pytest.mark.parametrize("position", [10, -10, np.array([0, 12])])
def test_positions_outside_the_table_are_refused(position):
    table = tables.make_table(encodings.LOCAL256, 10)
    with pytest.raises(errors.InputError, match="has 0 to 9"):
        table.rows(position)


def test_positions_are_whole_numbers():
    with pytest.raises(errors.InputError, match="integer"):
        tables.make_table(encodings.LOCAL256, 10).rows(1.0)


def test_bits_tell_zeros_apart_and_count():
    a, b = jnp.asarray([0.0, 1.0, np.nan, 2.0]), jnp.asarray([-0.0, 1.0, np.nan, 3.0])
    assert bits.bit_equal(a, b).tolist() == [False, True, True, False]
    assert int(bits.bit_difference_count(a, b)) == 2
    assert bits.bit_difference_count(a[None], b[None], axis=0).tolist() == [1, 0, 0, 1]
    for bad in (a[:2], a.astype(jnp.bfloat16), a.astype(jnp.int32)):
        with pytest.raises(errors.ConfigError, match="comparison of bits"):
            bits.bit_equal(a, bad)


@pytest.mark.parametrize("encoding", encodings.ENCODINGS, ids=lambda e: e.name)
@pytest.mark.parametrize("scheme", [keys.ENGINE_BF16, keys.ENGINE_F32], ids=lambda s: s.name)
def test_fresh_keys_are_the_engines(encoding, scheme):
    k_raw_TxH = gaussian(5, encoding.head_dim, scheme.raw)
    attention = config_lib.AttentionConfig(1, encoding.head_dim, encoding.rotary)
    engine = rotary_lib.make_tables(_one_kind(attention), 9, jnp.dtype(scheme.raw)).full
    table = tables.make_table(encoding, 9)
    wanted = jax.jit(rotary_lib.rotate)(k_raw_TxH[:, None], engine.cos_SxR[3:8], engine.sin_SxR[3:8])[:, 0]
    found = keys.fresh_key(k_raw_TxH, table, np.arange(3, 8), scheme)
    assert int(bits.bit_difference_count(found, wanted)) == 0 and found.dtype == scheme.stored
    one = keys.fresh_key(k_raw_TxH, table, 4, scheme)
    assert int(bits.bit_difference_count(one[1], wanted[1])) == 0


def _one_kind(attention):
    sliding = config_lib.AttentionConfig(1, 16, config_lib.RotaryConfig(1e4), window=8)
    return config_lib.GemmaConfig(
        name="t",
        vocab_size=8,
        embed_dim=8,
        hidden_dim=8,
        num_heads=1,
        layer_kinds=("full",),
        sliding=sliding,
        full=attention,
        query_scale=1.0,
    )


@pytest.mark.parametrize("scheme", keys.SCHEMES, ids=lambda s: s.name)
@pytest.mark.parametrize("encoding", encodings.CERTIFIED, ids=lambda e: e.name)
def test_own_position_is_exact_and_every_shift_is_not(encoding, scheme):
    table = tables.make_table(encoding, 1200)
    k_raw_TxH = gaussian(64, encoding.head_dim, scheme.raw)
    shifts = (-999, -1, 0, 1, 2, 199)
    counts = keys.mismatch_by_pair(k_raw_TxH, table, 1000, shifts, scheme)
    assert counts.shape == (6, encoding.num_pairs) and counts.dtype == np.int32
    assert (counts[2] == 0).all() and (np.delete(counts, 2, axis=0).sum(axis=1) > 0).all()
    assert (counts[:, encoding.num_rotated_pairs :] == 0).all()  # E2: pairs that do not rotate.


@pytest.mark.parametrize("scheme", keys.SCHEMES, ids=lambda s: s.name)
@pytest.mark.parametrize("method", [keys.REROTATE, keys.UNROTATE, keys.SNAP])
def test_from_position_0_every_shift_is_exact(scheme, method):  # E1
    table = tables.make_table(encodings.LOCAL256, 2000)
    k_raw_TxH = gaussian(256, 256, scheme.raw)
    assert keys.mismatch_by_pair(k_raw_TxH, table, 0, (1, 1000, 1999), scheme, method).sum() == 0


def test_a_map_without_errors_of_its_own_is_no_better():
    """T5: what fails is not the re-rotation; the stored key lacks what is needed."""
    table = tables.make_table(encodings.LOCAL256, 32_001)
    k_raw_TxH = gaussian(512, 256)
    rerotated, linear = (
        keys.mismatch_by_pair(k_raw_TxH, table, 30_000, (2000,), keys.BF16_WIDE, method).mean() / 1024
        for method in (keys.REROTATE, keys.LINEAR)
    )
    assert 0.32 < linear < 0.34 and 0.32 < rerotated < 0.35
    assert keys.mismatch_by_pair(k_raw_TxH, table, 0, (1000,), keys.BF16_WIDE, keys.LINEAR).sum() <= 10


def test_wider_storage_gives_the_key_back():  # E4
    table = tables.make_table(encodings.GLOBAL256_SCALE8, 32_001)
    k_raw_TxH = gaussian(2048, 256)
    counts = [
        keys.mismatch_by_pair(k_raw_TxH, table, p, (d,), keys.F32_OF_BF16, keys.SNAP).sum()
        for p, d in ((1, 1), (1000, 1000), (30_000, 2000))
    ]
    assert max(counts) <= 4, counts
    assert keys.mismatch_by_pair(k_raw_TxH, table, 1000, (1000,), keys.F32_OF_BF16).sum() > 200_000


def test_bad_keys_are_refused_before_any_compute():
    table = tables.make_table(encodings.LOCAL256, 10)
    k_raw_TxH = gaussian(2, 256)
    with pytest.raises(errors.InputError, match="NaN"):
        keys.fresh_key(k_raw_TxH.at[1, 3].set(jnp.nan), table, 1)
    with pytest.raises(errors.ConfigError, match="k_raw_TxH: got float32"):
        keys.fresh_key(k_raw_TxH.astype(jnp.float32), table, 1)
    with pytest.raises(errors.ConfigError, match="k_rot_TxH: got shape"):
        keys.rerotated_key(k_raw_TxH[:, :128], table, 1)
    with pytest.raises(errors.InputError, match="both ends"):
        keys.mismatch_by_pair(k_raw_TxH, table, 1, (0, -2))
    with pytest.raises(errors.InputError, match="has 0 to 9"):
        keys.mismatch_by_pair(k_raw_TxH, table, 8, (0, 2))
    with pytest.raises(errors.ConfigError, match="method"):
        keys.moved_key(k_raw_TxH, table, 1, 2, method="guess")
    with pytest.raises(errors.ConfigError, match="2 positions for 3"):
        keys.fresh_key(gaussian(3, 256), table, np.array([1, 2]))
    with pytest.raises(errors.ConfigError, match="stored"):
        keys.Scheme("x", "bfloat16", "float32", "float16")
    with pytest.raises(errors.ConfigError, match="scheme"):
        keys.scheme("x")
