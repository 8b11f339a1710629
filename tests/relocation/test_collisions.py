"""The arithmetic of the integer checker against the machine's and the engine's, and the generator's against its."""

from __future__ import annotations

import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import check_certificate
from experiments.make_certificate import generator as make_certificate
from kvgraft_jax import errors
from kvgraft_jax.gemma import rotary
from kvgraft_jax.relocation import collisions, encodings


@pytest.mark.parametrize("digits", [8, 24])
def test_rounding_is_that_of_the_machine(digits):
    rng = random.Random(digits)
    dtype = jnp.bfloat16 if digits == 8 else np.float32
    values = [rng.choice((-1, 1)) * rng.getrandbits(rng.randint(1, 24 if digits == 8 else 53)) for _ in range(3000)]
    values += [
        sign * (odd << (digits + 5)) + sign * tie for sign in (-1, 1) for odd in range(128, 140) for tie in (0, 32)
    ]
    wanted = np.array(values, np.float32 if digits == 8 else np.float64).astype(dtype).astype(np.float64)
    assert [check_certificate.rounded(value, digits) for value in values] == wanted.astype(int).tolist()


def test_cells_are_the_numbers_of_bfloat16_without_ties():
    values = np.random.default_rng(0).integers(-(1 << 24), 1 << 24, 20_000)
    values = values[np.abs(values) >= 1 << 9]
    bits = values.astype(np.float32).view(np.int32).astype(np.int64)
    is_tie = bits & 0xFFFF == 0x8000
    order = np.argsort(values)
    cells = np.array([check_certificate.cell(int(value)) for value in values])
    stored = values.astype(np.float32).astype(jnp.bfloat16).astype(np.float64)
    assert (np.diff(cells[order]) >= 0).all()
    cells, stored = cells[~is_tie], stored[~is_tie]
    assert len(np.unique(cells)) == len(np.unique(stored)) == len(np.unique(np.stack([cells, stored]), axis=1).T)


@pytest.mark.parametrize("encoding", encodings.ENCODINGS, ids=lambda encoding: encoding.name)
def test_tables_of_the_engine_are_recomputed_to_the_bit(encoding):
    num_positions = 600
    config = check_certificate.CONFIGS[encoding.name]
    assert config == (
        encoding.head_dim,
        encoding.rotary.base,
        encoding.rotary.scale,
        encoding.num_rotated_pairs,
    )
    frequency_R = encoding.frequencies()
    tables = [table_SxR.astype(jnp.bfloat16) for table_SxR in rotary.rotary_tables_f32(frequency_R, num_positions)]
    for pair in (0, 1, 2, 7, 30, encoding.num_rotated_pairs - 1):
        found = check_certificate.frequency(config, pair, check_certificate.REFERENCE)
        assert found == int(float(frequency_R[pair]) * 2**80) << (check_certificate.WORK - 80)
        rows = check_certificate.make_table(config, pair, check_certificate.HF_BF16, num_positions)
        for column, table_SxR in enumerate(tables):
            found_S = np.array([row[column] / 2**check_certificate.BITS for row in rows])
            np.testing.assert_array_equal(found_S, table_SxR[:, pair].astype(np.float64))


@pytest.mark.parametrize(("name", "pair"), [("local256", 0), ("global512p", 5), ("g3global256s8", 40)])
def test_real_tables_are_cosines_and_sines(name, pair):
    head_dim, base, scale, _ = config = check_certificate.CONFIGS[name]
    rows = check_certificate.make_table(config, pair, check_certificate.REAL, 2000)
    for position in (0, 1, 2, 355, 1999):
        angle = position * (base ** (-2 * pair / head_dim) / scale)
        cosine, sine, error = (item / 2**check_certificate.BITS for item in rows[position])
        assert abs(cosine - math.cos(angle)) < 1e-12 and abs(sine - math.sin(angle)) < 1e-12
        assert math.isclose(error, 2**-21 + (2**-22 * angle if pair else 0))


