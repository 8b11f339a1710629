"""The command of every figure is written twice, in its configuration and in a document, and is the same in both."""

from __future__ import annotations

import ast
import pathlib
import re
import shlex

import pytest

ROOT = pathlib.Path(__file__).parents[1]
WORKSPACE = "WORKSPACE.md"
DOCUMENTS = (WORKSPACE, "results/README.md", "docs/rotary.md")
CONFIGURATIONS = sorted(path.name for path in (ROOT / "configs").glob("[!_]*.py"))

_COMMAND = re.compile(r"(?:python -m|bash workspace\.sh) [^\n`]*--config=configs/(?!FILE)[^\n`]*")


def in_header(name: str) -> set[frozenset[str]]:
    """Commands of a configuration, each as the set of its words; what is indented deeper continues a line."""
    header = ast.get_docstring(ast.parse((ROOT / "configs" / name).read_text()))
    return _commands(re.sub(r"\n    +(?=\S)", " ", header))


def in_document(name: str) -> set[frozenset[str]]:
    """Commands of a document that name a configuration."""
    return _commands((ROOT / name).read_text())


def _commands(text: str) -> set[frozenset[str]]:
    return {frozenset(shlex.split(command)) for command in _COMMAND.findall(text)}


def _shown(commands: set[frozenset[str]]) -> list[str]:
    return sorted(shlex.join(sorted(command)) for command in commands)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_command_of_a_configuration_has_a_place_in_the_workspace(name):
    commands = in_header(name)
    assert commands and all(any(f"configs/{name}" in word for word in command) for command in commands)
    assert _shown(commands - in_document(WORKSPACE)) == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_of_a_document_is_that_of_its_configuration(document):
    commands = in_document(document)
    assert commands and _shown(commands - set().union(*map(in_header, CONFIGURATIONS))) == []


def test_lines_that_go_on_are_one_command():
    (cut,) = (command for command in in_header("exactness_gemma4.py") if "--out=out/graft_31b_cut" in command)
    assert "--config.model=random:gemma-4-31b?layers=6&vocab=8192&window=64&seed=0" in cut and len(cut) == 11


def test_a_field_too_few_makes_another_command():
    whole = "python -m experiments.a --config=configs/a.py --config.width=16 --out=out/a"
    assert _commands(f"| a | `{whole}` | |") == _commands(f"  {whole}\n") == {frozenset(whole.split())}
    assert _commands(whole.replace("--config.width=16 ", "")) != _commands(whole)
