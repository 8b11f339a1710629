"""The fresh-against-grafted experiment: its samples reach every edge, and it fails when a graft is not exact."""

from __future__ import annotations

import dataclasses
import gc
import json
import weakref

import numpy as np
import pytest

from configs import exactness_small
from experiments import corpus as corpus_lib
from experiments import harness
from experiments.graft_exactness import experiment as graft_exactness
import kvgraft_jax as kg

MODEL = "random:gemma-3-270m?layers=6&vocab=256&embed=32&hidden=64&heads=2&kv_heads=1&head_dim=16&window=16"
CORPUS = corpus_lib.Corpus(tuple(tuple(range(10 * n, 10 * n + 7)) for n in range(20)), 2, "")


def settings(**changes):
    values = dict(model=MODEL, dtype="bfloat16", seed=0, shapes=(2, 10), kv_block=128, capacity=1280, samples=50)
    values |= dict(min_tokens=2, max_tokens=1200, spread_tokens=1200, decode_steps=16)
    return graft_exactness.Settings(**values | changes)


def test_samples_reach_every_edge_and_are_read_otherwise_than_they_were_deposited():
    samples = graft_exactness.plan_samples(settings(), 512, CORPUS)
    assert samples == graft_exactness.plan_samples(settings(), 512, CORPUS)
    assert samples != graft_exactness.plan_samples(settings(seed=1), 512, CORPUS)
    assert len(samples) == 50 and len(set(samples)) >= 48
    cuts = {sample.cut for sample in samples}
    assert {1, 2, 127, 128, 129, 511, 512, 513, 641, 1027} <= cuts and len(cuts) > 25
    full_hits = {sample.cut for sample in samples if sample.cut == len(sample.token_ids)}
    assert {2, 127, 128, 129, 511, 512, 513, 641, 1027} <= full_hits and len(full_hits) < 25
    lengths = [len(sample.token_ids) for sample in samples]
    assert min(lengths) < 20 and max(lengths) > 1030 and 200 < np.mean(lengths) < 350
    for sample in samples:
        assert 1 <= sample.cut <= len(sample.token_ids) <= 1200
        assert sum(sample.pieces) == len(sample.token_ids) and min(sample.pieces) >= 1
        ends = np.cumsum(sample.pieces)[:-1]
        assert sample.cut not in ends and (len(ends) or len(sample.token_ids) <= 2)


@pytest.mark.parametrize("window", [None, 3, 5000])
@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (1, 2), (7, 7), (40, 60)])
def test_lengths_stay_within_the_settings(window, shortest, longest):
    changed = settings(min_tokens=shortest, max_tokens=longest)
    for sample in graft_exactness.plan_samples(changed, window, CORPUS):
        assert shortest <= len(sample.token_ids) <= longest and 1 <= sample.cut <= len(sample.token_ids)


def run(tmp_path, **changes):
    config = exactness_small.get_config()
    config.update(dict(model=MODEL, samples=4, max_tokens=70, decode_steps=2) | changes)
    code = harness.execute(graft_exactness.EXPERIMENT, config, tmp_path)
    return code, json.loads((tmp_path / harness.RESULT).read_text())


@pytest.mark.slow
def test_one_wrong_bit_in_one_artifact_fails_the_claim(tmp_path, monkeypatch, capsys):
    """The lowest bit of one value of the newest row, flipped before the deposit: the digests fit, the bits do not."""
    exact = kg.Engine.capture

    def capture(engine, state, *, provenance, **_):
        artifact = exact(engine, state, provenance=provenance)
        if provenance["sample"] != 1:
            return artifact
        kv_Lx2xSxKxH = np.array(artifact.stacks[0].kv_Lx2xSxKxH)
        kv_Lx2xSxKxH[0, 1, -1].view(np.uint8)[0, 0] ^= 1
        stack = dataclasses.replace(artifact.stacks[0], kv_Lx2xSxKxH=kv_Lx2xSxKxH)
        return dataclasses.replace(artifact, stacks=(stack, *artifact.stacks[1:]))

    monkeypatch.setattr(kg.Engine, "capture", capture)
    code, document = run(tmp_path)
    assert code == 1 and document["holds"] is False
    assert document["kv_sha256_equal"] == 3 and document["decode_sha256_equal"] == 3 and document["samples"] == 4
    different = [row["sample"] for row in document["rows"] if row["fresh_kv_sha256"] != row["grafted_kv_sha256"]]
    assert different == [1]
    assert capsys.readouterr().out.splitlines()[-1].startswith("FAIL: ")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.slow
def test_an_artifact_damaged_on_disk_is_counted_and_named(tmp_path, monkeypatch):
    exact = kg.save_artifact

    def save(artifact, directory):
        artifact_id = exact(artifact, directory)
        if artifact.provenance["sample"] == 2:
            files = [path for path in (directory / artifact_id).rglob("*") if path.is_file()]
            largest = max(files, key=lambda path: path.stat().st_size)
            raw = bytearray(largest.read_bytes())
            raw[len(raw) // 2] ^= 1
            largest.write_bytes(raw)
        return artifact_id

    monkeypatch.setattr(kg, "save_artifact", save)
    code, document = run(tmp_path)
    assert code == 1 and document["kl_nats_max"] is None
    assert document["logits_sha256_equal"] == document["kv_sha256_equal"] == document["argmax_agree"] == 3
    assert [row["error"].partition(":")[0] for row in document["rows"]] == ["", "", "IntegrityError", ""]


@pytest.mark.slow
def test_the_recipient_has_the_memory_of_the_donor(tmp_path, monkeypatch, capsys):
    loaded, load = [], kg.load_model

    def remember(*args, **kwargs):
        model = load(*args, **kwargs)
        loaded.append(weakref.ref(model.params["embedder"]["embedding"][0]))
        return model

    def start(*_):
        gc.collect()
        raise kg.ConfigError(f"{sum(array() is not None for array in loaded)} of {len(loaded)} are in memory")

    monkeypatch.setattr(kg, "load_model", remember)
    monkeypatch.setattr(harness, "run_module", start)
    config = exactness_small.get_config()
    config.update(dict(model=MODEL, samples=2, max_tokens=20, decode_steps=2))
    assert harness.execute(graft_exactness.EXPERIMENT, config, tmp_path / "out") == harness.REFUSED
    assert "0 of 1 are in memory" in capsys.readouterr().err
