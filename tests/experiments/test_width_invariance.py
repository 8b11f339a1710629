"""The width experiment: plans are what they say, a wrong bit at one width fails the claim, detectors can fail."""

from __future__ import annotations

import dataclasses
import json
import weakref

import jax
import numpy as np
import pytest

from configs import exactness_270m, exactness_small
from experiments import harness
from experiments.width_invariance import detectors, readings
from experiments.width_invariance import experiment as width_invariance
import kvgraft_jax as kg
from kvgraft_jax.checkpoints import load
from kvgraft_jax.gemma import cache as cache_lib
from kvgraft_jax.gemma import configurations as configurations_lib
from kvgraft_jax.gemma import parameters as parameters_lib
from kvgraft_jax.runtime import run as run_lib

TINY = "random:gemma-3-270m?layers=6&vocab=256&embed=32&hidden=64&heads=2&kv_heads=1&head_dim=16&window=16"
WIDE = "random:gemma-3-270m?layers=3&vocab=256&embed=640&hidden=640&heads=4&kv_heads=1&head_dim=64&window=16"
SHAPES = (2, 5, 17)
CUT = {"layers", "vocab", "window", "seed"}
FIRED = [{"detector": name, "setting": "", "fired": True} for name in detectors.CAUSES]


def settings(**changes):
    config = exactness_small.get_config()
    small = dict(model=TINY, kv_block=16, width_shapes=SHAPES, width_plans=4, width_tokens=50, configurations=())
    config.update(small | changes)
    return config


def run(tmp_path, **changes):
    code = harness.execute(width_invariance.EXPERIMENT, settings(**changes), tmp_path)
    return code, json.loads((tmp_path / harness.RESULT).read_text())


@pytest.fixture
def detectors_awake(monkeypatch):
    """Leaves the detectors out: all have fired."""
    monkeypatch.setattr(detectors, "run", lambda *_: iter(FIRED))


def test_plans_read_the_whole_text_and_mix_widths_and_live_lanes():
    shapes = exactness_270m.get_config().width_shapes
    drawn = [readings.draw(number, 0, shapes, 2048) for number in range(100)]
    assert drawn == [readings.draw(number, 0, shapes, 2048) for number in range(100)] and len(set(drawn)) == 100
    for plan in (*drawn, *(readings.single(width, 2047) for width in shapes)):
        assert sum(live for _, live in plan.steps) in (2047, 2048)
        assert all(1 <= live <= width for width, live in plan.steps)
    steps = [step for plan in drawn for step in plan.steps]
    assert {width for width, _ in steps} == set(shapes)
    assert {live for width, live in steps if width == 16} == set(range(1, 17))
    assert any(live == width for width, live in steps) and any(live == 1 < width for width, live in steps)
    assert {plan.idle_seed is None for plan in drawn} == {True, False}
    assert readings.single(7, 20).steps == ((7, 7), (7, 7), (7, 6)) and readings.single(7, 20).widths == (7,)


@pytest.mark.slow
def test_the_result_holds_what_was_asked_and_the_claim_holds(tmp_path, detectors_awake):
    code, document = run(tmp_path, configurations=(TINY,), configuration_shapes=(2, 9), configuration_tokens=30)
    assert code == 0 and document["holds"]
    assert document["shapes"] == list(SHAPES) and document["plans"] == len(document["rows"]) == len(SHAPES) + 4
    assert document["distinct_hashes"] == 1 and document["refused"] == 0 and document["probe_agrees"]
    assert document["detectors"] == {"plain_sums": True, "uncut_products": True}
    assert sum(document["tokens_by_width"].values()) == 50 * document["plans"]
    assert all(count >= 50 for count in document["tokens_by_width"].values())
    (row,) = document["tables"]["configurations"]
    assert (
        row["model"] == TINY
        and row["configuration"] == "gemma-3-270m"
        and row["plans"] == 4
        and row["distinct_hashes"] == 1
        and row["holds"]
    )
    assert document["configurations_equal"] == 1
    assert "## Configurations" in (tmp_path / harness.REPORT).read_text()


