"""The rotary study at reduced size: exact compositions, laws, decoders, logits and transports against known figures."""

from __future__ import annotations

import fractions
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import check_certificate
from kvgraft_jax import engine as engine_lib
from kvgraft_jax import errors
from kvgraft_jax.checkpoints import load
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma import layers
from kvgraft_jax.relocation import bits, compositions, decoders, encodings, keys, laws, logits, tables, transports

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "rotary.md"

PAIR0 = encodings.Encoding("pair 0", 2, config_lib.RotaryConfig(1e4))
THREE_LAYERS = (
    "random:gemma-3-270m?seed=0&layers=3&vocab=512&embed=64&hidden=128&heads=4&kv_heads=1&head_dim=16&window=32"
)


def mismatch_expectation(angle):
    """Predicts the share of elements that differ after rotation by a generic angle, all numbers in one binade.

    With c >= s >= 0 the larger and smaller of |cos| and |sin|, E|c e1 - s e2| = c/4 + s^2/(12 c) for roundings e1, e2
    uniform in [-1/2, 1/2]: 0.25 at angles near 0 (but not at 0) down to 0.2357 at an eighth of a turn.
    """
    smaller, larger = sorted((abs(np.cos(angle)), abs(np.sin(angle))))
    return larger / 4 + smaller**2 / (12 * larger)


def small_angle_expectation(sin_shift, partner, unit):
    """Predicts the share after an angle so small that few roundings change: the mean distance of |sin| |partner| / unit
    from the nearest whole number.

    `partner` is the other element of each pair, `unit` the distance from each element to the next number of its dtype.
    """
    t = np.abs(sin_shift) * np.abs(np.asarray(partner, np.float64)) / np.asarray(unit, np.float64)
    return float(np.abs(t - np.rint(t)).mean())


def changes(name):
    (transport,) = [t for t in transports.TRANSPORTS if t.name == name]
    return transports.count_changes(transport)


@pytest.mark.parametrize("transport", transports.TRANSPORTS, ids=lambda t: t.name)
def test_a_copy_keeps_every_pattern_but_nans_and_arithmetic_does_not(transport):  # T1
    found = transports.count_changes(transport)
    if transport.is_copy:
        assert (found.subnormals, found.negative_zero, found.others) == (0, 0, 0)
    else:
        assert found.subnormals == 254
    assert 0 <= found.nans <= 254


def test_the_patterns_that_each_transport_changes():  # T1
    for name in ("device put and get", "jitted identity", "bits as uint16", "dynamic_update_slice of uint16"):
        assert changes(name) == transports.Changes(0, 0, 0, 0)
    assert changes("rotation by 0") == changes("product with 1") == transports.Changes(252, 254, 0, 0)
    assert changes("blend by mask") == transports.Changes(252, 254, 1, 0)
    assert changes("through float16") == transports.Changes(252, 254, 0, 56_322)
    one_hot = changes("product with one-hot rows")
    assert (one_hot.subnormals, one_hot.negative_zero, one_hot.others) == (254, 1, 32_514)


def test_depth_is_the_power_of_two_that_makes_an_integer():
    values = np.array([0.0, 1.0, -3.0, 0.5, 0.75, 25 / 32, -5 / 8, 2.0**-40, 3 * 2.0**-50])
    assert compositions.dyadic_depth(values).tolist() == [0, 0, 0, 1, 2, 5, 3, 40, 50]
    rng = np.random.default_rng(0)
    for value in rng.uniform(-1, 1, 200).astype(np.float32):
        wanted = fractions.Fraction(float(value)).denominator.bit_length() - 1
        assert compositions.dyadic_depth(value) == wanted


