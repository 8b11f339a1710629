"""Deposits at other positions: keys before rotation are the engine's, d = 0 is exact, and the claim can fail."""

from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from configs import relocation_270m, relocation_small
from experiments import harness
from experiments.relocation import experiment as relocation
from experiments.relocation import real_keys, relocated
import kvgraft_jax as kg
from kvgraft_jax import engine as engine_lib
from kvgraft_jax import errors
from kvgraft_jax.gemma import rotary as rotary_lib
from kvgraft_jax.grafting import manifest
from kvgraft_jax.grafting import rows as rows_lib
from kvgraft_jax.relocation import keys
from tests import tiny

MODEL = "random:gemma-3-270m?layers=6&vocab=64&embed=32&hidden=64&heads=2&kv_heads=2&head_dim=16&window=16"
TEXT = tuple(int(token_id) for token_id in np.random.default_rng(0).integers(2, 60, 40))
TAIL = TEXT[:3]
SHIFTS = (0, 1, 200)


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def engine(request):
    return kg.Engine(kg.load_model(MODEL, request.param), capacity=64, kv_block=32, shapes=(2, 10))


def tables(engine):
    return rotary_lib.make_tables(engine.model.config, 400, engine.step_config.jnp_dtype)


def bits(array):
    rows = np.asarray(array)
    return rows.view(np.uint16 if rows.itemsize == 2 else np.uint32)


def test_keys_before_rotation_are_the_engines_in_every_bit(engine):
    state, k_raw = engine.prefill(TEXT), real_keys.raw_keys(engine, TEXT)
    assert len(k_raw) == 6
    scheme = real_keys.SCHEMES[engine.model.dtype]
    held = {}
    for index, kind in enumerate(engine.model.config.kinds):
        kv_Lx2xSxKxH = rows_lib.read_rows(state.blocks, index, 0, len(TEXT), engine.step_config.jnp_dtype)
        held |= zip(kind.layers, kv_Lx2xSxKxH[:, 0], strict=True)
    for layer, k_raw_TxKxH in enumerate(k_raw):
        table = real_keys.make_table(engine.model.config.attention(layer), 64)
        position_T = np.repeat(np.arange(len(TEXT)), 2)
        k_rot_TxH = keys.fresh_key(jnp.asarray(k_raw_TxKxH.reshape(-1, 16)), table, position_T, scheme)
        np.testing.assert_array_equal(bits(k_rot_TxH.reshape(k_raw_TxKxH.shape)), bits(held[layer]))
        assert (k_raw_TxKxH[1:] != np.asarray(k_rot_TxH).reshape(k_raw_TxKxH.shape)[1:]).any()


def test_a_shifted_runner_puts_slots_at_other_positions_with_the_same_program(engine):
    relocated.fresh(engine, engine.runner, TEXT[:1], TAIL)
    compiled = tiny.num_compiled(engine.runner.programs)
    k_raw = real_keys.raw_keys(engine, TEXT[:1])[0]
    for shift in SHIFTS:
        runner = relocated.shifted(engine, tables(engine), shift)
        context = relocated.fresh(engine, runner, TEXT[:1], TAIL)
        table = real_keys.make_table(engine.model.config.attention(0), 400)
        scheme = real_keys.SCHEMES[engine.model.dtype]
        wanted_TxH = keys.fresh_key(jnp.asarray(k_raw.reshape(-1, 16)), table, shift, scheme)
        np.testing.assert_array_equal(context.kv_bits[0][0].reshape(-1, 16), bits(wanted_TxH))
    assert tiny.num_compiled(engine.runner.programs) == compiled


@pytest.mark.parametrize("way", relocated.WAYS)
def test_only_the_own_position_is_exact_and_only_it_is_labelled_so(engine, way):
    artifact = engine.capture(engine.prefill(TEXT), policy=manifest.ALL_ROWS)
    k_raw = real_keys.raw_keys(engine, TEXT)
    for shift in SHIFTS:
        runner = relocated.shifted(engine, tables(engine), shift)
        state = relocated.relocated(engine, artifact, k_raw, shift, way)
        assert state.exact is (shift == 0)
        if shift:
            with pytest.raises(errors.CaptureError):
                engine.capture(state)
            with pytest.raises(errors.InputError, match="position"):
                engine.graft(artifact, position=shift)
        fresh = relocated.fresh(engine, runner, TEXT, TAIL)
        found = relocated.difference(fresh, relocated.read_on(engine, runner, state, TAIL))
        keys_L, values_L = found.bits_Lx2.T
        assert keys_L[0] == 0 if shift == 0 or way == relocated.PREROTARY else keys_L[0] > 0
        assert values_L[0] == 0
        if shift:
            assert keys_L[1:].all() and values_L[1:].all() and found.kl_nats_T.all()
        else:
            assert not found.bits_Lx2.any() and not found.kl_nats_T.any() and found.argmax_agree == len(TAIL)


