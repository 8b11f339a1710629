"""Cutting tokens into steps, and the programs of which a step consists."""

from __future__ import annotations

import pytest

from kvgraft_jax import engine as engine_lib
from kvgraft_jax.gemma import configurations
from kvgraft_jax.runtime import step as step_lib

SHAPES = engine_lib.DEFAULT_SHAPES["cpu"]


@pytest.mark.parametrize(
    ("num_tokens", "widths"),
    [
        (1, [2]),
        (2, [2]),
        (3, [10]),
        (10, [10]),
        (12, [10, 2]),
        (32, [32]),
        (100, [32, 32, 32, 10]),
        (208, [256]),  # One step that is mostly full, not seven narrow ones.
        (256, [256]),
        (300, [256, 32, 10, 2]),
        (512, [256, 256]),
    ],
)
def test_a_text_is_cut_into_the_cheapest_steps(num_tokens, widths):
    cut = list(step_lib.cut(range(num_tokens), 7, SHAPES))
    assert [width for width, _ in cut] == widths
    assert [token for _, piece in cut for token in piece.tokens] == list(range(num_tokens))
    assert [piece.start for _, piece in cut] == [7 + sum(widths[:index]) for index in range(len(widths))]


@pytest.mark.parametrize("num_tokens", [1, 7, 33])
def test_one_width_reads_everything(num_tokens):
    assert {width for width, _ in step_lib.cut(range(num_tokens), 0, (7,))} == {7}


@pytest.mark.parametrize("name", configurations.CONFIGURATIONS)
def test_layers_of_one_form_share_a_program_and_others_do_not(name):
    config = step_lib.StepConfig(configurations.get(name), "bfloat16", 128)
    model, programs = config.model, step_lib.Programs(config)
    forms = [
        (model.attention(layer), layer < model.num_kv_layers, model.feedforward_dim(layer))
        for layer in range(model.num_layers)
    ]
    assert len(programs.layers) == model.num_layers
    assert len(set(zip(forms, programs.layers, strict=True))) == len(set(forms)) == len(set(programs.layers)) <= 4
