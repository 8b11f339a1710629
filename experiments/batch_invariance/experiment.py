"""Many sequences side by side: does each leave the bits that it leaves alone, and would the check notice if not?

Sequences of very different lengths, some after a shared grafted prefix, some greedy, some drawn with seeds of their
own, run alone first. Then they run together, waiting for a row and ending whenever they do, in other orders, with
different numbers of rows, and with their neighbours changed: other texts, none, or rows of NaN. Every state's K/V rows
and logits and all tokens are compared. `detectors` shows that mistakes are found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
import pathlib

import numpy as np

from experiments import corpus as corpus_lib
from experiments import harness
from experiments.batch_invariance import detectors, rounds
from experiments.batch_invariance import sequences as sequences_lib
import kvgraft_jax as kg
from kvgraft_jax import digest, errors, progress

_DETECTOR_SEQUENCES = 12
SAME, OTHER, ABSENT, POISONED = "the same sequences", "other texts", "absent", "NaN"


@dataclasses.dataclass(frozen=True)
class Settings:
    """What this experiment reads from a configuration.

    Attributes:
      model, dtype: as for `load_model`.
      seed: of sequences and orders.
      kv_block, shapes: of every engine.
      batch_rows: sequences that run at once, a number for each engine, rising; the last two serve for changed
        neighbours.
      sequences: how many.
      sequence_tokens: the most tokens that one reads in its first call.
      prefix_tokens: length of the prefix that some continue.
      new_tokens: the most that each decodes.
    """

    model: str
    dtype: str
    seed: int
    kv_block: int
    shapes: tuple[int, ...]
    batch_rows: tuple[int, ...]
    sequences: int
    sequence_tokens: int
    prefix_tokens: int
    new_tokens: int

    def __post_init__(self):
        if self.sequences < 2:
            raise errors.ConfigError(f"sequences: got {self.sequences}, wanted 2 or more")
        if self.seed < 0:
            raise errors.ConfigError(f"seed: got {self.seed}, wanted 0 or more")
        if len(self.batch_rows) < 2 or list(self.batch_rows) != sorted(set(self.batch_rows)) or self.batch_rows[-2] < 1:
            raise errors.ConfigError(f"batch_rows: got {self.batch_rows}, wanted two numbers or more in rising order")
        for name, least in (("sequence_tokens", sequences_lib.SHORTEST), ("prefix_tokens", 1), ("new_tokens", 1)):
            if getattr(self, name) < least:
                raise errors.ConfigError(f"{name}: got {getattr(self, name)}, wanted {least} or more")

    @property
    def capacity(self) -> int:
        """Returns the tokens of the longest sequence that may be drawn."""
        most = self.sequence_tokens + sequences_lib.second_tokens(self.sequence_tokens)
        return self.prefix_tokens + most + self.new_tokens


@dataclasses.dataclass(frozen=True)
class Round:
    """One way of running sequences.

    Attributes:
      way: what they go through.
      rows: sequences at once.
      neighbours: what is beside those that are compared.
      numbers: of the sequences that are compared.
      compute: gives their outcomes, and maybe others, by number.
    """

    way: str
    rows: int
    neighbours: str
    numbers: frozenset[int]
    compute: Callable[[], Mapping[int, sequences_lib.Outcome]]


def run(settings: Settings, model: kg.Model, out: pathlib.Path) -> harness.Findings:
    """Draws the sequences, runs each alone and then in every round, then the detectors."""
    del out  # It draws nothing.
    corpus = corpus_lib.tokenize(model)
    drawn = [
        sequences_lib.draw(number, settings.seed, corpus, settings.sequence_tokens)
        for number in range(settings.sequences)
    ]
    benches = _benches(settings, model, corpus.sample(settings.seed, settings.prefix_tokens))
    first = benches[settings.batch_rows[0]]
    alone = {
        each.number: rounds.alone(first, each) for each in progress.each(drawn, description="alone", unit="sequence")
    }
    rows, differences = [], {}
    planned = list(plan_rounds(settings, benches, drawn))
    for number, one in enumerate(progress.each(planned, description="rounds", unit="round")):
        stages = _differences(one, alone)
        for sequence, stage in stages.items():
            differences.setdefault(sequence, {"round": number, "sequence": sequence, "stage": stage})
        row = {"round": number, "way": one.way, "rows": one.rows, "neighbours": one.neighbours}
        rows.append({**row, "sequences": len(one.numbers), "equal": len(one.numbers) - len(stages)})
    tries = list(detectors.run(benches[settings.batch_rows[-1]], drawn[:_DETECTOR_SEQUENCES], alone))
    table = [_row(each, alone[each.number], each.number not in differences) for each in drawn]
    figures = {
        "sequences": len(drawn),
        "equal": len(drawn) - len(differences),
        "compared": sum(row["sequences"] for row in rows),
        "compared_equal": sum(row["equal"] for row in rows),
        "refused": sum(outcome.difference(outcome) is not None for outcome in alone.values()),
        "detectors": {row["detector"]: row["fired"] for row in tries},
        "kinds": _kinds(drawn, alone, settings.new_tokens),
    }
    return harness.Findings(
        holds=figures["equal"] == figures["sequences"]
        and not figures["refused"]
        and all(figures["detectors"].values()),
        figures={**figures, "first_difference": min(differences.values(), key=lambda d: d["round"], default={})},
        pin=first.engine.pin,
        inputs={
            "weights_sha256": model.digest,
            "corpus_sha256": corpus.sha256,
            "sequences_sha256": digest.json_digest([dataclasses.asdict(each) for each in drawn]),
        },
        outputs={"sequences_sha256": digest.json_digest(table), "rows_sha256": digest.json_digest(rows)},
        rows=rows,
        tries=tries,
        tables={"sequences": table},
    )


def _differences(one: Round, alone: Mapping[int, sequences_lib.Outcome]) -> dict[int, str]:
    """Returns the numbers of the sequences that a round leaves otherwise, rising, each with the stage."""
    try:
        found = one.compute()
    except errors.WeightsError as error:  # NaN of a neighbour has come to where a token is chosen.
        return dict.fromkeys(sorted(one.numbers), f"refused: {error}")
    stages = {number: found[number].difference(alone[number]) for number in sorted(one.numbers)}
    return {number: stage for number, stage in stages.items() if stage is not None}


def plan_rounds(
    settings: Settings, benches: Mapping[int, rounds.Bench], drawn: Sequence[sequences_lib.Sequence]
) -> Iterator[Round]:
    """Yields all rounds, each in an order of its own.

    Where neighbours change, one half of the sequences is compared and the other half changed, and then the other way
    round, so that each is compared beside every kind of neighbour.
    """
    rng = np.random.default_rng([settings.seed, len(drawn)])

    def shuffled(given: Sequence[sequences_lib.Sequence]) -> list[sequences_lib.Sequence]:
        return [given[index] for index in rng.permutation(len(given))]

    def calls(num_rows, neighbours, numbers, given):
        compute = functools.partial(rounds.together, benches[num_rows], shuffled(given))
        return Round("calls", num_rows, neighbours, numbers, compute)

    def mixed(num_rows, neighbours, numbers):
        poisoned = everyone - numbers
        compute = functools.partial(rounds.mixed, benches[num_rows], shuffled(drawn), poisoned=poisoned)
        return Round("reading beside decoding", num_rows, neighbours, numbers, compute)

    everyone = frozenset(each.number for each in drawn)
    for num_rows in settings.batch_rows:
        yield calls(num_rows, SAME, everyone, drawn)
        yield mixed(num_rows, SAME, everyone)
    for num_rows in settings.batch_rows[-2:]:
        vocab_size = benches[num_rows].engine.model.config.vocab_size
        half = frozenset(each.number for each in shuffled(drawn)[: len(drawn) // 2])
        for kept in (half, everyone - half):
            others = [
                each if each.number in kept else sequences_lib.other_text(each, settings.seed, vocab_size)
                for each in drawn
            ]
            yield calls(num_rows, OTHER, kept, others)
            yield calls(num_rows, ABSENT, kept, [each for each in drawn if each.number in kept])
            yield mixed(num_rows, POISONED, kept)


def _benches(settings: Settings, model: kg.Model, prefix: Sequence[int]) -> dict[int, rounds.Bench]:
    """Makes an engine for each number of rows, and the shared prefix, which they all have by graft."""
    benches, artifact = {}, None
    for num_rows in settings.batch_rows:
        engine = kg.Engine(
            model,
            capacity=settings.capacity,
            shapes=settings.shapes,
            rows=num_rows,
            kv_block=settings.kv_block,
        )
        artifact = artifact or engine.capture(engine.prefill(prefix))
        stops = sequences_lib.stop_ids(model.config.vocab_size)
        benches[num_rows] = rounds.Bench(engine, engine.graft(artifact), settings.new_tokens, stops)
    return benches


def _row(sequence: sequences_lib.Sequence, alone: sequences_lib.Outcome, is_equal: bool) -> dict:
    return {
        "sequence": sequence.number,
        "begins": "after the prefix" if sequence.continues else "fresh",
        "first_tokens": len(sequence.first),
        "second_tokens": len(sequence.second),
        "decoding": f"seed {sequence.sampling.seed}" if sequence.sampling else "greedy",
        "new_tokens": len(alone.new_tokens),
        "equal": is_equal,
        "sha256": alone.decoded,
    }


def _kinds(
    drawn: Sequence[sequences_lib.Sequence], alone: Mapping[int, sequences_lib.Outcome], new_tokens: int
) -> dict[str, int]:
    lengths = [each.num_tokens for each in drawn]
    return {
        "after_the_prefix": sum(each.continues for each in drawn),
        "in_two_calls": sum(bool(each.second) for each in drawn),
        "sampled": sum(each.sampling is not None for each in drawn),
        "stopped_early": sum(len(outcome.new_tokens) < new_tokens for outcome in alone.values()),
        "tokens_min": min(lengths),
        "tokens_max": max(lengths),
        "tokens": sum(lengths),
        "new_tokens": sum(len(outcome.new_tokens) for outcome in alone.values()),
    }


EXPERIMENT = harness.Experiment(
    "batch_invariance",
    "Every sequence leaves the same tokens and the same bits in K/V rows and logits alone and beside any others; every "
    "detector reports a difference.",
    Settings,
    run,
)