@pytest.mark.slow
def test_the_hash_covers_every_row_and_is_that_of_an_engine(tmp_path):
    model = kg.load_model(TINY)
    token_ids = tuple(n * 7 % 256 for n in range(40))
    runner = readings.make_runner(model, 16, 40)
    outcome = readings.read(runner, model.digest, readings.draw(1, 0, SHAPES, 40), token_ids, (0, 20))
    state = kg.Engine(model, capacity=48, kv_block=16).prefill(token_ids)
    assert kg.compare(state, outcome.state, policy="full").equal
    assert len(set(outcome.logits_sha256)) == 3
    again = readings.read(runner, model.digest, readings.single(5, 40), token_ids, (0, 20))
    assert again.sha256 == outcome.sha256
    other = readings.read(runner, model.digest, readings.single(5, 40), (token_ids[0] + 1, *token_ids[1:]), (0, 20))
    assert other.sha256 != outcome.sha256
    assert readings.first_difference(outcome, other, (0, 20)) == "the key of layer 0 at position 0"


def spoil(monkeypatch, width, change):
    """Changes the keys of layer 3 that steps of one width leave."""
    step = run_lib.Runner.step

    def spoiled(runner, cache, pieces, table, given, **idle):
        result = step(runner, cache, pieces, table, given, **idle)
        if given != width:
            return result
        layers = list(result.cache.layers)
        k_rot_JxSxKxH = np.array(layers[3].k_rot_JxSxKxH)
        change(k_rot_JxSxKxH[0, 5])
        layers[3] = dataclasses.replace(layers[3], k_rot_JxSxKxH=jax.device_put(k_rot_JxSxKxH))
        return dataclasses.replace(result, cache=cache_lib.Cache(tuple(layers)))

    monkeypatch.setattr(run_lib.Runner, "step", spoiled)


@pytest.mark.slow
def test_one_wrong_bit_at_one_width_fails_the_claim_and_is_located(tmp_path, monkeypatch, detectors_awake):
    def flip(row_KxH):
        row_KxH[0, 0] ^= 1

    engine = kg.Engine

    def made(*given, **sizes):  # The self-test of the engine stays what it is.
        found = engine(*given, **sizes)
        _ = found.pin
        spoil(monkeypatch, 17, flip)
        return found

    monkeypatch.setattr(kg, "Engine", made)
    code, document = run(tmp_path)
    assert code == 1 and document["distinct_hashes"] > 1 and not document["refused"]
    assert document["rows"][0]["sha256"] == document["rows"][1]["sha256"] != document["rows"][2]["sha256"]
    found = document["first_difference"]
    assert found["plan"] == 2 and found["name"] == "width 17" and found["where"].startswith("the key of layer 3")


@pytest.mark.slow
def test_equal_hashes_of_nan_are_no_proof(tmp_path, monkeypatch, detectors_awake):
    def poison(row_KxH):
        row_KxH[:] = 0x7FC0

    engine = kg.Engine

    def made(*given, **sizes):
        found = engine(*given, **sizes)
        _ = found.pin
        for width in SHAPES:
            spoil(monkeypatch, width, poison)
        return found

    monkeypatch.setattr(kg, "Engine", made)
    code, document = run(tmp_path)
    assert code == 1 and document["refused"] == document["plans"]


@pytest.mark.slow
def test_a_detector_that_reports_no_difference_fails_the_claim(tmp_path, monkeypatch):
    asleep = [dict(row, fired=row["detector"] != detectors.PLAIN_SUMS) for row in FIRED]
    monkeypatch.setattr(detectors, "run", lambda *_: iter(asleep))
    code, document = run(tmp_path)
    assert code == 1 and document["distinct_hashes"] == 1
    assert document["detectors"] == {"plain_sums": False, "uncut_products": True}


@pytest.mark.slow
def test_a_size_that_cannot_be_read_is_refused_in_its_row_and_fails_the_claim(tmp_path, monkeypatch, detectors_awake):
    start = harness.start_module

    def end(module, job, answer):
        return (-9, "") if "seed=9" in job else start(module, job, answer)

    monkeypatch.setattr(harness, "start_module", end)
    changes = dict(configuration_shapes=(2, 5), configuration_tokens=20)
    huge = "random:gemma-4-31b"
    code, document = run(tmp_path, configurations=(f"{TINY}&seed=9", TINY, huge), **changes)
    assert code == 1 and document["configurations_equal"] == 1 and document["distinct_hashes"] == 1
    ended, held, refused = document["tables"]["configurations"]
    assert ended["sha256"].startswith("refused: the system ended it") and "-9" in ended["sha256"]
    assert held["holds"] and not ended["holds"] and not refused["holds"]
    assert "GB" in refused["sha256"] and refused["sha256"].startswith("refused: ") and "code 2" in refused["sha256"]


