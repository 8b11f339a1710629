"""What is refused before a step when many sequences are given, and what is told for each of them."""

from __future__ import annotations

import types

import numpy as np
import pytest

from kvgraft_jax import errors
from kvgraft_jax.grafting import compare
from tests import tiny


@pytest.fixture
def no_step(monkeypatch):
    """Fails the test if a step runs."""
    monkeypatch.setattr(tiny.engine().runner.programs, "step", lambda *_: pytest.fail("a step ran"))


BAD = [tiny.tokens(5), [], tiny.tokens(161), [3, 512], tiny.tokens(9, seed=1), "text"]
TOLD = {1: errors.InputError, 2: errors.CapacityError, 3: errors.InputError, 5: errors.InputError}


def test_one_error_names_every_sequence_that_cannot_be_run(no_step):
    engine = tiny.engine()
    with pytest.raises(errors.BatchError, match="4 sequence.s. cannot be run, by index:") as caught:
        engine.prefill_many(BAD)
    assert {index: type(error) for index, error in caught.value.errors.items()} == TOLD
    lines = str(caught.value).splitlines()[1:]
    assert [line.split(":")[0] for line in lines] == ["  1", "  2", "  3", "  5"]
    assert "161 new = 161, but the cache has 160 slots" in lines[1] and "token_ids[1]: got 512" in lines[2]


def test_every_call_names_its_bad_sequences():
    engine = tiny.engine()
    state, long = engine.prefill([1, 2, 3]), engine.prefill(tiny.tokens(155))
    for call, told in (
        (lambda: engine.extend_many([state, long, state, "s"], [[1], [1] * 6, [-1], [1]]), [1, 2, 3]),
        (lambda: engine.generate_many([long, state, None], max_new_tokens=6), [0, 2]),
        (lambda: engine.generate_many([state, state], sampling=[None, 0.7]), [1]),
    ):
        with pytest.raises(errors.BatchError) as caught:
            call()
        assert list(caught.value.errors) == told


@pytest.mark.parametrize("on_error", ["raise", "return"])
def test_what_all_sequences_share_is_refused_once(on_error, no_step):
    for given, told in (
        ({"max_new_tokens": [1, 2]}, r"max_new_tokens: got \[1, 2\], wanted an int"),
        ({"max_new_tokens": -1}, "max_new_tokens: got -1, wanted an int, 0 or more"),
        ({"stop_ids": [512]}, r"stop_ids\[0\]: got 512"),
    ):
        with pytest.raises(errors.InputError, match=told):
            tiny.engine().generate_many([None, None], on_error=on_error, **given)


def test_one_text_given_as_many_is_told_what_reads_it(no_step):
    for ids in ([1, 2, 3], np.array([1, 2, 3])):
        with pytest.raises(errors.InputError, match="got 3 ids, wanted a list with the ids of each text; `prefill` "):
            tiny.engine().prefill_many(ids)


def test_an_error_in_the_place_of_a_state_stays_the_reason():
    engine = tiny.engine()
    states = engine.prefill_many([[1], [], [2]], on_error="return")
    found = engine.generate_many(states, max_new_tokens=1, on_error="return")
    more = engine.extend_many(states, [[3]] * 3, on_error="return")
    assert found[1] is more[1] is states[1] and more[2].length == 2
    with pytest.raises(errors.BatchError, match=r"1: token_ids: got none, wanted one or more"):
        engine.generate_many(states)
    with pytest.raises(errors.InputError, match="token_ids: got none, wanted one or more"):
        engine.extend(states[1], [1])


def test_the_others_are_answered_where_errors_are_returned():
    engine = tiny.engine()
    found = engine.prefill_many(BAD, on_error="return")
    assert {index: type(one) for index, one in enumerate(found) if isinstance(one, errors.KVGraftError)} == TOLD
    for index in (0, 4):
        assert compare.compare(found[index], engine.prefill(BAD[index])).equal
    more = engine.extend_many([found[0], found[0], found[4]], [[7], [512], [8]], on_error="return")
    assert isinstance(more[1], errors.InputError)
    assert [state.token_ids[-1] for state in (more[0], more[2])] == [7, 8]


