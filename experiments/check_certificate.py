"""Checks the exactness theorems of rotary encoding with integers; imports only the standard library.

  python -m experiments.check_certificate no-decoder FILE [--positions N]   T5: no function moves a key stored at p >= 1
  python -m experiments.check_certificate shift N [--scale 8]               T2: re-rotation by d fails, 0 < |d| < N
  python -m experiments.check_certificate value-flip N                      T6: a value at layer 1 flips, 0 < |d| < N

Angles, cosines and sines are computed here, with 160 binary digits. Rules; under each, p = 0 keeps the key as it is:
  real       every pre-rounding value is within (|x1| + |x2|) (2^-21 + 2^-22 p w) of the rotation by the real angle p w
             (without the second term on pair 0, whose angles are exact in float32), then rounded to bfloat16
  reference  the angle is RN32(p RN32(w)), w as the reference code rounds it; within (|x1| + |x2|) 2^-21, then rounded
  hf-bf16    cosine and sine of that angle, both products and their sum are each rounded to bfloat16: nothing is free
Exit codes: 0 the theorem holds, 1 it does not, or is not decided, 2 bad input, or a table that float64 leaves open.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import math
import sys
import time

HOLDS, FAILS, REFUSED = range(3)
WORK, BITS = 160, 64  # Fraction digits of angles and their functions; of the entries of a table.
ONE = 1 << WORK
REAL, REFERENCE, HF_BF16 = RULES = ("real", "reference", "hf-bf16")
COLLIDE, SEPARATE, UNDECIDED = range(3)
MAX_POSITIONS, MAX_KEY_PAIRS, MAX_BYTES = 1 << 18, 1 << 10, 1 << 16
CONFIG_FIELDS = ("name", "head_dim", "base", "scale", "rotated_pairs")
CONFIGS = {
    "local256": (256, 10_000, 1, 128),
    "g3global256": (256, 1_000_000, 1, 128),
    "g3global256s8": (256, 1_000_000, 8, 128),
    "global512p": (512, 1_000_000, 1, 64),
    "local128": (128, 10_000, 1, 64),
    "g3global128s8": (128, 1_000_000, 8, 64),
}
CONSTANTS = {
    "format": "rope-exactness-certificate/1",
    "theorem": "no-decoder",
    "storage": "bfloat16",
    "key_pair_encoding": "[pair, X, M, E]: k1=(X/128, M/2^(8+E)), k2=(X/128, (M+sign(M))/2^(8+E)); "
    "all other head coordinates arbitrary and equal",
}
canonical = functools.partial(json.dumps, sort_keys=True, separators=(",", ":"))
MARGINS = {REAL: {"eps_log2": -22, "eta_log2": -21}, REFERENCE: {"eta_log2": -21}, HF_BF16: {}}
SHIFT_KEYS, SHIFT_TRIES = ((1, 0), (1, 1), (3, 1)), 256
QUERY, KEY_FAR, KEY_NEAR, FLIP_GAP, FLIP_EXTRA = (314, 0), (170, 264), (314, 0), 25, 4096


class BadInput(Exception):
    """A certificate that is refused before anything is computed."""


def unique(fields: list[tuple[str, object]]) -> dict:
    """Returns the object of these fields, none of which may be there twice."""
    if len(dict(fields)) < len(fields):
        raise ValueError("a field is there twice")
    return dict(fields)


def rounded(value: int, digits: int) -> int:
    """Rounds to the nearest integer with that many significant binary digits, ties to even."""
    shift = value.bit_length() - digits
    return value if shift <= 0 else (value + (1 << (shift - 1)) - 1 + (value >> shift & 1)) >> shift << shift


def settled(value: int, *digits: int) -> int:
    """`value`, of which a float64 knows all but 2^-50, rounded to digits after digits."""
    low, high = (value + side * ((abs(value) >> 50) + 1) for side in (-1, 1))
    for count in digits:
        low, high = rounded(low, count), rounded(high, count)
    if low != high:
        raise BadInput(f"a float64 could round {value} / 2^{WORK} either way: not decided")
    return low


def power(base: int, exponent: int, root: int) -> int:
    """base^(exponent/root) in fixed point; `root` is a power of two."""
    value = base**exponent << (WORK * root)
    for _ in range(root.bit_length() - 1):
        value = math.isqrt(value)
    return value


def cos_sin(angle: int) -> tuple[int, int]:
    """Cosine and sine of an angle up to 1, within 2^-150."""
    sums, term, order = [ONE, 0, 0, 0], ONE, 0
    while term:
        order += 1
        term = (term * abs(angle) >> WORK) // order
        sums[order % 4] += term
    return sums[0] - sums[2], (sums[1] - sums[3]) * (1 if angle > 0 else -1)


def turned(point: tuple[int, int], turn: tuple[int, int]) -> tuple[int, int]:
    """Multiplies two numbers of the unit circle."""
    (a, b), (c, s) = point, turn
    return (a * c - b * s) >> WORK, (a * s + b * c) >> WORK


def frequency(config: tuple[int, int, int, int], pair: int, rule: str) -> int:
    """w of a pair, the angle per position, in fixed point."""
    head_dim, base, scale, _ = config
    raised = power(base, 2 * pair, head_dim)
    if rule == REAL:
        return ONE * ONE // (raised * scale)
    return rounded(ONE * ONE // settled(raised, 24), 24) // scale  # Scales are powers of two.


def make_table(config: tuple[int, int, int, int], pair: int, rule: str, positions: int) -> list:
    """One row per position: cosine, sine and error for each unit of |x1| + |x2|."""
    step, rows = frequency(config, pair, rule), []
    point, turn = (ONE, 0), cos_sin(step)
    for position in range(positions):
        angle = position * step
        cosine, sine = point if rule == REAL else turned(point, cos_sin(rounded(angle, 24) - angle))
        if rule == HF_BF16 and position:
            cosine, sine = settled(cosine, 24, 8), settled(sine, 24, 8)
        error = (1 << (BITS - 21)) + (angle >> (WORK - BITS + 22) if rule == REAL and pair else 0) + 4
        rows.append((cosine >> (WORK - BITS), sine >> (WORK - BITS), error))
        point = turned(point, turn)
    return rows


def cell(value: int) -> int:
    """Number of the bfloat16 to which a value rounds, rising with it; both neighbours of a tie count as on its side."""
    if value < 0:
        return -cell(-value)
    length = max(value.bit_length(), 9)
    return (length << 7) + ((value + (1 << (length - 9))) >> (length - 8))


def bounds(row: tuple[int, int, int], x: int, y: int) -> list[tuple[int, int]]:
    """Both coordinates of (x, y) rotated, as open intervals."""
    cosine, sine, error = row
    error *= abs(x) + abs(y)
    first, second = cosine * x - sine * y, cosine * y + sine * x
    return [(first - error, first + error), (second - error, second + error)]


def rotated(row: tuple[int, int, int], x: int, y: int) -> tuple[int, int]:
    """Both coordinates of (x, y) rotated, the products and their sum rounded to bfloat16."""
    cosine, sine, _ = row
    first = rounded(cosine * x, 8) - rounded(sine * y, 8)
    second = rounded(cosine * y, 8) + rounded(sine * x, 8)
    return rounded(first, 8), rounded(second, 8)


def stored(row: tuple[int, int, int], x: int, y: int, rule: str) -> tuple[int, int] | None:
    """Returns the key stored for (x, y), in units of `row` times theirs; None where the rule leaves a choice."""
    if rule == HF_BF16:
        return rotated(row, x, y)
    ends = bounds(row, x, y)
    is_settled = all(cell(low) == cell(high) for low, high in ends)
    return tuple(rounded(low + high >> 1, 8) for low, high in ends) if is_settled else None


def compared(row: tuple[int, int, int], one: tuple, other_row: tuple[int, int, int], other: tuple, rule: str) -> int:
    """Returns whether two keys, each rotated by its row, become one stored key in every implementation, or never."""
    if rule == HF_BF16:
        return COLLIDE if rotated(row, *one) == rotated(other_row, *other) else SEPARATE
    do_collide = True
    for (low1, high1), (low2, high2) in zip(bounds(row, *one), bounds(other_row, *other), strict=True):
        if cell(high1) < cell(low2) or cell(high2) < cell(low1):
            return SEPARATE
        do_collide = do_collide and cell(min(low1, low2)) == cell(max(high1, high2))
    return COLLIDE if do_collide else UNDECIDED


def check_no_decoder(document: dict, positions: int) -> tuple[bool, str]:
    """T5: for every p, each other p' has a key pair that is one key at p and two at p'."""
    name, rule, pair = document["config"]["name"], document["angle_rule"], None
    everywhere, merged, unless_apart = (1 << positions) - 1, [[] for _ in range(positions)], []
    for number, (next_pair, x, m, e) in enumerate(sorted(document["key_pairs"])):
        if next_pair != pair:
            pair, table = next_pair, make_table(CONFIGS[name], next_pair, rule, positions)
        one, other = (x << (1 + e), m), (x << (1 + e), m + (1 if m > 0 else -1))
        found = {row: compared(row, one, row, other, rule) for row in set(table)}
        found[table[0]] = SEPARATE  # At position 0 nothing is rotated: the two keys stay two.
        codes = [found[row] for row in table]
        unless_apart.append(everywhere ^ int("".join("01"[code is SEPARATE] for code in reversed(codes)), 2))
        for position in (position for position, code in enumerate(codes) if code is COLLIDE):
            merged[position].append(number)
    masks = ([unless_apart[number] for number in merged[position]] for position in range(1, positions))
    failing = sum(functools.reduce(int.__and__, mask, everywhere).bit_count() - 1 for mask in masks)
    report = f"""{name}, rule {rule}, {len(document["key_pairs"])} key pairs, positions below {positions}
