"""What the demo deposits: problems whose worked solutions are verified here, and a sheet of facts drawn by chance."""

from __future__ import annotations

import ast
from collections.abc import Callable
import dataclasses
import operator
import random
import re

_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_NAMES = (
    "Anna", "Bruno", "Clara", "Daniel", "Emma", "Felix", "Greta", "Hugo", "Ivan", "Julia", "Karl", "Laura", "Martin",
    "Nora", "Oscar", "Paula", "Robert", "Sofia", "Thomas", "Victor", "Walter",
)  # fmt: skip
_EQUATION = re.compile(r"(?:mod|[0-9()+*^= -])+")


@dataclasses.dataclass(frozen=True)
class Problem:
    """A problem with an integer answer.

    Attributes:
      question: as the model sees it.
      solution: sentences whose equations are written with digits, + - * ^ mod and parentheses.
      answer: what the solution claims.
      recompute: the answer found another way, by counting or stepping through; knows nothing of the solution.
    """

    question: str
    solution: str
    answer: int
    recompute: Callable[[], int]

    @property
    def deposit(self) -> str:
        """Text that is deposited."""
        final = f"So the final answer is \\boxed{{{self.answer}}}."
        return f"Problem: {self.question}\nAnswer: {self.answer}\nSolution: {self.solution} {final}\n\n"

    @property
    def query(self) -> str:
        """Text that asks for the answer, with or without a deposit before it."""
        return f"Problem: {self.question}\nSo the final answer is \\boxed{{"


@dataclasses.dataclass(frozen=True)
class Fact:
    """An invented fact, which no model can know: the phone number of someone who does not exist."""

    name: str
    number: str

    @property
    def subject(self) -> str:
        """Returns what it is about, in few words."""
        return f"phone of {self.name}"

    @property
    def question(self) -> str:
        """Returns what is asked."""
        return f"What is the phone number of {self.name}?"

    @property
    def query(self) -> str:
        """Text that asks for the number."""
        return f"Question: {self.question}\nAnswer:"

    @property
    def deposit(self) -> str:
        """Its lines in the sheet."""
        return f"{self.query} {self.number}\n\n"


@dataclasses.dataclass(frozen=True)
class Verification:
    """What checking a solution found.

    Attributes:
      steps: equations in the solution that hold.
      mistakes: what is wrong, as text; empty for a verified solution.
    """

    steps: int
    mistakes: tuple[str, ...]


def verify(problem: Problem) -> Verification:
    """Evaluates every equation of the solution, and finds the answer another way.

    Verified means: at least one equation, all of them true, the last one ends in the answer, and the independent
    computation agrees.
    """
    found = (match.group().strip() for match in _EQUATION.finditer(problem.solution) if "=" in match.group())
    equations = [[_evaluate(side) for side in text.split("=")] for text in found]
    mistakes = [" = ".join(map(str, values)) + " is false" for values in equations if len(set(values)) != 1]
    if not equations:
        mistakes.append("the solution has no equation to check")
    elif equations[-1][-1] != problem.answer:
        mistakes.append(f"the solution ends in {equations[-1][-1]}, not in its answer {problem.answer}")
    recomputed = problem.recompute()
    if recomputed != problem.answer:
        mistakes.append(f"the answer is {problem.answer}, computing it another way gives {recomputed}")
    return Verification(len(equations) - sum(len(set(values)) != 1 for values in equations), tuple(mistakes))


def draw_facts(count: int, seed: int) -> tuple[Fact, ...]:
    """Draws facts about people of different names; the numbers have four digits."""
    rng = random.Random(seed)
    return tuple(Fact(name, str(rng.randint(1000, 9999))) for name in rng.sample(_NAMES, count))


def problems() -> tuple[Problem, ...]:
    """Returns the problems of the demo."""
    return (
        Problem(
            "What is the remainder when 7^222 is divided by 1000?",
            "Since 7^4 mod 1000 = 401 and 401^5 mod 1000 = 1, the powers of 7 repeat after 4 * 5 = 20 steps. "
            "The exponent leaves 222 mod 20 = 2, and 7^2 = 49.",
            49,
            _last_digits_of_power,
        ),
        Problem(
            "How many positive divisors does 5040 have?",
            "Factor 2^4 * 3^2 * 5 * 7 = 5040. A divisor picks each exponent freely, so there are "
            "(4 + 1) * (2 + 1) * (1 + 1) * (1 + 1) = 60.",
            60,
            lambda: sum(5040 % divisor == 0 for divisor in range(1, 5041)),
        ),
        Problem(
            "A sequence begins with 2 and 5. Each later term is three times the one before it minus twice the one "
            "before that. What is the eighth term?",
            "The next terms are 3 * 5 - 2 * 2 = 11, 3 * 11 - 2 * 5 = 23, 3 * 23 - 2 * 11 = 47, "
            "3 * 47 - 2 * 23 = 95, 3 * 95 - 2 * 47 = 191 and 3 * 191 - 2 * 95 = 383.",
            383,
            _eighth_term,
        ),
    )


def _last_digits_of_power() -> int:
    value = 1
    for _ in range(222):
        value = value * 7 % 1000
    return value


def _eighth_term() -> int:
    terms = [2, 5]
    while len(terms) < 8:
        terms.append(3 * terms[-1] - 2 * terms[-2])
    return terms[-1]


def _evaluate(text: str) -> int:
    """Evaluates an expression of integers, + - * ^ mod and parentheses; anything else is a `ValueError`."""

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.BinOp(left, operation, right) if type(operation) in _OPERATORS:
                return _OPERATORS[type(operation)](value(left), value(right))
        raise ValueError(f"cannot evaluate {text!r}")

    try:
        tree = ast.parse(text.strip().replace("^", "**").replace("mod", "%"), mode="eval")
    except SyntaxError as error:
        raise ValueError(f"cannot evaluate {text!r}") from error
    return value(tree.body)