def test_nothing_runs_for_no_sequences_or_none_that_can_be_run(no_step):
    engine = tiny.engine()
    assert engine.prefill_many([]) == engine.extend_many([], []) == engine.generate_many([]) == []
    found = engine.prefill_many([[], [512]], on_error="return")
    assert [type(one) for one in found] == [errors.InputError] * 2


@pytest.mark.parametrize("on_error", ["skip", None, True, "RAISE"])
def test_another_word_for_what_to_do_is_refused(on_error, no_step):
    engine = tiny.engine()
    for call in (
        lambda: engine.prefill_many([[1]], on_error=on_error),
        lambda: engine.extend_many([], [], on_error=on_error),
        lambda: engine.generate_many([], on_error=on_error),
    ):
        with pytest.raises(errors.InputError, match=f"on_error: got {on_error!r}, wanted 'raise' or 'return'"):
            call()


def test_lists_that_do_not_fit_together_are_refused():
    engine = tiny.engine()
    state = engine.prefill([1])
    with pytest.raises(errors.InputError, match="states, token_ids: got 2 and 1 entries"):
        engine.extend_many([state, state], [[1]])
    with pytest.raises(errors.InputError, match="sampling: got 3 of them, wanted one, or 2"):
        engine.generate_many([state, state], sampling=[None] * 3)
    for call in (lambda: engine.prefill_many(7), lambda: engine.generate_many({"a": state})):
        with pytest.raises(errors.InputError, match="wanted a list with an entry for each sequence"):
            call()


@pytest.mark.parametrize("given", [{(1, 2), (3,)}, types.MappingProxyType({0: [1]}), np.array(3), list, b"ab"])
def test_what_has_no_order_or_no_entries_is_no_list(given, no_step):
    engine = tiny.engine()
    for call in (engine.prefill_many, engine.generate_many, lambda given: engine.extend_many(given, [[1], [2]])):
        with pytest.raises(errors.InputError, match="wanted a list with an entry for each sequence"):
            call(given)


def test_no_state_is_not_a_fresh_one(no_step):
    engine = tiny.engine()
    with pytest.raises(errors.InputError, match="state: .*None"):
        engine.extend(None, [1, 2])
    with pytest.raises(errors.BatchError, match="state: .*None"):
        engine.extend_many([None], [[1, 2]])


def test_stop_tokens_may_come_from_an_iterator_and_hold_for_every_state():
    engine = tiny.engine()
    state = engine.prefill(tiny.tokens(6))
    stop_id = engine.generate(state, max_new_tokens=3, stop_ids=())[0][-1]
    wanted = engine.generate(state, max_new_tokens=3, stop_ids=[stop_id])[0]
    found = engine.generate_many([state] * 2, max_new_tokens=3, stop_ids=(each for each in [stop_id]))
    assert [tokens for tokens, _ in found] == [wanted, wanted] and len(wanted) < 3
    assert engine.generate(state, max_new_tokens=3, stop_ids={stop_id})[0] == wanted
    for given in (b"\x05", "", {5: 1}, 5):
        with pytest.raises(errors.InputError, match="stop_ids: "):
            engine.generate(state, stop_ids=given)


def test_a_callback_that_cannot_be_called_is_refused():
    engine = tiny.engine()
    state = engine.prefill([1])
    for call in (lambda: engine.generate(state, on_token=5), lambda: engine.generate_many([state], on_token=5)):
        with pytest.raises(errors.InputError, match=r"on_token: got 5, wanted a function of \(.*token, logits_V\)"):
            call()
    told = r"on_token: too many positional arguments in .*; wanted a function of \(index, token, logits_V\), or None"
    with pytest.raises(errors.InputError, match=told):
        engine.generate_many([state], on_token=lambda token, logits_V: None)
    with pytest.raises(errors.InputError, match=r"missing .*; wanted a function of \(token, logits_V\)"):
        engine.generate(state, on_token=lambda index, token, logits_V: None)
    with pytest.raises(errors.InputError, match="sampling: got 0.5, wanted a Sampling, or a list with one for each"):
        engine.generate_many([state], sampling=0.5)
