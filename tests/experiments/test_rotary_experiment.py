"""The rotary experiment: settings that make no sense are refused, and the small configuration passes in full."""

from __future__ import annotations

import numpy as np
import pytest

from configs import rotary_exactness as full
from configs import rotary_small
from experiments import harness
from experiments.rotary_exactness import experiment as rotary_exactness
from experiments.rotary_exactness import parts as rotary_parts
from kvgraft_jax import engine as engine_lib
from kvgraft_jax.checkpoints import load
from kvgraft_jax.relocation import encodings, keys
from tests.experiments import test_experiments


def config(**changes):
    changed = rotary_small.get_config()
    with changed.ignore_type():
        changed.update(changes)
    return changed


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"encodings": ("local257",)}, "local257"),
        ({"encodings": ()}, "encodings"),
        ({"schemes": ("bf17",)}, "bf17"),
        ({"num_keys": 0}, "num_keys"),
        ({"num_positions": 100}, "num_positions"),
        ({"swept_position": 4200}, "swept_position"),
        ({"moves": ((1, 0),)}, "moves"),
        ({"moves": ((1, -2),)}, "moves"),
        ({"moves": ((4000, 200),)}, "moves"),
        ({"moves": ((1, 2, 3),)}, "moves"),
        ({"moves": (1,)}, "moves"),
        ({"value_shifts": (1, 2)}, "value_shifts"),
        ({"value_shifts": (0, -1)}, "value_shifts"),
        ({"text_tokens": 0}, "text_tokens"),
        ({"program_shifts": 1}, "program_shifts"),
        ({"program_positions": 1 << 19}, "program_positions"),
        ({"row_positions": 0}, "row_positions"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_settings_are_refused_before_any_compute(tmp_path, capsys, monkeypatch, changes, named):
    monkeypatch.setattr(rotary_exactness.kg, "load_model", lambda *_: pytest.fail("loaded a model"))
    assert harness.execute(rotary_exactness.EXPERIMENT, config(**changes), tmp_path) == 2
    assert named in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_the_configurations_cover_what_certificates_speak_of():
    assert sorted(full.get_config()) == sorted(rotary_small.get_config())
    for settings in (full.get_config(), rotary_small.get_config()):
        assert settings.encodings == tuple(encoding.name for encoding in encodings.CERTIFIED)
        assert sorted(settings.schemes) == sorted(scheme.name for scheme in keys.SCHEMES)


def test_a_check_says_what_was_found_and_wanted():
    assert rotary_parts.check("a", 3, "> 2") == {"check": "a", "found": 3, "wanted": "> 2", "holds": True}
    assert not rotary_parts.check("a", 0.5, "< 0.5")["holds"] and rotary_parts.check("a", 0.5, "<= 0.5")["holds"]
    assert rotary_parts.check("a", 0, "= 0")["holds"] and not rotary_parts.check("a", 1, "= 0")["holds"]


def test_what_differs_at_the_own_position_fails():
    settings = harness.read_settings(rotary_exactness.Settings, config())
    row = rotary_exactness._row(settings, encodings.LOCAL256, keys.ENGINE_BF16, "copy", 1000, 0, np.ones(128, int))
    assert row["different"] == 128 and row["elements"] == 2 * 128 * settings.num_keys
    (own, *_) = rotary_exactness._checks([row])
    assert not own["holds"] and own["found"] == 128


@pytest.mark.slow
def test_the_small_configuration_passes(tmp_path):
    result = test_experiments.command("rotary_exactness", "--config=configs/rotary_small.py", f"--out={tmp_path}")
    assert result.returncode == 0, result.stderr + result.stdout
    document = test_experiments.results(tmp_path)
    assert document["holds"] and document["own_position_mismatches"] == 0 < document["own_position_elements"]
    assert document["checks_held"] == len(document["checks"]) >= 21 and document["checks_failed"] == 0
    assert all(check["holds"] for check in document["checks"])
    settings = rotary_small.get_config()
    shifts = {row["shift"] for row in document["rows"] if row["position"] == settings.swept_position}
    assert {-512, -1, 0, 1, 2048} <= shifts
    for row in document["rows"]:
        assert (row["different"] == 0) == (row["shift"] == 0) or row["position"] == 0 or row["method"] == keys.SNAP
    plots = sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".png")
    assert [name[0] for name in plots] == list("1234567") and len(list(tmp_path.iterdir())) == 9
    test_experiments.assert_report_equals_result(tmp_path)
    text = (tmp_path / harness.REPORT).read_text()
    for name, rows in document["tables"].items():
        assert f"## {name.capitalize()}\n" in text and rows


@pytest.mark.slow
def test_drift_grows_with_the_position_but_for_pair_0():
    drift = rotary_parts._drift(0)
    (positions, pair_0), (_, pair_1) = drift[0], drift[1]
    assert positions[-1] == 80_000 and pair_0.max() < 6 and pair_1[-5:].max() > 10_000 > 100 > pair_1[0]


def test_values_are_counted_by_layer():
    uri = "random:gemma-3-270m?layers=2&vocab=64&embed=16&hidden=32&heads=1&kv_heads=1&head_dim=16&window=8"
    engine = engine_lib.Engine(load.load_model(uri, "bfloat16"), capacity=64, kv_block=16)
    counts, elements = rotary_parts._values(engine, range(20), (0, 5))
    assert elements == 20 * 16 and counts.shape == (2, 2) and counts[0].sum() == 0 < counts[1, 1]
