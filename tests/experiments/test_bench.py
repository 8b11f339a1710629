"""The benchmark runs, says what it measured, and judges its own figures; no test asks how fast anything is."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys

from absl import flags
import pytest

from configs import bench_270m
from experiments import harness
from experiments.bench import claims, export, measurement, memory, peer, report, timing
from experiments.bench import experiment as bench
import kvgraft_jax as kg
from kvgraft_jax import engine
from tests import tiny

MEMORY = memory.Memory(
    base_bytes=100,
    weights_bytes=1000,
    cache_bytes=500,
    load_s=1.0,
    loading=memory.Phase(peak_bytes=1900, resident_bytes=1100),
    engine=memory.Phase(peak_bytes=2600, resident_bytes=1700),
    prefill=memory.Phase(peak_bytes=2700, resident_bytes=1900),
)


FIELDS = {
    "model": tiny.URI,
    "dtype": "bfloat16",
    "capacity": tiny.CAPACITY,
    "shapes": tiny.SHAPES,
    "kv_block": tiny.KV_BLOCK,
    "sequences": 3,
    "sequence_tokens": 10,
    "prompt_tokens": 20,
    "context_tokens": 40,
    "question_tokens": 5,
    "decode_tokens": 3,
    "step_starts": (0, 30),
    "repeats": 2,
    "memory_tokens": 0,
    "widths": (tiny.WIDTH, 16),
    "kv_blocks": (tiny.KV_BLOCK,),
    "curve_decode_tokens": 2,
    "curve_repeats": 1,
    "peer_threads": 1,
}
PARTS = {
    "step of 1 token at 0",
    "step of 1 token at 30",
    "widest step at 0",
    "widest step at 30",
    "head",
    "capture",
    "save_artifact",
    "load_artifact",
    "load_artifact, files not in memory",
    "graft",
    "question",
}


def seconds(*runs_s: float) -> timing.Timing:
    return timing.Timing(99.0, runs_s)


def tasks(**peers_s: float) -> dict[str, dict[str, timing.Timing]]:
    """Ours: prompt 4 s, context 10 s, graft 0.5 s, first token 0.5 s, decode 2 s, ten 4 s; peers as given."""
    ours_s = {claims.PREFILL_PROMPT: 4, claims.PREFILL_CONTEXT: 10, claims.FIRST_TOKEN: 0.5, claims.DECODE: 2}
    ours_s[claims.DECODE_MANY] = 4
    found = {task: {claims.OURS: seconds(ours_s[task])} for task in ours_s}
    found[claims.PREFILL_CONTEXT][claims.GRAFT] = seconds(0.5)
    found[claims.DECODE] |= {claims.ONE_WIDTH: seconds(3), claims.LIBRARY_ORDER: seconds(1.8)}
    found[claims.PREFILL_PROMPT] |= {claims.ONE_WIDTH: seconds(8), claims.LIBRARY_ORDER: seconds(4)}
    for task in found:
        found[task] |= {name: seconds(peer_s) for name, peer_s in peers_s.items()}
    return found


def test_a_timing_is_the_median_of_the_runs_after_the_first():
    assert timing.Timing(100.0, (3.0, 1.0, 2.0)).median_s == 2.0
    assert timing.Timing(100.0, (4.0, 1.0, 2.0, 3.0)).median_s == 2.5


def test_contenders_take_turns_in_order():
    calls = []

    def contender(name: str, took_s: float):
        def contend() -> float:
            calls.append(name)
            return took_s * len(calls)

        return contend

    timings = timing.take_turns({"a": contender("a", 1.0), "b": contender("b", 10.0)}, 2)
    assert calls == ["a", "b"] * 3
    assert timings == {"a": timing.Timing(1.0, (3.0, 5.0)), "b": timing.Timing(20.0, (40.0, 60.0))}


def test_measure_counts_the_first_call_apart():
    calls = []
    measured = timing.measure(lambda: calls.append(0), 3)
    assert len(calls) == 4 and len(measured.runs_s) == 3


def test_claims_compare_with_the_better_peer():
    found = claims.claims(tasks(slow=8.0, fast=3.0), None, 10)[:10]
    assert [claim.got for claim in found] == pytest.approx([20, 1.5, 5, 2 / 1.8, 1.5, 0.75, 0.75, 0.3, 6, 6])
    assert [claim.holds for claim in found] == [True, True, True, True, True, False, True, False, False, False]


def test_without_peers_and_memory_only_our_own_ratios_are_measured():
    found = claims.claims(tasks(), None, 10)
    assert [claim.limit for claim in found if claim.got is not None] == [20, 1.3, 4, 1.15] and len(found) == 12
    assert not any(claim.holds for claim in found if claim.got is None)


def test_memory_claims_are_upper_limits():
    loading, afterwards = claims.claims(tasks(), MEMORY, 10)[-2:]
    assert (loading.got, loading.wanted, loading.holds) == (1.9, "<= 2", True)
    assert (afterwards.got, afterwards.holds) == (1.4, True)  # The cache is taken off.
    assert not claims.Claim("", got=2.1, limit=2, is_minimum=False).holds


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_export_holds_the_same_weights(tmp_path, dtype):
    model = tiny.model(dtype)
    export.export(model, tmp_path)
    loaded = kg.load_model(f"hf:{tmp_path}", dtype=dtype)
    assert loaded.digest == model.digest
    assert loaded.config.document() == model.config.document()


@pytest.fixture(scope="module")
def outcome(tmp_path_factory) -> tuple[int, dict]:
    """Exit code and result.json of our side alone, with settings as a configuration file gives them."""
    out = tmp_path_factory.mktemp("bench")
    flags.FLAGS(["bench"])
    code = harness.execute(bench.EXPERIMENT, FIELDS, out)
    assert sorted(path.name for path in out.iterdir()) == ["report.md", "result.json"]
    return code, json.loads((out / "result.json").read_text())


def test_without_peers_our_own_figures_are_judged_and_the_rest_is_named(outcome):
    code, result = outcome
    judged = [name for name in result["figures"] if isinstance(result[name], dict) and "ok" in result[name]]
    assert judged == [claim.name for claim in claims.claims(tasks(), None, FIELDS["sequences"])[:4]]
    assert code == (harness.HOLDS if all(result[name]["ok"] for name in judged) else harness.FAILS)
    assert result["holds"] == (code == 0)
    assert result["decode / best peer"]["got"] == "not measured"
    assert result["peak memory while loading / weights"]["got"] == "not measured"
    assert result["medians of"] == {
        "turns after the first": FIELDS["repeats"],
        "note": "fewer than the 5 that a claim should rest on",
    }
    assert "peer" not in result and result["load average"]["after"] > 0


def test_a_run_measures_every_task_part_and_shape(outcome):
    _, result = outcome
    tasks = {claims.PREFILL_PROMPT: 20, claims.PREFILL_CONTEXT: 40, claims.FIRST_TOKEN: 45, claims.DECODE: 3}
    tasks[claims.DECODE_MANY] = 9
    rows = {(row["task"], row["contender"]): row for row in result["rows"]}
    assert set(rows) == {
        *((task, claims.OURS) for task in [*tasks, *PARTS]),
        (claims.PREFILL_CONTEXT, claims.GRAFT),
        *((task, claims.ONE_WIDTH) for task in (claims.PREFILL_PROMPT, claims.PREFILL_CONTEXT, claims.DECODE)),
        *((task, claims.LIBRARY_ORDER) for task in (claims.PREFILL_PROMPT, claims.DECODE)),
    }
    for task, num_tokens in tasks.items():
        row = rows[task, claims.OURS]
        assert row["tokens"] == num_tokens
        assert row["tokens_per_s"] == pytest.approx(num_tokens / row["median_s"], rel=1e-3)
    for row in rows.values():
        assert 0 < row["min_s"] <= row["median_s"] <= row["max_s"] and row["first_call_s"] > 0
    assert set(result["parts: ms"]) == PARTS
    assert set(result["first calls: ms"]) == PARTS | {"Engine", "Engine.pin"}
    assert set(result["by shape of the step: decode_tokens_per_s"]) == {
        "widths 8; block 16",
        "widths 16; block 16",
        "widths 2, 8; block 16",
    }
    assert result["artifact of the context: bytes"]["files"] > result["artifact of the context: bytes"]["arrays"] > 0


def measured(tasks_: dict[str, dict[str, timing.Timing]]) -> report.Measured:
    return report.Measured(
        tokens=dict.fromkeys(tasks_, 20),
        tasks=tasks_,
        parts={name: seconds(0.5) for name in PARTS},
        once_s={},
        artifact_bytes={},
        memory=MEMORY,
        curve=(),
        num_sequences=10,
        next_tokens={},
    )


def test_one_missed_figure_fails_the_run_with_peers_or_without():
    assert measured(tasks(slow=9.1, fast=9.0)).holds
    assert not measured(tasks(slow=9.0, fast=2.5)).holds
    without_peers = tasks()
    assert measured(without_peers).holds
    without_peers[claims.PREFILL_CONTEXT][claims.GRAFT] = seconds(9.0)
    assert not measured(without_peers).holds
    heavy = dataclasses.replace(MEMORY, loading=memory.Phase(peak_bytes=2100, resident_bytes=1100))
    assert not dataclasses.replace(measured(tasks()), memory=heavy).holds
    assert "note" not in report.figures(measured(enough_repeats()))["medians of"]


def enough_repeats() -> dict[str, dict[str, timing.Timing]]:
    return {
        task: {name: seconds(*5 * timing_.runs_s) for name, timing_ in contenders.items()}
        for task, contenders in tasks().items()
    }


def test_figures_print_wanted_got_and_ok():
    figures = report.figures(measured(tasks(slow=8.0, fast=3.0)))
    graft = "graft from disk / own prefill of the context"
    assert figures[graft] == {"wanted": ">= 20", "got": 20.0, "ok": True}
    assert figures["decode / best peer"] == {"wanted": ">= 1.3", "got": 1.5, "ok": True}
    assert not figures["prefill of the context / best peer"]["ok"]
    assert figures[f"{claims.PREFILL_PROMPT}: tokens/s"]["fast"] == 6.667
    assert figures["deposit of the context: ms"] == {
        "all": 11000,
        "prefill": 10000,
        "capture": 500,
        "save_artifact": 500,
    }
    assert figures["resident memory above initialised jax: MB"]["weights"] == 0
    assert (
        harness.table({"experiment": "bench", "claim": "", "holds": False, "figures": list(figures), **figures}).count(
            "ok true"
        )
        == 8
    )


def test_memory_is_measured_in_processes_of_their_own():
    found = memory.measure(tiny.URI, "bfloat16", 64, 32)
    slots = 128 + 128  # One block each of the cache and of the context.
    assert found.cache_bytes == 2 * 7 * slots * 2 * 32 * 2  # keys and values; layers; slots; heads; head width; bytes
    assert found.base_bytes > 0 and found.weights_bytes > 0
    for phase in (found.loading, found.engine, found.prefill):
        assert phase.peak_bytes >= phase.resident_bytes > 0


@pytest.mark.parametrize(
    "field, value",
    [("repeats", 0), ("capacity", 44), ("prompt_tokens", 41), ("step_starts", (0, 161)), ("memory_tokens", -1)],
)
def test_settings_that_make_no_sense_are_refused_by_name(tmp_path, capsys, field, value):
    assert harness.execute(bench.EXPERIMENT, {**FIELDS, field: value}, tmp_path) == harness.REFUSED
    assert f"{field}: got" in capsys.readouterr().err


def test_the_configuration_for_the_270m_is_complete():
    settings = harness.read_settings(measurement.Settings, bench_270m.get_config())
    assert (settings.shapes, settings.block) == (engine.DEFAULT_SHAPES["cpu"], engine.DEFAULT_KV_BLOCK)
    assert {((10,), 128), ((256,), 128), (settings.shapes, 64)} < set(settings.curve_shapes)


def test_a_missing_peer_says_how_to_get_it(tmp_path):
    with pytest.raises(kg.ConfigError, match="bash workspace.sh peers"):
        peer.Transformers(tmp_path / "python", tmp_path, 1)


def test_a_worker_that_cannot_load_says_why(tmp_path):
    with pytest.raises(kg.ConfigError, match="load: .*(ModuleNotFoundError|OSError|ValueError)"):
        peer.Transformers(pathlib.Path(sys.executable), tmp_path / "nothing", 1)


@pytest.mark.skipif(not peer.DEFAULT_PYTHON.is_file(), reason="peers: .venv-peers is not there")
def test_transformers_does_the_same_work(tmp_path):
    model, prompt = tiny.model("float32"), tiny.tokens(20)
    export.export(model, tmp_path)
    state = tiny.engine("float32").prefill(prompt)
    with peer.Transformers(peer.DEFAULT_PYTHON, tmp_path, 1) as transformers:
        assert transformers.next_token("float32", prompt) == int(state.logits.argmax())
        assert transformers.prefill("bfloat16", prompt) > 0
        for cache in peer.CACHES:
            assert transformers.decode("float32", cache, [prompt, prompt], 3) > 0
