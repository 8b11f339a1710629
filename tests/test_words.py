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


def _prose_of_python(source: str) -> Iterator[tuple[int, str]]:
    """Yields line and text of every comment and string, docstrings included."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)):
            yield from ((token.start[0] + i, line) for i, line in enumerate(token.string.splitlines()))


def _prose_of_markdown(text: str) -> Iterator[tuple[int, str]]:
    """Yields the lines outside fenced code, without spans of code."""
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        is_code ^= line.startswith("```")
        if not is_code:
            yield number, re.sub(r"`[^`]*`", "`code`", line)


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
    """Finds functions whose docstring opens with a noun instead of a verb; that of a test states a fact."""
    if path.suffix != ".py":
        return []
    return [
        f"{path.name}:{node.lineno}: {node.name}: {OPENING}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("test_")
        and (ast.get_docstring(node) or "").startswith(("The ", "A ", "An ", "Whether "))
    ]


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


def test_what_reads_well_passes(tmp_path):
    path = tmp_path / "a.md"
    path.write_text("There is no such file. It is no longer there. `it is no file` is code.\n```\nso many\n```\n")
    assert phrases(path) == []
