"""The rotary document keeps its word: what it names exists, its figures are those recorded, its examples come out."""

from __future__ import annotations

import functools
import itertools
import json
import pathlib
import re

import jax.numpy as jnp
import numpy as np
import pytest

from kvgraft_jax.grafting import rows as rows_lib
from kvgraft_jax.relocation import bits, collisions, encodings, keys
from kvgraft_jax.relocation import tables as tables_lib
from tests import test_docs, tiny

ROOT = pathlib.Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "rotary.md").read_text()
CERTIFICATES = ROOT / "results" / "certificates"
GRID_MOVES = ((1, 2), (1, 1000), (7, 8), (2, 0))


def tables(text: str) -> dict[str, list[tuple[str, ...]]]:
    """Rows below `<!-- table: NAME -->`, without the heading and commas; tables of one name together."""
    found = {}
    for name, lines in re.findall(r"^<!-- table: (\w+) -->\n((?:\|.*\n)+)", text, re.M):
        rows = [tuple(cell.strip(" `") for cell in line.strip("|").split("|")) for line in lines.splitlines()[2:]]
        found.setdefault(name, []).extend(tuple(re.sub(r"(?<=\d),(?=\d)", "", cell) for cell in row) for row in rows)
    return found


@functools.cache
def result() -> dict:
    return json.loads((ROOT / "results" / "rotary" / "result.json").read_text())


def part(name: str) -> list[dict]:
    """Returns the table of the recorded run whose name begins so."""
    (rows,) = [rows for title, rows in result()["tables"].items() if title.startswith(name)]
    return rows


def texts(*values: object) -> tuple[str, ...]:
    return tuple(f"{value:.8f}".rstrip("0") if isinstance(value, float) else str(value) for value in values)


def programs():
    (engines,) = [row for row in part("programs") if row["program"] == "host table, jitted"]
    return {texts(*item) for item in engines.items()}


def transports():
    return {texts(*row.values()) for row in part("transports")}


def compositions():
    names = ("encoding", "table", "positions", "norm_1_beyond_0", "depth", "candidates", "exact")
    rows = [row | {"depth": f"{row['depth_min']} to {row['depth_max']}"} for row in part("compositions")]
    return {texts(*(row[name] for name in names)) for row in rows}


def shifts():
    return {texts(*row.values()) for row in part("the engine's float32 program: re-rotation")}


def rows():
    return {texts(*row.values()) for row in part("tables: rows")}


def float32():
    return {texts(*row.values()) for row in part("the engine's float32 program: pairs")}


def decoders():
    found = {}
    for row in part("decoders"):
        move = f"{row['stored_at']}, {row['wanted_at']}"
        found[move] = found.get(move, (move,)) + tuple(f"{row[name]:.2f}" for name in ("best", "snap", "rerotate"))
    assert [row["scheme"] for row in part("decoders")] == 7 * ["engine bf16"] + 7 * ["bf16, f32 arithmetic"]
    return set(found.values())


def moves():
    found = {}
    for row in result()["rows"]:
        if row["heads_equal"] is not None:
            place = texts(row["encoding"], row["scheme"], row["position"], row["shift"])
            found.setdefault(place, {})[row["method"]] = f"{row['percent']:.2f}"
            if row["method"] == keys.REROTATE and row["log10_head_equal"] is not None:
                found[place]["log10"] = str(row["log10_head_equal"])
    names = ("rerotate", "unrotate", "linear", "snap", "log10")
    return {place + tuple(got.get(name, "-") for name in names) for place, got in found.items()}


def logits():
    return {texts(*(row[name] for name in ("scheme", "shift", "float32", "bfloat16"))) for row in part("logits")}


def values():
    return {
        texts(*(row[name] for name in ("shift", "layer_0", "layer_1", "layer_2", "layer_5"))) for row in part("values")
    }


def checks():
    return {texts(row["check"], row["found"]) for row in result()["checks"]}


def certificates():
    found = set()
    for path in CERTIFICATES.glob("*.json"):
        document = json.loads(path.read_text())
        ordered = (document["positions"] - 1) ** 2
        row = document["positions"], len(document["key_pairs"]), len(path.read_bytes()), ordered
        found.add(texts(str(path.relative_to(ROOT)), *row))
    return found


