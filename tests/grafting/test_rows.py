"""Rows between host and device: every bit pattern, and no memory in common."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from kvgraft_jax.gemma import cache
from kvgraft_jax.grafting import rows


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_bit_pattern_survives_the_device(dtype):
    """All bfloat16 but NaN, and special float32, host to device to host."""
    if dtype == "bfloat16":
        words = np.arange(1 << 16, dtype=np.uint16)
        patterns = words[(words & 0x7FFF) <= 0x7F80].view(jnp.bfloat16.dtype)
    else:
        words = [0, 1 << 31, 1, (1 << 31) + 1, 0x007FFFFF, 0x7F800000, 0xFF800000, 0x3F800001]
        patterns = np.array(words * 16, np.uint32).view(np.float32)
    patterns = patterns[: len(patterns) // 64 * 64]
    kv = np.stack([patterns, patterns[::-1]]).reshape(1, 2, -1, 2, 32)
    blocks = rows.place_rows(kv, 3, 16)
    assert len(blocks) == -(-(3 + kv.shape[2]) // 16)
    found = rows.read_rows([cache.CacheBlock((block,)) for block in blocks], 0, 3, 3 + kv.shape[2], kv.dtype)
    assert found.tobytes() == kv.tobytes()


def test_slots_without_a_row_hold_zeros():
    kv = np.ones((1, 2, 10, 2, 32), np.float32)
    blocks = rows.place_rows(kv, 40, 16)
    assert [int(np.asarray(block).sum()) for block in blocks] == [0, 0, 2 * 8 * 64, 2 * 2 * 64]
    assert (np.asarray(blocks[2])[:, :, 8:] == 1).all() and (np.asarray(blocks[3])[:, :, :2] == 1).all()


@pytest.mark.parametrize("low, high", [(0, 50), (7, 16), (16, 32), (15, 33), (49, 50)])
def test_any_stretch_of_rows_can_be_read(low, high):
    kv = np.arange(1 * 2 * 50 * 1 * 4, dtype=np.float32).reshape(1, 2, 50, 1, 4)
    blocks = [cache.CacheBlock((kv[..., :0], block)) for block in rows.place_rows(kv, 0, 16)]
    np.testing.assert_array_equal(rows.read_rows(blocks, 1, low, high, kv.dtype), kv[:, :, low:high])


def test_changing_the_source_after_placing_rows_changes_nothing():
    kv = np.ones((1, 2, 48, 2, 32), np.float32)
    blocks = rows.place_rows(kv, 0, 48)  # As many slots as rows: nothing but a copy keeps them apart.
    kv[...] = 7
    assert float(np.asarray(blocks[0]).max()) == 1
