"""Arguments of a neighbouring kind: typed errors that name the call that was meant."""

from __future__ import annotations

import types

import pytest

import kvgraft_jax as kg
from kvgraft_jax import errors
from tests import tiny


@pytest.fixture(scope="module")
def kinds() -> types.SimpleNamespace:
    """One of each kind."""
    engine = tiny.engine()
    state = engine.prefill([1, 2, 3])
    return types.SimpleNamespace(engine=engine, state=state, artifact=engine.capture(state), model=engine.model)


CALLS = {
    "compare(artifact, state)": lambda k, _: kg.compare(k.artifact, k.state),
    "compare(state, artifact)": lambda k, _: kg.compare(k.state, k.artifact),
    "diff(engine, engine)": lambda k, _: kg.diff(k.engine, k.engine),
    "diff(pin, artifact)": lambda k, _: kg.diff(k.engine.pin, k.artifact),
    "engine.graft(state)": lambda k, _: k.engine.graft(k.state),
    "engine.verify(state)": lambda k, _: k.engine.verify(k.state),
    "engine.verify(id)": lambda k, _: k.engine.verify(k.artifact.artifact_id),
    "engine.extend(artifact)": lambda k, _: k.engine.extend(k.artifact, [1]),
    "engine.generate(artifact)": lambda k, _: k.engine.generate(k.artifact),
    "engine.capture(artifact)": lambda k, _: k.engine.capture(k.artifact),
    "engine.extend_many([artifact])": lambda k, _: k.engine.extend_many([k.artifact], [[1]]),
    "engine.generate_many([artifact])": lambda k, _: k.engine.generate_many([k.artifact]),
    "engine.generate_many(state)": lambda k, _: k.engine.generate_many(k.state),
    "engine.prefill_many([state])": lambda k, _: k.engine.prefill_many([k.state]),
    "engine.prefill_many(text)": lambda k, _: k.engine.prefill_many("text"),
    "engine.generate(sampling)": lambda k, _: k.engine.generate(k.state, sampling=0.7),
    "engine.prefill(state)": lambda k, _: k.engine.prefill(k.state),
    "engine.score(artifact)": lambda k, _: k.engine.score(k.artifact),
    "save_artifact(state)": lambda k, path: kg.save_artifact(k.state, path),
    "Engine(uri)": lambda k, _: kg.Engine(tiny.URI),
    "Engine(engine)": lambda k, _: kg.Engine(k.engine),
}
MEANT = {
    "compare(artifact, state)": r"state_a: got an Artifact, wanted a State; engine\.graft",
    "compare(state, artifact)": r"state_b: got an Artifact, wanted a State; engine\.graft",
    "diff(engine, engine)": r"got an Engine, wanted a Pin; engine\.pin is one",
    "diff(pin, artifact)": r"theirs: got an Artifact, wanted a Pin; artifact\.pin is one",
    "engine.graft(state)": r"got a State, wanted an Artifact; engine\.capture\(state\)",
    "engine.verify(state)": r"got a State, wanted an Artifact; engine\.capture\(state\)",
    "engine.verify(id)": r"got a str, wanted an Artifact; load_artifact",
    "engine.extend(artifact)": r"got an Artifact, wanted a State; engine\.graft",
    "engine.generate(artifact)": r"got an Artifact, wanted a State; engine\.graft",
    "engine.capture(artifact)": r"got an Artifact, wanted a State; engine\.graft",
    "engine.extend_many([artifact])": r"0: state: got an Artifact, wanted a State; engine\.graft",
    "engine.generate_many([artifact])": r"0: state: got an Artifact, wanted a State; engine\.graft",
    "engine.generate_many(state)": r"states: got State\(3 tokens, .*\), wanted a list with an entry for each sequence",
    "engine.prefill_many([state])": r"0: token_ids: got a State, wanted a list of int; state\.token_ids",
    "engine.prefill_many(text)": r"token_ids: got 'text', wanted a list with an entry for each sequence",
    "engine.generate(sampling)": r"sampling: got a float, wanted a Sampling",
    "engine.prefill(state)": r"got a State, wanted a list of int; state\.token_ids",
    "engine.score(artifact)": r"got an Artifact, wanted a list of int; artifact\.token_ids",
    "save_artifact(state)": r"got a State, wanted an Artifact; engine\.capture\(state\)",
    "Engine(uri)": r"got a str, wanted a Model; load_model\(uri\)",
    "Engine(engine)": r"got an Engine, wanted a Model; engine\.model",
}


@pytest.mark.parametrize("call", CALLS)
def test_the_error_names_the_call_that_was_meant(call, kinds, tmp_path):
    with pytest.raises(errors.InputError, match=MEANT[call]):
        CALLS[call](kinds, tmp_path)
    assert not list(tmp_path.iterdir())
