"""Letters of axes: every one in the library is listed in `notation`, in names of arrays and in einsum strings."""

import ast
import pathlib
import re

from kvgraft_jax import notation

ROOT = pathlib.Path(__file__).parents[1]
LISTED = re.findall(r"(?:^|  )([A-Z])  (?=\S)", notation.__doc__, re.MULTILINE)
ARRAY = re.compile(r"[a-z][a-z0-9_]*_([A-Z0-9](?:x[A-Z0-9])*)")
EINSUM = re.compile(r"[A-Z]+(?:,[A-Z]+)*->[A-Z]+")


def letters(source):
    """Line and letter of every axis that a file names."""
    for node in ast.walk(ast.parse(source)):
        text = next((vars(node)[field] for field in ("id", "arg", "attr", "value") if field in vars(node)), None)
        if not isinstance(text, str):
            continue
        if name := ARRAY.fullmatch(text):
            yield from ((node.lineno, axis) for axis in name[1].split("x") if not axis.isdigit())
        elif EINSUM.fullmatch(text):
            yield from ((node.lineno, axis) for axis in re.findall("[A-Z]", text))


def test_every_letter_of_the_library_is_listed():
    files = sorted((ROOT / "kvgraft_jax").rglob("*.py"))
    used = {(str(file.relative_to(ROOT)), *found) for file in files for found in letters(file.read_text())}
    assert sorted(found for found in used if found[2] not in LISTED) == []
    assert len(used) > 500


def test_every_letter_is_listed_once_and_has_one_line():
    assert len(LISTED) == len(set(LISTED)) and {"B", "T", "S", "L", "P"} <= set(LISTED)


def test_a_letter_that_is_not_listed_is_found():
    source = 'def f(rows_BxYxH):\n    self.parted_W = dot("TD,DI->TI", rows_BxYxH)\n'
    assert [found for found in letters(source) if found[1] not in LISTED] != []
    assert {axis for _, axis in letters(source)} - set(LISTED) == {"Y", "W", "I"}
