"""The shape that every experiment shares: settings, output folder, exit codes, and a report that equals the result."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import subprocess
import sys
import typing

import pytest

from configs import exactness_270m, exactness_small
from experiments import corpus as corpus_lib
from experiments import harness
from experiments.graft_exactness import experiment as graft_exactness
from experiments.schedule_invariance import experiment as schedule_invariance
import kvgraft_jax as kg
from kvgraft_jax import engine as engine_lib
from kvgraft_jax import errors
from kvgraft_jax import pin as pin_lib

ROOT = pathlib.Path(__file__).parents[2]
SMALL = "--config=configs/exactness_small.py"
NAMES = ("graft_exactness", "schedule_invariance")


def command(name, *arguments):
    return subprocess.run(
        [sys.executable, "-m", f"experiments.{name}", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True
    )


def results(folder):
    return json.loads((folder / harness.RESULT).read_text())


def assert_report_equals_result(folder):
    """Asserts that report.md holds every figure, digest, setting and row of result.json, and no other."""
    document, text = results(folder), (folder / harness.REPORT).read_text()
    cells = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row] for row in cells]
    assert text.startswith(f"# {document['experiment']}: {'PASS' if document['holds'] else 'FAIL'}\n")
    for name in ("config", "inputs", "outputs", "environment"):
        for key, value in document[name].items():
            assert [key, value if isinstance(value, str) else json.dumps(value)] in cells
    for key in document["figures"]:
        if isinstance(value := document[key], int | float):
            assert [key, json.dumps(value)] in cells
    for rows in (document["rows"], document["checks"], document["tries"]):
        for row in rows:
            assert [
                value[:16] if re.fullmatch("[0-9a-f]{64}", value) else value
                for value in (value if isinstance(value, str) else json.dumps(value) for value in row.values())
            ] in cells
    for name, fired in document.get("detectors", {}).items():
        assert f"{name} {json.dumps(fired)}" in text


def toy(holds=True, run=None):
    """Returns an experiment without compute, on a real model."""

    def found(settings, model, out):
        rows = [{"row": 0, "a|b": "x", "sha256": "0" * 64}]
        return harness.Findings(holds, {"answer": 1.5}, pin_lib.Pin({"schema": "test"}), {"in": "1" * 64}, {}, rows)

    return harness.Experiment("toy", "It is so.", graft_exactness.Settings, run or found)


def config(**changes):
    changed = exactness_small.get_config()
    changed.model = "random:gemma-3-270m?layers=1&vocab=64&embed=16&hidden=32&heads=1&kv_heads=1&head_dim=16&window=8"
    with changed.ignore_type():
        changed.update(changes)
    return changed


@pytest.mark.parametrize(("holds", "code", "word"), [(True, 0, "PASS"), (False, 1, "FAIL")])
def test_the_exit_code_and_the_last_line_tell_whether_the_claim_holds(tmp_path, capsys, holds, code, word):
    assert harness.execute(toy(holds), config(), tmp_path / "a" / "b") == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"{word}: It is so." and sum("answer" in line for line in lines) == 1
    document = results(tmp_path / "a" / "b")
    assert document["holds"] is holds and document["answer"] == 1.5 and document["inputs"] == {"in": "1" * 64}
    assert document["pin"] == {"schema": "test"} and document["pin_id"] == pin_lib.Pin({"schema": "test"}).id
    assert document["config"]["samples"] == exactness_small.get_config().samples
    assert document["source"] == document["config"]["model"]
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == [harness.REPORT, harness.RESULT]


def test_the_result_names_the_commit_of_the_weights(tmp_path, monkeypatch):
    commit = "hf:owner/model@0123456789abcdef0123456789abcdef01234567"
    load = kg.load_model
    monkeypatch.setattr(
        kg, "load_model", lambda *names, **mesh: dataclasses.replace(load(*names, **mesh), source=commit)
    )
    assert harness.execute(toy(), config(), tmp_path) == 0
    assert results(tmp_path)["source"] == commit


def test_checks_are_a_list_of_their_own_and_counted(tmp_path):
    def checked(settings, model, out):
        checks = [{"check": "a", "found": 0, "holds": True}, {"check": "b", "found": 1, "holds": False}]
        return dataclasses.replace(toy().run(settings, model, out), checks=checks)

    harness.execute(toy(run=checked), config(), tmp_path)
    document = results(tmp_path)
    assert document["checks"][1] == {"check": "b", "found": 1, "holds": False} and document["tries"] == []
    assert (document["checks_held"], document["checks_failed"]) == (1, 1)
    assert "## Checks" in (tmp_path / harness.REPORT).read_text()
    assert_report_equals_result(tmp_path)
    harness.execute(toy(), config(), tmp_path / "none")
    assert "checks_held" not in results(tmp_path / "none")["figures"]


def test_the_report_holds_the_figures_of_the_result(tmp_path):
    harness.execute(toy(), config(), tmp_path)
    document = results(tmp_path)
    text = (tmp_path / harness.REPORT).read_text()
    assert text == harness.report(document)
    for cells in ("| answer | 1.5 |", f"| in | {'1' * 64} |", "| row | a\\|b | sha256 |", f"| 0 | x | {'0' * 16} |"):
        assert cells in text
    document["answer"] = 2.5
    assert harness.report(document) != text


def test_an_experiment_that_cannot_run_is_refused_in_one_paragraph(tmp_path, capsys):
    def run(settings, model, out):
        raise errors.CapacityError("too long")

    assert harness.execute(toy(run=run), config(), tmp_path) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.splitlines()[-1] == "toy: too long" and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "said", "code"),
    [
        (OSError(28, "No space left on device"), "toy: OSError: [Errno 28] No space left on device", 2),
        (MemoryError(), "toy: MemoryError", 2),
        (ModuleNotFoundError("No module named 'chess'"), "No module named 'chess'; run: pip install", 2),
        (ImportError("cannot import name 'a'"), "cannot import name 'a'", 2),
        (KeyboardInterrupt(), "toy: interrupted", 130),
        (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero", 2),
    ],
)
def test_what_goes_wrong_is_never_a_claim_that_fails(tmp_path, capsys, error, said, code):
    def run(settings, model, out):
        raise error

    assert harness.execute(toy(run=run), config(), tmp_path) == code
    told = capsys.readouterr().err
    is_mistake = type(error) in (ImportError, ZeroDivisionError)
    assert said in told and ("pip install" in told) == (type(error) is ModuleNotFoundError)
    assert ("Traceback" in told) == is_mistake and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_recipient_that_dies_is_refused_with_its_reason(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(graft_exactness, "_JOB", "other.json")  # The new process looks for another file.
    changes = dict(samples=2, max_tokens=20, capacity=64, decode_steps=1)
    assert harness.execute(graft_exactness.EXPERIMENT, config(**changes), tmp_path) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert "experiments.graft_exactness ended with 2: recipient: FileNotFoundError" in told and "job.json" in told
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["rows", "pin", "pin_id", "seconds", "experiment", "figures"])
def test_a_figure_named_like_a_field_of_the_result_is_refused(tmp_path, capsys, name):
    def run(settings, model, out):
        return harness.Findings(True, {name: 1}, pin_lib.Pin({"schema": "test"}), {}, {}, [])

    assert harness.execute(toy(run=run), config(), tmp_path) == 2
    assert f"figures: {name}: " in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_settings_are_read_by_their_types_not_by_how_these_are_spelt():
    settings = dataclasses.make_dataclass("Settings", [("sizes", typing.Tuple[int, ...]), ("name", "str")])  # noqa: UP006
    assert harness.read_settings(settings, {"sizes": (1, 2), "name": "a"}) == settings((1, 2), "a")
    for bad in ({"sizes": [1, 2], "name": "a"}, {"sizes": (1, True), "name": "a"}, {"sizes": (), "name": 1}):
        with pytest.raises(errors.ConfigError, match="wanted"):
            harness.read_settings(settings, bad)


@pytest.mark.parametrize("kind", ["full folder", "file", "below a file", "none"])
def test_the_output_folder_is_checked_before_any_compute(tmp_path, capsys, monkeypatch, kind):
    monkeypatch.setattr(kg, "load_model", lambda *_: pytest.fail("loaded a model"))
    (tmp_path / "earlier").write_text("kept")
    file = tmp_path / "earlier"
    out = {"full folder": tmp_path, "file": file, "below a file": file / "out", "none": None}[kind]
    assert harness.execute(toy(), config(), out) == 2
    assert "--out: " in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["earlier"] and (tmp_path / "earlier").read_text() == "kept"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"samples": 0}, "samples"),
        ({"samples": True}, "samples"),
        ({"samples": 2.0}, "samples"),
        ({"min_tokens": 0}, "min_tokens"),
        ({"min_tokens": 201}, "min_tokens"),
        ({"spread_tokens": 1}, "spread_tokens"),
        ({"decode_steps": -1}, "decode_steps"),
        ({"seed": -1}, "seed"),
        ({"capacity": 215}, "capacity"),
        ({"model": "random:gemma-9"}, "gemma-9"),
        ({"model": "hf:/nowhere"}, "nowhere"),
        ({"dtype": "float16"}, "float16"),
        ({"shapes": (1,)}, "shapes"),
        ({"shapes": ()}, "shapes"),
        ({"shapes": (10, 2)}, "shapes"),
        ({"shapes": (2, 10.0)}, "shapes"),
        ({"kv_block": 17}, "kv_block"),
    ],
)
def test_graft_exactness_refuses_bad_settings(tmp_path, capsys, changes, named):
    assert harness.execute(graft_exactness.EXPERIMENT, config(**changes), tmp_path) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"schedules": 1}, "schedules"),
        ({"single_steps": 0}, "single_steps"),
        ({"single_steps": 150}, "single_steps"),
        ({"capacities": ()}, "capacities"),
        ({"capacities": (149, 200)}, "capacities"),
        ({"capacities": (160, "200")}, "capacities"),
        ({"seed": -1}, "seed"),
    ],
)
def test_schedule_invariance_refuses_bad_settings(tmp_path, capsys, changes, named):
    assert harness.execute(schedule_invariance.EXPERIMENT, config(**changes), tmp_path) == 2
    assert named in capsys.readouterr().err


def test_a_configuration_that_lacks_a_field_is_refused(tmp_path, capsys):
    lacking = config()
    del lacking.decode_steps
    assert harness.execute(graft_exactness.EXPERIMENT, lacking, tmp_path) == 2
    assert "'decode_steps'" in capsys.readouterr().err
    assert harness.execute(graft_exactness.EXPERIMENT, None, tmp_path) == 2
    assert "--config" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((SMALL, "--config.sample=3"), "sample"),
        ((SMALL, "--config.samples=many"), "many"),
        ((SMALL, "--samples=3"), "samples"),
        ((SMALL, "samples=3"), "samples=3"),
        (("--config=configs/nowhere.py",), "nowhere"),
        ((), "--config"),
        ((SMALL, "--config.samples=0"), "samples"),
        ((SMALL, "--config.model=package:gemma-9"), "gemma-9"),
    ],
)
def test_a_command_line_that_makes_no_sense_exits_with_2_and_no_traceback(tmp_path, arguments, named):
    result = command("graft_exactness", *arguments, f"--out={tmp_path / 'out'}")
    assert result.returncode == 2 and result.stdout == ""
    assert named in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_overrides_reach_the_experiment_and_the_result(tmp_path):
    out = tmp_path / "out"
    overrides = ("--config.samples=3", "--config.max_tokens=40", "--config.decode_steps=2", "--config.dtype=float32")
    result = command("graft_exactness", SMALL, *overrides, f"--out={out}")
    assert result.returncode == 0, result.stderr
    document = results(out)
    assert document["samples"] == 3 and document["tokens_max"] <= 40
    assert document["config"]["dtype"] == document["pin"]["dtype"] == "float32"
    assert document["config"]["seed"] == exactness_small.get_config().seed
    again = command("graft_exactness", SMALL, f"--out={out}")
    assert again.returncode == 2 and results(out) == document


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_small_configuration_passes(tmp_path, name):
    result = command(name, SMALL, f"--out={tmp_path}")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].startswith("PASS: ")
    document = results(tmp_path)
    if name == "graft_exactness":
        samples = document["samples"]
        assert samples == exactness_small.get_config().samples == len(document["rows"])
        for figure in ("logits_sha256_equal", "kv_sha256_equal", "decode_sha256_equal", "argmax_agree"):
            assert document[figure] == samples
        assert document["kl_nats_max"] == 0.0 and document["recipient_pin_id"] == document["pin_id"]
    else:
        assert document["schedules"] == exactness_small.get_config().schedules == len(document["rows"])
        assert document["distinct_hashes"] == document["distinct_full_hashes"] == 1
        wanted = ["nan_inside", "plain_sums", "row_bit", "uncut_products", "vmap_over_requests"]
        assert sorted(document["detectors"]) == wanted and all(document["detectors"].values())
        singles = [row["trailing_singles"] for row in document["rows"]]
        assert sum(count >= 64 for count in singles) * 10 >= len(singles)
    plots = [path.name for path in tmp_path.iterdir() if path.suffix == ".png"]
    assert len(plots) == 1 and len(list(tmp_path.iterdir())) == 3
    assert_report_equals_result(tmp_path)


@pytest.mark.weights
@pytest.mark.slow
def test_the_270m_grafts_exactly(tmp_path):
    result = command(
        "graft_exactness",
        "--config=configs/exactness_270m.py",
        "--config.samples=4",
        "--config.max_tokens=560",
        "--config.decode_steps=4",
        "--config.seed=6",
        f"--out={tmp_path}",
    )
    assert result.returncode == 0, result.stderr
    document = results(tmp_path)
    assert document["samples"] == document["decode_sha256_equal"] == 4 and document["kl_nats_max"] == 0.0


def test_configurations_measure_the_default_engine_and_cross_window_and_blocks():
    real, small = exactness_270m.get_config(), exactness_small.get_config()
    assert (real.shapes, real.kv_block) == (engine_lib.DEFAULT_SHAPES["cpu"], engine_lib.DEFAULT_KV_BLOCK)
    assert sorted(real) == sorted(small)
    assert real.samples == 50 and real.decode_steps == 16 and real.max_tokens > 2 * 512 + 3
    assert real.schedules >= 200 and real.text_tokens >= 600 and real.single_steps >= 64


def test_the_corpus_is_the_same_every_time_and_long_enough():
    documents = corpus_lib.documents()
    assert len(documents) > 1000 and sum(map(len, documents)) > 300_000 and all(documents)
    model = kg.load_model(config().model)
    tokens = corpus_lib.tokenize(model)
    assert tokens.sha256 == corpus_lib.tokenize(model).sha256
    sample = tokens.sample(len(documents) - 1, 3000)
    assert len(sample) == 3000 and sample[0] == tokens.bos_id and tokens.sample(len(documents) - 1, 30) == sample[:30]
    first = [byte % model.config.vocab_size for byte in documents[-1].encode()]
    assert list(sample[1 : 1 + len(first)]) == first
