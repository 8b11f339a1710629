"""Identity: whatever decides the bits is in the pin, changes its id, and is named when a graft is refused."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys
import warnings

import flax
import jax
import numpy as np
import pytest

from kvgraft_jax import determinism, errors, width_probe
from kvgraft_jax import engine as engine_lib
from kvgraft_jax import pin as pin_lib
from kvgraft_jax.checkpoints import assemble
from kvgraft_jax.gemma import attention, parameters, products, rotary
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.grafting import storage
from kvgraft_jax.runtime import model as model_lib
from kvgraft_jax.runtime import step as step_lib
from tests import tiny

ROOT = pathlib.Path(__file__).parent.parent


@dataclasses.dataclass(frozen=True)
class Digest:
    """Stands for a tokenizer or a chat template: the pin reads their digest and nothing else."""

    digest: str
    template_digest: str = ""


def build(model: model_lib.Model | None = None, kv_block: int = tiny.KV_BLOCK) -> engine_lib.Engine:
    return engine_lib.Engine(model or tiny.model(), capacity=tiny.CAPACITY, shapes=tiny.SHAPES, kv_block=kv_block)


def with_config(**changes) -> model_lib.Model:
    model = tiny.model()
    return dataclasses.replace(model, config=dataclasses.replace(model.config, **changes))


def sliding(**changes) -> config_lib.AttentionConfig:
    return dataclasses.replace(tiny.model().config.sliding, **changes)


CHANGES = {
    "weights": lambda: build(one_ulp_off(tiny.model())),
    "tokenizer": lambda: build(dataclasses.replace(tiny.model(), tokenizer=Digest("t"))),
    "chat_template": lambda: build(dataclasses.replace(tiny.model(), chat=Digest("", "c"))),
    "dtype": lambda: tiny.engine("float32"),
    "model.sliding.rotary.base": lambda: build(with_config(sliding=sliding(rotary=config_lib.RotaryConfig(1e5)))),
    "model.sliding.window": lambda: build(with_config(sliding=sliding(window=tiny.WINDOW + 1))),
    "model.final_softcap": lambda: build(with_config(final_softcap=30.0)),
    "model.norm_eps": lambda: build(with_config(norm_eps=1e-5)),
    "kv_block": lambda: build(kv_block=tiny.KV_BLOCK * 2),
}


def params_digest(params) -> str:
    whole = parameters.whole(tiny.model().config, params)
    return assemble.params_digest({path: assemble.digest_lib.array_digest(array) for path, array in whole.items()})


def one_ulp_off(model: model_lib.Model) -> model_lib.Model:
    """Returns the model with one weight moved to the next bfloat16, and the digest of those weights."""
    params = flax.core.unfreeze(model.params)
    first, *rest = params["layer_3"]["mlp"]["up_proj"]["kernel"]
    first = np.array(first)
    first.view(np.uint16)[5, 7] += 1
    kernel = (first, *rest)
    params["layer_3"] = {**params["layer_3"], "mlp": {**params["layer_3"]["mlp"], "up_proj": {"kernel": kernel}}}
    return dataclasses.replace(model, params=params, digest=params_digest(params))


def test_digest_of_this_test_is_the_loaders():
    assert params_digest(tiny.model().params) == tiny.model().digest


@pytest.fixture(scope="module")
def artifact():
    engine = tiny.engine()
    return engine.capture(engine.prefill(tiny.tokens(20)))


@pytest.mark.parametrize("field", CHANGES)
def test_a_change_is_a_new_id_and_a_refusal_that_names_it(field, artifact):
    engine = CHANGES[field]()
    assert engine.pin.id != tiny.engine().pin.id
    with pytest.raises(errors.PinMismatch, match="(?s)differ.*" + field.replace(".", r"\.")) as caught:
        engine.graft(artifact)
    assert field in caught.value.fields
    follow = {"program.step", "program.head", "rotary_tables", "self_test", "weights"}
    unexpected = set(caught.value.fields) - {field, *follow}
    assert not unexpected, unexpected


@pytest.mark.parametrize("field", ["jax", "jaxlib", "device_kind", "platform"])
def test_software_and_device_are_named(field, artifact, monkeypatch):
    environment = {**determinism.environment(jax.devices()[0]), field: "another"}
    monkeypatch.setattr(determinism, "environment", lambda device: environment)
    with pytest.raises(errors.PinMismatch) as caught:
        build().graft(artifact)
    assert caught.value.fields == (field,)


def test_another_rotary_rule_is_named(artifact, monkeypatch):
    monkeypatch.setattr(rotary, "ENGINE_RULE", rotary.CORRECT)
    with pytest.raises(errors.PinMismatch) as caught:
        build().graft(artifact)
    assert caught.value.fields == ("rotary_rule",)


def test_other_rotary_tables_are_named(artifact, monkeypatch):
    """As another mathematical library would make them: one sine in the last place."""
    cos_sin = rotary._cos_sin

    def other(position_Tx1, frequency_R):
        cos_TxR, sin_TxR = cos_sin(position_Tx1, frequency_R)
        row = position_Tx1[:, 0] == 1023  # Beyond what the self-test reads.
        sin_TxR[row, 3] = np.nextafter(np.float32(sin_TxR[row, 3]), np.float32(2))
        return cos_TxR, sin_TxR

    monkeypatch.setattr(rotary, "_cos_sin", other)
    engine = build()
    with pytest.raises(errors.PinMismatch) as caught:
        engine.graft(artifact)
    assert caught.value.fields == ("rotary_tables",)


def older_pin(pin: pin_lib.Pin, version: int) -> pin_lib.Pin:
    """Returns the pin as an engine of an older schema wrote it: each held the width of its step."""
    document = pin.document
    del document["program"]["draw"]
    document |= {"schema": f"kvgraft/pin/{version}", "width": 10, "head_lanes": 4}
    if version == 1:
        for field in ("library", "rotary_tables", "self_test", "head_lanes"):
            del document[field]
        document["cpu"] = None
    return pin_lib.Pin(document)


@pytest.mark.parametrize("version", [1, 2])
def test_a_deposit_of_an_older_schema_loads_and_lists_and_the_fields_that_differ_are_named(artifact, tmp_path, version):
    older = dataclasses.replace(artifact, pin=older_pin(artifact.pin, version))
    artifact_id = storage.save_artifact(older, tmp_path)
    assert list(storage.list_artifacts(tmp_path)) == [artifact_id]
    older = storage.load_artifact(tmp_path, artifact_id)
    with pytest.raises(errors.PinMismatch) as caught:
        tiny.engine().graft(older)
    message = str(caught.value)
    assert "width: (absent) here, 10 there" in message and f"'kvgraft/pin/3' here, 'kvgraft/pin/{version}'" in message
    cpu = ("cpu", "cpu.architecture", "cpu.instructions", "cpu.model")
    fields = {
        1: (*cpu, "library", "program.draw", "rotary_tables", "schema", "self_test", "width"),
        2: ("head_lanes", "program.draw", "schema", "width"),
    }
    assert caught.value.fields == fields[version]
    assert not tiny.engine().graft(older, allow_inexact=True).exact


def test_where_bits_depend_on_the_width_there_is_one_and_the_pin_names_it(artifact, monkeypatch):
    monkeypatch.setattr(width_probe, "check", lambda *_: width_probe.Verdict(False, "sum in float32: row 0 of 3"))
    told = r"shapes: got \(2, 3, 8\), but on this machine .* \(sum in float32: row 0 of 3\), so all steps are 3 lanes"
    with pytest.warns(errors.KVGraftWarning, match=told) as warned:
        middle = tiny.engine.__wrapped__(shapes=(2, 3, 8))
    assert warned[0].filename == tiny.__file__
    narrow = tiny.engine.__wrapped__(shapes=(2,))  # Asked for by name: no warning.
    assert (middle.shapes, narrow.shapes) == ((3,), (2,))
    assert (middle.pin.document["width"], narrow.pin.document["width"]) == (3, 2)
    with pytest.raises(errors.PinMismatch) as caught:
        narrow.graft(artifact)
    assert caught.value.fields == ("program.head", "program.step", "width")
    with pytest.raises(errors.PinMismatch) as caught:
        narrow.graft(middle.capture(middle.prefill([1, 2, 3])))
    assert caught.value.fields == ("program.head", "program.step", "width")
    with pytest.raises(errors.InputError, match="state: its step_config"):
        narrow.extend(middle.prefill([1]), [2])


@pytest.mark.parametrize("width", [2, 33, 64])
def test_the_one_width_has_one_set_of_bits_where_a_row_depends_on_how_many_there_are(width, monkeypatch, tmp_path):
    def by_count(apply):
        """Adds to a float32 result what depends on the number of rows, as another order of a sum would."""
        return lambda a, *others: apply(a, *others) * np.float32(1 + a.shape[-2] * 2.0**-13)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # Nobody else shall remember what is found here.
    monkeypatch.setattr(products, "product", by_count(products.product))
    monkeypatch.setattr(products, "product_with_rows", by_count(products.product_with_rows))
    monkeypatch.setattr(attention, "query_key", by_count(attention.query_key))
    monkeypatch.setattr(attention, "weighted_values", by_count(attention.weighted_values))
    monkeypatch.setattr(width_probe, "_check", width_probe._check.__wrapped__)
    monkeypatch.setattr(step_lib, "programs", step_lib.Programs)  # Traced anew, with these products.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errors.KVGraftWarning)
        engine = tiny.engine.__wrapped__("float32", shapes=(width,))
    assert engine.step_config.width == width
    text = tiny.tokens(45)
    whole = engine.prefill(text)
    cut = engine.extend(engine.extend(engine.prefill(text[:40]), text[40:41]), text[41:])
    beside = engine.prefill_many([tiny.tokens(3), text, [7]])[1]
    for state in (cut, beside):
        assert engine.capture(state).state_digest == engine.capture(whole).state_digest
    np.testing.assert_array_equal(engine.score(text)[-1], whole.logits)
    tokens = engine.generate(whole, max_new_tokens=4, stop_ids=())
    (again, _) = engine.generate_many([whole, engine.prefill([1])], max_new_tokens=4, stop_ids=())
    assert again[0] == tokens[0] and engine.capture(again[1]).state_digest == engine.capture(tokens[1]).state_digest


def test_shapes_rows_and_capacity_are_not_part_of_the_pin(artifact):
    assert tiny.engine.__wrapped__(shapes=(tiny.WIDTH,), rows=1, capacity=tiny.CAPACITY).pin == artifact.pin
    assert not {"width", "head_lanes", "shapes", "rows", "capacity"} & set(artifact.pin.document)


def test_another_cpu_is_named(artifact, monkeypatch):
    cpu = {**determinism.cpu_description(), "instructions": ["avx2"]}
    monkeypatch.setattr(determinism, "cpu_description", lambda: cpu)
    with pytest.raises(errors.PinMismatch) as caught:
        build().graft(artifact)
    assert caught.value.fields == ("cpu.instructions",)


def test_a_changed_program_has_another_fingerprint(monkeypatch):
    config = tiny.engine().step_config
    before = step_lib.Programs(config).fingerprint
    assert step_lib.Programs(config).fingerprint == before
    monkeypatch.setattr(attention, "MASKED", -2e30)
    after = step_lib.Programs(config).fingerprint
    assert after["step"] != before["step"] and after["head"] == before["head"]


def test_limits_and_special_tokens_are_not_part_of_the_pin(artifact):
    model = with_config(max_positions=7, stop_ids=(5,), pad_id=3, name="another")
    with pytest.warns(errors.KVGraftWarning, match="another was trained on 7 positions"):
        engine = build(model)
    build(model)  # No second warning.
    assert engine.pin.id == artifact.pin.id


def run(code: str, *arguments: str, cwd: pathlib.Path = ROOT, flags: str | None = None) -> str:
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    environment.pop("XLA_FLAGS")
    if flags:
        environment["XLA_FLAGS"] = flags
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def test_pin_is_the_same_in_another_process_and_folder(tmp_path):
    code = "from tests import no_thread_test, tiny; print(tiny.engine(capacity=96).pin.id)"
    assert run(code, cwd=tmp_path) == tiny.engine().pin.id


def test_xla_flags_are_named(tmp_path, artifact):
    """Deposited here; another process runs XLA with one more flag."""
    storage.save_artifact(artifact, tmp_path)
    code = (
        "import sys; from tests import no_thread_test, tiny\n"
        "from kvgraft_jax import errors; from kvgraft_jax.grafting import storage\n"
        "try: tiny.engine().graft(storage.load_artifact(*sys.argv[1:]))\n"
        "except errors.PinMismatch as error: print(*error.fields)"
    )
    flag = "--xla_cpu_prefer_vector_width=128"
    assert run(code, str(tmp_path), artifact.artifact_id, flags=flag) == "xla_flags"
    # Where kernels for AMX are then used, bits depend on the width, so the engine has one and names that, too.
    found = run(code, str(tmp_path), artifact.artifact_id, flags=tiny.NATIVE_CPU_FLAG)
    assert found in ("xla_flags", "program.head program.step width xla_flags")


def test_same_name_with_other_weights_is_a_miss(artifact):
    engine = build(tiny.model(uri=tiny.URI.replace("seed=0", "seed=1")))
    assert engine.model.config == tiny.model().config
    with pytest.raises(errors.PinMismatch) as caught:
        engine.graft(artifact)
    assert caught.value.fields == ("self_test", "weights")