def test_a_difference_counts_bits_elements_and_tokens():
    logits = np.array([[0.0, 1.0], [2.0, 0.0]], np.float32)
    zeros = np.zeros((2, 1, 2), np.uint16)
    k_bits = zeros.copy()
    k_bits[1, 0] = 0b101, 0b1
    wanted = relocated.Context([(zeros, zeros)], logits)
    found = relocated.Context([(k_bits, zeros)], logits[:, ::-1] * [[1.0], [0.0]])
    difference = relocated.difference(wanted, found)
    assert difference.bits_Lx2.tolist() == [[3, 0]] and difference.elements_Lx2.tolist() == [[2, 0]]
    assert (difference.kl_nats_T > 0).all() and difference.argmax_agree == 1


def run(tmp_path, **changes):
    config = relocation_small.get_config()
    with config.ignore_type():
        config.update(dict(model=MODEL, document_tokens=(10, 40), shifts=(0, 1, 200)) | changes)
    code = harness.execute(relocation.EXPERIMENT, config, tmp_path)
    return code, json.loads((tmp_path / harness.RESULT).read_text()) if code in (0, 1) else None


@pytest.mark.slow
def test_the_claim_holds_on_a_small_model(tmp_path):
    code, document = run(tmp_path)
    assert code == 0 and document["holds"] and all(row["holds"] for row in document["checks"])
    assert len(document["rows"]) == 2 * 2 * 3 * 3 and document["own_position_bits"] == 0
    for row in document["rows"]:
        assert row["exact"] is (row["shift"] == 0) is (row["k_bits"] == 0) is (row["kl_nats_max"] == 0.0)
        assert row["window"] == ("full" if row["document_tokens"] == 40 else "not full")
        assert (row["probe_kl_nats_mean"] > 0) is (row["shift"] > 0)
    attribution, key_rows, value_rows = document["tables"].values()
    assert len(attribution) == 8 and len(key_rows) == len(document["rows"]) == 3 * len(value_rows)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["relocation.png", harness.REPORT, harness.RESULT]


@pytest.mark.slow
def test_the_claim_fails_where_a_move_is_exact(tmp_path, capsys):
    """A document of one token: nothing was rotated at position 0, and its values saw no other position."""
    code, document = run(tmp_path, document_tokens=(1,), other_dtypes=())
    assert code == 1 and not document["holds"]
    failed = {row["check"] for row in document["checks"] if not row["holds"]}
    assert failed == {
        "other d: fewest bits that differ",
        "other d: smallest mean KL divergence",
        "labels of exact or inexact that the bits contradict",
    }
    assert capsys.readouterr().out.splitlines()[-1].startswith("FAIL: ")


@pytest.mark.slow
def test_the_claim_fails_where_one_bit_of_the_own_position_does(tmp_path, monkeypatch):
    exact = relocated.relocated

    def flipped(engine, artifact, k_raw, shift, way):
        if shift or way != relocated.PREROTARY:
            return exact(engine, artifact, k_raw, shift, way)
        stack = artifact.stacks[-1]
        kv_Lx2xSxKxH = np.array(stack.kv_Lx2xSxKxH)
        kv_Lx2xSxKxH[0, 1, -1].view(np.uint8)[0, 0] ^= 1
        stacks = (*artifact.stacks[:-1], dataclasses.replace(stack, kv_Lx2xSxKxH=kv_Lx2xSxKxH))
        return exact(engine, dataclasses.replace(artifact, stacks=stacks), k_raw, shift, way)

    monkeypatch.setattr(relocated, "relocated", flipped)
    code, document = run(tmp_path, document_tokens=(10,), other_dtypes=())
    assert code == 1 and document["own_position_bits"] == 1
    assert not document["checks"][0]["holds"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dtype": "float16"}, "dtype"),
        ({"other_dtypes": ("bfloat16",)}, "dtype"),
        ({"document_tokens": ()}, "document_tokens"),
        ({"document_tokens": (0, 5)}, "document_tokens"),
        ({"documents": 0}, "documents"),
        ({"tail_tokens": 0}, "tail_tokens"),
        ({"seed": -1}, "seed"),
        ({"shifts": ()}, "shifts"),
        ({"shifts": (0,)}, "shifts"),
        ({"shifts": (1, 2)}, "shifts"),
        ({"shifts": (0, 2, 1)}, "shifts"),
        ({"shifts": (0, 1 << 20)}, "shifts"),
        ({"shifts": (0, 1.5)}, "shifts"),
    ],
)
def test_bad_settings_are_refused(tmp_path, capsys, changes, named):
    assert run(tmp_path, **changes) == (2, None)
    assert named in capsys.readouterr().err


def test_the_configuration_asks_what_the_study_asks():
    config = relocation_270m.get_config()
    assert config.shifts == (0, 1, 2, 8, 16, 128, 1024, 4096) and sorted(config) == sorted(
        relocation_small.get_config()
    )
    assert config.document_tokens[0] < 512 <= config.document_tokens[-1]
    assert {config.dtype, *config.other_dtypes} == {"bfloat16", "float32"}
    assert (config.shapes, config.kv_block) == (engine_lib.DEFAULT_SHAPES["cpu"], engine_lib.DEFAULT_KV_BLOCK)