ordered pairs of a position p >= 1 and another one p': {(positions - 1) ** 2}; without a witness: {failing}
claim: no function of the bfloat16 key stored at p gives the one of p', unless p' = p"""
    return failing == 0, report


def check_shift(count: int, scale: int, rule: str) -> tuple[bool, str]:
    """T2: for every d there is a key that, rotated on by d in its stored form, is not the fresh key."""
    table = make_table((256, 10_000, scale, 128), 0, rule, count + SHIFT_TRIES)

    def is_witness(source: int, shift: int, x: int, y: int) -> bool:
        cosine, sine, error = table[abs(shift)]
        turn, fresh = (cosine, sine if shift > 0 else -sine, error), (x << BITS, y << BITS)
        kept = stored(table[source], x, y, rule)
        return kept is not None and compared(turn, kept, table[source + shift], fresh, rule) is SEPARATE

    failing, deepest = 0, 0
    for shift in (sign * size for size in range(1, count) for sign in (1, -1)):
        first = max(1, -shift)
        sources = range(first, first + SHIFT_TRIES)
        tries = next((at - first for at in sources if any(is_witness(at, shift, *key) for key in SHIFT_KEYS)), None)
        failing, deepest = failing + (tries is None), max(deepest, tries or 0)
    report = f"""pair 0, scale {scale}, rule {rule}, keys {SHIFT_KEYS}
