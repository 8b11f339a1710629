"""What is recorded under results/ was made by the configurations as they are."""

from __future__ import annotations

import importlib
import json
import pathlib

import jax
import pytest

from experiments import harness
from kvgraft_jax.gemma import configurations
from kvgraft_jax.runtime import step

RESULTS = pathlib.Path(__file__).parents[1] / "results"
CHANGES = {
    "cpu/graft_f32": {"dtype": "float32"},
    "cpu/schedules_f32": {"dtype": "float32", "schedules": 50},
}
CONFIGURATIONS = {
    "cpu/graft_bf16": "exactness_270m",
    "cpu/graft_f32": "exactness_270m",
    "cpu/schedules_bf16": "exactness_270m",
    "cpu/schedules_f32": "exactness_270m",
    "cpu/bench": "bench_270m",
    "rotary": "rotary_exactness",
    "rotary/relocation": "relocation_270m",
    "rotary/emitted_keys": "emitted_keys_270m",
}


def test_every_record_is_looked_at():
    found = {str(path.parent.relative_to(RESULTS)) for path in RESULTS.glob("**/result.json")}
    assert found == set(CONFIGURATIONS)


@pytest.mark.parametrize("folder", CONFIGURATIONS)
def test_the_record_has_todays_configuration(folder):
    document = json.loads((RESULTS / folder / "result.json").read_text())
    config = importlib.import_module(f"configs.{CONFIGURATIONS[folder]}").get_config()
    config.update(CHANGES.get(folder, {}))
    today = json.loads(json.dumps(config.to_dict()))
    if CONFIGURATIONS[folder] == "exactness_270m":  # Two experiments share it; each records what it reads.
        today = {name: today[name] for name in document["config"]}
    assert document["config"] == today
    assert folder == "cpu/bench" or document["holds"]


@pytest.mark.parametrize("folder", [folder for folder in CONFIGURATIONS if folder.startswith("rotary")])
def test_the_checks_of_a_record_are_counted(folder):
    document = json.loads((RESULTS / folder / "result.json").read_text())
    held = [check["holds"] for check in document["checks"]]
    assert held and not document["tries"]
    assert (document["checks_held"], document["checks_failed"]) == (sum(held), held.count(False))


@pytest.mark.parametrize("folder", CONFIGURATIONS)
def test_the_report_is_that_of_the_record(folder):
    document = json.loads((RESULTS / folder / "result.json").read_text())
    assert (RESULTS / folder / "report.md").read_text() == harness.report(document)


@pytest.mark.parametrize("folder", ["cpu/graft_bf16", "cpu/graft_f32", "cpu/schedules_bf16", "cpu/schedules_f32"])
def test_the_programs_are_those_of_the_record(folder):
    pin = json.loads((RESULTS / folder / "result.json").read_text())["pin"]
    if pin["jax"] != jax.__version__:
        pytest.skip(f"recorded with jax {pin['jax']}, whose programs have another text than those of {jax.__version__}")
    model = configurations.get("gemma-3-270m")
    config = step.StepConfig(model, pin["dtype"], pin["width"], pin["kv_block"])
    assert step.Programs(config).fingerprint == pin["program"]
