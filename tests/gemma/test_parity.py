"""The decoder against reference logits of tiny random models: float32 close, bfloat16 to the bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvgraft_jax.gemma import cache as cache_lib
from kvgraft_jax.gemma import parameters as parameters_lib
from kvgraft_jax.gemma import rotary, transformer
from tests import golden_cases

TINY, WIDE = golden_cases.TINY, golden_cases.WIDE
STEPS = {
    "tokens one by one": [1] * 80,
    "prefill, then one by one": [8] * 4 + [1] * 48,
    "all lengths": [1, 2, 3, 4, 5, 6, 7, 8, 1, 1, 8, 5, 3, 3, 7, 1, 1, 2, 6, 4, 1, 1],
}


@pytest.mark.parametrize("name", TINY + WIDE)
def test_float32_is_close_to_reference(name):
    case = golden_cases.load(name)
    program = golden_cases.shared_program(case.config, "float32", 8, 16)
    logits_TxV, states = program.run(case.params("float32"), case.token_ids)
    is_gemma3 = name == "gemma3"
    np.testing.assert_allclose(logits_TxV, case.arrays["logits_f32"], rtol=0, atol=1e-4 if is_gemma3 else 2e-3)
    for index, wanted in enumerate(case.hidden_states("f32")):
        largest = np.abs(wanted).max()
        tolerance = 1e-5 if is_gemma3 or index <= 1 else 5e-4
        np.testing.assert_allclose(states[index] / largest, wanted / largest, rtol=0, atol=tolerance, err_msg=index)


ORDER_FREE_WIDE = [name for name in WIDE if name not in golden_cases.NOT_ORDER_FREE]
SHAPES = {  # Width and K/V block; one lane takes another path through XLA, which the engine never takes.
    **dict.fromkeys(TINY, ((1, 8), (8, 16), (24, 256))),
    **dict.fromkeys(ORDER_FREE_WIDE, ((2, 32), (8, 16), (24, 256))),
}


@pytest.mark.parametrize(("name", "width", "kv_block"), [(name, *shape) for name in SHAPES for shape in SHAPES[name]])
def test_bfloat16_is_bit_identical_to_reference(name, width, kv_block):
    case = golden_cases.load(name)
    program = golden_cases.shared_program(case.config, "bfloat16", width, kv_block)
    logits_TxV, _ = program.run(case.params("bfloat16"), case.token_ids)
    np.testing.assert_array_equal(logits_TxV, case.arrays["logits_bf16"])


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("name", WIDE)
def test_cached_decoding_is_bit_identical_to_prefill_and_reference(name, steps):
    case = golden_cases.load(name)
    assert len(case.token_ids) > 2 * case.config.sliding.window and case.config.full.head_dim == 512
    program = golden_cases.shared_program(case.config, "bfloat16", 8, 16)
    logits_TxV, _ = program.run(case.params("bfloat16"), case.token_ids, cuts=STEPS[steps])
    np.testing.assert_array_equal(logits_TxV, program.run(case.params("bfloat16"), case.token_ids)[0])
    if name in ORDER_FREE_WIDE:
        np.testing.assert_array_equal(logits_TxV, case.arrays["logits_bf16"])


def _layer_by_layer(module, states_LxTxD, tokens_T, tables, cache):
    """Returns every layer's output for the reference's own input, and the logits for the reference's last state."""
    start, count = jnp.int32(0), jnp.int32(len(tokens_T))
    rows = {kind: tables.rows(kind, 0, len(tokens_T)) for kind in ("sliding", "full")}
    vectors = module.per_layer_embedder(states_LxTxD[0], tokens_T) if module.config.per_layer else None
    outputs, caches = [module.embedder.encode(tokens_T)], list(cache.layers)
    for index, block in enumerate(module.layer):
        owner = module.config.kv_layer(index)
        vector_TxP = None if vectors is None else vectors[:, index]
        table = rows[module.config.layer_kinds[index]]
        x_TxD, caches[owner] = block(states_LxTxD[index], table, caches[owner], vector_TxP, start, count)
        outputs.append(x_TxD)
    outputs[-1] = module.final_norm(outputs[-1])
    return jnp.stack(outputs), module.head(states_LxTxD[-1])


@pytest.mark.parametrize("name", [*ORDER_FREE_WIDE, *golden_cases.NOT_ORDER_FREE])
def test_every_layer_on_the_reference_input(name):
    case = golden_cases.load(name)
    dtype, num_tokens = jnp.dtype("bfloat16"), len(case.token_ids)
    model = transformer.Transformer(case.config, dtype, 16)
    cache = cache_lib.make_cache(case.config, -(-num_tokens // 16) * 16, dtype)
    tables = rotary.make_tables(case.config, num_tokens, dtype)
    wanted = case.hidden_states("bf16")
    run = jax.jit(lambda params, *args: model.apply({"params": params}, *args, method=_layer_by_layer))
    states, logits_TxV = run(case.params("bfloat16"), wanted.astype(dtype), case.token_ids, tables, cache)
    pairs = [*zip(np.asarray(states.astype(jnp.float32)), wanted, strict=True)]
    for got, want in [*pairs, (np.asarray(logits_TxV), case.arrays["logits_bf16"])]:
        # One ulp of the row's largest element: where large numbers cancel, theirs are the last bits.
        ulp_T = 2.0 ** (np.floor(np.log2(np.abs(want).max(axis=1))) - 7)
        share, ulps = (1.0, 0) if name in ORDER_FREE_WIDE else (0.9, 2)
        assert np.mean(got == want) >= share and np.all(np.abs(got - want) <= ulps * ulp_T[:, None])


def test_softcap_bends_large_logits():
    case = golden_cases.load("31b")
    cap = case.config.final_softcap
    program = golden_cases.shared_program(case.config, "bfloat16", 8, 16)
    leaves = dict(case.leaves("bfloat16"))
    leaves["final_norm/scale"] = leaves["final_norm/scale"] * jnp.bfloat16(40)
    logits_TxV, states = program.run(parameters_lib.nest(leaves), case.token_ids)
    embedding_VxD = np.asarray(leaves["embedder/embedding"].astype(jnp.float32))
    rounded = states[-1] @ embedding_VxD.T
    assert np.mean(np.abs(rounded) > cap) > 0.3
    for step in (lambda x: x * np.float32(1 / cap), np.tanh, lambda x: x * np.float32(cap)):
        rounded = step(rounded.astype(jnp.bfloat16).astype(np.float32))
    rounded = rounded.astype(jnp.bfloat16).astype(np.float32)
    assert np.mean(logits_TxV == rounded) > 0.995 and np.abs(logits_TxV).max() <= cap
