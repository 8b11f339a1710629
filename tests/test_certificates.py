"""The integer checker against other arithmetic, the certificates against the checker, and damage against both."""

from __future__ import annotations

import ast
import json
import math
import pathlib
import random
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import check_certificate, harness, make_certificate
from kvgraft_jax import errors
from kvgraft_jax.exactness import collisions, encodings
from kvgraft_jax.gemma import rotary

ROOT = pathlib.Path(__file__).parents[1]
CHECKER = pathlib.Path(check_certificate.__file__)
CERTIFICATES = sorted((ROOT / "results" / "certificates").glob("*.json"))
HOLDS, FAILS, REFUSED = harness.HOLDS, harness.FAILS, harness.REFUSED
SMALL = 256


def check(*arguments):
    return check_certificate.main([str(argument) for argument in arguments])


@pytest.fixture(scope="module", params=collisions.RULES)
def small(request):
    """A certificate of few positions, as its document without the digest."""
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


@pytest.mark.parametrize("digits", [8, 24])
def test_rounding_is_that_of_the_machine(digits):
    rng = random.Random(digits)
    dtype = jnp.bfloat16 if digits == 8 else np.float32
    values = [rng.choice((-1, 1)) * rng.getrandbits(rng.randint(1, 24 if digits == 8 else 53)) for _ in range(3000)]
    values += [
        sign * (odd << (digits + 5)) + sign * tie for sign in (-1, 1) for odd in range(128, 140) for tie in (0, 32)
    ]
    wanted = np.array(values, np.float32 if digits == 8 else np.float64).astype(dtype).astype(np.float64)
    assert [check_certificate.rounded(value, digits) for value in values] == wanted.astype(int).tolist()


def test_cells_are_the_numbers_of_bfloat16_without_ties():
    values = np.random.default_rng(0).integers(-(1 << 24), 1 << 24, 20_000)
    values = values[np.abs(values) >= 1 << 9]
    bits = values.astype(np.float32).view(np.int32).astype(np.int64)
    is_tie = bits & 0xFFFF == 0x8000
    order = np.argsort(values)
    cells = np.array([check_certificate.cell(int(value)) for value in values])
    stored = values.astype(np.float32).astype(jnp.bfloat16).astype(np.float64)
    assert (np.diff(cells[order]) >= 0).all()
    cells, stored = cells[~is_tie], stored[~is_tie]
    assert len(np.unique(cells)) == len(np.unique(stored)) == len(np.unique(np.stack([cells, stored]), axis=1).T)


@pytest.mark.parametrize("encoding", encodings.ENCODINGS, ids=lambda encoding: encoding.name)
def test_tables_of_the_engine_are_recomputed_to_the_bit(encoding):
    num_positions = 600
    config = check_certificate.CONFIGS[encoding.name]
    assert config == (
        encoding.head_dim,
        encoding.rotary.base,
        encoding.rotary.scale,
        encoding.num_rotated_pairs,
    )
    frequency_R = encoding.frequencies()
    tables = [table_SxR.astype(jnp.bfloat16) for table_SxR in rotary.rotary_tables_f32(frequency_R, num_positions)]
    for pair in (0, 1, 2, 7, 30, encoding.num_rotated_pairs - 1):
        found = check_certificate.frequency(config, pair, check_certificate.REFERENCE)
        assert found == int(float(frequency_R[pair]) * 2**80) << (check_certificate.WORK - 80)
        rows = check_certificate.make_table(config, pair, check_certificate.HF_BF16, num_positions)
        for column, table_SxR in enumerate(tables):
            found_S = np.array([row[column] / 2**check_certificate.BITS for row in rows])
            np.testing.assert_array_equal(found_S, table_SxR[:, pair].astype(np.float64))


@pytest.mark.parametrize(("name", "pair"), [("local256", 0), ("global512p", 5), ("g3global256s8", 40)])
def test_real_tables_are_cosines_and_sines(name, pair):
    head_dim, base, scale, _ = config = check_certificate.CONFIGS[name]
    rows = check_certificate.make_table(config, pair, check_certificate.REAL, 2000)
    for position in (0, 1, 2, 355, 1999):
        angle = position * (base ** (-2 * pair / head_dim) / scale)
        cosine, sine, error = (item / 2**check_certificate.BITS for item in rows[position])
        assert abs(cosine - math.cos(angle)) < 1e-12 and abs(sine - math.sin(angle)) < 1e-12
        assert math.isclose(error, 2**-21 + (2**-22 * angle if pair else 0))


