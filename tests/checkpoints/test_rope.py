"""Rotary entries of config.json: the official forms are read, malformed or contradicting ones are listed errors."""

from __future__ import annotations

import pytest

from kvgraft_jax import errors
from kvgraft_jax.checkpoints.hf import config as huggingface_config
from kvgraft_jax.gemma import config as config_lib

FULL, SLIDING = "full_attention", "sliding_attention"
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "factor": 8.0}
ROPES = {
    "gemma3_text": {SLIDING: PLAIN, FULL: LINEAR | {"rope_theta": 1e6}},
    "gemma4_text": {
        SLIDING: PLAIN,
        FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    },
}


def parse(model_type: str, **change: object) -> config_lib.GemmaConfig:
    return huggingface_config.parse_config({"model_type": model_type} | change, "x")


def problems(model_type: str, **change: object) -> str:
    with pytest.raises(errors.ConfigError) as caught:
        parse(model_type, **change)
    return str(caught.value)


@pytest.mark.parametrize("model_type", ROPES)
@pytest.mark.parametrize("kind", [SLIDING, FULL])
@pytest.mark.parametrize("entry", [None, {}, [], "gone"])
def test_an_entry_for_every_kind_in_use(model_type, kind, entry):
    ropes = dict(ROPES[model_type])
    del ropes[kind]
    ropes |= {} if entry == "gone" else {kind: entry}
    assert f"rope_parameters: {kind}" in problems(model_type, rope_parameters=ropes)


@pytest.mark.parametrize("model_type", ROPES)
def test_no_entry_for_a_kind_without_layers(model_type):
    ropes = {FULL: ROPES[model_type][FULL]}
    whole = parse(model_type, rope_parameters=ropes, layer_types=[FULL] * 3, num_hidden_layers=3)
    assert whole.full.rotary.base == 1e6
    assert f"rope_parameters: {SLIDING}" in problems(model_type, rope_parameters={})


@pytest.mark.parametrize("model_type", ROPES)
@pytest.mark.parametrize("kind", [SLIDING, FULL])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rope_type": "linear"}, "factor: got None"),
        ({"rope_type": "linear", "factor": None}, "factor: got None"),
        ({"rope_theta": 0}, "rotary base: got 0"),
        ({"rope_theta": ""}, "rope_theta: got ''"),
        ({"rope_theta": False}, "rope_theta: got False"),
        ({"rope_theta": []}, "rope_theta: got []"),
        ({"rope_theta": None}, "rope_theta: got None"),
        ({"rope_type": ""}, "got type ''"),
        ({"rope_type": None}, "got type None"),
        ({"type": "linear", "rope_type": "default"}, "type: got 'linear' beside rope_type 'default'"),
        ({"type": "default", "rope_type": "linear", "factor": 2.0}, "type: got 'default' beside rope_type 'linear'"),
    ],
)
def test_malformed_entries(model_type, kind, change, named):
    message = problems(model_type, rope_parameters=ROPES[model_type] | {kind: PLAIN | change})
    assert f"rotary encoding of {kind}: " in message and named in message


@pytest.mark.parametrize("key", ["rope_theta", "rope_local_base_freq"])
@pytest.mark.parametrize("value", [0, "", False, []])
def test_bases_of_the_old_form(key, value):
    assert f"got {value!r}" in problems("gemma3_text", **{key: value})


@pytest.mark.parametrize("scaling", [{"rope_type": "linear"}, {"type": "linear"}, {}, {"factor": 8.0}, [8.0]])
def test_malformed_scaling(scaling):
    problems("gemma3_text", rope_scaling=scaling)


def test_the_old_form_beside_the_new():
    ropes = ROPES["gemma3_text"]
    for scaling in (LINEAR, {"type": "linear", "factor": 8}, None):
        config = parse("gemma3_text", rope_parameters=ropes, rope_scaling=scaling, rope_theta=1e6)
        assert (config.full.rotary.scale, config.full.rotary.base) == (8.0, 1e6)
    for change in ({"rope_scaling": LINEAR | {"factor": 4.0}}, {"rope_theta": 1e5}, {"rope_local_base_freq": 1e5}):
        message = problems("gemma3_text", rope_parameters=ropes, **change)
        assert next(iter(change)) in message and "as rope_parameters say of" in message
    plain = {SLIDING: PLAIN, FULL: PLAIN}
    message = problems("gemma3_text", rope_parameters=plain, rope_scaling=LINEAR)
    assert "rope_scaling: rope_type: got 'linear', wanted 'default', as rope_parameters say of full" in message
    bare = {SLIDING: PLAIN, FULL: {"rope_type": "default"}}
    assert parse("gemma3_text", rope_parameters=bare, rope_theta=1e5).full.rotary.base == 1e5


def test_type_is_another_word_for_rope_type():
    for entry in ({"type": "linear"}, {"type": "linear", "rope_type": "linear"}):
        config = parse("gemma3_text", rope_scaling=entry | {"factor": 8.0})
        assert config.full.rotary == config_lib.RotaryConfig(1e6, 8.0)
