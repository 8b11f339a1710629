"""Many sequences at a time: the bits of each alone, what they share, and everything that is refused before a step."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from kvgraft_jax import device_memory, errors, self_test
from kvgraft_jax.gemma import cache as cache_lib
from kvgraft_jax.grafting import compare
from kvgraft_jax.runtime import contexts as contexts_lib
from kvgraft_jax.runtime import sampling as sampling_lib
from kvgraft_jax.runtime import state as state_lib
from kvgraft_jax.runtime import step as step_lib
from tests import tiny

LENGTHS = (1, 33, 2, 60, 17, 8, 40)  # More than there are rows, so some wait.


def texts() -> list[list[int]]:
    return [tiny.tokens(length, seed) for seed, length in enumerate(LENGTHS)]


def hashes(states: list[state_lib.State]) -> list[compare.StateHashes]:
    return [compare.hashes(state, policy="full") for state in states]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_reading_going_on_and_decoding_give_what_each_gives_alone(dtype):
    engine = tiny.engine(dtype)
    alone = [engine.prefill(text) for text in texts()]
    together = engine.prefill_many(texts())
    assert [state.token_ids for state in together] == [tuple(text) for text in texts()]
    assert hashes(together) == hashes(alone)
    more = [tiny.tokens(length, 50 + length) for length in reversed(LENGTHS)]
    assert hashes(engine.extend_many(together, more)) == hashes(list(map(engine.extend, alone, more)))
    found = engine.generate_many(together, max_new_tokens=12, stop_ids=range(100))
    wanted = [engine.generate(state, max_new_tokens=12, stop_ids=range(100)) for state in alone]
    assert [token_ids for token_ids, _ in found] == [token_ids for token_ids, _ in wanted]
    assert len({len(token_ids) for token_ids, _ in found}) > 2  # They end at different times.
    assert hashes([state for _, state in found]) == hashes([state for _, state in wanted])


def test_samples_are_those_of_each_alone_whatever_the_order_and_the_company():
    engine = tiny.engine()
    states = engine.prefill_many(texts()[:5])
    samplings = [
        sampling_lib.Sampling(seed=1),
        None,
        sampling_lib.Sampling(temperature=0.7, top_k=40, seed=2),
        sampling_lib.Sampling(top_p=0.9, seed=1),
        sampling_lib.Sampling(temperature=0.0),
    ]
    wanted = [
        engine.generate(state, max_new_tokens=9, stop_ids=(), sampling=sampling)[0]
        for state, sampling in zip(states, samplings, strict=True)
    ]
    found = engine.generate_many(states, max_new_tokens=9, stop_ids=(), sampling=samplings)
    assert [token_ids for token_ids, _ in found] == wanted
    found = engine.generate_many(states[::-1], max_new_tokens=9, stop_ids=(), sampling=samplings[::-1])
    assert [token_ids for token_ids, _ in found][::-1] == wanted
    one_for_all = engine.generate_many(states, max_new_tokens=9, stop_ids=(), sampling=samplings[0])
    assert one_for_all[0][0] == wanted[0] != engine.generate(states[0], max_new_tokens=9, stop_ids=())[0]
    begun = engine.generate_many(states, max_new_tokens=4, stop_ids=(), sampling=samplings)
    ended = engine.generate_many([state for _, state in begun], max_new_tokens=5, stop_ids=(), sampling=samplings)
    assert [first + second for (first, _), (second, _) in zip(begun, ended, strict=True)] == wanted


def test_tokens_are_told_as_they_come_with_the_index_in_the_callers_list():
    engine, told = tiny.engine(), []
    states = engine.prefill_many(texts()[:4])
    found = engine.generate_many(
        [states[0], states[1], "no state", states[2], states[3]],
        max_new_tokens=6,
        stop_ids=(),
        on_error="return",
        on_token=lambda index, token_id, logits_V: told.append((index, token_id, compare.logits_sha256(logits_V))),
    )
    assert isinstance(found[2], errors.InputError)
    for index in (0, 1, 3, 4):
        token_ids, after = found[index]
        own = [(token_id, sha256) for number, token_id, sha256 in told if number == index]
        assert [token_id for token_id, _ in own] == token_ids
        assert own[-1][1] == compare.logits_sha256(after.logits)
    order = [index for index, _, _ in told]
    assert order != sorted(order)  # They come from several sequences in turn.


def test_questions_to_one_artifact_share_its_blocks(monkeypatch):
    engine, copied = tiny.engine(), []
    grafted = engine.graft(engine.capture(engine.prefill(tiny.tokens(40)), policy="full"))
    put_block = cache_lib.put_block
    monkeypatch.setattr(
        cache_lib, "put_block", lambda cache, block, *rest: copied.append(block) or put_block(cache, block, *rest)
    )
    questions = [tiny.tokens(3 + index, 70 + index) for index in range(8)]
    afters = engine.extend_many([grafted] * 8, questions)
    whole = 40 // tiny.KV_BLOCK
    for after in afters:
        assert all(ours is theirs for ours, theirs in zip(after.blocks, grafted.blocks[:whole], strict=False))
    ends = [block for after in afters for block in after.blocks[whole:]]
    assert len({id(block) for block in (*ends, *grafted.blocks)}) == len(ends) + len(grafted.blocks)
    assert [copied.count(block) for block in grafted.blocks[:whole]] == [1] * whole
    assert hashes(afters) == [compare.hashes(engine.extend(grafted, each), policy="full") for each in questions]


def test_states_live_in_engines_of_any_capacity_rows_and_shapes():
    large, small = tiny.engine(), tiny.engine(capacity=64, rows=2)
    text = tiny.tokens(50)
    wanted = hashes([large.prefill(text)])
    assert hashes([small.extend(large.prefill(text[:30]), text[30:])]) == wanted
    assert hashes([large.extend(small.prefill(text[:30]), text[30:])]) == wanted
    half = small.prefill(text[:45])
    assert hashes([small.extend(large.extend(half, text[45:48]), text[48:])]) == wanted
    assert small.capture(large.prefill(text)).artifact_id == large.capture(small.prefill(text)).artifact_id
    longer = large.prefill(tiny.tokens(70))
    with pytest.raises(errors.CapacityError, match="70 tokens held \\+ 1 new = 71, but the cache has 64 slots"):
        small.extend(longer, [1])
    assert small.capture(longer).artifact_id == large.capture(longer).artifact_id


def test_prompts_are_read_in_the_order_in_which_they_came():
    engine, steps = tiny.engine(), []
    step = engine.runner.step

    class Told(type(engine.runner)):
        def step(self, cache, pieces, *rest, **others):
            steps.append([piece.row for piece in pieces])
            return step(cache, pieces, *rest, **others)

    fields = {field.name: getattr(engine.runner, field.name) for field in dataclasses.fields(engine.runner)}
    contexts = contexts_lib.Contexts(engine.model, Told(**fields), engine.capacity, engine.rows)
    jobs = [contexts.reading(tiny.tokens(24, seed=seed)) for seed in range(3)]
    found = [state for _, state in contexts.run(jobs, many=True, progress=False)]
    assert steps == [[row] for row in (0, 0, 0, 1, 1, 1, 2, 2, 2)]
    assert hashes(found) == hashes([engine.prefill(job.token_ids) for job in jobs])


class Stop(Exception):
    """Raised by a callback."""


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
@pytest.mark.parametrize("after", [1, 5, 14])
def test_an_exception_in_the_middle_loses_no_state_and_no_bit(error, after):
    engine = tiny.engine()
    states = engine.prefill_many(texts()[:5])
    before = hashes(states)
    wanted = engine.generate_many(states, max_new_tokens=6, stop_ids=())
    count = itertools.count(1)

    def raise_in_the_middle(index, token_id, logits_V):
        if next(count) == after:
            raise error

    with pytest.raises(error):
        engine.generate_many(states, max_new_tokens=6, stop_ids=(), on_token=raise_in_the_middle)
    assert hashes(states) == before
    found = engine.generate_many(states, max_new_tokens=6, stop_ids=())
    assert [token_ids for token_ids, _ in found] == [token_ids for token_ids, _ in wanted]
    assert hashes([state for _, state in found]) == hashes([state for _, state in wanted])
    count = itertools.count(1)
    with pytest.raises(error):
        engine.generate(
            states[1], max_new_tokens=15, stop_ids=(), on_token=lambda *given: raise_in_the_middle(0, *given)
        )
    assert engine.generate(states[1], max_new_tokens=6, stop_ids=())[0] == wanted[1][0]


def test_a_step_that_is_broken_off_between_two_layers_loses_no_state_and_no_bit(monkeypatch):
    engine, runs = tiny.engine(), itertools.count(1)
    state = engine.prefill(tiny.tokens(20))
    wanted, after = engine.generate(state, max_new_tokens=3, stop_ids=())
    before, layers = hashes([state]), engine.runner.programs.layers

    def break_off(*inputs):
        if next(runs) == 2:
            raise KeyboardInterrupt
        return layers[3](*inputs)

    monkeypatch.setattr(engine.runner.programs, "layers", [*layers[:3], break_off, *layers[4:]])
    with pytest.raises(KeyboardInterrupt):
        engine.generate(state, max_new_tokens=3, stop_ids=())
    assert hashes([state]) == before
    tokens, again = engine.generate(state, max_new_tokens=3, stop_ids=())
    assert tokens == wanted and hashes([again]) == hashes([after])


def test_a_callback_may_use_the_engine():
    engine, inner = tiny.engine(), []
    states = engine.prefill_many(texts()[:3])
    wanted = engine.generate_many(states, max_new_tokens=4, stop_ids=())

    def ask(index, token_id, logits_V):
        inner.append(engine.generate_many(states[:1], max_new_tokens=2, stop_ids=())[0][0])

    found = engine.generate_many(states, max_new_tokens=4, stop_ids=(), on_token=ask)
    assert [token_ids for token_ids, _ in found] == [token_ids for token_ids, _ in wanted]
    assert inner == [wanted[0][0][:2]] * 12


def test_memory_of_everything_that_comes_out_is_checked_first(monkeypatch):
    engine = tiny.engine()
    config = engine.step_config
    state, *_ = engine.prefill_many(texts())  # The workspace is there.
    long = engine.prefill(tiny.tokens(40))
    calls = {
        lambda: engine.prefill_many([tiny.tokens(40)] * 3 + [[1]]): 10,
        lambda: engine.extend_many([long] * 4, [tiny.tokens(10)] * 4): 4 * (4 - 2),  # Two blocks are shared.
        lambda: engine.generate_many([state] * 5, max_new_tokens=tiny.KV_BLOCK): 5 * 2,
        lambda: engine.prefill(tiny.tokens(40)): 3,
        lambda: engine.extend(long, tiny.tokens(10)): 2,
    }
    for call, blocks in calls.items():
        needed = blocks * engine.prefill([1]).blocks[0].nbytes
        with monkeypatch.context() as patch:
            patch.setattr(device_memory, "available", lambda _, needed=needed: needed)
            call()
            patch.setattr(device_memory, "available", lambda _, needed=needed: needed - 1)
            patch.setattr(engine.runner.programs, "step", lambda *_: pytest.fail("a step ran"))
            told = f"needs {needed} bytes .* for the context(s of . sequence|, .*shorter text)"
            with pytest.raises(errors.ResourceError, match=told):
                call()
    fresh = tiny.engine.__wrapped__()
    whole = cache_lib.device_bytes(config.model, 1 + 3 * 10, tiny.KV_BLOCK, config.jnp_dtype)
    monkeypatch.setattr(device_memory, "available", lambda _: whole - 1)
    with pytest.raises(errors.ResourceError, match=f"needs {whole} bytes"):  # A workspace of three rows, and a block.
        fresh.prefill_many([[1]])


def test_warming_up_runs_every_program_so_that_none_is_compiled_later(monkeypatch):
    step_lib.programs.cache_clear()
    engine, measured, measure = tiny.engine.__wrapped__(capacity=32, shapes=(2, 8), rows=2), [], self_test.measure
    monkeypatch.setattr(self_test, "measure", lambda runner, sizes: measured.append(sizes) or measure(runner, sizes))
    assert engine.warm_up() is None
    assert measured == [
        self_test.Sizes(width, blocks, rows) for blocks, rows in ((2, 1), (4, 2)) for width in engine.shapes
    ]
    monkeypatch.setattr(self_test, "measure", lambda *_: pytest.fail("another program was tested"))
    programs = engine.runner.programs
    compiled = tiny.num_compiled(programs), sampling_lib._draw._cache_size()
    state = engine.prefill(tiny.tokens(11))
    engine.generate(state, max_new_tokens=2)
    engine.generate(state, max_new_tokens=2, sampling=sampling_lib.Sampling(seed=1))
    engine.generate_many(engine.prefill_many([[1], tiny.tokens(9), [3, 4]]), max_new_tokens=3)
    engine.warm_up()
    assert (tiny.num_compiled(programs), sampling_lib._draw._cache_size()) == compiled


def test_logits_of_a_state_stay_what_they_were():
    engine = tiny.engine()
    states = engine.prefill_many(texts())
    before = [np.asarray(jax.device_get(state.logits)).tobytes() for state in states]
    engine.generate_many(states, max_new_tokens=5, stop_ids=())
    engine.extend_many(states, texts())
    assert [np.asarray(jax.device_get(state.logits)).tobytes() for state in states] == before
