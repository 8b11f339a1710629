"""The benchmark runs, says what it measured, and judges its own figures; no test asks how fast anything is."""

from __future__ import annotations

import json
import pathlib
import sys

import pytest

from experiments.benchmark import claims, export, memory, ours, peer, report, session, timing
import kvgraft_jax as kg
from tests import tiny

SIZES = ours.Sizes(prompt=20, context=40, question=5, decoded=3)
MEMORY = memory.Memory(
    base_bytes=100,
    weights_bytes=1000,
    cache_bytes=500,
    loading=memory.Phase(peak_bytes=1900, resident_bytes=1100),
    engine=memory.Phase(peak_bytes=2600, resident_bytes=1700),
    prefill=memory.Phase(peak_bytes=2700, resident_bytes=1900),
)


def settings(**changes) -> session.Settings:
    fields = {
        "model": tiny.URI,
        "dtype": "bfloat16",
        "capacity": tiny.CAPACITY,
        "width": tiny.WIDTH,
        "kv_block": tiny.KV_BLOCK,
        "sizes": SIZES,
        "step_starts": (0, 30),
        "repeats": 2,
        "measures_memory": False,
        "widths": (tiny.WIDTH, 16),
        "kv_blocks": (tiny.KV_BLOCK,),
        "curve_decoded": 2,
        "curve_repeats": 1,
        "peer_threads": 1,
    }
    return session.Settings(**{**fields, **changes})


def seconds(*runs_s: float) -> timing.Timing:
    return timing.Timing(99.0, runs_s)


def tasks(**peers_s: float) -> dict[str, dict[str, timing.Timing]]:
    """Ours: prompt 4 s, context 10 s, graft 0.5 s, first token 1 s, decode 2 s; peers as given."""
    ours_s = {claims.PREFILL_PROMPT: 4, claims.PREFILL_CONTEXT: 10, claims.FIRST_TOKEN: 1, claims.DECODE: 2}
    found = {task: {claims.OURS: seconds(ours_s[task])} for task in ours_s}
    found[claims.PREFILL_CONTEXT][claims.GRAFT] = seconds(0.5)
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
    found = {claim.name: claim for claim in claims.claims(tasks(slow=8.0, fast=3.0), None)}
    assert [claim.got for claim in found.values()] == pytest.approx([20, 1.5, 0.75, 0.3, 6, 3])
    assert [claim.holds for claim in found.values()] == [True, True, True, False, False, False]


def test_claims_without_peers_are_those_that_need_none():
    assert [claim.limit for claim in claims.claims(tasks(), None)] == [20]


def test_memory_claims_are_upper_limits():
    loading, afterwards = claims.claims(tasks(), MEMORY)[-2:]
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
def figures() -> report.Figures:
    return session.run(settings(), None)


def test_a_run_measures_every_task_and_part(figures):
    assert set(figures.tasks) == {
        claims.PREFILL_PROMPT,
        claims.PREFILL_CONTEXT,
        claims.FIRST_TOKEN,
        claims.DECODE,
    }
    assert set(figures.parts) == {
        "step at 0",
        "step at 30",
        "head",
        "copy_cache",
        "capture",
        "save_artifact",
        "load_artifact",
        "load_artifact, files not in memory",
        "graft",
        "question",
    }
    assert set(figures.once_s) == {"load_model", "Engine", "Engine.pin"}
    assert [(point.width, point.kv_block) for point in figures.curve] == [(8, 16), (16, 16)]
    for timing_ in [*figures.parts.values(), *(t for found in figures.tasks.values() for t in found.values())]:
        assert len(timing_.runs_s) == 2 and min(timing_.first_s, *timing_.runs_s) > 0
    assert figures.artifact.disk_bytes > figures.artifact.array_bytes > 0
    assert figures.peer is None and figures.memory is None


def test_figures_are_plain_data(figures):
    document = json.loads(json.dumps(figures.document(), allow_nan=False))
    prompt = document["tasks"][claims.PREFILL_PROMPT][claims.OURS]
    assert prompt["tokens_per_s"] == pytest.approx(SIZES.prompt / prompt["median_s"])
    assert document["claims"][0]["wanted"] == ">= 20"
    assert document["sizes"]["context"] == 40


def test_tables_print_wanted_got_and_ok():
    figures = report.Figures(
        SIZES, {}, {}, tasks(slow=8.0, fast=3.0), report.Artifact(1, 2), MEMORY, (), None, {"kvgraft_jax": 1}
    )
    wanted, speed, *_, resident = report.tables(figures)
    assert wanted.rows[0] == ("graft from disk / own prefill of the context", ">= 20", "20.00", "yes")
    assert wanted.rows[4] == ("graft from disk / best peer's prefill of the context", ">= 8", "6.00", "NO")
    assert (claims.PREFILL_PROMPT, "fast", "20", "3.000", "6.7", "99.000") in speed.rows
    assert all(len(row) == len(resident.header) for row in resident.rows)


def test_memory_is_measured_in_processes_of_their_own():
    found = memory.measure(tiny.URI, "bfloat16", 64, 32)
    assert found.cache_bytes == 2 * 7 * (128 + 16) * 2 * 32 * 2  # keys, values; layers; slots; heads; width; bytes
    assert found.base_bytes > 0 and found.weights_bytes > 0
    for phase in (found.loading, found.engine, found.prefill):
        assert phase.peak_bytes >= phase.resident_bytes > 0


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"repeats": 0}, "repeats"),
        ({"capacity": 44}, "capacity"),
        ({"sizes": ours.Sizes(50, 40, 5, 3)}, "prompt_tokens"),
        ({"step_starts": (0, 161)}, r"step_starts\[1\]"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(changes, name):
    with pytest.raises(kg.ConfigError, match=name):
        settings(**changes)


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
            assert transformers.decode("float32", cache, prompt, 3) > 0