def test_norm_defects_are_the_real_ones_rounded_once():
    table = tables.make_table(encodings.LOCAL256, 50)
    defect_SxR = compositions.unit_norm_defect(table.cos_SxR, table.sin_SxR)
    for position, pair in ((0, 0), (1, 0), (7, 100), (49, 127), (3, 5)):
        c, s = (fractions.Fraction(float(x[position, pair])) for x in (table.cos_SxR, table.sin_SxR))
        assert defect_SxR[position, pair] == float(c * c + s * s - 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("encoding", encodings.ENCODINGS, ids=lambda e: e.name)
def test_only_position_0_has_norm_1(encoding, dtype):  # T4
    table = tables.make_table(encoding, 1024)
    rotated = slice(encoding.num_rotated_pairs)
    cos_SxR, sin_SxR = (x[:, rotated].astype(jnp.dtype(dtype)) for x in (table.cos_SxR, table.sin_SxR))
    defect_SxR = compositions.unit_norm_defect(cos_SxR, sin_SxR)
    assert (defect_SxR[0] == 0).all() and (defect_SxR[1:] != 0).all()
    assert np.abs(defect_SxR).max() < (2**-23.5 if dtype == "float32" else 2**-7.5)


def test_bfloat16_tables_compose_exactly_at_single_pairs():  # T4, E9
    table = tables.make_table(encodings.LOCAL256, 1935)
    cos_SxR, sin_SxR = (x.astype(jnp.bfloat16) for x in (table.cos_SxR, table.sin_SxR))
    for position in (970, 964):
        assert (cos_SxR[position, 101], sin_SxR[position, 101]) == (25 / 32, 5 / 8)
    assert compositions.unit_norm_defect(25 / 32, 5 / 8) == 1 / 1024
    assert (cos_SxR[1934, 101], sin_SxR[1934, 101]) == (225 / 1024, 125 / 128)
    pair = slice(101, 102)
    found = compositions.exact_composition_candidates(cos_SxR[:, pair], sin_SxR[:, pair])
    is_exact_M = compositions.is_exact(cos_SxR[:, pair], sin_SxR[:, pair], found)
    exact = set(zip(found.first_M[is_exact_M], found.second_M[is_exact_M], found.target_M[is_exact_M], strict=True))
    assert (970, 964, 1934) in exact


def test_no_float32_rotation_is_a_product_of_two():  # T4
    table = tables.make_table(encodings.GLOBAL256_SCALE8, 8192)
    found = compositions.exact_composition_candidates(table.cos_SxR, table.sin_SxR)
    assert found.pair_M.size > 0 and not compositions.is_exact(table.cos_SxR, table.sin_SxR, found).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoding", "num_positions", "dtype", "candidates", "exact"),
    [
        (encodings.GLOBAL256_SCALE8, 32_768, "float32", 2_976, 0),
        (encodings.GLOBAL256, 32_768, "float32", 30_154, 0),
        (encodings.GLOBAL512_PARTIAL, 4096, "bfloat16", 8_162_817, 5_088),
    ],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_the_counts_of_compositions(encoding, num_positions, dtype, candidates, exact):  # T4
    table = tables.make_table(encoding, num_positions, rule="correct")
    rotated = slice(encoding.num_rotated_pairs)
    cos_SxR, sin_SxR = (x[:, rotated].astype(jnp.dtype(dtype)) for x in (table.cos_SxR, table.sin_SxR))
    found = compositions.exact_composition_candidates(cos_SxR, sin_SxR)
    is_exact_M = compositions.is_exact(cos_SxR, sin_SxR, found)
    assert (found.orders_M.sum(), found.orders_M[is_exact_M].sum()) == (candidates, exact)


def test_candidates_are_those_of_a_search_through_all_products():
    table = tables.make_table(encodings.LOCAL256, 90)
    cos_SxR, sin_SxR = (x[:, 60:64].astype(jnp.bfloat16) for x in (table.cos_SxR, table.sin_SxR))
    depth_SxR = compositions.rotation_depth(cos_SxR, sin_SxR)
    wanted = set()
    for pair in range(4):
        for a in range(1, 90):
            for b in range(1, a + 1):
                for target, back in ((a + b, False), (a - b, True)):
                    if 0 < target < 90 and depth_SxR[target, pair] >= depth_SxR[a, pair] + depth_SxR[b, pair] - 1:
                        wanted.add((pair, a, b, back))
    found = compositions.exact_composition_candidates(cos_SxR, sin_SxR)
    columns = (found.pair_M, found.first_M, found.second_M, found.turns_back_M)
    listed = [tuple(map(int, row)) for row in zip(*columns, strict=True)]
    assert len(listed) == len(set(listed)) and {(*row[:3], bool(row[3])) for row in listed} == wanted and wanted


def test_a_product_that_float64_cannot_tell_from_its_target_is_not_exact():
    tiny = np.float32(2.0**-40)
    cos_SxR = np.array([[1.0], [1.0], [0.5], [0.5]], np.float32)
    sin_SxR = np.array([[0.0], [tiny], [tiny], [1.5 * tiny]], np.float32)
    sums = compositions.Compositions(*(np.array([n]) for n in (0, 2, 1)), np.array([False]))
    assert not compositions.is_exact(cos_SxR, sin_SxR, sums)[0]  # 0.5 - 2^-80.
    assert compositions.is_exact(cos_SxR, np.zeros_like(sin_SxR), sums)[0]


def test_tables_of_another_shape_are_refused():
    with pytest.raises(errors.ConfigError, match="table"):
        compositions.exact_composition_candidates(np.ones((3, 2)), np.ones((3, 1)))


@pytest.mark.parametrize("scheme", keys.SCHEMES, ids=lambda s: s.name)
@pytest.mark.parametrize("encoding", encodings.CERTIFIED, ids=lambda e: e.name)
def test_the_error_stays_below_its_bound(encoding, scheme):
    roundoff = {"bfloat16": 2.0**-8, "float32": 2.0**-24}
    table = tables.make_table(encoding, 130_001)
    raw = np.random.default_rng(0).standard_normal((64, encoding.head_dim), np.float32)
    k_raw_TxH = jnp.asarray(raw).astype(scheme.raw)
    for position, shift in ((1, 1), (1000, -999), (30_000, 2000), (100_000, 30_000)):
        k_rot_TxH = keys.fresh_key(k_raw_TxH, table, position, scheme)
        moved_TxH = keys.rerotated_key(k_rot_TxH, table, shift, scheme)
        fresh_TxH = keys.fresh_key(k_raw_TxH, table, position + shift, scheme)
        moved, fresh, wide = (np.asarray(x).astype(np.float64) for x in (moved_TxH, fresh_TxH, k_raw_TxH))

        def norm(x):
            return np.hypot(*np.split(x, 2, axis=1))

        bound_R = laws.mismatch_bound(
            encoding.frequencies(),
            position,
            shift,
            stored_roundoff=roundoff[scheme.stored],
            arithmetic_roundoff=roundoff[scheme.arithmetic],
        )
        assert (norm(moved - fresh) <= bound_R * norm(wide)).all()


def test_the_angle_term_of_the_bound_is_0_where_angles_are_whole():
    near, far = (
        laws.mismatch_bound(encodings.LOCAL256.frequencies(), p, 1, stored_roundoff=2**-24, arithmetic_roundoff=2**-24)
        for p in (1, 100_000)
    )
    assert near[0] == far[0] and (far[1:] > near[1:]).all()
    with pytest.raises(errors.InputError, match="both ends"):
        laws.mismatch_bound(encodings.LOCAL256.frequencies(), 1, -2, stored_roundoff=0, arithmetic_roundoff=0)


def test_the_law_of_equal_binades():
    assert mismatch_expectation(0.0) == 0.25 and mismatch_expectation(np.pi / 2) == 0.25
    np.testing.assert_allclose(mismatch_expectation(np.pi / 4), 0.2357, atol=5e-5)
    rng = np.random.default_rng(0)
    real = rng.uniform(2**20, 2**21, (2, 400_000))  # On a grid of 1, far from any change of binade.
    for angle in (0.3, np.pi / 4, 1.2):
        c, s = np.cos(angle), np.sin(angle)
        stored = np.rint(real)
        moved, fresh = (np.rint(c * x[0] - s * x[1]) for x in (stored, real))
        np.testing.assert_allclose((moved != fresh).mean(), mismatch_expectation(angle), atol=0.003)


def test_the_law_of_small_angles():
    rng = np.random.default_rng(0)
    fresh = rng.uniform(1, 2, (2, 20_000)).astype(jnp.bfloat16)
    unit = np.full(20_000, 2.0**-7)
    assert small_angle_expectation(0.0, fresh[1], unit) == 0
    np.testing.assert_allclose(small_angle_expectation(2.0**-9, fresh[1], unit), 0.25 * 1.5, atol=0.01)


@pytest.mark.parametrize("encoding", encodings.CERTIFIED[:3], ids=lambda e: e.name)
def test_the_law_of_small_angles_predicts_what_slow_pairs_do(encoding):
    table = tables.make_table(encoding, 1002)
    k_raw_TxH = jnp.asarray(np.random.default_rng(0).standard_normal((2048, 256), np.float32)).astype(jnp.bfloat16)
    by_pair = keys.mismatch_by_pair(k_raw_TxH, table, 1000, (1,), keys.BF16_WIDE)[0] / 4096
    k_rot_TxH = np.asarray(keys.fresh_key(k_raw_TxH, table, 1000, keys.BF16_WIDE)).astype(np.float64)
    partner_TxH, unit_TxH = np.roll(k_rot_TxH, 128, axis=1), 2.0 ** (np.frexp(k_rot_TxH)[1] - 8)
    predicted = [
        small_angle_expectation(np.sin(frequency), partner_TxH[:, pair::128], unit_TxH[:, pair::128])
        for pair, frequency in enumerate(encoding.frequencies())
        if pair >= 64
    ]
    np.testing.assert_allclose(by_pair[64:].mean(), np.mean(predicted), rtol=0.05)


@pytest.mark.parametrize(
    ("encoding", "scheme", "share"),
    [
        (encodings.GLOBAL256_SCALE8, keys.BF16_WIDE, (0.03, 0.05)),
        (encodings.GLOBAL256_SCALE8, keys.ENGINE_BF16, (0, 0)),
        (encodings.LOCAL256, keys.BF16_WIDE, (0, 0)),
    ],
    ids=lambda x: getattr(x, "name", None),
)
def test_lucky_heads_are_rare_and_of_one_encoding(encoding, scheme, share):  # E8
    table = tables.make_table(encoding, 2)
    k_raw_TxH = jnp.asarray(np.random.default_rng(1).standard_normal((8192, 256), np.float32)).astype(jnp.bfloat16)
    fresh_TxH, stored_TxH = (keys.fresh_key(k_raw_TxH, table, position, scheme) for position in (0, 1))
    is_equal_T = bits.bit_equal(keys.rerotated_key(stored_TxH, table, -1, scheme), fresh_TxH).all(axis=1)
    assert share[0] <= float(is_equal_T.mean()) <= share[1]


@pytest.mark.parametrize(
    ("position", "target", "wanted"),
    [(0, 1000, 1 << 20), (1, 0, 751_424), (1, 2, 830_568), (1000, 30_000, 894_424), (44, 45, 1_031_392)],
)
def test_the_best_decoder_of_all_ordinary_keys(position, target, wanted):  # T5
    table = tables.make_table(PAIR0, 30_001)
    k_raw_TxH = jnp.asarray(decoders.binade_keys(0.25, 4.0))
    stored, fresh = (np.asarray(keys.fresh_key(k_raw_TxH, table, p, keys.BF16_WIDE)) for p in (position, target))
    assert k_raw_TxH.shape == (1 << 20, 2)
    stored_M, fresh_M = decoders.pair_codes(stored), decoders.pair_codes(fresh)
    assert decoders.optimal_decoder_accuracy(stored_M, fresh_M) == wanted
    if target == 0:
        assert np.unique(stored_M).size == wanted


@pytest.mark.parametrize("scheme", [keys.BF16_WIDE, keys.ENGINE_BF16], ids=lambda s: s.name)
@pytest.mark.parametrize("position", [355, 710])
def test_near_quarter_turns_lose_no_ordinary_key(position, scheme):  # E7
    table = tables.make_table(PAIR0, 711)
    k_raw_TxH = jnp.asarray(decoders.binade_keys(0.25, 4.0))
    k_rot_TxH = keys.fresh_key(k_raw_TxH, table, position, scheme)
    assert np.unique(decoders.pair_codes(np.asarray(k_rot_TxH))).size == 1 << 20


def test_a_decoder_is_as_good_as_its_most_frequent_answers():
    stored, wanted = np.array([7, 7, 7, 3, 3, 9]), np.array([1, 1, 2, 5, 6, 0])
    assert decoders.optimal_decoder_accuracy(stored, wanted) == 2 + 1 + 1
    assert decoders.optimal_decoder_accuracy(stored[:0], wanted[:0]) == 0
    with pytest.raises(errors.ConfigError, match="codes"):
        decoders.optimal_decoder_accuracy(stored, wanted[:1])
    with pytest.raises(errors.ConfigError, match="bfloat16"):
        decoders.pair_codes(np.ones((1, 2), np.float32))
    with pytest.raises(errors.InputError, match="0 < low"):
        decoders.binade_keys(1.0, 1.0)


@pytest.mark.parametrize(("power_of_two", "lost"), [(True, 0), (False, 34_297)])
def test_position_free_values_give_keys_back_if_the_scale_is_a_power_of_two(power_of_two, lost):  # E6
    """Gemma 4's full layers: V is the norm of what K is the norm of, times a scale."""
    rng = np.random.default_rng(0)
    raw = jnp.asarray(rng.standard_normal((2048, 64)).astype(np.float32)).astype(jnp.bfloat16)
    scale = 2.0 ** rng.integers(-2, 3, 64) if power_of_two else rng.uniform(0.5, 1.5, 64)
    scale_H = jnp.asarray(scale.astype(np.float32)).astype(jnp.bfloat16)
    v_TxH = jax.jit(layers.RMSNorm(1e-6, has_weight=False).apply)({}, raw)
    k_raw_TxH = jax.jit(layers.RMSNorm(1e-6, plus_one=False).apply)({"params": {"scale": scale_H}}, raw)
    different = int(bits.bit_difference_count(v_TxH * scale_H[None], k_raw_TxH))
    assert different == lost and raw.size == 131_072
    assert not lost or f"{lost:,} of {raw.size:,} elements" in DOCUMENT.read_text()


@pytest.mark.parametrize("scheme", [keys.ENGINE_BF16, keys.BF16_WIDE, keys.ENGINE_F32], ids=lambda s: s.name)
def test_logits_are_invariant_in_the_reals_alone(scheme):
    table = tables.make_table(encodings.LOCAL256, 2000)
    rng = np.random.default_rng(0)
    q_raw_TxH, k_raw_TxH = (
        jnp.asarray(rng.standard_normal((512, 256)).astype(np.float32)).astype(scheme.raw) for _ in range(2)
    )
    key_position_T = rng.integers(0, 400, 512)
    query_position_T = key_position_T + rng.integers(0, 512, 512)
    positions = (query_position_T, key_position_T)
    same = logits.logit_shift_difference(q_raw_TxH, k_raw_TxH, table, *positions, 0, scheme)
    assert same.num_equal("float32") == 512 and not same.difference_T.any()
    moved = logits.logit_shift_difference(q_raw_TxH, k_raw_TxH, table, *positions, 1000, scheme)
    mean = np.abs(moved.difference_T).mean() / 16
    if scheme.stored == "bfloat16":
        assert moved.num_equal("float32") == 0 and 0 < moved.num_equal("bfloat16") < 512
        assert 1e-3 < mean < 1e-2
    else:
        assert moved.num_equal("float32") < 10 and 1e-6 < mean < 1e-4


def test_two_tokens_swap_their_attention_with_their_position():  # T6
    table = tables.make_table(PAIR0, 4001)
    position_T = np.arange(4000)

    def logit(key, key_position_T, scheme):
        q, k = (jnp.tile(jnp.asarray([x], jnp.bfloat16), (position_T.size, 1)) for x in ((314.0, 0.0), key))
        shifted = logits.logit_shift_difference(q, k, table, position_T + 1, key_position_T, 0, scheme)
        return shifted.before_T

    for scheme in (keys.BF16_WIDE, keys.ENGINE_BF16):
        gap_T = logit((170.0, 264.0), position_T, scheme) - logit((314.0, 0.0), position_T + 1, scheme)
        assert (gap_T >= 25).mean() > 0.15 and (gap_T <= -25).mean() > 0.15
        assert abs((170 * np.cos(1) + 264 * np.sin(1) - 314) * 314 + 0.0842) < 1e-4


@pytest.fixture(scope="module")
def engine():
    return engine_lib.Engine(load.load_model(THREE_LAYERS, "bfloat16"), capacity=2048, kv_block=64, shapes=(2, 10))


def test_values_of_deeper_layers_move_with_positions(engine):  # T6
    token_ids = [7 * n % 512 for n in range(60)]
    for shift in (0, 1, 1000, 2048 - 60):
        counts = logits.layer_value_shift_difference(engine.runner, token_ids, shift)
        assert counts.shape == (3,) and counts[0] == 0 and (counts[1:] > 0).all() == (shift > 0)


@pytest.mark.parametrize(("tokens", "shift"), [(60, 2048 - 59), (60, -1), (2049, 0), (0, 0)])
def test_shifts_past_the_tables_are_refused(engine, tokens, shift):
    with pytest.raises(errors.InputError):
        logits.layer_value_shift_difference(engine.runner, [1] * tokens, shift)


def test_the_keys_of_t6_come_out_of_a_norm():
    scale_H = jnp.zeros(256, jnp.bfloat16).at[jnp.array([0, 128])].set(19.625)
    raw_TxH = (
        jnp.zeros((2, 256), jnp.bfloat16).at[:, jnp.array([0, 128])].set(jnp.array([(1, 0), (128, 198)], jnp.bfloat16))
    )
    keys_TxH = layers.RMSNorm(1e-6).apply({"params": {"scale": scale_H}}, raw_TxH)
    found = np.asarray(keys_TxH, np.float32)[:, [0, 128]]
    assert found.tolist() == [list(check_certificate.KEY_NEAR), list(check_certificate.KEY_FAR)]
    assert np.count_nonzero(np.asarray(keys_TxH, np.float32)) == 3
