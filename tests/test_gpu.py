"""On a GPU: one hash in two processes, for every schedule, and for a graft; skipped by name where there is none."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import numpy as np
import pytest

from kvgraft_jax import determinism
from kvgraft_jax import engine as engine_lib
from kvgraft_jax.grafting import compare
from tests import tiny

ROOT = pathlib.Path(__file__).parent.parent
WIDTHS = (16, 64, 128)

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def engine(dtype: str, width: int) -> engine_lib.Engine:
    return tiny.engine(dtype, shapes=(width,), kv_block=64, capacity=512)


def digest(dtype: str, width: int) -> str:
    """Hashes of a prompt of 300 tokens, all K/V rows included."""
    found = compare.hashes(engine(dtype, width).prefill(tiny.tokens(300)), policy="full")
    return f"{found.logits_sha256} {found.kv_sha256} {engine(dtype, width).pin.id}"


def test_flags_and_pin():
    assert set(determinism.GPU_FLAGS) <= set(determinism.flags_in_force())
    document = engine("bfloat16", 16).pin.document
    assert document["platform"] == "gpu" and document["cpu"] is None and document["device_kind"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("width", WIDTHS)
def test_two_processes_give_one_hash(dtype, width):
    code = f"from tests import test_gpu; print(test_gpu.digest({dtype!r}, {width}))"
    other = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert other.stdout.split() == digest(dtype, width).split()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_schedule_gives_one_hash(dtype, width):
    donor, token_ids = engine(dtype, width), tiny.tokens(300)
    found = {compare.hashes(donor.prefill(token_ids))}
    rng = np.random.default_rng(0)
    for _ in range(6):
        cuts = [0, *sorted({*rng.integers(1, 300, 6).tolist(), 299}), 300]
        state = donor.prefill(token_ids[: cuts[1]])
        for low, high in zip(cuts[1:], cuts[2:], strict=False):
            state = donor.extend(donor.graft(donor.capture(state)), token_ids[low:high])
        found.add(compare.hashes(state))
    assert len(found) == 1
