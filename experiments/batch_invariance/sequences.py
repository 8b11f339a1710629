"""Sequences to run alone and beside others: what each reads and how it decodes, and the hash of what that leaves."""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np

from experiments import corpus as corpus_lib
import kvgraft_jax as kg
from kvgraft_jax import digest, errors
from kvgraft_jax.grafting import compare
from kvgraft_jax.grafting import manifest as manifest_lib

SHORTEST = 2
_STOP_EVERY = 16
_TEMPERATURES = (0.7, 1.0, 4.0, 10.0)  # The high ones make random models draw other tokens than the likeliest.


@dataclasses.dataclass(frozen=True)
class Sequence:
    """What one sequence does.

    Attributes:
      number: of all.
      continues: whether it reads on after the shared grafted prefix, or into a fresh context.
      first: tokens that it reads.
      second: tokens that it reads in a further call; may be empty.
      sampling: how it then decodes; None is greedy.
    """

    number: int
    continues: bool
    first: tuple[int, ...]
    second: tuple[int, ...]
    sampling: kg.Sampling | None

    @property
    def num_tokens(self) -> int:
        """Returns how many tokens it reads."""
        return len(self.first) + len(self.second)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a sequence left.

    Attributes:
      read: SHA-256 of K/V rows, logits and tokens after the first call; None where nobody looked then.
      extended: the same after the second call; None likewise, or where there is none.
      decoded: the same after decoding.
      new_tokens: decoded.
    """

    read: str | None
    extended: str | None
    decoded: str
    new_tokens: tuple[int, ...]

    def difference(self, alone: Outcome) -> str | None:
        """Names the first stage at which this outcome is not that of the same sequence by itself; None where it is."""
        for field in dataclasses.fields(self):
            mine, theirs = getattr(self, field.name), getattr(alone, field.name)
            if mine is not None and mine != theirs:
                return field.name
            if str(mine).startswith("refused"):  # All NaN is equal to all NaN, which shows nothing.
                return f"{field.name} ({mine})"
        return None


def draw(number: int, seed: int, corpus: corpus_lib.Corpus, longest: int) -> Sequence:
    """Draws sequence `number`: of any length from a few tokens to `longest`, short ones as likely as long ones."""
    rng = np.random.default_rng([seed, number])
    text = corpus.sample(int(rng.integers(len(corpus.documents))), longest + second_tokens(longest) + 1)
    continues = bool(rng.random() < 0.4)
    begin = 1 if continues else 0  # Begin of text stands in the prefix.
    stop = begin + _length(rng, longest)
    second = _length(rng, second_tokens(longest)) if rng.random() < 0.3 else 0
    sampling = None
    if rng.random() < 0.5:
        top_k = int(rng.integers(2, 64)) if rng.random() < 0.5 else None
        top_p = float(rng.uniform(0.7, 1.0)) if rng.random() < 0.5 else 1.0
        sampling = kg.Sampling(float(rng.choice(_TEMPERATURES)), top_k, top_p, seed=int(rng.integers(1 << 32)))
    return Sequence(number, continues, text[begin:stop], text[stop : stop + second], sampling)


def second_tokens(longest: int) -> int:
    """Returns the most tokens that a sequence reads in its second call."""
    return max(SHORTEST, longest // 4)


def stop_ids(vocab_size: int) -> tuple[int, ...]:
    """Returns tokens before which decoding ends: one in sixteen, so that sequences end at different times."""
    return tuple(range(3, vocab_size, _STOP_EVERY))


def other_text(sequence: Sequence, seed: int, vocab_size: int) -> Sequence:
    """Returns a sequence of the same lengths with tokens drawn at random, and with another seed where it has one."""
    rng = np.random.default_rng([seed, sequence.number, 1])
    first, second = (
        tuple(rng.integers(0, vocab_size, len(tokens)).tolist()) for tokens in (sequence.first, sequence.second)
    )
    sampling = sequence.sampling and dataclasses.replace(sequence.sampling, seed=int(rng.integers(1 << 32)))
    return dataclasses.replace(sequence, first=first, second=second, sampling=sampling)


def state_sha256(state: kg.State) -> str:
    """Returns the SHA-256 (hex) of tokens, logits and every K/V row; of a graft's later ones, those still visible.

    "refused: ..." where one of them is not finite.
    """
    if not np.isfinite(np.asarray(jax.device_get(state.logits))).all():
        return "refused: a logit is NaN or infinite"
    policy = manifest_lib.VISIBLE_ROWS if state.first_row else manifest_lib.ALL_ROWS
    try:
        hashes = compare.hashes(state, policy=policy)
    except errors.CaptureError as error:
        return f"refused: {error}"
    document = {"tokens": list(state.token_ids), "kv": hashes.kv_sha256, "logits": hashes.logits_sha256}
    return digest.json_digest(document)


def _length(rng: np.random.Generator, longest: int) -> int:
    return round(math.exp(rng.uniform(math.log(SHORTEST), math.log(longest))))
