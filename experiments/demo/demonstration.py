"""The demonstration on the real Gemma 3 270M: what a frozen model cannot answer, it answers after a graft.

  python -m experiments.demo [--out=DIR] [--seed=N] [--samples=N]

Ends with one line, PASS or FAIL, and exits with the codes of `harness`. Without --out nothing is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
import contextlib
import dataclasses
import pathlib
import re
import shutil
import tempfile
import time

from absl import flags

from experiments import harness
from experiments import scratch as scratch_lib
from experiments.demo import knowledge
from experiments.graft_exactness import experiment as graft_exactness
import kvgraft_jax as kg
from kvgraft_jax import errors, progress

MODEL = "package:gemma-3-270m"
DTYPE = "bfloat16"
CAPACITY = 384
FACTS = 6
WORKING_TOKENS = 48  # Space to work a problem out before the model has to answer.
ANSWER_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that has to hold for a PASS: what was checked, what was found, whether it is as it should be."""

    name: str
    found: str
    holds: bool


@dataclasses.dataclass(frozen=True)
class Answer:
    """What the model answered, greedily: its text, the tokens that it decoded, and the seconds, reading included."""

    text: str
    tokens: int
    seconds: float

    def __str__(self) -> str:
        return f"{_short(self.text, 14)} ({self.tokens} tok, {self.seconds:.1f} s)"


@dataclasses.dataclass(frozen=True)
class Item:
    """A question of the demo: its name in tables, the text that asks it, the right answer, who deposits it."""

    name: str
    query: str
    answer: str
    artifact_id: str

    def is_right(self, answer: Answer) -> bool:
        """Tells whether the model gave the answer and nothing else."""
        return answer.text == self.answer

    def is_named(self, answer: Answer) -> bool:
        """Tells whether the right number occurs anywhere in what the model wrote."""
        return self.answer in re.findall(r"\d+", answer.text.replace(",", ""))


@dataclasses.dataclass(frozen=True)
class Answers:
    """What the model answered to one question.

    Attributes:
      item: the question.
      worked: from nothing, after working it out; None for a fact, which cannot be.
      direct: from nothing, asked directly.
      grafted: after its own graft.
      unrelated: after the graft of another text.
    """

    item: Item
    worked: Answer | None
    direct: Answer
    grafted: Answer
    unrelated: Answer

    @property
    def tries(self) -> tuple[Answer, ...]:
        """Those from nothing, in the order in which they were made."""
        return (self.direct,) if self.worked is None else (self.worked, self.direct)


@dataclasses.dataclass(frozen=True)
class Damage:
    """Where a bit was flipped: file, relative to the directory of artifacts, byte and bit."""

    file: pathlib.Path
    byte: int
    bit: int


class Respondent:
    """Asks one engine questions whose answers end at a brace or at the end of a line."""

    def __init__(self, engine: kg.Engine):
        self.engine = engine
        tokenizer = engine.model.tokenizer
        pieces = ((token_id, tokenizer.piece(token_id)) for token_id in range(tokenizer.vocab_size))
        ends = {token_id for token_id, piece in pieces if "}" in piece or "\n" in piece}
        self._ends = tuple(ends | set(engine.model.stop_ids))

    def ask(self, query: str, state: kg.State | None = None) -> Answer:
        """Reads `query` in a fresh context, or after `state`, and decodes the answer."""
        began = time.perf_counter()
        state = self._read(query, state)
        tokens, _ = self.engine.generate(state, max_new_tokens=ANSWER_TOKENS, stop_ids=self._ends)
        return Answer(self._text(tokens), len(tokens), time.perf_counter() - began)

    def work_out(self, question: str) -> tuple[str, Answer]:
        """Lets the model write a solution first; returns what it wrote, and the answer with its cost."""
        began = time.perf_counter()
        state = self._read(f"Problem: {question}\nSolution:", None)
        working, state = self.engine.generate(state, max_new_tokens=WORKING_TOKENS)
        answer = self.ask("\nSo the final answer is \\boxed{", state)
        seconds = time.perf_counter() - began
        return self._text(working), Answer(answer.text, len(working) + answer.tokens, seconds)

    def _read(self, text: str, state: kg.State | None) -> kg.State:
        tokenizer = self.engine.model.tokenizer
        if state is None:
            return self.engine.prefill(tokenizer.encode(text, bos=True))
        return self.engine.extend(state, tokenizer.encode(text))

    def _text(self, tokens: Sequence[int]) -> str:
        return self.engine.model.tokenizer.decode(tokens).strip()


