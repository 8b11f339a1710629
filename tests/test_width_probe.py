"""The width probe: it agrees on this machine, names a planted difference, and is remembered."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvgraft_jax import determinism, width_probe
from kvgraft_jax.checkpoints import random as random_lib
from kvgraft_jax.gemma import configurations, products
from kvgraft_jax.runtime import step
from tests import tiny

AGREES = width_probe.Verdict(True)
DTYPES = ("bfloat16", "float32")


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """Returns a cache directory of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    width_probe._check.cache_clear()
    yield tmp_path / "cache"
    width_probe._check.cache_clear()


@pytest.fixture
def short(monkeypatch):
    """Shortens the ladder, since each number of rows is a program to compile."""
    monkeypatch.setattr(width_probe, "LADDER", (2, 8, 33))
    monkeypatch.setattr(width_probe, "FEW", (2, 33))


@pytest.fixture
def measured(monkeypatch) -> list[tuple[int, ...]]:
    """Ladders that were measured; none finds a difference."""
    found: list[tuple[int, ...]] = []
    monkeypatch.setattr(width_probe, "_measure", lambda _, ladder, few, device: found.append(ladder) or AGREES)
    return found


def small_config(dtype: str = "float32") -> step.StepConfig:
    """Returns the step of the small model, without an engine, which would run the probe."""
    return step.StepConfig(tiny.model(dtype).config, dtype, tiny.KV_BLOCK)


def check(
    config: step.StepConfig | None = None, dtype: str = "float32", widths: tuple[int, ...] = ()
) -> width_probe.Verdict:
    """Runs the probe as if in a new process."""
    width_probe._check.cache_clear()
    config = config or small_config(dtype)
    return width_probe.check(config, jax.devices()[0], widths)


def cut(name: str, dtype: str) -> step.StepConfig:
    """Returns a small configuration with all parts of the named one: experts, per-layer inputs, shared layers."""
    model = configurations.get(name)
    small = dict(vocab_size=512, embed_dim=64, hidden_dim=96)
    if model.per_layer is not None:
        small["per_layer"] = dataclasses.replace(model.per_layer, vocab_size=512, dim=16)
    if model.experts is not None:
        small["experts"] = dataclasses.replace(model.experts, num_experts=8, top_k=3, hidden_dim=48)
    return step.StepConfig(dataclasses.replace(model, suppress_ids=(), **small), dtype, 16)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_agrees_for_the_270m(dtype):
    config = step.StepConfig(configurations.get("gemma-3-270m"), dtype, 128)
    assert check(config, widths=(10, 32)) == AGREES


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["gemma-4-e2b", "gemma-4-26b-a4b"])
def test_it_agrees_for_small_models_of_every_kind(short, name, dtype):
    assert check(cut(name, dtype), widths=(16,)) == AGREES


def test_it_asks_about_every_product_of_the_270m():
    model = configurations.get("gemma-3-270m")
    found = {each.name for each in width_probe._operations(model, "bfloat16", 128, 4096) if "product" in each.name}
    pairs = [(640, 1024), (640, 256), (1024, 640), (640, 2048), (2048, 640), (640, 4096)]
    assert found == {f"product of {summed} with {outputs} columns" for summed, outputs in pairs}


def test_it_asks_about_routers_experts_and_per_layer_inputs_and_without_a_limit_about_the_whole_head():
    def names(name: str) -> set[str]:
        return {each.name for each in width_probe._operations(configurations.get(name), "float32", 128, None)}

    experts = {
        "softmax over 128",
        "sum over 8",
        "activation over 704",
        "product of 2816 with 128 columns",
        "product of 2816 with 1408 columns",
        "product of 704 with 2816 columns",
    }
    assert experts | {"product of 2816 with 262144 columns"} <= names("gemma-4-26b-a4b")
    per_layer = {
        "product of 1536 with 8960 columns",
        "product of 1536 with 256 columns",
        "product of 256 with 1536 columns",
    }
    assert per_layer <= names("gemma-4-e2b")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", configurations.CONFIGURATIONS)
