"""The invariance experiment: schedules are what they say, garbage stays off the rows, detectors can fail."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import exactness_small
from experiments import harness
from experiments.schedule_invariance import detectors, schedules
from experiments.schedule_invariance import experiment as schedule_invariance
from experiments.width_invariance import detectors as causes
import kvgraft_jax as kg
from kvgraft_jax.runtime import run as run_lib
from kvgraft_jax.runtime import step as step_lib

MODEL = "random:gemma-3-270m?layers=6&vocab=256&embed=32&hidden=64&heads=2&kv_heads=1&head_dim=16&window=16"
SHAPES, CAPACITIES = (2, 32, 256), (768, 896, 1280)
DRAWN = tuple(schedules.draw(number, 0, 650, SHAPES, CAPACITIES, 64) for number in range(200))


def test_schedules_cover_every_kind():
    first = DRAWN[0]
    assert first == schedules.Schedule((schedules.Leg(768, (650,)),))
    assert DRAWN == tuple(schedules.draw(number, 0, 650, SHAPES, CAPACITIES, 64) for number in range(200))
    assert len(set(DRAWN)) == 200
    for schedule in DRAWN:
        assert sum(sum(leg.pieces) for leg in schedule.legs) == 650
        assert all(piece > 0 for leg in schedule.legs for piece in leg.pieces)
    assert sum(schedule.trailing_singles >= 64 for schedule in DRAWN) >= 20
    for values, wanted in (
        ({schedule.garbage for schedule in DRAWN}, set(schedules.GARBAGE)),
        ({schedule.policy for schedule in DRAWN}, {"visible", "full"}),
        ({schedule.carrier for schedule in DRAWN}, {schedules.MEMORY, schedules.DISK}),
        ({schedule.num_grafts for schedule in DRAWN}, {0, 1, 2}),
        ({leg.capacity for schedule in DRAWN for leg in schedule.legs}, {768, 896, 1280}),
        ({schedule.random_idle_lanes for schedule in DRAWN}, {False, True}),
    ):
        assert values == wanted
    grafted = [schedule for schedule in DRAWN if schedule.num_grafts]
    assert any(schedule.trailing_singles >= 64 for schedule in grafted)
    windowed = [s for s in grafted if s.policy == "visible" and sum(sum(leg.pieces) for leg in s.legs[:-1]) > 512]
    assert len(windowed) >= 20 and any(sum(schedule.legs[0].pieces) < 128 for schedule in grafted)
    lanes = {sum(schedule.legs[0].pieces) % 16 for schedule in grafted}
    assert len(lanes) == 16, "grafts fall on every lane"


@pytest.fixture(scope="module")
def engine():
    return kg.Engine(kg.load_model(MODEL), capacity=96, kv_block=32, shapes=(2, 10))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("garbage", schedules.GARBAGE)
def test_garbage_fills_the_other_slots_and_changes_no_bit_of_a_row(dtype, garbage):
    config = step_lib.StepConfig(kg.load_model(MODEL).config, dtype, 16)
    rng = np.random.default_rng(0)
    unsigned = np.uint16 if dtype == "bfloat16" else np.uint32
    patterns = jax.tree.map(
        lambda array: rng.integers(0, np.iinfo(unsigned).max, array.shape, unsigned).view(array.dtype),
        config.make_cache(5),
    )
    before = jax.tree.map(jnp.array, patterns)
    places = (3, 0, 2, 4, 1)  # Rows 3 to 39 lie in the first three; the others belong to nobody.
    after = schedules.fill_unused(before, config, places, 3, 40, garbage, rng)
    for kind, old, new in zip(config.model.layer_kinds, patterns.layers, after.layers, strict=True):
        first = 3 if kind == "sliding" else 0
        for side in ("k_rot_JxSxKxH", "v_JxSxKxH"):
            old_SxKxH, new_SxKxH = (np.asarray(getattr(layer, side))[list(places)] for layer in (old, new))
            bits, new_bits = (rows.reshape(80, *rows.shape[2:]).view(unsigned) for rows in (old_SxKxH, new_SxKxH))
            np.testing.assert_array_equal(new_bits[first:40], bits[first:40])
            buried = np.concatenate([new_bits[:first], new_bits[40:]])
            if garbage == schedules.BITS:
                assert (buried != 0).mean() > 0.99
            else:
                wide = buried.view(jnp.dtype(dtype)).astype(np.float64)
                check = {"zero": wide == 0, "huge": wide > 3e38, "NaN": np.isnan(wide)}[garbage]
                assert check.all()


def test_a_schedule_reads_at_every_width_with_foreign_tokens_in_blocks_anywhere(engine, tmp_path, monkeypatch):
    """What reaches the program: widths that the engine would not take, tokens in idle lanes, blocks out of order."""
    steps = []
    exact = run_lib.Runner.step

    def step(runner, cache, pieces, table, width, *, idle_tokens=()):
        if runner.prepare is not None:  # Not the self-test's.
            steps.append((width, len(pieces[0].tokens), tuple(table[0]), tuple(idle_tokens)))
        return exact(runner, cache, pieces, table, width, idle_tokens=idle_tokens)

    monkeypatch.setattr(run_lib.Runner, "step", step)
    token_ids = [n * 7 % 256 for n in range(40)]
    plain = schedules.Schedule((schedules.Leg(96, (40,)),))
    shuffled = schedules.Schedule(
        (schedules.Leg(96, (20, *[1] * 13, 7)),), random_idle_lanes=True, shuffled=True, seed=9
    )
    outcomes = [schedules.run(schedule, {96: engine}, token_ids, (0, 31), tmp_path) for schedule in (plain, shuffled)]
    assert outcomes[0].sha256 == outcomes[1].sha256 and outcomes[0].full_sha256 == outcomes[1].full_sha256
    ours, theirs = steps[:4], steps[4:]
    assert ours == [(10, 10, (0, 1, 0), ())] * 4
    assert {width for width, *_ in theirs} == {2, 10}
    assert any(count == 1 and width == 10 for width, count, *_ in theirs)
    assert all(len(idle) == width - count for width, count, _, idle in theirs)
    assert len(set().union(*(idle for *_, idle in theirs))) > 10
    (table,) = {table for _, _, table, _ in theirs}
    assert table[:2] != (0, 1) and len(set(table[:2])) == 2 and table[2] == 0


def run(tmp_path, **changes):
    config = exactness_small.get_config()
    config.update(dict(model=MODEL, schedules=6, text_tokens=80, capacities=(96, 128, 160)) | changes)
    code = harness.execute(schedule_invariance.EXPERIMENT, config, tmp_path)
    return code, json.loads((tmp_path / harness.RESULT).read_text())


def only_damage(bench):
    """Returns the two detectors that need no other program."""
    yield detectors.Try("row_bit", "", bench.flipped)
    yield detectors.Try("nan_inside", "", bench.poisoned)


@pytest.mark.slow
def test_the_detectors_find_no_difference_where_none_is(engine, tmp_path):
    """Other widths, and a batch of one: the ways of computing that detectors use do not differ by themselves."""
    token_ids, checkpoints = [n * 7 % 256 for n in range(75)], (0, 31, 60)
    plain = schedules.Schedule((schedules.Leg(96, (75,)),))
    reference = schedules.run(plain, {96: engine}, token_ids, checkpoints, tmp_path)
    bench = detectors.Bench(engine, token_ids, checkpoints)
    assert bench.alone(2).sha256 == bench.alone(33).sha256 == reference.sha256
    assert bench.company(1, 10).sha256 == bench.with_cause(causes.PLAIN_SUMS, 10).sha256
    assert len({bench.flipped().sha256, bench.poisoned().sha256, reference.sha256}) == 3


@pytest.mark.slow
def test_a_detector_that_reports_no_difference_fails_the_claim(tmp_path, monkeypatch, capsys):
    def asleep(bench):
        yield detectors.Try("plain_sums", "the engine's own sums", lambda: bench.alone(10))
        yield from only_damage(bench)

    monkeypatch.setattr(detectors, "tries", asleep)
    code, document = run(tmp_path)
    assert code == 1 and document["distinct_hashes"] == document["distinct_full_hashes"] == 1
    assert document["detectors"] == {"plain_sums": False, "row_bit": True, "nan_inside": True}
    assert document["first_difference"] == {}
    assert capsys.readouterr().out.splitlines()[-1].startswith("FAIL: ")


@pytest.mark.slow
def test_a_graft_with_one_wrong_bit_is_found_and_located(tmp_path, monkeypatch):
    monkeypatch.setattr(detectors, "tries", only_damage)
    exact = kg.Engine.graft

    def graft(engine, artifact):
        state = exact(engine, artifact)
        *others, last = state.blocks
        full_Lx2xSxKxH = np.array(last.kinds[1])  # Layer 5 is the only full one.
        full_Lx2xSxKxH[0, 1, (state.length - 1) % engine.kv_block].view(np.uint8)[0, 0] ^= 1
        block = dataclasses.replace(last, kinds=(last.kinds[0], jnp.array(full_Lx2xSxKxH)))
        return dataclasses.replace(state, blocks=(*others, block))

    monkeypatch.setattr(kg.Engine, "graft", graft)
    code, document = run(tmp_path)
    grafted = [row["schedule"] for row in document["rows"] if row["grafts"]]
    assert code == 1 and grafted
    found = document["first_difference"]
    assert found["schedule"] in grafted
    first_context = document["rows"][found["schedule"]]["contexts"].split()[0]
    assert found["position"] == int(first_context) - 1 and found["elements"] == 1
    assert (found["layer"], found["kind"], found["what"]) == (5, "full", "value")
    plain = [row["sha256"] for row in document["rows"] if not row["grafts"]]
    assert len(set(plain)) == 1


@pytest.mark.slow
def test_a_schedule_that_raises_is_a_difference_with_its_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(detectors, "tries", only_damage)

    def graft(engine, artifact):
        raise kg.IntegrityError(artifact.artifact_id, "logits", "not what was deposited")

    monkeypatch.setattr(kg.Engine, "graft", graft)
    code, document = run(tmp_path)
    assert code == 1 and document["distinct_hashes"] > 1
    assert "IntegrityError" in document["first_difference"]["error"]
