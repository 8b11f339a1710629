"""What is recorded under results/ was made by the configurations as they are."""

from __future__ import annotations

import json

import jax
import pytest

from experiments import harness, records
from kvgraft_jax import errors, pin
from kvgraft_jax.gemma import configurations

FOLDERS = [record.folder for record in records.RECORDS]


def result(folder: str) -> dict:
    """Returns a record of the present pin schema; an earlier one is skipped by name."""
    document = json.loads((records.RESULTS / folder / harness.RESULT).read_text())
    if document["pin"]["schema"] != pin.SCHEMA:
        pytest.skip(f"results/{folder} is of an earlier program: bash workspace.sh records {folder}")
    return document


def test_every_record_is_looked_at():
    found = {str(path.parent.relative_to(records.RESULTS)) for path in records.RESULTS.glob("**/result.json")}
    assert found == set(FOLDERS)


@pytest.mark.parametrize("record", records.RECORDS, ids=FOLDERS)
def test_the_record_has_todays_configuration_and_programs(record):
    document = result(record.folder)
    if document["pin"]["jax"] != jax.__version__:
        pytest.skip(f"recorded with jax {document['pin']['jax']}, whose programs have another text")
    assert records.is_current(record, document)
    assert record.folder == "cpu/bench" or document["holds"]


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder.startswith("rotary")])
def test_the_checks_of_a_record_are_counted(folder):
    document = json.loads((records.RESULTS / folder / harness.RESULT).read_text())
    held = [check["holds"] for check in document["checks"]]
    assert held and not document["tries"]
    assert (document["checks_held"], document["checks_failed"]) == (sum(held), held.count(False))


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_report_is_that_of_the_record(folder):
    document = json.loads((records.RESULTS / folder / harness.RESULT).read_text())
    assert (records.RESULTS / folder / "report.md").read_text() == harness.report(document)


def test_a_record_of_another_program_or_configuration_is_made_again():
    record = records.RECORDS[0]
    config = json.loads(json.dumps(record.configuration.to_dict()))
    program = records._programs("bfloat16", 128, None)
    model = json.loads(json.dumps(configurations.get("gemma-3-270m").document()))
    own = {"schema": pin.SCHEMA, "jax": jax.__version__, "model": model, "dtype": "bfloat16", "kv_block": 128}
    document = {"config": config, "pin": {**own, "program": program}}
    assert records.is_current(record, document)
    assert not records.is_current(record, {**document, "config": {**config, "seed": 1}})
    assert not records.is_current(record, {**document, "pin": {**own, "program": {**program, "step": "0"}}})
    assert not records.is_current(record, {**document, "pin": {**own, "schema": "kvgraft/pin/1", "program": program}})


def test_a_record_changes_only_when_the_new_one_is_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(records, "ROOT", tmp_path)
    place, new = tmp_path / "results" / "cpu" / "graft_bf16", tmp_path / "out" / "records" / "cpu" / "graft_bf16"
    place.mkdir(parents=True)
    (place / harness.RESULT).write_text("old")

    def fail(*_):
        new.mkdir(parents=True)
        (new / "samples.png").write_text("half")
        return 2, ""

    def succeed(*_):
        fail()
        (new / harness.RESULT).write_text("new")
        return 0, ""

    monkeypatch.setattr(harness, "start_module", fail)
    assert records.make(records.RECORDS[0]) == 2
    assert (place / harness.RESULT).read_text() == "old" and not (place / "samples.png").exists()
    monkeypatch.setattr(harness, "start_module", succeed)
    assert records.make(records.RECORDS[0]) == 0
    assert (place / harness.RESULT).read_text() == "new" and (place / "samples.png").read_text() == "half"


def test_a_record_that_nobody_knows_is_refused():
    with pytest.raises(errors.ConfigError, match="got none/such, wanted some of cpu/graft_bf16"):
        records.main(["none/such"])


def test_a_record_whose_claim_did_not_hold_fails_every_time(monkeypatch):
    monkeypatch.setattr(records, "is_current", lambda *_: True)
    folder = FOLDERS[0]
    assert records.main([folder]) == harness.HOLDS
    document = json.loads((records.RESULTS / folder / harness.RESULT).read_text())
    monkeypatch.setattr(records, "read", lambda _: document | {"holds": False})
    assert records.main([folder]) == harness.FAILS
