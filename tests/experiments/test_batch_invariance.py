"""The batch experiment: sequences are of every kind, neighbours are what they are said to be, mistakes are found."""

from __future__ import annotations

import collections
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import exactness_270m, exactness_small
from experiments import corpus as corpus_lib
from experiments import harness
from experiments.batch_invariance import detectors, rounds, sequences
from experiments.batch_invariance import experiment as batch_invariance
import kvgraft_jax as kg
from kvgraft_jax.grafting import compare
from kvgraft_jax.runtime import batch as batch_lib

TINY = "random:gemma-3-270m?layers=6&vocab=256&embed=32&hidden=64&heads=2&kv_heads=1&head_dim=16&window=16"
FIRED = [{"detector": name, "sequences": 2, "different": "2", "fired": True} for name in detectors.NAMES]


def settings(**changes):
    config = exactness_small.get_config()
    small = dict(model=TINY, kv_block=16, shapes=(2, 8), batch_rows=(1, 3), sequences=12, sequence_tokens=40)
    config.update(small | dict(prefix_tokens=25, new_tokens=5) | changes)
    return config


def run(tmp_path, **changes):
    code = harness.execute(batch_invariance.EXPERIMENT, settings(**changes), tmp_path)
    return code, json.loads((tmp_path / harness.RESULT).read_text())


@pytest.fixture
def detectors_awake(monkeypatch):
    """Leaves the detectors out: all have fired."""
    monkeypatch.setattr(detectors, "run", lambda *_: iter(FIRED))


@pytest.fixture(scope="module")
def drawn():
    corpus = corpus_lib.tokenize(kg.load_model(TINY))
    found = [sequences.draw(number, 0, corpus, 500) for number in range(200)]
    assert found == [sequences.draw(number, 0, corpus, 500) for number in range(200)]
    return found


def test_sequences_are_of_every_kind(drawn):
    lengths = [len(each.first) for each in drawn]
    assert min(lengths) < 5 and max(lengths) > 400 and len(set(lengths)) > 80
    for kind in (lambda s: s.continues, lambda s: bool(s.second), lambda s: s.sampling is not None):
        assert 40 < sum(map(kind, drawn)) < 160
    draws = [each.sampling for each in drawn if each.sampling]
    assert len({draw.seed for draw in draws}) == len(draws) and {draw.top_k is None for draw in draws} == {True, False}
    assert all(each.first[0] == 2 for each in drawn if not each.continues), "begin of text"


def test_other_texts_have_the_same_lengths(drawn):
    for each in drawn[:20]:
        other = sequences.other_text(each, 0, 256)
        assert (other.number, len(other.first), len(other.second)) == (each.number, len(each.first), len(each.second))
        assert other.first != each.first and (other.sampling is None) == (each.sampling is None)
        assert other.sampling is None or other.sampling.seed != each.sampling.seed


def test_every_sequence_is_compared_beside_every_kind_of_neighbour(drawn):
    config = settings(sequences=200, sequence_tokens=500, batch_rows=(1, 3, 16))
    asked = harness.read_settings(batch_invariance.Settings, config)
    engine = kg.Engine(kg.load_model(TINY), capacity=32, shapes=(2, 8), kv_block=16)
    benches = dict.fromkeys(asked.batch_rows, rounds.Bench(engine, None, 5, ()))
    seen = collections.Counter()
    for one in batch_invariance.plan_rounds(asked, benches, drawn):
        seen.update((one.way, one.rows, one.neighbours, number) for number in one.numbers)
        given = one.compute.args[1]
        assert one.numbers <= {each.number for each in given} and given != sorted(given, key=lambda s: s.number)
        poisoned = one.compute.keywords.get("poisoned", frozenset())
        assert not poisoned & one.numbers and bool(poisoned) == (one.neighbours == batch_invariance.POISONED)
        assert all(drawn[each.number] == each for each in given if each.number in one.numbers)
        if one.neighbours == batch_invariance.OTHER:
            assert all(drawn[each.number] != each for each in given if each.number not in one.numbers)
    assert set(seen.values()) == {1} and len(seen) == 200 * (3 * 2 + 2 * 3)


def test_a_poisoned_context_is_nan_throughout():
    state = kg.Engine(kg.load_model(TINY), capacity=32, shapes=(2, 8), kv_block=16).prefill(range(20))
    poisoned = rounds.poison(state)
    assert len(poisoned.blocks) == len(state.blocks) == 2
    for block, whole in zip(poisoned.blocks, state.blocks, strict=True):
        for array, like in zip(block.kinds, whole.kinds, strict=True):
            assert array.shape == like.shape and array.dtype == like.dtype
            assert np.isnan(np.asarray(array).view(jnp.bfloat16).astype(np.float32)).all()
    assert sequences.state_sha256(poisoned).startswith("refused: ")
    assert sequences.state_sha256(state) == sequences.state_sha256(state)


