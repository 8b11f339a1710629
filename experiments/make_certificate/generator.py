"""Finds key pairs that prove that no function of a stored key moves it, and writes them as a certificate.

  python -m experiments.make_certificate --encoding=local256 --rule=real --positions=32768 --out=FILE

Greedy: of the pairs (p, p') that nothing tells apart yet a sample is drawn, and from a pool of candidates drawn at
random the one that settles most of it is taken, until no pair is left. `experiments.check_certificate` decides; this
only proposes.
"""

from __future__ import annotations

import hashlib
import json

from absl import flags
import numpy as np

from experiments import check_certificate, harness
from kvgraft_jax import errors, paths, progress
from kvgraft_jax.relocation import collisions, encodings

SAMPLE = 1 << 14
_LEAVE = 16  # A sample is drawn anew once all but this part of it is settled.


def find_key_pairs(
    encoding: encodings.Encoding,
    rule: str,
    num_positions: int,
    *,
    pairs: tuple[int, ...],
    pool: int = 1024,
    seed: int = 0,
) -> np.ndarray:
    """Finds key pairs that show that no position's key decides another position's key.

    Args:
      encoding, rule, num_positions: as for `collision_codes`.
      pairs: rotary pairs to draw from; half of the candidates turn on the first.
      pool: number of candidates.
      seed: of the candidates and samples.

    Returns:
      int64 [M, 4].

    Raises:
      ConfigError: the candidates do not settle everything; draw more, or from other pairs.
    """
    rng = np.random.default_rng(seed)
    candidate_Mx4 = _draw(rng, pairs, pool)
    codes = collisions.collision_codes(encoding, rule, candidate_Mx4, num_positions)
    parted_MxQ = np.packbits(codes.parted_MxS, axis=1)
    merged_SxV, parted_SxV = (np.packbits(code_MxS.T, axis=1) for code_MxS in (codes.merged_MxS, codes.parted_MxS))
    open_SxQ = np.tile(np.packbits(np.ones(num_positions, bool)), (num_positions, 1))
    open_SxQ[0] = 0
    diagonal_S = np.arange(num_positions)
    open_SxQ[diagonal_S, diagonal_S // 8] &= ~(128 >> diagonal_S % 8).astype(np.uint8)
    chosen = []
    with progress.bar(unit=" key pairs", description=f"{encoding.name} {rule}") as bar:
        while len(sample_Tx2 := _sample(rng, open_SxQ)):
            covers_TxV = merged_SxV[sample_Tx2[:, 0]] & parted_SxV[sample_Tx2[:, 1]]
            enough = len(covers_TxV) // _LEAVE if len(covers_TxV) == SAMPLE else 0
            while len(covers_TxV) > enough:
                count_M = np.unpackbits(covers_TxV, axis=1, count=pool).sum(0, dtype=np.int64)
                best = int(count_M.argmax())
                if not count_M[best]:
                    raise errors.ConfigError(
                        f"{encoding.name} {rule}: {pool} candidates on pairs {pairs} leave {len(sample_Tx2)} pairs of "
                        f"positions or more together, e.g. {sample_Tx2[:9].tolist()}; ask for other candidates"
                    )
                chosen.append(best)
                open_SxQ[codes.merged_MxS[best]] &= ~parted_MxQ[best]
                is_open_T = covers_TxV[:, best // 8] >> (7 - best % 8) & 1 == 0
                covers_TxV, sample_Tx2 = covers_TxV[is_open_T], sample_Tx2[is_open_T]
                bar.update()
    return candidate_Mx4[sorted(chosen)]


def certificate(encoding: encodings.Encoding, rule: str, num_positions: int, key_pairs_Mx4: np.ndarray) -> str:
    """Returns the text of a certificate: its digest comes last."""
    document = {
        **check_certificate.CONSTANTS,
        **check_certificate.MARGINS[rule],
        "config": {
            "name": encoding.name,
            "head_dim": encoding.head_dim,
            "base": int(encoding.rotary.base),
            "scale": int(encoding.rotary.scale),
            "rotated_pairs": encoding.num_rotated_pairs,
        },
        "positions": num_positions,
        "angle_rule": rule,
        "key_pairs": sorted(key_pairs_Mx4.tolist()),
    }
    document["sha256"] = hashlib.sha256(check_certificate.canonical(document).encode()).hexdigest()
    lines = [f"{json.dumps(field)}: {json.dumps(value)}" for field, value in document.items()]
    return "{" + ",\n".join(lines).replace(": [[", ": [\n[").replace("], [", "],\n[") + "}\n"


def run(
    encoding: str | None,
    rule: str | None,
    positions: int,
    out: str | None,
    pairs: list[int] | None,
    pool: int,
    seed: int,
) -> int:
    """Finds the key pairs and writes the certificate."""
    if out is None:
        raise errors.InputError("--out: got none, wanted --out=FILE, a new file in a folder that exists")
    file = paths.absolute(out, "--out")
    if file.exists() or not file.parent.is_dir():
        raise errors.InputError(f"--out: got {errors.shown(out)}, wanted a new file in a folder that exists")
    if pool < 1 or seed < 0:
        raise errors.InputError(f"--pool, --seed: got {pool}, {seed}, wanted 1 or more, 0 or more")
    found = encodings.get(encoding)
    chosen = tuple(pairs) if pairs else default_pairs(found, rule)
    key_pairs_Mx4 = find_key_pairs(found, rule, positions, pairs=chosen, pool=pool, seed=seed)
    text = certificate(found, rule, positions, key_pairs_Mx4)
    harness.write_text(file, text)
    print(f"{file}: {len(key_pairs_Mx4)} key pairs, {len(text)} bytes; python -m experiments.check_certificate decides")
    return harness.HOLDS


def default_pairs(encoding: encodings.Encoding, rule: str) -> tuple[int, ...]:
    """Returns pair 0 and seven others; under 'real', slow pairs that still rotate and whose angles are known well."""
    rotated_R = encoding.frequencies()[: encoding.num_rotated_pairs]
    fits_R = (rotated_R < 0.04) & (rotated_R > 0.0003) if rule == collisions.REAL else rotated_R < rotated_R[0]
    slow = np.flatnonzero(fits_R)
    return 0, *(int(pair) for pair in np.linspace(min(slow[0], slow[-1] - 6), slow[-1], 7))


def _draw(rng: np.random.Generator, pairs: tuple[int, ...], count: int) -> np.ndarray:
    """Candidates [count, 4]; E from 1 to 3, by which about half of the positions merge a key pair."""
    pair_M = np.where(rng.random(count) < 0.5, pairs[0], rng.choice(pairs, count))
    sign_M = rng.choice((-1, 1), count)
    return np.stack(
        [pair_M, rng.integers(128, 256, count), sign_M * rng.integers(128, 255, count), rng.integers(1, 4, count)],
        axis=1,
    )


def _sample(rng: np.random.Generator, open_SxQ: np.ndarray) -> np.ndarray:
    """Draws open pairs (p, p') at random with repetition, [SAMPLE, 2]; returns all where there are fewer."""
    count_S = np.array([np.bitwise_count(open_Q).sum(dtype=np.int64) for open_Q in open_SxQ])
    total = int(count_S.sum())
    ranks = np.arange(total) if total < SAMPLE else np.sort(rng.integers(total, size=SAMPLE))
    ends_S = np.cumsum(count_S)
    position_T = np.searchsorted(ends_S, ranks, side="right")
    other_T = np.empty_like(position_T)
    for position in np.unique(position_T):
        is_here_T = position_T == position
        others = np.flatnonzero(np.unpackbits(open_SxQ[position]))
        other_T[is_here_T] = others[ranks[is_here_T] - (ends_S[position] - count_S[position])]
    return np.stack([position_T, other_T], axis=1)


def main() -> None:
    """Reads the flags and runs."""
    encoding = flags.DEFINE_string("encoding", None, ", ".join(item.name for item in encodings.ENCODINGS))
    rule = flags.DEFINE_enum("rule", collisions.REAL, collisions.RULES, "what is known of the arithmetic")
    positions = flags.DEFINE_integer("positions", 32_768, "positions below this one")
    out = flags.DEFINE_string("out", None, "the file to write; a new one")
    pairs = flags.DEFINE_multi_integer("pair", None, "a rotary pair to draw from; default: 0 and seven others")
    pool = flags.DEFINE_integer("pool", 4096, "candidates to choose from")
    seed = flags.DEFINE_integer("seed", 0, "of the candidates")

    def start() -> int:
        return run(encoding.value, rule.value, positions.value, out.value, pairs.value, pool.value, seed.value)

    harness.start("make_certificate", start)
