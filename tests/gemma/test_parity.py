"""The decoder against reference logits of tiny random models: float32 close, bfloat16 to the bit."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvgraft_jax.gemma import cache as cache_lib
from kvgraft_jax.gemma import rotary, transformer
from kvgraft_jax.runtime import step as step_lib
from tests import golden_cases

TINY, WIDE = golden_cases.TINY, golden_cases.WIDE
ORDER_FREE = [name for name in TINY + WIDE if name not in golden_cases.NOT_ORDER_FREE]
KV_BLOCK = 16
WIDTHS = (2, 3, 8, 10, 33, 64)  # From 64 rows on, products take another way to the same bits.
# Width of each step and how many tokens it reads; repeated until all are read.
SCHEDULES = {
    **{f"width {width}": ((width, width),) for width in WIDTHS},
    "tokens one by one": ((8, 1),),
    "prefill, then one by one": ((33, 32), *[(2, 1)] * 48),
    "all lengths": tuple((8, count) for count in (1, 2, 3, 4, 5, 6, 7, 8, 1, 1, 8, 5, 3, 3, 7, 1, 1, 2, 6, 4, 1, 1)),
    "all widths": ((2, 1), (33, 9), (3, 3), (10, 10), (8, 5), (2, 2), (10, 1), (33, 33), (3, 2), (8, 8)),
}


def run(name: str, dtype: str, steps, kv_block: int = KV_BLOCK) -> tuple[np.ndarray, np.ndarray]:
    """Logits and hidden states of a case."""
    case = golden_cases.load(name)
    return golden_cases.shared_program(case.config, dtype, kv_block).run(case.params(dtype), case.token_ids, steps)


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY + WIDE)
def test_float32_is_close_to_reference_and_one_set_of_bits_in_every_schedule(name):
    case, is_gemma3 = golden_cases.load(name), name == "gemma3"
    first = run(name, "float32", SCHEDULES["width 2"])
    for schedule, steps in SCHEDULES.items():
        logits_TxV, states = run(name, "float32", steps)
        np.testing.assert_allclose(logits_TxV, case.arrays["logits_f32"], rtol=0, atol=1e-4 if is_gemma3 else 2e-3)
        for index, wanted in enumerate(case.hidden_states("f32")):
            largest = np.abs(wanted).max()
            tolerance = 1e-5 if is_gemma3 or index <= 1 else 5e-4
            np.testing.assert_allclose(states[index] / largest, wanted / largest, rtol=0, atol=tolerance, err_msg=index)
        for found, wanted in zip((logits_TxV, states), first, strict=True):
            np.testing.assert_array_equal(found, wanted, err_msg=schedule)


@pytest.mark.slow
@pytest.mark.parametrize("name", ORDER_FREE)
def test_bfloat16_is_bit_identical_to_reference_in_every_schedule(name):
    for schedule, steps in SCHEDULES.items():
        logits_TxV, _ = run(name, "bfloat16", steps)
        np.testing.assert_array_equal(logits_TxV, golden_cases.load(name).arrays["logits_bf16"], err_msg=schedule)


@pytest.mark.parametrize("kv_block", [32, 256])
@pytest.mark.parametrize("name", ORDER_FREE)
def test_bfloat16_is_bit_identical_to_reference_in_blocks_of_every_size(name, kv_block):
    logits_TxV, _ = run(name, "bfloat16", SCHEDULES["width 8"], kv_block)
    np.testing.assert_array_equal(logits_TxV, golden_cases.load(name).arrays["logits_bf16"])


@pytest.mark.slow
@pytest.mark.parametrize("name", golden_cases.NOT_ORDER_FREE)
def test_bfloat16_has_one_set_of_bits_in_every_schedule_where_the_order_of_sums_decides_them(name):
    first = run(name, "bfloat16", SCHEDULES["width 2"])
    for schedule, steps in SCHEDULES.items():
        for found, wanted in zip(run(name, "bfloat16", steps), first, strict=True):
            np.testing.assert_array_equal(found, wanted, err_msg=schedule)


def test_wide_cases_have_wide_heads_and_more_tokens_than_two_windows():
    for name in WIDE:
        case = golden_cases.load(name)
        assert len(case.token_ids) > 2 * case.config.sliding.window and case.config.full.head_dim == 512


@pytest.mark.parametrize("name", ["wide_31b", *golden_cases.NOT_ORDER_FREE])
def test_every_layer_on_the_reference_input(name):
    case = golden_cases.load(name)
    dtype, num_tokens = jnp.dtype("bfloat16"), len(case.token_ids)
    programs, num_blocks = (
        step_lib.Programs(step_lib.StepConfig(case.config, "bfloat16", KV_BLOCK)),
        -(-num_tokens // KV_BLOCK),
    )
    cache = cache_lib.make_cache(case.config, num_blocks, KV_BLOCK, dtype)
    tables = rotary.make_tables(case.config, num_tokens, dtype)
    piece = step_lib.Piece(0, 0, tuple(case.token_ids))
    lanes = step_lib.lay_out([piece], [range(num_blocks)], num_tokens, KV_BLOCK)
    wanted = case.hidden_states("bf16")
    states = [jnp.asarray(x_TxD, dtype) for x_TxD in wanted]
    inputs = []  # What each layer would have read here: the output of the one before it.

    def read_reference(index: int, run: Callable) -> Callable:
        return lambda params, x_TxD, *rest: inputs.append(x_TxD) or run(params, states[index], *rest)

    programs.layers = [read_reference(index, run) for index, run in enumerate(programs.layers)]
    params = case.params("bfloat16")
    result = programs.step(params, tables, cache, lanes)
    logits = programs.head(params, states[-1], np.arange(num_tokens, dtype=np.int32))
    found = [np.asarray(x_TxD.astype(jnp.float32)) for x_TxD in (*inputs, result.hidden_TxD)]
    for got, want in [*zip(found, wanted, strict=True), (np.stack(logits), case.arrays["logits_bf16"])]:
        # One ulp of the row's largest element: where large numbers cancel, theirs are the last bits.
        ulp_T = 2.0 ** (np.floor(np.log2(np.abs(want).max(axis=1))) - 7)
        share, ulps = (1.0, 0) if name in ORDER_FREE else (0.9, 2)
        assert np.mean(got == want) >= share and np.all(np.abs(got - want) <= ulps * ulp_T[:, None])


@pytest.mark.parametrize("name", ["gemma3", "e2b"])
def test_the_whole_decoder_as_one_program_is_bit_identical_to_reference(name):
    case, dtype = golden_cases.load(name), jnp.dtype("bfloat16")
    decoder, num_tokens = transformer.Transformer(case.config, dtype, 32), len(case.token_ids)
    tables, cache = rotary.make_tables(case.config, 32, dtype), cache_lib.make_cache(case.config, 1, 32, dtype)
    lanes = step_lib.lay_out([step_lib.Piece(0, 0, tuple(case.token_ids))], [(0,)], num_tokens, 32)

    @jax.jit
    def run(variables, *inputs):
        hidden_TxD, _ = decoder.apply(variables, *inputs)
        return decoder.apply(variables, hidden_TxD, method=decoder.head)

    logits_TxV = run({"params": case.params("bfloat16")}, lanes, tables, cache)
    np.testing.assert_array_equal(logits_TxV, case.arrays["logits_bf16"])


def test_softcap_bends_large_logits():
    case = golden_cases.load("31b")
    cap = case.config.final_softcap
    program = golden_cases.shared_program(case.config, "bfloat16", KV_BLOCK)
    leaves = dict(case.leaves("bfloat16"))
    leaves["final_norm/scale"] = leaves["final_norm/scale"] * jnp.bfloat16(40)
    logits_TxV, states = program.run(case.tree(leaves), case.token_ids, SCHEDULES["width 8"])
    embedding_VxD = np.asarray(leaves["embedder/embedding"].astype(jnp.float32))
    rounded = states[-1] @ embedding_VxD.T
    assert np.mean(np.abs(rounded) > cap) > 0.3
    for step in (lambda x: x * np.float32(1 / cap), np.tanh, lambda x: x * np.float32(cap)):
        rounded = step(rounded.astype(jnp.bfloat16).astype(np.float32))
    rounded = rounded.astype(jnp.bfloat16).astype(np.float32)
    assert np.mean(logits_TxV == rounded) > 0.995 and np.abs(logits_TxV).max() <= cap
