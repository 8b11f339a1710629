"""Rows between host and device: every bit pattern, and no memory in common."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

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
    layers = rows.place_rows(kv, 3, kv.shape[2] + 29)
    found = rows.read_rows(layers, 3, 3 + kv.shape[2], 16, kv.dtype)
    assert found.tobytes() == kv.tobytes()


def test_changing_the_source_after_placing_rows_changes_nothing():
    kv = np.ones((1, 2, 40, 2, 32), np.float32)
    (layer,) = rows.place_rows(kv, 0, 40)  # as many slots as rows: nothing but a copy keeps them apart
    kv[...] = 7
    assert float(np.asarray(layer.k_rot_SxKxH).max()) == float(np.asarray(layer.v_SxKxH).max()) == 1
