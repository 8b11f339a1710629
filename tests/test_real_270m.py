"""The real Gemma 3 270M: token ids and logits against reference values, and the graft on it."""

from __future__ import annotations

import functools
import json
import pathlib

import numpy as np
import pytest

from kvgraft_jax import engine as engine_lib
from kvgraft_jax.checkpoints import load
from kvgraft_jax.grafting import compare, storage

REFERENCE = pathlib.Path(__file__).parent / "golden" / "reference.json"
PROMPTS = json.loads(REFERENCE.read_text())["prompts"]

pytestmark = [pytest.mark.weights, pytest.mark.slow]


@functools.cache
def engine(dtype: str) -> engine_lib.Engine:
    return engine_lib.Engine(load.load_model("package:gemma-3-270m", dtype), capacity=1024)


@functools.cache
def prefilled(dtype: str, index: int):
    return engine(dtype).prefill(PROMPTS[index]["ids"])


@pytest.mark.parametrize("index", range(len(PROMPTS)))
def test_token_ids(index):
    prompt = PROMPTS[index]
    assert engine("float32").model.tokenizer.encode(prompt["prompt"], bos=True) == prompt["ids"]


@pytest.mark.parametrize("index", range(len(PROMPTS)))
def test_float32_logits(index):
    prompt, logits_V = PROMPTS[index], np.asarray(prefilled("float32", index).logits)
    top_ids, top_logits = zip(*[(entry[0], entry[1]) for entry in prompt["top10"]], strict=True)
    assert int(np.argmax(logits_V)) == top_ids[0]
    np.testing.assert_allclose(logits_V[list(top_ids)], top_logits, rtol=0, atol=1e-3)
    np.testing.assert_allclose(logits_V[prompt["sample_index"]], prompt["sample_logits"], rtol=0, atol=1e-3)
    log_sum_exp = np.log(np.sum(np.exp(logits_V.astype(np.float64))))
    np.testing.assert_allclose(log_sum_exp, prompt["logsumexp"], rtol=0, atol=1e-3)


@pytest.mark.parametrize("index", range(len(PROMPTS)))
def test_bfloat16_agrees_in_argmax_and_closely_in_distribution(index):
    bf16_V, f32_V = (np.asarray(prefilled(dtype, index).logits) for dtype in ("bfloat16", "float32"))
    assert np.argmax(bf16_V) == np.argmax(f32_V)
    assert compare.kl_nats(f32_V, bf16_V) < 0.05


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_graft_of_a_text_past_the_window(dtype, tmp_path):
    token_ids = PROMPTS[-1]["ids"]
    assert len(token_ids) > 600
    donor = engine(dtype)
    artifact_id = storage.save_artifact(donor.capture(donor.prefill(token_ids[:590])), tmp_path)
    state = donor.extend(donor.graft(storage.load_artifact(tmp_path, artifact_id)), token_ids[590:])
    assert compare.compare(state, prefilled(dtype, len(PROMPTS) - 1)).equal


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_artifact_of_one_width_is_that_of_the_platforms_widths(dtype):
    """Past the window, read by steps of ten lanes: the same pin, rows and logits, so the same artifact."""
    token_ids = PROMPTS[-1]["ids"]
    narrow = engine_lib.Engine(engine(dtype).model, capacity=1024, shapes=(10,))
    found = narrow.capture(narrow.prefill(token_ids), policy="full")
    wanted = engine(dtype).capture(prefilled(dtype, len(PROMPTS) - 1), policy="full")
    assert found.pin == wanted.pin and found.artifact_id == wanted.artifact_id