@pytest.mark.slow
def test_other_sizes_have_the_memory_of_the_model(tmp_path, monkeypatch, detectors_awake):
    loaded, load = [], kg.load_model

    def remember(*args, **kwargs):
        model = load(*args, **kwargs)
        loaded.append(weakref.ref(model.params["embedder"]["embedding"][0]))
        return model

    def start(*_):
        raise kg.ConfigError(f"{sum(array() is not None for array in loaded)} of {len(loaded)} are in memory")

    monkeypatch.setattr(kg, "load_model", remember)
    monkeypatch.setattr(harness, "start_module", start)
    changes = dict(configuration_shapes=(2, 5), configuration_tokens=20, width_plans=1)
    config = settings(configurations=(TINY,), **changes)
    with pytest.raises(kg.ConfigError, match="^0 of 1 are in memory"):
        width_invariance.run(harness.read_settings(width_invariance.Settings, config), kg.load_model(TINY), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_two_causes_are_seen_when_they_are_put_back(dtype):
    model = kg.load_model(WIDE, dtype)
    token_ids = tuple(n * 7 % 256 for n in range(70))
    tries = list(detectors.run(model, 16, (2, 64), token_ids))
    assert {row["detector"] for row in tries if row["fired"]} == set(detectors.CAUSES), tries
    assert all(row["fired"] == (row["sha256"] != row["against_sha256"]) for row in tries)
    runner = readings.make_runner(model, 16, 70)
    plans = [readings.single(width, 70) for width in (1, 2, 64)]
    found = {readings.read(runner, model.digest, plan, token_ids, range(69)).sha256 for plan in plans}
    assert len(found) == 1, "nothing differs without the causes, not even in steps of one lane"


def test_uncut_products_have_parameters_in_one_piece_and_of_the_same_bits():
    model = kg.load_model(WIDE, "float32")
    ours = parameters_lib.whole(model.config, model.params)
    with detectors.uncut_products(model) as params:
        assert len(params["layer_0"]["mlp"]["down_proj"]["kernel"]) == 1
        theirs = parameters_lib.whole(model.config, params)
    assert len(model.params["layer_0"]["mlp"]["down_proj"]["kernel"]) == 2
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[path], theirs[path]) for path in ours)


def test_the_configuration_of_the_270m_covers_every_released_size_in_its_true_widths():
    config = exactness_270m.get_config()
    found = {}
    for uri in config.configurations:
        name, _, query = uri.removeprefix("random:").partition("?")
        assert {pair.partition("=")[0] for pair in query.split("&")} <= CUT
        cut, whole = load._random_config(uri.removeprefix("random:"))[0], configurations_lib.get(name)
        assert set(cut.layer_kinds) == {"sliding", "full"} and cut.sliding.window < config.configuration_tokens
        assert bool(cut.num_kv_shared_layers) == bool(whole.num_kv_shared_layers)
        widths = {cut.feedforward_dim(layer) for layer in range(cut.num_layers)}
        assert widths == {whole.feedforward_dim(layer) for layer in range(whole.num_layers)}
        assert config.configuration_tokens > config.configuration_kv_block
        found[name] = cut
    assert sorted(found) == sorted(configurations_lib.CONFIGURATIONS) and len(found) == 10
    assert config.width_tokens >= 2000 and config.width_plans >= 100
    assert {2, 3, 4, 7, 8, 10, 16, 33, 64, 128, 256} <= set(config.width_shapes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"width_shapes": ()}, "width_shapes"),
        ({"width_shapes": (2,)}, "width_shapes"),
        ({"width_shapes": (1, 2)}, "width_shapes"),
        ({"width_shapes": (4, 2)}, "width_shapes"),
        ({"configuration_shapes": (2, 2)}, "configuration_shapes"),
        ({"width_plans": 0}, "width_plans"),
        ({"width_tokens": 16}, "width_tokens"),
        ({"configuration_tokens": 1}, "configuration_tokens"),
        ({"seed": -1}, "seed"),
        ({"kv_block": 17}, "kv_block"),
    ],
)
def test_bad_settings_are_refused(tmp_path, capsys, changes, named):
    assert harness.execute(width_invariance.EXPERIMENT, settings(**changes), tmp_path) == 2
    assert named in capsys.readouterr().err
