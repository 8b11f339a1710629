"""The demo: its verifier refuses wrong solutions, its damage is seen, its verdict follows the checks, and it passes."""

from __future__ import annotations

import dataclasses
import pathlib
import subprocess
import sys

import pytest

from experiments.demo import demonstration as demo
from experiments.demo import knowledge
import kvgraft_jax as kg

ROOT = pathlib.Path(__file__).parents[2]
PROBLEMS = knowledge.problems()
TINY = "random:gemma-3-270m?seed=0&layers=2&vocab=64&embed=32&hidden=32&heads=2&kv_heads=1&head_dim=16&window=32"


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: str(problem.answer))
def test_every_solution_is_verified(problem):
    verification = knowledge.verify(problem)
    assert verification.mistakes == ()
    assert verification.steps >= 2


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: str(problem.answer))
def test_a_wrong_answer_is_refused_twice(problem):
    mistakes = knowledge.verify(dataclasses.replace(problem, answer=problem.answer + 1)).mistakes
    assert len(mistakes) == 2 and "ends in" in mistakes[0] and "another way gives" in mistakes[1]


def test_a_wrong_step_is_refused_though_the_answer_is_right():
    wrong = dataclasses.replace(PROBLEMS[0], solution=PROBLEMS[0].solution.replace("= 401", "= 402"))
    assert knowledge.verify(wrong).mistakes == ("401 = 402 is false",)


def test_a_solution_without_arithmetic_is_refused():
    bare = dataclasses.replace(PROBLEMS[0], solution="It is known to be 49.")
    assert knowledge.verify(bare).mistakes == ("the solution has no equation to check",)


@pytest.mark.parametrize("text", ["7 +", "(1)(2)", "* 3", "--"])
def test_what_is_no_arithmetic_cannot_be_evaluated(text):
    with pytest.raises(ValueError, match="cannot evaluate"):
        knowledge.verify(dataclasses.replace(PROBLEMS[0], solution=f"We see {text} = 3."))


def test_facts_follow_the_seed():
    facts = knowledge.draw_facts(6, seed=1)
    assert facts == knowledge.draw_facts(6, seed=1) != knowledge.draw_facts(6, seed=2)
    assert len({fact.name for fact in facts}) == 6
    for fact in facts:
        assert len(fact.number) == 4 and fact.number in fact.deposit and fact.number not in fact.query


def answers(index: int = 0, **texts: str) -> list[demo.Answers]:
    """Returns a problem and a fact, answered as wanted, but for `texts` in the one of that index."""
    found = []
    for number, right in enumerate(("60", "7634")):
        given = {"worked": "5040", "direct": "7", "grafted": right, "unrelated": "49"}
        given |= texts if number == index else {}
        said = {name: demo.Answer(text, 1, 0.1) for name, text in given.items()}
        found.append(demo.Answers(demo.Item(f"item {number}", "", right, ""), **said))
    found[1] = dataclasses.replace(found[1], worked=None)
    return found


def test_answers_as_wanted_pass_every_check():
    assert [(check.found, check.holds) for check in demo.judge(answers())] == [("2 of 2", True)] * 3


@pytest.mark.parametrize(
    "index, texts, failing",
    [
        (0, {"worked": "60"}, 0),
        (0, {"direct": "60 divisors"}, 0),
        (1, {"direct": "7,634."}, 0),
        (0, {"grafted": "61"}, 1),
        (1, {"grafted": "7634 or 7635"}, 1),
        (1, {"grafted": ""}, 1),
        (0, {"unrelated": "60"}, 2),
        (1, {"unrelated": "it is 7634"}, 2),
    ],
)
def test_one_planted_answer_fails_its_check_alone(capsys, index, texts, failing):
    checks = demo.judge(answers(index, **texts))
    assert [number for number, check in enumerate(checks) if not check.holds] == [failing]
    assert checks[failing].found == "1 of 2" and demo.conclude(checks) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "FAIL: 1 of 3 checks do not hold"


def test_one_flipped_bit_is_refused_and_the_original_stays_good(tmp_path):
    engine = kg.Engine(kg.load_model(TINY), capacity=128)
    artifact_id = kg.save_artifact(engine.capture(engine.prefill(list(range(40)))), tmp_path / "good")
    damage = demo.flip_a_bit(tmp_path / "good", artifact_id, tmp_path / "bad")
    intact, damaged = (tmp_path / "good" / damage.file).read_bytes(), (tmp_path / "bad" / damage.file).read_bytes()
    assert [(a ^ b).bit_count() for a, b in zip(intact, damaged, strict=True) if a != b] == [1]
    with pytest.raises(kg.IntegrityError):
        kg.load_artifact(tmp_path / "bad", artifact_id)
    assert kg.load_artifact(tmp_path / "good", artifact_id).artifact_id == artifact_id


@pytest.mark.parametrize("holds, last, code", [((True, True), "PASS", 0), ((True, False), "FAIL", 1)])
def test_the_verdict_is_the_last_line_and_the_exit_code(capsys, holds, last, code):
    checks = [demo.Check(f"check {index}", "found", value) for index, value in enumerate(holds)]
    assert demo.conclude(checks) == code
    assert capsys.readouterr().out.splitlines()[-1].startswith(last)


def test_a_directory_in_use_is_bad_input(tmp_path):
    (tmp_path / "mine").write_text("")
    result = subprocess.run(
        [sys.executable, "-m", "experiments.demo", f"--out={tmp_path}"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 2
    assert str(tmp_path) in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.weights
@pytest.mark.slow
def test_the_demo_passes_on_the_real_model(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "experiments.demo", "--samples=3", "--seed=7", f"--out={tmp_path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert lines[-1].startswith("PASS")
    for fact in knowledge.draw_facts(demo.FACTS, seed=7):
        assert any(fact.subject in line and fact.number in line for line in lines)
    assert any("3 of 3" in line for line in lines)
    assert len(kg.list_artifacts(tmp_path / "artifacts")) == len(PROBLEMS) + 1