shifts d, 0 < |d| < {count}: {2 * (count - 1)}; without a witness: {failing}
the first position with a witness is at most {deepest} after the first that the shift admits
claim: for every d some stored key, rotated on by d, is not the fresh key"""
    return failing == 0, report


def check_value_flip(count: int, rule: str) -> tuple[bool, str]:
    """T6: tokens at p and p + 1 with values +1 and -1; some output is +1 at one of p, p + d and -1 at the other."""
    positions, unit, ups, downs = count + FLIP_EXTRA, 1 << (2 * BITS), 0, 0
    table = make_table(CONFIGS["local256"], 0, rule, positions + 1)
    for position in range(1, positions):
        query, near = (stored(table[position + 1], *key, rule) for key in (QUERY, KEY_NEAR))
        far = stored(table[position], *KEY_FAR, rule)
        if query and near and far:
            low = high = [query[0] * key[0] + query[1] * key[1] for key in (far, near)]
            if rule == HF_BF16:  # Logits are rounded too, after a sum in float32 that may be off by less than 1 / 32.
                low, high = ([rounded(logit + side, 8) for logit in low] for side in (-(unit >> 5), unit >> 5))
            ups |= (low[0] - high[1] >= FLIP_GAP * unit) << position
            downs |= (low[1] - high[0] >= FLIP_GAP * unit) << position
    failing = sum(not (ups & downs >> shift or downs & ups >> shift) for shift in range(1, count))
    report = f"""q = {QUERY}, keys {KEY_FAR} and {KEY_NEAR}, pair 0, rule {rule}, positions below {positions}
