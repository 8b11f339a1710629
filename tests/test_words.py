"""The wording of documents, docstrings, comments and messages: phrases that make a reader stumble are found here.

Like `tests/test_structure.py`, the check runs on planted violations too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
import io
import json
import pathlib
import re
import tokenize

import pytest

ROOT = pathlib.Path(__file__).parents[1]
# What a phrase matches, and what to write in its place.
PHRASES = {
    r"(?<!there )\b(?:is|are) no (?!longer\b|more\b|less\b)": "is not a",
    r"\bso many\b": "that many, or the number",
    r"\bturned (?:on )?by\b": "rotated by",
    r"\brooms?\b": "module, directory or space",
    r"\balone(?=[.:;)]|$)": "only, in front of what it limits",
    r"\bfor ever\b": "without end, or deadlock",
    r"\bwithout a word\b": "silently",
    r"\bsome (?:hundred|thousand)\b": "about a thousand",
    r"(?<!Terms )\bof use\b": "useful",
}
OPENING = "a function's docstring opens with a verb"
# Plural nouns that a docstring might open with, and words that are neither.
NOUNS = frozenset(
    "Args As Bits Bytes Columns Cosines Embeddings Entries Files Frequencies Ids Its Keys Layers Lines Logits Messages "
    "Multiples Pairs Positions Radians Rows Seconds Slots Tables Tensors This Tokens Values Weights Words Zeros".split()
)


def _prose_of_python(source: str) -> Iterator[tuple[int, str]]:
    """Yields line and text of every paragraph of a string, docstrings included, and of every block of comments."""
    strings = (tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1))
    comments: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.string.lstrip("# ")
        elif token.type in strings:
            yield from _paragraphs(dict(enumerate(token.string.splitlines(), token.start[0])))
    yield from _paragraphs(comments)


def _paragraphs(lines: dict[int, str]) -> Iterator[tuple[int, str]]:
    """Yields the number of the first line and the joined text of lines that follow each other without an empty one."""
    joined: list[str] = []
    for number, line in lines.items():
        if line.strip():
            joined += [line.strip()]
        if joined and not lines.get(number + 1, "").strip():
            yield number + 1 - len(joined), " ".join(joined)
            joined = []


def _prose_of_markdown(text: str) -> Iterator[tuple[int, str]]:
    """Yields the paragraphs outside fenced code, without spans of code."""
    is_code = False
    lines = {}
    for number, line in enumerate(text.splitlines(), 1):
        is_code ^= line.startswith("```")
        if not is_code:
            lines[number] = re.sub(r"`[^`]*`", "`code`", line)
    yield from _paragraphs(lines)


def _prose(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    text = path.read_text()
    if path.suffix == ".py":
        yield from _prose_of_python(text)
    elif path.suffix == ".ipynb":
        for cell in json.loads(text)["cells"]:
            if cell["cell_type"] == "markdown":
                yield from _prose_of_markdown("".join(cell["source"]))
    else:
        yield from _prose_of_markdown(text)


def phrases(path: pathlib.Path) -> list[str]:
    """Finds the phrases of `PHRASES`."""
    return [
        f"{path.name}:{number}: {found[0]!r}, write {instead!r}: {line.strip()}"
        for number, line in _prose(path)
        for phrase, instead in PHRASES.items()
        if (found := re.search(phrase, line, re.IGNORECASE))
    ]


def openings(path: pathlib.Path) -> list[str]:
    """Finds functions whose docstring opens with a noun instead of a verb; that of a test states a fact.

    In the library the first word has to be a verb like "Returns", except for properties.
    """
    if path.suffix != ".py":
        return []
    is_library = path.is_relative_to(ROOT / "kvgraft_jax") or path.parent.name == "kvgraft_jax"
    return [
        f"{path.name}:{node.lineno}: {node.name}: {OPENING}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("test_")
        and (docstring := ast.get_docstring(node))
        and (
            docstring.startswith(("The ", "A ", "An ", "Whether "))
            or (is_library and not _is_property(node) and not _is_verb(docstring.split()[0]))
        )
    ]


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(mark).rpartition(".")[2] in ("property", "cached_property") for mark in node.decorator_list)


def _is_verb(word: str) -> bool:
    return re.fullmatch("[A-Z][a-z]+s", word) is not None and word not in NOUNS


def _files() -> list[pathlib.Path]:
    """Returns every document and source file; reports of recorded runs are data."""
    found = [ROOT / "README.md", ROOT / "WORKSPACE.md", ROOT / "results" / "README.md", *(ROOT / "docs").glob("*.md")]
    for folder in ("kvgraft_jax", "experiments", "configs"):
        found += [path for ext in ("py", "ipynb") for path in (ROOT / folder).rglob(f"*.{ext}")]
    return sorted(found)


@pytest.mark.parametrize("check", [phrases, openings], ids=lambda check: check.__name__)
def test_the_project_reads_well(check):
    findings = [finding for path in _files() for finding in check(path)]
    assert not findings, "\n" + "\n".join(findings)


def test_docstrings_of_test_helpers_open_with_verbs():
    findings = [finding for path in sorted((ROOT / "tests").rglob("*.py")) for finding in openings(path)]
    assert not findings, "\n" + "\n".join(findings)


@pytest.mark.parametrize(
    "text",
    [
        "It is no file.",
        "the last so many layers",
        "keys turned on by d",
        "keys turned by d",
        "It makes room for more.",
        "It needs Python alone.",
        "They wait for ever.",
        "Orbax casts without a word.",
        "some thousand digits",
        "far above what is of use",
    ],
)
@pytest.mark.parametrize("name", ["a.py", "a.md", "a.ipynb"])
def test_a_planted_phrase_is_found(tmp_path, name, text):
    path = tmp_path / name
    notebook = json.dumps({"cells": [{"cell_type": "markdown", "source": [text]}]})
    path.write_text({"a.py": f"# {text}\n", "a.md": f"{text}\n", "a.ipynb": notebook}[name])
    assert len(phrases(path)) == 1


def test_a_planted_opening_is_found(tmp_path):
    path = tmp_path / "a.py"
    path.write_text('def f():\n    """The result."""\n\n\nclass C:\n    """The class may."""\n')
    assert openings(path) == [f"a.py:1: f: {OPENING}"]


@pytest.mark.parametrize(
    ("first", "is_found"),
    [("Returns it.", False), ("Logits of it.", True), ("`x`, or None.", True), ("Next-token logits.", True)],
)
def test_a_docstring_of_the_library_opens_with_a_verb_and_that_of_a_property_may_not(tmp_path, first, is_found):
    path = tmp_path / "kvgraft_jax" / "a.py"
    path.parent.mkdir()
    path.write_text(f'def f():\n    """{first}"""\n')
    assert openings(path) == [f"a.py:1: f: {OPENING}"] * is_found
    path.write_text(f'class C:\n    @functools.cached_property\n    def f(self):\n        """{first}"""\n')
    assert openings(path) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", '"""First.\n\nThe last so\nmany layers.\n"""\n'),
        ("a.py", "x = 1\n\n# The last so\n# many layers.\n"),
        ("a.md", "First.\n\nThe last so\nmany layers.\n"),
    ],
)
def test_a_phrase_that_runs_over_two_lines_is_found(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    (found,) = phrases(tmp_path / name)
    assert found.startswith(f"{name}:3: 'so many'")


def test_what_reads_well_passes(tmp_path):
    path = tmp_path / "a.md"
    path.write_text("There is no such file. It is no longer there. `it is no file` is code.\n```\nso many\n```\n")
    assert phrases(path) == []
