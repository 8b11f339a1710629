"""What the engine's float32 program loses: shifts at which re-rotation fails, and neighbouring keys that it merges."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import check_certificate
from experiments.rotary_exactness import parts as rotary_parts
from kvgraft_jax import errors
from kvgraft_jax.relocation import collisions, encodings, keys, pair_keys, tables


def pair_0(num_positions):
    return tables.make_table(rotary_parts.PAIR0, num_positions)


def test_every_shift_has_a_float32_key_that_rerotation_gets_wrong():
    depth_Z = pair_keys.rerotation_witnesses(pair_0(1100), 1024)
    assert depth_Z.shape == (2046,) and depth_Z.min() >= 0 and depth_Z.max() <= 8
    # Shifts are 1, 2, ..., then -1, -2, ...; at depth 0 the source is p = 1, or -d for turning back.
    table, k_raw_TxH = pair_0(1100), jnp.asarray(pair_keys.WITNESSES, jnp.float32)
    for shift in (1, 7, 1023, -1, -500):
        depth = int(depth_Z[abs(shift) - 1 + 1023 * (shift < 0)])
        wrong = []
        for position in range(max(1, -shift), max(1, -shift) + depth + 1):
            k_rot_TxH = keys.fresh_key(k_raw_TxH, table, position, keys.ENGINE_F32)
            moved_TxH = keys.rerotated_key(k_rot_TxH, table, shift, keys.ENGINE_F32)
            fresh_TxH = keys.fresh_key(k_raw_TxH, table, position + shift, keys.ENGINE_F32)
            wrong.append(not np.array_equal(np.asarray(moved_TxH), np.asarray(fresh_TxH)))
        assert wrong == [False] * depth + [True], shift


def test_the_bfloat16_program_has_the_depth_that_integers_find():
    depth_Z = pair_keys.rerotation_witnesses(pair_0(1400), 1024, keys.ENGINE_BF16, max_tries=300)
    held, report = check_certificate.check_shift(1024, 1, check_certificate.HF_BF16)
    assert held and depth_Z.min() >= 0
    assert f"is at most {depth_Z.max()} after" in report


def test_a_shift_without_a_witness_is_reported():
    # From position 1 alone not every shift has one.
    assert pair_keys.rerotation_witnesses(pair_0(1100), 1024, max_tries=1).min() == -1


def test_shifts_beyond_the_table_are_refused():
    with pytest.raises(errors.InputError, match="num_shifts"):
        pair_keys.rerotation_witnesses(pair_0(100), 100)
    with pytest.raises(errors.ConfigError, match="head_dim"):
        pair_keys.rerotation_witnesses(tables.make_table(encodings.LOCAL256, 100), 10)


@pytest.mark.parametrize("encoding", encodings.CERTIFIED, ids=lambda encoding: encoding.name)
def test_no_function_of_a_float32_key_moves_it(encoding):
    table = tables.make_table(encoding, 256)
    codes = pair_keys.neighbour_codes(pair_keys.random_keys(0, 24, encoding.head_dim), table)
    assert codes.merged_MxS.shape == (24 * encoding.num_rotated_pairs, 256)
    assert collisions.num_confused(codes) == 0
    # The claim rests on key pairs: hardly any of them decides by itself.
    few = collisions.Codes(codes.merged_MxS[:8], codes.parted_MxS[:8])
    assert collisions.num_confused(few) > 0


def test_neighbours_that_merge_are_stored_as_one_key():
    table = tables.make_table(encodings.LOCAL256, 64)
    k_raw_MxH = pair_keys.random_keys(0, 2, 256)
    codes = pair_keys.neighbour_codes(k_raw_MxH, table)
    m, position = np.argwhere(codes.merged_MxS)[0]
    n, pair = divmod(int(m), 128)
    near_H = k_raw_MxH[n]
    far_H = near_H.copy()
    far_H[128 + pair] = np.nextafter(near_H[128 + pair], np.sign(near_H[128 + pair]) * np.float32(np.inf))
    one, other = (
        keys.fresh_key(jnp.asarray(k_H)[None], table, int(position), keys.ENGINE_F32) for k_H in (near_H, far_H)
    )
    assert not np.array_equal(near_H, far_H) and np.array_equal(np.asarray(one), np.asarray(other))
    assert not codes.merged_MxS[:, 0].any() and codes.parted_MxS[:, 0].all()


def test_bfloat16_neighbours_merge_as_the_certificates_say():
    table = tables.make_table(encodings.LOCAL256, 64)
    k_raw_MxH = np.zeros((1, 256), jnp.bfloat16)
    k_raw_MxH[0, :128], k_raw_MxH[0, 128:] = 170 / 128, 200 / 2**10  # X = 170, M = 200, E = 2 on every pair.
    codes = pair_keys.neighbour_codes(k_raw_MxH, table, keys.ENGINE_BF16)
    key_pairs_Mx4 = np.array([[pair, 170, 200, 2] for pair in range(128)])
    wanted = collisions.collision_codes(encodings.LOCAL256, collisions.HF_BF16, key_pairs_Mx4, 64)
    np.testing.assert_array_equal(codes.merged_MxS, wanted.merged_MxS)
    np.testing.assert_array_equal(codes.parted_MxS, wanted.parted_MxS)