output forced to +1 at {ups.bit_count()} of them, to -1 at {downs.bit_count()}
shifts d, 0 < |d| < {count}: {2 * (count - 1)}; without a witness: {2 * failing}
claim: for every d some p has outputs of opposite sign at p and p + d"""
    return failing == 0, report


def read_certificate(path: str) -> dict:
    """Reads a certificate and checks that nothing in it is missing, unknown, of another type or out of range."""
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ValueError(f"longer than {MAX_BYTES} bytes")
        document = json.loads(raw, object_pairs_hook=unique)
        name, rule = document["config"]["name"], document["angle_rule"]
        config = dict(zip(CONFIG_FIELDS, (name, *CONFIGS[name]), strict=True))
        wanted = CONSTANTS | MARGINS[rule] | {"config": config, "angle_rule": rule}
        positions, key_pairs = (document[field] for field in ("positions", "key_pairs"))
        if document.pop("sha256", ...) not in (..., hashlib.sha256(canonical(document).encode()).hexdigest()):
            raise ValueError("sha256 is not that of the rest: the file was changed")
        if canonical(document) != canonical(wanted | {"positions": positions, "key_pairs": key_pairs}):
            raise ValueError(f"fields: wanted positions, key_pairs and {wanted}")
        sizes_fit = type(positions) is int and 2 <= positions <= MAX_POSITIONS and 1 <= len(key_pairs) <= MAX_KEY_PAIRS
        if not sizes_fit or type(key_pairs) is not list:
            raise ValueError(f"wanted 2 to {MAX_POSITIONS} positions and a list of 1 to {MAX_KEY_PAIRS} key_pairs")
        for pair, x, m, e in key_pairs:
            is_known = {type(item) for item in (pair, x, m, e)} == {int} and 0 <= pair < config["rotated_pairs"]
            if not (is_known and 128 <= x < 256 and 128 <= abs(m) < 255 and 0 <= e < 16):
                raise ValueError(f"key pair {[pair, x, m, e]}: wanted pair, X, M, E as the encoding says")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise BadInput(f"{path}: {type(error).__name__}: {error}") from None
    return document


def main(arguments: list[str] | None = None) -> int:
    """Decides what the command line asks and returns the exit code."""
    parser = argparse.ArgumentParser(prog="check_certificate", description="exit 0 holds, 1 does not, 2 bad input")
    commands = parser.add_subparsers(dest="command", required=True)
    no_decoder, shift, value_flip = map(commands.add_parser, ("no-decoder", "shift", "value-flip"))
    no_decoder.add_argument("file")
    no_decoder.add_argument("--positions", type=int)
    for command in (shift, value_flip):
        command.add_argument("positions", type=int)
        command.add_argument("--rule", choices=(REAL, HF_BF16), default=REAL)
    shift.add_argument("--scale", type=int, choices=(1, 8), default=1)
    asked, began = parser.parse_args(arguments), time.perf_counter()
    try:
        document = read_certificate(asked.file) if asked.command == "no-decoder" else {"positions": MAX_POSITIONS}
        positions, most = asked.positions, document["positions"]
        if positions is not None and not 2 <= positions <= most:
            raise BadInput(f"positions or shifts: got {positions}, wanted 2 to {most}")
        if asked.command == "no-decoder":
            holds, report = check_no_decoder(document, positions or most)
        elif asked.command == "shift":
            holds, report = check_shift(positions, asked.scale, asked.rule)
        else:
            holds, report = check_value_flip(positions, asked.rule)
    except BadInput as error:
        with contextlib.suppress(OSError):  # A full stderr must not turn "bad input" into "does not hold".
            print(f"check_certificate: {error}", file=sys.stderr)
        return REFUSED
    print(report, f"{'HOLDS' if holds else 'DOES NOT HOLD'} ({time.perf_counter() - began:.1f} s)", sep="\n")
    return HOLDS if holds else FAILS


if __name__ == "__main__":
    sys.exit(main())