def test_the_rotation_is_that_of_the_engine_to_the_bit():
    rng = np.random.default_rng(1)
    frequency_R = encodings.LOCAL256.frequencies()
    cos_SxR, sin_SxR = (table_SxR.astype(jnp.bfloat16) for table_SxR in rotary.rotary_tables_f32(frequency_R, 512))
    k_TxH = rng.standard_normal((512, 256)).astype(jnp.bfloat16)
    rotated_TxH = np.asarray(jax.jit(rotary.rotate)(k_TxH[:, None], cos_SxR, sin_SxR))[:, 0]
    for pair in (0, 3, 60, 127):
        rows = check_certificate.make_table((256, 10_000, 1, 128), pair, check_certificate.HF_BF16, 512)
        for position in range(512):
            x, y = (int(float(k_TxH[position, i]) * 2**40) for i in (pair, pair + 128))
            found = [
                item / 2 ** (40 + check_certificate.BITS) for item in check_certificate.rotated(rows[position], x, y)
            ]
            assert found == [float(rotated_TxH[position, i]) for i in (pair, pair + 128)]


# The generator agrees with the checker.


@pytest.mark.parametrize("rule", collisions.RULES)
def test_codes_are_those_of_the_checker(rule):
    rng = np.random.default_rng(2)
    pair_M, count = np.repeat([0, 20, 60, 100], 12), 48
    key_pairs_Mx4 = np.stack(
        [
            pair_M,
            rng.integers(128, 256, count),
            rng.choice((-1, 1), count) * rng.integers(128, 255, count),
            rng.integers(0, 16, count),
        ],
        axis=1,
    )
    codes = collisions.collision_codes(encodings.LOCAL256, rule, key_pairs_Mx4, 400)
    undecided = 0
    for (pair, x, m, e), merged_S, parted_S in zip(
        key_pairs_Mx4.tolist(), codes.merged_MxS, codes.parted_MxS, strict=True
    ):
        rows = check_certificate.make_table(check_certificate.CONFIGS["local256"], pair, rule, 400)
        one, other = (x << (1 + e), m), (x << (1 + e), m + (1 if m > 0 else -1))
        found = np.array([check_certificate.compared(row, one, row, other, rule) for row in rows[1:]])
        np.testing.assert_array_equal(merged_S[1:], found == check_certificate.COLLIDE)
        np.testing.assert_array_equal(parted_S[1:], found == check_certificate.SEPARATE)
        undecided += (found == check_certificate.UNDECIDED).sum()
    assert (undecided > 0) == (rule != collisions.HF_BF16)
    assert not codes.merged_MxS[:, 0].any() and codes.parted_MxS[:, 0].all()


@pytest.mark.parametrize("count", [3, 12, 40])
def test_separates_all_and_confused_positions_by_definition(count):
    rng = np.random.default_rng(count)
    code_MxS = rng.integers(0, 3, (count, 21))
    codes = collisions.Codes(code_MxS == 0, code_MxS == 1)
    confused = [
        [p, other]
        for p in range(1, 21)
        for other in range(21)
        if other != p and not (codes.merged_MxS[:, p] & codes.parted_MxS[:, other]).any()
    ]
    found_S = collisions.separates_all(codes)
    assert found_S.tolist() == [p > 0 and p not in {first for first, _ in confused} for p in range(21)]
    assert collisions.confused_positions(codes, 10_000).tolist() == confused
    assert collisions.confused_positions(codes, 3).tolist() == confused[:3]


@pytest.mark.parametrize(
    ("rule", "num_positions", "key_pair"),
    [
        ("imaginary", 9, (0, 128, 128, 0)),
        ("real", 1, (0, 128, 128, 0)),
        ("real", 1 << 19, (0, 128, 128, 0)),
        ("real", 9, (128, 128, 128, 0)),
        ("real", 9, (-1, 128, 128, 0)),
        ("real", 9, (0, 256, 128, 0)),
        ("real", 9, (0, 128, 255, 0)),
        ("real", 9, (0, 128, 0, 0)),
        ("real", 9, (0, 128, 128, 16)),
        ("real", 9, (0, 128, 128)),
        ("real", 9, (0.0, 128.0, 128.0, 0.0)),
    ],
)
def test_codes_refuse_what_makes_no_sense(rule, num_positions, key_pair):
    with pytest.raises(errors.ConfigError):
        collisions.collision_codes(encodings.LOCAL256, rule, np.array([key_pair]), num_positions)


def test_too_few_candidates_are_told():
    with pytest.raises(errors.ConfigError, match="other candidates"):
        make_certificate.find_key_pairs(encodings.LOCAL256, collisions.REAL, 64, pairs=(0,), pool=8)


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
    assert check("no-decoder", path, "--positions", 384) == HOLDS
    said = capsys.readouterr().out
    assert f"{383**2}; without a witness: 0\n" in said and "HOLDS" in said


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