def commands():
    """From what the checker said: shifts, those without a witness, then the farthest position, or +1 and -1."""
    said = (CERTIFICATES / "decided.txt").read_text().split("$ python -m experiments.check_certificate ")
    found = set()
    for name, _, report in (part.partition("\n") for part in said if part.startswith(("shift", "value-flip"))):
        shifts = re.findall(r"^shifts d, .*: (\d+); without a witness: (\d+)$", report, re.M)
        rest = re.findall(r"at most (\d+) after", report) or re.findall(r"[+-]1 at (\d+)", report)
        assert len(shifts) == 1 and "\nHOLDS (" in report
        found.add((name, *shifts[0], *rest))
    return found


def turned(k: np.ndarray, angle: float) -> np.ndarray:
    """Grid points, as complex numbers, turned and rounded to the grid."""
    turned_k = k * np.exp(1j * angle)
    return np.rint(turned_k.real) + 1j * np.rint(turned_k.imag)


@functools.cache
def grid():
    """Counted and predicted share of grid points whose neighbour merges with them at p and not at p'."""
    side = np.arange(2000.0)
    k, rows = side[:, None] + 1j * side, set()
    for p, other in GRID_MOVES:
        merged, parted = turned(k, p) == turned(k + 1, p), turned(k, other) != turned(k + 1, other)
        stay, move = ((1 - abs(np.cos(angle))) * (1 - abs(np.sin(angle))) for angle in (p, other))
        rows.add((f"{p}, {other}", str((merged & parted).sum()), f"{stay * (1 - move):.6f}"))
    return rows


SOURCES = {
    source.__name__: source
    for source in (
        *(programs, transports, compositions, rows, shifts, float32, decoders, moves, logits, values, checks),
        *(certificates, commands, grid),
    )
}


@pytest.mark.parametrize("check", test_docs.CHECKS, ids=lambda check: check.__name__)
def test_what_the_document_names_exists(check):
    assert check(TEXT) == []


def test_the_tests_that_it_names_exist():
    named = re.findall(r"(tests/[\w/]+\.py)::(\w+)", TEXT)
    assert named and [name for path, name in named if f"\ndef {name}(" not in (ROOT / path).read_text()] == []


def test_every_theorem_and_exception_is_stated_and_has_a_command():
    for theorem in ("T1", "T2", "T3 (bound)", "T4", "T5", "T5'", "T6"):
        assert f"\n**{theorem}.**" in TEXT or f"\n**{theorem}." in TEXT
    for number in range(1, 12):
        (line,) = re.findall(rf"^- \*\*E{number},.*$", TEXT, re.M)
        assert "`rotary_exactness`" in line or "`tests/" in line


def test_its_tables_are_those_with_a_source():
    assert sorted(tables(TEXT)) == sorted(SOURCES)
    named = {name for name, *_ in tables(TEXT)["certificates"]}
    for encoding in encodings.CERTIFIED:
        assert {
            f"results/certificates/no_decoder_{encoding.name}_32768_{rule}.json" for rule in ("real", "hf-bf16")
        } <= named


@pytest.mark.parametrize("name", SOURCES)
def test_figures_in_tables_are_the_recorded_ones(name):
    assert [row for row in tables(TEXT)[name] if row not in SOURCES[name]()] == []


@pytest.mark.parametrize("name", SOURCES)
def test_a_wrong_digit_in_a_table_is_found(name):
    row = tables(TEXT)[name][-1]
    place = max(index for index, cell in enumerate(row) if cell[-1:].isdigit())
    wrong = (*row[:place], row[place][:-1] + str((int(row[place][-1]) + 1) % 10), *row[place + 1 :])
    assert row in SOURCES[name]() and wrong not in SOURCES[name]()


def test_the_list_of_results_says_what_the_checker_said():
    listed = re.findall(
        r"^\| `((?:shift|value-flip) [^`]*)` \| (.*) \| .* \|$", (ROOT / "results/README.md").read_text(), re.M
    )
    assert {(name, *re.findall(r"(?<![+\-\d])\d+", found.replace(",", ""))) for name, found in listed} == commands()


def test_figures_of_the_270m_are_the_recorded_ones():
    recorded = json.loads((ROOT / "results/rotary/emitted_keys/result.json").read_text())
    changed, total = recorded["keys_that_a_rotation_by_0_changes"], recorded["keys"]
    assert f"changes {changed['sliding']:,} of {total['sliding']:,} keys" in TEXT


def test_figures_in_the_text_are_the_recorded_ones():
    (lucky,) = [
        row["heads_equal"]
        for row in result()["rows"]
        if (row["encoding"], row["scheme"], row["method"]) == ("g3global256s8", "bf16, f32 arithmetic", "snap")
        and (row["position"], row["shift"]) == (1, 1)
    ]
    assert f"snap keeps {lucky} of 2,048" in TEXT
    bound = max(row["error_of_bound"] for row in result()["rows"] if row["error_of_bound"] is not None)
    assert f"is {bound} of it" in TEXT
    assert f"{result()['own_position_elements']:,} elements" in TEXT and result()["own_position_mismatches"] == 0


