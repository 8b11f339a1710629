"""Luck with emitted keys: what is counted, which texts are read, and that the claim fails where luck is easy."""

from __future__ import annotations

import json

import jax.numpy as jnp
import pytest

from configs import emitted_keys_270m, emitted_keys_small
from experiments import corpus as corpus_lib
from experiments import harness
from experiments.emitted_keys import experiment as emitted_keys
from kvgraft_jax import engine as engine_lib
from kvgraft_jax import errors

MODEL = "random:gemma-3-270m?vocab=64&embed=32&hidden=64&heads=2&kv_heads=2&window=16"


def test_luck_counts_elements_pairs_and_heads_and_adds_up():
    fresh_TxH = jnp.arange(12, dtype=jnp.float32).reshape(3, 4)
    found_TxH = fresh_TxH.at[0, 2].set(-1.0).at[1].set(-1.0)
    luck = emitted_keys.compare(found_TxH, fresh_TxH)
    assert (luck.keys, luck.elements, luck.heads, luck.most_pairs) == (3, 7, 1, 2)
    assert luck.pair_R.tolist() == [1, 2]
    assert (luck.differences, luck.signs) == (5, 0)
    negative = emitted_keys.compare(-fresh_TxH, fresh_TxH)
    assert (negative.elements, negative.differences, negative.signs) == (0, 12, 1)  # -0 is not 0.
    total = luck + negative
    assert (total.keys, total.elements, total.heads, total.most_pairs, total.signs) == (6, 7, 1, 2, 1)
    assert total.pair_R.tolist() == [1, 2]


def test_texts_follow_each_other_and_a_short_corpus_is_refused():
    corpus = corpus_lib.Corpus(((3, 4, 5), (6,), (7, 8, 9, 10)), 2, "")
    assert emitted_keys.plan_texts(corpus, 2, 5) == [(2, 3, 4, 5, 6), (2, 7, 8, 9, 10)]
    with pytest.raises(errors.InputError, match="only 8 tokens"):
        emitted_keys.plan_texts(corpus, 3, 5)


def run(tmp_path, **changes):
    config = emitted_keys_small.get_config()
    with config.ignore_type():
        config.update(dict(model=MODEL + "&layers=6&head_dim=64", texts=16, min_keys=1000) | changes)
    code = harness.execute(emitted_keys.EXPERIMENT, config, tmp_path)
    return code, json.loads((tmp_path / harness.RESULT).read_text()) if code in (0, 1) else None


@pytest.mark.slow
def test_the_claim_holds_on_a_small_model(tmp_path):
    code, document = run(tmp_path)
    assert code == 0 and document["whole_keys_back_by_luck"] == 0 and all(row["holds"] for row in document["checks"])
    assert document["keys"] == {"sliding": 5 * 2 * 16 * 63, "full": 2 * 16 * 63}
    own = [row for row in document["rows"] if row["method"] == "copy"]
    assert len(own) == 2 and all(row["heads_equal"] == row["keys"] for row in own)
    assert len(document["rows"]) == 2 * (1 + 2 * 4)
    best, *by_pair = document["tables"].values()
    assert len(best) == 4 and all(0 < row["wrong"] < row["keys"] * row["pairs"] for row in best)
    for rows, row in zip(by_pair, own, strict=True):
        assert [pair["d = 0"] for pair in rows] == [row["keys"]] * 32
        assert max(pair["d = 1024"] for pair in rows) < row["keys"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pairs.png", harness.REPORT, harness.RESULT]


@pytest.mark.slow
def test_the_claim_fails_for_heads_so_small_that_luck_is_easy(tmp_path, capsys):
    # Sums of four elements can have other bits at other widths.
    code, document = run(tmp_path, model=MODEL + "&layers=1&head_dim=4", shapes=(10,))
    assert code == 1 and document["whole_keys_back_by_luck"] > 0
    assert "other d: keys that come back whole" in {row["check"] for row in document["checks"] if not row["holds"]}
    assert capsys.readouterr().out.splitlines()[-1].startswith("FAIL: ")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dtype": "float32"}, "dtype"),
        ({"texts": 0}, "texts"),
        ({"text_tokens": 1}, "text_tokens"),
        ({"min_keys": 0}, "min_keys"),
        ({"min_keys": 10_000}, "emit 2016 keys"),
        ({"texts": 100_000}, "tokens"),
        ({"shifts": ()}, "shifts"),
        ({"shifts": (1,)}, "shifts"),
        ({"shifts": (0, 1 << 20)}, "shifts"),
        ({"best_position": 0}, "best_position"),
        ({"best_shifts": ()}, "best_shifts"),
        ({"best_shifts": (0,)}, "best_shifts"),
    ],
)
def test_bad_settings_are_refused(tmp_path, capsys, changes, named):
    assert run(tmp_path, **changes) == (2, None)
    assert named in capsys.readouterr().err


def test_the_configuration_asks_what_the_study_asks():
    config, small = emitted_keys_270m.get_config(), emitted_keys_small.get_config()
    assert config.min_keys >= 100_000 and len(config.shifts) > 5 and sorted(config) == sorted(small)
    assert (config.shapes, config.kv_block) == (engine_lib.DEFAULT_SHAPES["cpu"], engine_lib.DEFAULT_KV_BLOCK)