def test_the_rotation_is_that_of_the_engine_to_the_bit():
    rng = np.random.default_rng(1)
    frequency_R = encodings.LOCAL256.frequencies()
    cos_SxR, sin_SxR = (table_SxR.astype(jnp.bfloat16) for table_SxR in rotary.rotary_tables_f32(frequency_R, 512))
    k_TxH = rng.standard_normal((512, 256)).astype(jnp.bfloat16)
    rotated_TxH = np.asarray(jax.jit(rotary.rotate)(k_TxH[:, None], cos_SxR, sin_SxR))[:, 0]
    for pair in (0, 3, 60, 127):
        rows = check_certificate.make_table((256, 10_000, 1, 128), pair, check_certificate.HF_BF16, 512)
        for position in range(512):
            x, y = (int(float(k_TxH[position, i]) * 2**40) for i in (pair, pair + 128))
            found = [
                item / 2 ** (40 + check_certificate.BITS) for item in check_certificate.rotated(rows[position], x, y)
            ]
            assert found == [float(rotated_TxH[position, i]) for i in (pair, pair + 128)]


@pytest.mark.parametrize("rule", collisions.RULES)
def test_codes_are_those_of_the_checker(rule):
    rng = np.random.default_rng(2)
    pair_M, count = np.repeat([0, 20, 60, 100], 12), 48
    key_pairs_Mx4 = np.stack(
        [
            pair_M,
            rng.integers(128, 256, count),
            rng.choice((-1, 1), count) * rng.integers(128, 255, count),
            rng.integers(0, 16, count),
        ],
        axis=1,
    )
    codes = collisions.collision_codes(encodings.LOCAL256, rule, key_pairs_Mx4, 400)
    undecided = 0
    for (pair, x, m, e), merged_S, parted_S in zip(
        key_pairs_Mx4.tolist(), codes.merged_MxS, codes.parted_MxS, strict=True
    ):
        rows = check_certificate.make_table(check_certificate.CONFIGS["local256"], pair, rule, 400)
        one, other = (x << (1 + e), m), (x << (1 + e), m + (1 if m > 0 else -1))
        found = np.array([check_certificate.compared(row, one, row, other, rule) for row in rows[1:]])
        np.testing.assert_array_equal(merged_S[1:], found == check_certificate.COLLIDE)
        np.testing.assert_array_equal(parted_S[1:], found == check_certificate.SEPARATE)
        undecided += (found == check_certificate.UNDECIDED).sum()
    assert (undecided > 0) == (rule != collisions.HF_BF16)
    assert not codes.merged_MxS[:, 0].any() and codes.parted_MxS[:, 0].all()


@pytest.mark.parametrize("count", [3, 12, 40])
def test_what_key_pairs_separate_by_definition(count):
    rng = np.random.default_rng(count)
    code_MxS = rng.integers(0, 3, (count, 21))
    codes = collisions.Codes(code_MxS == 0, code_MxS == 1)
    confused = [
        [p, other]
        for p in range(1, 21)
        for other in range(21)
        if other != p and not (codes.merged_MxS[:, p] & codes.parted_MxS[:, other]).any()
    ]
    assert collisions.num_confused(codes) == len(confused)


@pytest.mark.parametrize(
    ("rule", "num_positions", "key_pair"),
    [
        ("imaginary", 9, (0, 128, 128, 0)),
        ("real", 1, (0, 128, 128, 0)),
        ("real", 1 << 19, (0, 128, 128, 0)),
        ("real", 9, (128, 128, 128, 0)),
        ("real", 9, (-1, 128, 128, 0)),
        ("real", 9, (0, 256, 128, 0)),
        ("real", 9, (0, 128, 255, 0)),
        ("real", 9, (0, 128, 0, 0)),
        ("real", 9, (0, 128, 128, 16)),
        ("real", 9, (0, 128, 128)),
        ("real", 9, (0.0, 128.0, 128.0, 0.0)),
    ],
)
def test_codes_refuse_what_makes_no_sense(rule, num_positions, key_pair):
    with pytest.raises(errors.ConfigError):
        collisions.collision_codes(encodings.LOCAL256, rule, np.array([key_pair]), num_positions)


def test_too_few_candidates_are_told():
    with pytest.raises(errors.ConfigError, match="other candidates"):
        make_certificate.find_key_pairs(encodings.LOCAL256, collisions.REAL, 64, pairs=(0,), pool=8)
