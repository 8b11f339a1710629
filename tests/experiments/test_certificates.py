"""The theorems and the certificates before the integer checker, and every kind of damage."""

from __future__ import annotations

import ast
import json
import pathlib
import random
import subprocess
import sys

import pytest

from experiments import check_certificate, harness
from experiments.make_certificate import generator as make_certificate
from kvgraft_jax import errors
from kvgraft_jax.relocation import collisions, encodings

ROOT = pathlib.Path(__file__).parents[2]
CHECKER = pathlib.Path(check_certificate.__file__)
CERTIFICATES = sorted((ROOT / "results" / "certificates").glob("*.json"))
HOLDS, FAILS, REFUSED = harness.HOLDS, harness.FAILS, harness.REFUSED
SMALL = 256


def check(*arguments):
    return check_certificate.main([str(argument) for argument in arguments])


@pytest.fixture(scope="module", params=collisions.RULES)
def small(request):
    """Returns a certificate of few positions, as its document without the digest."""
    key_pairs_Mx4 = make_certificate.find_key_pairs(
        encodings.LOCAL256, request.param, SMALL, pairs=(0, 40, 50, 64, 80), pool=1024
    )
    document = json.loads(make_certificate.certificate(encodings.LOCAL256, request.param, SMALL, key_pairs_Mx4))
    del document["sha256"]
    return document


@pytest.fixture
def written(tmp_path):
    """Writes a document, or a text, and gives the path."""

    def write(document):
        path = tmp_path / "certificate.json"
        path.write_text(document if isinstance(document, str) else json.dumps(document))
        return path

    return write


# The checker is what it says.


def test_the_checker_imports_the_standard_library_alone_and_has_300_lines_at_most():
    tree = ast.parse(CHECKER.read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported and {name.split(".")[0] for name in imported} <= sys.stdlib_module_names
    assert len(CHECKER.read_text().splitlines()) <= 300


def test_the_checker_decides_without_floats():
    tree = ast.parse(CHECKER.read_text())
    nodes = list(ast.walk(tree))
    assert not [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, float | complex)]
    assert not [node for node in nodes if isinstance(node, ast.Div)]
    assert not [node for node in nodes if isinstance(node, ast.Name) and node.id in ("float", "pow", "round", "eval")]
    assert {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "math"} == {
        "isqrt"
    }


# The theorems.


def test_all_certificates_are_there():
    found = {(document["config"]["name"], document["angle_rule"]) for document in map(_read, CERTIFICATES)}
    assert found >= {(item.name, rule) for item in encodings.CERTIFIED for rule in ("real", "hf-bf16")}
    for path in CERTIFICATES:
        document = _read(path)
        parts = document["config"]["name"], document["positions"], document["angle_rule"]
        assert path.name == "no_decoder_{}_{}_{}.json".format(*parts)
        assert document["positions"] >= 32_768 and "sha256" in document


def _read(path):
    return json.loads(path.read_text())


@pytest.mark.parametrize("path", CERTIFICATES, ids=lambda path: path.stem)
def test_no_decoder(path, capsys):
    assert check("no-decoder", path, "--positions", 256) == HOLDS
    said = capsys.readouterr().out
    assert f"{255**2}; without a witness: 0\n" in said and "HOLDS" in said


@pytest.mark.slow
def test_a_committed_certificate_holds_at_its_own_length(capsys):
    assert check("no-decoder", ROOT / "results/certificates/no_decoder_local256_32768_hf-bf16.json") == HOLDS
    assert f"{32767**2}; without a witness: 0\n" in capsys.readouterr().out


@pytest.mark.parametrize("rule", ["real", "hf-bf16"])
@pytest.mark.parametrize("scale", [1, 8])
def test_shift(rule, scale, capsys):
    assert check("shift", 4096, "--scale", scale, "--rule", rule) == HOLDS
    assert "shifts d, 0 < |d| < 4096: 8190; without a witness: 0\n" in capsys.readouterr().out


@pytest.mark.parametrize("rule", ["real", "hf-bf16"])
def test_value_flip(rule, capsys):
    assert check("value-flip", 4096, "--rule", rule) == HOLDS
    assert "shifts d, 0 < |d| < 4096: 8190; without a witness: 0\n" in capsys.readouterr().out


def test_shift_fails_where_keys_cannot_show_it(monkeypatch, capsys):
    monkeypatch.setattr(check_certificate, "SHIFT_KEYS", ((0, 0),))
    assert check("shift", 16) == FAILS
    assert "without a witness: 30" in capsys.readouterr().out