def test_shares_on_a_uniform_grid_are_those_of_the_theorem():  # T5'
    assert all(abs(int(counted) / 4e6 - float(density)) < 5e-5 for _, counted, density in grid())


def test_the_witness_by_hand():  # T2
    table = tables_lib.make_table(encodings.LOCAL256, 3)
    k_raw_TxH = np.zeros((1, 256), jnp.bfloat16)
    k_raw_TxH[0, 0] = 1
    for scheme in (keys.ENGINE_BF16, keys.BF16_WIDE):
        stored, fresh = (keys.fresh_key(jnp.asarray(k_raw_TxH), table, p, scheme) for p in (1, 2))
        assert (stored[0, [0, 128]] * 256).tolist() == [138, 215] and float(fresh[0, 128]) == 233 / 256
        assert float(keys.rerotated_key(stored, table, 1, scheme)[0, 128]) == 232 / 256


@pytest.mark.parametrize("scheme", keys.SCHEMES, ids=lambda scheme: scheme.name)
def test_zero_pairs_keep_their_value_and_not_their_sign(scheme):  # E3
    table = tables_lib.make_table(encodings.LOCAL256, 3)
    k_raw_TxH = jnp.zeros((1, 256), scheme.raw)
    stored, fresh = (keys.fresh_key(k_raw_TxH, table, position, scheme) for position in (1, 2))
    moved = keys.rerotated_key(stored, table, 1, scheme)
    assert not moved.any() and not fresh.any()
    assert int(bits.bit_difference_count(moved, fresh)) == 4


@pytest.mark.parametrize("scheme", keys.SCHEMES, ids=lambda scheme: scheme.name)
def test_zeros_of_either_sign_have_no_decoder(scheme):  # E3
    num_positions, zeros = 64, ((0.0, 0.0), (0.0, -0.0), (-0.0, 0.0), (-0.0, -0.0))
    table = tables_lib.make_table(encodings.LOCAL256, num_positions)
    k_raw_TxH = np.zeros((len(zeros), 256), jnp.dtype(scheme.raw))
    k_raw_TxH[:, [0, 128]] = zeros
    signs = []
    for position in range(num_positions):
        pair_Tx2 = np.asarray(keys.fresh_key(jnp.asarray(k_raw_TxH), table, position, scheme))[:, [0, 128]]
        assert not pair_Tx2.any()
        signs.append([tuple(map(bool, sign_2)) for sign_2 in np.signbit(pair_Tx2)])
        c, s = (x_SxR[position, 0] for x_SxR in (table.cos_SxR, table.sin_SxR))
        assert signs[-1][0] == (c < 0 < s, c < 0 and s < 0)  # (+0, +0): known from the position.
    two_zeros = list(itertools.combinations(range(len(zeros)), 2))
    undecided = [
        (p, other)
        for p, other in itertools.permutations(range(num_positions), 2)
        if p and any(signs[p][a] == signs[p][b] and signs[other][a] != signs[other][b] for a, b in two_zeros)
    ]
    assert signs[1][0] == signs[1][1] and signs[2][0] != signs[2][1]
    assert f"for {len(undecided):,} of {(num_positions - 1) ** 2:,} ordered pairs" in TEXT


def test_a_half_turn_loses_small_components():  # E7
    codes = collisions.collision_codes(encodings.LOCAL256, "hf-bf16", np.array([[0, 128, 208, 13]]), 356)
    assert codes.merged_MxS[0, 355]


def test_deeper_rows_depend_on_the_context_within_reach():  # E11
    """The first token alone differs: layer l sees it from positions up to l (w - 1), as all of these layers slide."""
    rest = tiny.tokens(4 * tiny.WINDOW)
    states = [tiny.engine().prefill([first, *rest]) for first in (1, 2)]
    (sliding, _), length = tiny.model().config.kinds, len(rest) + 1
    assert sliding.layers[:3] == (0, 1, 2)
    a, b = (rows_lib.read_rows(state.blocks, 0, 0, length, np.dtype(np.uint16)) for state in states)
    for layer, differs_2xS in enumerate((a != b).any(axis=(3, 4))[:3]):
        for differs_S in differs_2xS:
            reach = layer * (tiny.WINDOW - 1)
            assert not differs_S[reach + 1 :].any() and differs_S[0]
            assert not layer or differs_S[1 : reach + 1].any()