def test_no_chunk_of_any_model_is_longer_than_the_machine_takes(name, dtype):
    for each in width_probe._operations(configurations.get(name), dtype, 128, 4096):
        if "product" in each.name:
            is_table = each.apply is width_probe._product_with_rows
            sizes = [shape[1 if is_table else 0] for shape in each.others]
            assert sum(sizes) == each.row_shape[0] and max(sizes) <= products.LONGEST


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_whose_order_depends_on_the_rows_is_found_and_named(monkeypatch, short, dtype):
    dot = products.dot

    def other_order(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
        if equation != "TD,DF->TF" or a.shape[0] < 8:
            return dot(equation, a, b)
        half = a.shape[1] // 2
        return dot(equation, a[:, half:], b[half:]) + dot(equation, a[:, :half], b[:half])

    monkeypatch.setattr(products, "dot", other_order)
    verdict = check(dtype=dtype)
    assert not verdict.agrees
    assert verdict.disagreement.startswith("product of ") and f"in {dtype}: row" in verdict.disagreement
    assert verdict.disagreement.endswith(" of 2") and " of 8 has other bits" in verdict.disagreement


@pytest.mark.parametrize(
    "name",
    ["sum over", "sum of squares", "exponential", "activation", "softmax", "queries times keys", "weighted values"],
)
def test_every_kind_of_operation_is_looked_at(monkeypatch, short, name):
    def moved(operation: width_probe._Operation) -> width_probe._Operation:
        """Moves the last bit where there are 33 rows."""

        def apply(rows: jax.Array, *others: jax.Array) -> jax.Array:
            result = operation.apply(rows, *others)
            return jnp.nextafter(result, jnp.inf) if rows.shape[operation.axis] == 33 else result

        return dataclasses.replace(operation, apply=apply) if operation.name.startswith(name) else operation

    listed = width_probe._operations
    monkeypatch.setattr(width_probe, "_operations", lambda *given: map(moved, listed(*given)))
    verdict = check(cut("gemma-4-26b-a4b", "float32") if name == "softmax" else None)
    assert not verdict.agrees
    assert verdict.disagreement.startswith(name)
    assert "in float32: row 0 of 33 has other bits" in verdict.disagreement


def test_the_engines_own_widths_are_compared_too(monkeypatch):
    monkeypatch.setattr(width_probe, "LADDER", (2, 8))
    monkeypatch.setattr(width_probe, "FEW", (2,))
    exp = products.exp
    monkeypatch.setattr(products, "exp", lambda x: jnp.nextafter(exp(x), jnp.inf) if x.shape[-2] == 48 else exp(x))
    assert check() == AGREES
    assert "of 48 has other bits" in check(widths=(48, 8)).disagreement


def test_too_many_rows_of_float32_at_a_time_are_found(monkeypatch):
    monkeypatch.setattr(width_probe, "LADDER", (2, 64))
    monkeypatch.setattr(width_probe, "FEW", ())
    monkeypatch.setattr(products, "_MOST_ROWS", {})
    for embed, hidden in ((640, 2048), (1152, 6912)):
        model = dataclasses.replace(tiny.model().config, embed_dim=embed, hidden_dim=hidden)
        verdict = check(step.StepConfig(model, "float32", 16))
        if not verdict.agrees:
            assert verdict.disagreement.startswith("product of ")
            return
    pytest.skip("this machine gives float32 products one order at every number of rows")


def test_the_answer_is_remembered_and_nothing_runs_again(monkeypatch, measured):
    assert check() == check() == AGREES
    assert measured == [width_probe.LADDER]


@pytest.mark.parametrize("verdict", [AGREES, width_probe.Verdict(False, "sum in float32: row 0 of 3")])
def test_either_answer_is_remembered(monkeypatch, verdict):
    monkeypatch.setattr(width_probe, "_measure", lambda *_: verdict)
    assert check() == verdict
    monkeypatch.setattr(width_probe, "_measure", lambda *_: pytest.fail("it was measured again"))
    assert check() == verdict


def test_it_runs_again_for_other_widths_lengths_dtypes_libraries_and_code(monkeypatch, measured):
    check()
    check(widths=(48,))
    assert measured == [width_probe.LADDER, (*width_probe.LADDER[:8], 48, *width_probe.LADDER[8:])]
    check(dtype="bfloat16")
    config = small_config()
    check(dataclasses.replace(config, kv_block=32))
    check(dataclasses.replace(config, model=random_lib.cut(config.model, vocab=256)))
    assert len(measured) == 5
    for module, name in ((determinism, "library_digest"), (width_probe, "_code_digest")):
        monkeypatch.setattr(module, name, lambda: "0" * 64)
        check()
    assert len(measured) == 7


def test_without_a_cache_directory_it_runs_once_per_process(cache, measured):
    cache.write_text("a file in its place")
    config = small_config()
    check(config)
    width_probe.check(config, jax.devices()[0], ())
    assert len(measured) == 1
    check(config)
    assert len(measured) == 2


@pytest.mark.parametrize("old, new", [(b"true", b"True"), (b'"agrees":true', b'"agrees":1234'), (b"{", b"")])
def test_a_damaged_entry_is_no_answer(cache, measured, old, new):
    check()
    (entry,) = (path for path in (cache / "kvgraft_jax" / "remembered").iterdir() if b"widths" in path.read_bytes())
    assert old in entry.read_bytes()
    entry.write_bytes(entry.read_bytes().replace(old, new))
    assert check() == AGREES
    assert len(measured) == 2


@pytest.mark.parametrize("value", ["yes", {"agrees": True}, {"agrees": False, "disagreement": None}, {"agrees": 1}])
def test_an_entry_of_another_form_is_no_answer(monkeypatch, measured, value):
    monkeypatch.setattr(width_probe.remembered, "get", lambda _: value)
    assert check() == AGREES
    assert measured


def test_operands_have_both_signs_and_eight_exponents():
    for dtype in DTYPES:
        numbers = width_probe._random(np.random.default_rng(0), (4096,), dtype).astype(np.float32)
        assert {*np.frexp(np.abs(numbers))[1].tolist()} == set(range(-6, 2))
        assert 1500 < (numbers < 0).sum() < 2500