def deposit(engine: kg.Engine, name: str, text: str, provenance: dict[str, str | int], directory: pathlib.Path) -> str:
    """Reads a text, with a progress bar, saves its state as an artifact and prints what that took; returns the id."""
    token_ids = engine.model.tokenizer.encode(text, bos=True)
    began = time.perf_counter()
    state = engine.prefill(token_ids, progress=True)
    read = time.perf_counter()
    artifact = engine.capture(state, provenance=provenance)
    artifact_id = kg.save_artifact(artifact, directory)
    saved = time.perf_counter()
    say(
        f"   {name:<10} {len(token_ids):>4} tokens  {artifact.nbytes / 1e6:>5.2f} MB  "
        f"read {read - began:.2f} s, saved {saved - read:.2f} s  id {artifact_id[:16]}"
    )
    return artifact_id


def flip_a_bit(source: pathlib.Path, artifact_id: str, target: pathlib.Path) -> Damage:
    """Copies an artifact from one directory to another and flips one bit in the middle of its largest file there."""
    shutil.copytree(source / artifact_id, target / artifact_id)
    files = [path for path in (target / artifact_id).rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    raw = bytearray(largest.read_bytes())
    damage = Damage(largest.relative_to(target), len(raw) // 2, 3)
    raw[damage.byte] ^= 1 << damage.bit
    largest.write_bytes(raw)
    return damage


def conclude(checks: Sequence[Check]) -> int:
    """Prints the table of all checks and, last, the verdict; returns the exit code."""
    show_table(["check", "found", "holds"], [[c.name, c.found, "yes" if c.holds else "NO"] for c in checks])
    failed = sum(not check.holds for check in checks)
    say(f"FAIL: {failed} of {len(checks)} checks do not hold" if failed else f"PASS: all {len(checks)} checks hold")
    return harness.FAILS if failed else harness.HOLDS


def show_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints the rows under their header."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    say("\n".join(harness.columns([header, ["-" * width for width in widths], *rows])))


def say(text: str) -> None:
    """Prints at once, also into a pipe."""
    progress.print_line(text)


def _short(text: str, limit: int) -> str:
    line = errors.printable(" ".join(text.split()))
    return line if len(line) <= limit else line[: limit - 1] + "…"


def show_from_nothing(
    respondent: Respondent, facts: Sequence[knowledge.Fact]
) -> tuple[dict[str, Answer], dict[str, Answer]]:
    """Asks everything in fresh contexts; returns the direct answers, and those after working it out, by query."""
    say("\n1. From nothing: the frozen model alone, greedy")
    direct, worked = {}, {}
    for problem in knowledge.problems():
        written, worked[problem.query] = respondent.work_out(problem.question)
        direct[problem.query] = respondent.ask(problem.query)
        say(f"   {problem.question}")
        say(f"     it writes: {_short(written, 76)}")
        say(f"     it answers {worked[problem.query]}; asked directly {direct[problem.query]}; right: {problem.answer}")
    for fact in facts:
        direct[fact.query] = respondent.ask(fact.query)
        say(f"   {fact.question}  {direct[fact.query]}; invented: {fact.number}")
    return direct, worked


def show_deposits(engine: kg.Engine, facts: Sequence[knowledge.Fact], seed: int, directory: pathlib.Path) -> list[Item]:
    """Verifies and deposits every solution, and the sheet of facts; returns the questions that they answer."""
    say("\n2. Deposits: read once, kept as key/value state")
    items = []
    for problem in knowledge.problems():
        verification = knowledge.verify(problem)
        if verification.mistakes:
            raise kg.InputError(f"solution of {problem.question!r}: {'; '.join(verification.mistakes)}")
        name = f"problem {len(items) + 1}"
        verifier = f"{verification.steps} equations evaluated, answer recomputed another way"
        artifact_id = deposit(
            engine, name, problem.deposit, {"who": "experiments.demo", "verified": verifier}, directory
        )
        say(f"              verified: {verifier}")
        items.append(Item(name, problem.query, str(problem.answer), artifact_id))
    sheet = "".join(fact.deposit for fact in facts)
    provenance = {"who": "experiments.demo", "facts": len(facts), "seed": seed}
    artifact_id = deposit(engine, "fact sheet", sheet, provenance, directory)
    return items + [Item(fact.subject, fact.query, fact.number, artifact_id) for fact in facts]


def show_grafts(respondent: Respondent, items: Sequence[Item], directory: pathlib.Path) -> dict[str, kg.State]:
    """Loads, verifies and grafts every artifact into a fresh context; returns the contexts by artifact id."""
    say("\n3. Grafts: from disk into a fresh context, every byte verified")
    states = {}
    for artifact_id in dict.fromkeys(item.artifact_id for item in items):
        began = time.perf_counter()
        artifact = kg.load_artifact(directory, artifact_id)
        loaded = time.perf_counter()
        states[artifact_id] = respondent.engine.graft(artifact)
        states[artifact_id].logits.block_until_ready()
        grafted = time.perf_counter()
        say(
            f"   {artifact_id[:16]}  {artifact.length:>4} tokens  "
            f"loaded and verified in {1e3 * (loaded - began):.0f} ms, grafted in {1e3 * (grafted - loaded):.0f} ms"
        )
    return states


def show_answers(
    respondent: Respondent,
    items: Sequence[Item],
    states: dict[str, kg.State],
    direct: dict[str, Answer],
    worked: dict[str, Answer],
) -> list[Check]:
    """Asks everything again after the right graft and after an unrelated one; prints both beside the first tries."""
    answers = []
    for item in items:
        unrelated = next(state for artifact_id, state in states.items() if artifact_id != item.artifact_id)
        answers.append(
            Answers(
                item,
                worked.get(item.query),
                direct[item.query],
                respondent.ask(item.query, states[item.artifact_id]),
                respondent.ask(item.query, unrelated),
            )
        )
    say("")
    header = ["", "right", "nothing, working it out", "nothing, asked directly", "after its graft", "unrelated graft"]
    rows = [
        [a.item.name, a.item.answer, str(a.worked or ""), str(a.direct), str(a.grafted), str(a.unrelated)]
        for a in answers
    ]
    show_table(header, rows)
    for name, costs in (
        ("from nothing", [a.tries[0] for a in answers]),
        ("after its graft", [a.grafted for a in answers]),
    ):
        tokens, seconds = sum(cost.tokens for cost in costs), sum(cost.seconds for cost in costs)
        say(f"   all {len(items)} questions, first try {name}: {tokens} decode tokens, {seconds:.1f} s")
    return judge(answers)


def judge(answers: Sequence[Answers]) -> list[Check]:
    """Lists the checks on the answers; a number among others counts as named, but not as right."""
    counts = {
        "from nothing, every try of the model is wrong": [not any(map(a.item.is_named, a.tries)) for a in answers],
        "after its graft, the model is right": [a.item.is_right(a.grafted) for a in answers],
        "an unrelated graft does not give the answer": [not a.item.is_named(a.unrelated) for a in answers],
    }
    return [Check(name, f"{sum(found)} of {len(found)}", all(found)) for name, found in counts.items()]


def show_exactness(engine: kg.Engine, seed: int, samples: int, root: pathlib.Path) -> list[Check]:
    """Compares short texts read afresh with the same texts grafted in a new process; prints the counts."""
    say("\n4. Exactness: texts read afresh here, and grafted from disk in a new process")
    settings = graft_exactness.Settings(
        model=MODEL,
        dtype=DTYPE,
        seed=seed,
        shapes=engine.shapes,
        kv_block=engine.step_config.kv_block,
        capacity=engine.capacity,
        samples=samples,
        min_tokens=20,
        max_tokens=200,
        spread_tokens=200,
        decode_steps=4,
    )
    figures = graft_exactness.run(settings, engine.model, root).figures
    counts = {
        "SHA-256 of logits equal": figures["logits_sha256_equal"],
        "SHA-256 of K/V equal": figures["kv_sha256_equal"],
        f"SHA-256 of {settings.decode_steps} decode steps equal": figures["decode_sha256_equal"],
        "same next token": figures["argmax_agree"],
    }
    checks = [
        Check(f"fresh and grafted: {name}", f"{count} of {settings.samples}", count == settings.samples)
        for name, count in counts.items()
    ]
    kl_nats = figures["kl_nats_max"]
    checks.append(Check("fresh and grafted: largest KL divergence", f"{kl_nats!r} nats", kl_nats == 0.0))
    lengths = f"{settings.min_tokens} to {settings.max_tokens} tokens, mean {figures['tokens_mean']}"
    say(f"   {settings.samples} texts of {lengths}")
    show_table(["", "found"], [[check.name.partition(": ")[2], check.found] for check in checks])
    return checks


def show_damage(artifact_id: str, directory: pathlib.Path, scratch: pathlib.Path) -> Check:
    """Flips one bit of a copy and loads it."""
    say("\n5. Damage: one bit of a copy flipped")
    damage = flip_a_bit(directory, artifact_id, scratch)
    where = f"bit {damage.bit} of byte {damage.byte:,} in {pathlib.Path(*damage.file.parts[1:])}"
    try:
        kg.load_artifact(scratch, artifact_id)
    except kg.IntegrityError as error:
        say(f"   {where}\n   refused: {error}")
        return Check("an artifact with one flipped bit is refused", "refused", True)
    say(f"   {where}\n   loaded without an error")
    return Check("an artifact with one flipped bit is refused", "loaded", False)


def run(root: pathlib.Path, seed: int, samples: int) -> int:
    """Runs the whole demo in a directory; returns the exit code."""
    began = time.perf_counter()
    engine = kg.Engine(kg.load_model(MODEL, DTYPE), capacity=CAPACITY)
    respondent = Respondent(engine)
    say(f"{MODEL}, {DTYPE}, frozen. Compiling the step (once) ...")
    respondent.ask("Hello", engine.graft(engine.capture(engine.prefill([engine.model.tokenizer.bos_id]))))
    say(f"ready after {time.perf_counter() - began:.0f} s; pin {engine.pin.id[:16]}")

    directory = root / "artifacts"
    facts = knowledge.draw_facts(FACTS, seed)
    direct, worked = show_from_nothing(respondent, facts)
    items = show_deposits(engine, facts, seed, directory)
    states = show_grafts(respondent, items, directory)
    checks = show_answers(respondent, items, states, direct, worked)
    checks += show_exactness(engine, seed, samples, root)
    checks.append(show_damage(items[0].artifact_id, directory, root / "damaged"))
    say(f"\nResult after {time.perf_counter() - began:.0f} s")
    return conclude(checks)


def main() -> None:
    """Runs the demo as the command line asks, and exits."""
    out = flags.DEFINE_string("out", None, "folder, new or empty, that keeps the artifacts (default: kept nowhere)")
    seed = flags.DEFINE_integer("seed", 0, "draws the invented facts and the texts of the exactness table", 0)
    samples = flags.DEFINE_integer("samples", 50, "texts of the exactness table", 1)

    def start() -> int:
        with contextlib.ExitStack() as stack:
            place = out.value
            if out.value is None:
                place = stack.enter_context(scratch_lib.folder(pathlib.Path(tempfile.gettempdir()), "kvgraft-demo-"))
            return run(harness.new_folder(place), seed.value, samples.value)

    harness.start("demo", start)