def test_value_flip_fails_where_the_gap_is_too_small(monkeypatch):
    monkeypatch.setattr(check_certificate, "FLIP_GAP", 1000)
    assert check("value-flip", 64) == FAILS


def test_the_command_in_a_process():
    def run(*arguments):
        command = [sys.executable, "-m", "experiments.check_certificate", *map(str, arguments)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert run("no-decoder", CERTIFICATES[0], "--positions", 64).returncode == HOLDS
    missing = run("no-decoder", "nowhere.json")
    assert (missing.returncode, missing.stdout) == (REFUSED, "") and "nowhere.json" in missing.stderr
    assert run("shift", "many").returncode == run().returncode == REFUSED


# Damage.


def test_a_small_certificate_holds_and_says_no_more_than_it_shows(small, written):
    assert check("no-decoder", written(small)) == HOLDS
    assert check("no-decoder", written(small | {"positions": 4 * SMALL})) == FAILS


@pytest.mark.parametrize("seed", range(3))
def test_dropped_key_pairs_are_missed(small, written, seed):
    kept = random.Random(seed).sample(small["key_pairs"], max(1, len(small["key_pairs"]) - 30))
    assert check("no-decoder", written(small | {"key_pairs": kept})) == FAILS


@pytest.mark.parametrize("encoding", encodings.CERTIFIED, ids=lambda encoding: encoding.name)
def test_dropped_key_pairs_are_missed_without_a_digest(written, encoding):
    document = _read(ROOT / "results" / "certificates" / f"no_decoder_{encoding.name}_32768_hf-bf16.json")
    del document["sha256"]
    kept = random.Random(encoding.name).sample(document["key_pairs"], len(document["key_pairs"]) - 30)
    assert check("no-decoder", written(document | {"key_pairs": kept}), "--positions", 2048) == FAILS


@pytest.mark.parametrize("seed", range(40))
def test_a_flipped_digit_is_seen(written, seed):
    rng = random.Random(seed)
    text = rng.choice(CERTIFICATES).read_text()
    place = rng.choice([place for place, letter in enumerate(text) if letter.isdigit()])
    digit = rng.choice("0123456789".replace(text[place], ""))
    assert check("no-decoder", written(text[:place] + digit + text[place + 1 :]), "--positions", 2) == REFUSED


@pytest.mark.parametrize("path", CERTIFICATES, ids=lambda path: path.stem)
def test_damage_to_a_signed_certificate_is_seen(path, written):
    document = _read(path)
    kept = random.Random(path.name).sample(document["key_pairs"], len(document["key_pairs"]) - 30)
    for damage in (
        {"key_pairs": kept},
        {"positions": document["positions"] * 2},
        {"config": document["config"] | {"base": 10_007}},
        {"note": "unknown"},
        {"sha256": "0" * 64},
        {"sha256": 0},
        {"sha256": None},
        {"sha256": ""},
    ):
        assert check("no-decoder", written(document | damage), "--positions", 2) == REFUSED


BAD = {
    "base": lambda document: document["config"].update(base=10_007),
    "scale": lambda document: document["config"].update(scale=0),
    "head width": lambda document: document["config"].update(head_dim=255),
    "absurd head width": lambda document: document["config"].update(head_dim=10**4000),
    "rotated pairs": lambda document: document["config"].update(rotated_pairs=127),
    "number as float": lambda document: document["config"].update(base=10_000.0),
    "unknown name": lambda document: document["config"].update(name="local257"),
    "name of no text": lambda document: document["config"].update(name=[]),
    "unknown field of config": lambda document: document["config"].update(theta=1),
    "config of no object": lambda document: document.update(config=7),
    "unknown field": lambda document: document.update(note=""),
    "missing field": lambda document: document.pop("storage"),
    "other storage": lambda document: document.update(storage="float32"),
    "other theorem": lambda document: document.update(theorem="decoder"),
    "other format": lambda document: document.update(format="rope-exactness-certificate/2"),
    "other encoding": lambda document: document.update(key_pair_encoding=""),
    "other margin": lambda document: document.update(eta_log2=-30),
    "unknown rule": lambda document: document.update(angle_rule="any"),
    "one position": lambda document: document.update(positions=1),
    "true positions": lambda document: document.update(positions=True),
    "positions as text": lambda document: document.update(positions="256"),
    "positions as float": lambda document: document.update(positions=256.0),
    "absurd positions": lambda document: document.update(positions=10**9),
    "no key pairs": lambda document: document.update(key_pairs=[]),
    "absurdly many key pairs": lambda document: document.update(key_pairs=[[0, 128, 128, 0]] * 1025),
    "key pairs of no list": lambda document: document.update(key_pairs={"0": 0}),
    "key pairs as number": lambda document: document.update(key_pairs=3),
    "key pair of three": lambda document: document["key_pairs"].append([0, 128, 128]),
    "key pair of floats": lambda document: document["key_pairs"].append([0, 128.0, 128, 0]),
    "key pair with true": lambda document: document["key_pairs"].append([True, 128, 128, 0]),
    "key pair with X of 9 digits": lambda document: document["key_pairs"].append([0, 256, 128, 0]),
    "key pair with M of 0": lambda document: document["key_pairs"].append([0, 128, 0, 0]),
    "key pair whose neighbour has 9 digits": lambda document: document["key_pairs"].append([0, 128, -255, 0]),
    "key pair with large E": lambda document: document["key_pairs"].append([0, 128, 128, 16]),
    "key pair on no rotated pair": lambda document: document["key_pairs"].append([128, 128, 128, 0]),
    "key pair on a negative pair": lambda document: document["key_pairs"].append([-1, 128, 128, 0]),
}


@pytest.mark.parametrize("damage", BAD.values(), ids=BAD.keys())
def test_bad_certificates_are_refused(written, damage, capsys):
    document = _read(ROOT / "results" / "certificates" / "no_decoder_local256_32768_real.json")
    del document["sha256"]
    assert check("no-decoder", written(document), "--positions", 2) == HOLDS
    damage(document)
    capsys.readouterr()
    assert check("no-decoder", written(document), "--positions", 2) == REFUSED
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("check_certificate: ")


def test_a_field_that_is_there_twice_is_refused(written, capsys):
    document = _read(ROOT / "results" / "certificates" / "no_decoder_local256_32768_real.json")
    del document["sha256"]
    text = json.dumps(document)
    assert check("no-decoder", written(text), "--positions", 2) == HOLDS
    for twice in ('{"positions": 32768, ' + text[1:], text.replace('"scale"', '"scale": 1, "scale"')):
        assert json.loads(twice) == document
        assert check("no-decoder", written(twice), "--positions", 2) == REFUSED
        assert "twice" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "7", '"text"', "[" * 60_000, "{}", " " * 70_000, '{"config": {"name": NaN}}', "9" * 5000],
    ids=lambda text: f"{text[:8]}x{len(text)}",
)
def test_files_that_are_no_certificates_are_refused(written, text):
    assert check("no-decoder", written(text)) == REFUSED