def test_an_outcome_differs_in_whatever_was_looked_at():
    alone = sequences.Outcome("a", "b", "c", (1, 2))
    assert alone.difference(alone) is None
    assert sequences.Outcome(None, None, "c", (1, 2)).difference(alone) is None
    assert sequences.Outcome("a", "x", "c", (1, 2)).difference(alone) == "extended"
    assert sequences.Outcome(None, None, "c", (1, 3)).difference(alone) == "new_tokens"
    nothing = sequences.Outcome("a", None, "refused: NaN", ())
    assert "refused: NaN" in nothing.difference(nothing)


@pytest.mark.slow
def test_the_claim_holds_and_every_detector_fires(tmp_path):
    code, document = run(tmp_path)
    assert code == 0 and document["holds"]
    assert document["sequences"] == document["equal"] == 12 == len(document["tables"]["sequences"])
    assert document["compared"] == document["compared_equal"] == sum(row["sequences"] for row in document["rows"])
    assert sorted(document["detectors"]) == sorted(detectors.NAMES) and all(document["detectors"].values())
    assert document["refused"] == 0 and document["first_difference"] == {}
    kinds = document["kinds"]
    assert 0 < kinds["after_the_prefix"] < 12 and 0 < kinds["sampled"] < 12 and kinds["stopped_early"]


@pytest.mark.slow
def test_sequences_that_read_each_others_rows_fail_the_claim(tmp_path, monkeypatch, detectors_awake):
    table = batch_lib._Batch._table

    def swapped(batch):
        rows = table(batch)
        if len(batch._active) > 1 and batch._num_steps % 3 == 0:
            a, b = (sequence.row for sequence in batch._active[:2])
            rows[a], rows[b] = rows[b], rows[a]
        return rows

    monkeypatch.setattr(batch_lib._Batch, "_table", swapped)
    code, document = run(tmp_path)
    assert code == 1 and document["equal"] < document["sequences"]
    alone_rows = [row for row in document["rows"] if row["rows"] == 1]
    assert all(row["equal"] == row["sequences"] for row in alone_rows)
    found = document["first_difference"]
    assert document["rows"][found["round"]]["rows"] == 3 and found["stage"]
    assert sum(not row["equal"] for row in document["tables"]["sequences"]) == 12 - document["equal"]


@pytest.mark.slow
def test_a_detector_that_reports_no_difference_fails_the_claim(tmp_path, monkeypatch):
    asleep = [dict(row, fired=row["detector"] != "row_bit") for row in FIRED]
    monkeypatch.setattr(detectors, "run", lambda *_: iter(asleep))
    code, document = run(tmp_path, sequences=4)
    assert code == 1 and document["equal"] == 4 and not document["detectors"]["row_bit"]


@pytest.mark.slow
def test_rounds_agree_with_the_engine_itself(drawn):
    engine = kg.Engine(kg.load_model(TINY), capacity=96, shapes=(2, 8), rows=3, kv_block=16)
    prefix = engine.graft(engine.capture(engine.prefill(range(25))))
    bench = rounds.Bench(engine, prefix, 5, ())
    short = [each for each in drawn if each.num_tokens < 40][:5]
    assert any(each.continues for each in short)
    outcome = rounds.mixed(bench, short)
    for each in short:
        state = engine.extend(prefix, each.first) if each.continues else engine.prefill(each.first)
        state = engine.extend(state, each.second) if each.second else state
        new_tokens, state = engine.generate(state, max_new_tokens=5, stop_ids=(), sampling=each.sampling)
        assert outcome[each.number].new_tokens == tuple(new_tokens)
        assert outcome[each.number].decoded == sequences.state_sha256(state)
    assert compare.hashes(state).logits_sha256 == compare.logits_sha256(jax.device_get(state.logits))


def test_the_configurations_ask_for_enough():
    for config in (exactness_270m.get_config(), exactness_small.get_config()):
        assert config.sequences >= 200 and config.batch_rows == (1, 3, 16)
        assert config.prefix_tokens % config.kv_block and config.prefix_tokens > config.kv_block
    assert exactness_270m.get_config().sequence_tokens >= 300


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sequences": 1}, "sequences"),
        ({"seed": -1}, "seed"),
        ({"batch_rows": (3,)}, "batch_rows"),
        ({"batch_rows": (3, 1)}, "batch_rows"),
        ({"batch_rows": (0, 1)}, "batch_rows"),
        ({"sequence_tokens": 1}, "sequence_tokens"),
        ({"prefix_tokens": 0}, "prefix_tokens"),
        ({"new_tokens": 0}, "new_tokens"),
        ({"shapes": (8, 2)}, "shapes"),
    ],
)
def test_bad_settings_are_refused(tmp_path, capsys, changes, named):
    assert harness.execute(batch_invariance.EXPERIMENT, settings(**changes), tmp_path) == 2
    assert named in capsys.readouterr().err