@pytest.mark.parametrize(
    "arguments",
    [
        ("no-decoder", CERTIFICATES[0], "--positions", 1 << 18),
        ("no-decoder", CERTIFICATES[0], "--positions", 1),
        ("no-decoder", ROOT),
        ("no-decoder", ROOT / "nothing.json"),
        ("shift", 1),
        ("shift", 10**12),
        ("value-flip", 0),
        ("value-flip", -3),
    ],
    ids=str,
)
def test_numbers_out_of_range_are_refused(arguments):
    assert check(*arguments) == REFUSED


@pytest.mark.parametrize("arguments", [("shift", 10, "--scale", 3), ("shift",), ("value-flip", 3, "--rule", "any"), ()])
def test_unknown_arguments_are_refused(arguments):
    with pytest.raises(SystemExit) as stopped:
        check(*arguments)
    assert stopped.value.code == REFUSED


def test_the_generator_writes_a_certificate_that_holds(tmp_path):
    path = tmp_path / "new.json"
    options = ("--encoding=g3global128s8", "--rule=hf-bf16", "--positions=200", "--pool=256", f"--out={path}")
    command = [sys.executable, "-m", "experiments.make_certificate", *options]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == HOLDS and str(path) in made.stdout, made.stderr
    assert check("no-decoder", path) == HOLDS


@pytest.mark.parametrize(
    "change",
    [{"encoding": "local257"}, {"encoding": None}, {"out": None}, {"out": str(ROOT)}, {"out": "nowhere/new.json"}]
    + [{"pool": 0}, {"seed": -1}, {"positions": 1}, {"pairs": [128]}, {"pairs": [-1]}],
    ids=str,
)
def test_the_generator_refuses_what_makes_no_sense(tmp_path, change):
    settings = {"encoding": "local256", "rule": "real", "positions": 64, "pairs": None, "pool": 9, "seed": 0}
    with pytest.raises(errors.KVGraftError):
        make_certificate.run(**{**settings, "out": str(tmp_path / "new.json"), **change})
    assert not list(tmp_path.iterdir())
