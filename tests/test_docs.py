"""The documents keep their word: paths, commands, fields and names in them exist, and the README's Python runs."""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import pathlib
import re
import subprocess
import sys

import pytest

import kvgraft_jax as kg
from tests import tiny, tiny_tokenizers

ROOT = pathlib.Path(__file__).parents[1]
DOCUMENTS = ("README.md", "WORKSPACE.md", "docs/checkpoints.md")
# Made by a run, or below a folder that one makes.
GENERATED = ("result.json", "report.md", "manifest.json", "files.json", "out/", "arrays/", "DIRECTORY/")
# Of a checkpoint, which someone else made.
FOREIGN = (
    "adapter_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "config.json",
    "chat_template.json",
    "generation_config.json",
    "index.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
PLACEHOLDERS = ("NAME", "FILE", "FIELD", "...")

_PATH = re.compile(r"(?<![\w./-])(?:[\w.-]+/)+[\w.-]*|\b[\w-]+\.(?:py|md|txt|sh|json|toml|ipynb)\b")


def _text(name: str) -> str:
    return (ROOT / name).read_text()


def _code(text: str) -> list[str]:
    """Everything set as code, fenced blocks and spans; a block of `text` is output."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S)
    return [block for kind, block in blocks if kind != "text"] + re.findall(
        r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    )


def missing_paths(text: str) -> list[str]:
    """Paths in code that are not in the repository."""
    found = {path for code in _code(text) for path in _PATH.findall(code)}
    found -= set(FOREIGN)
    named = {path for path in found if not path.startswith(GENERATED) and not any(p in path for p in PLACEHOLDERS)}
    return sorted(path for path in named if not (ROOT / path).exists())


def unknown_commands(text: str) -> list[str]:
    """Commands of the workspace, and experiments, that do not exist."""
    usage = subprocess.run(["bash", "workspace.sh"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    known = {line.split()[0] for line in usage.splitlines() if line.startswith("  ")}
    code = "\n".join(_code(text))
    unknown = [f"workspace.sh {name}" for name in re.findall(r"workspace\.sh (\w+)", code) if name not in known]
    for name in re.findall(r"\bexperiments\.(\w+)", code):
        runnable = (ROOT / "experiments" / name / "__main__.py", ROOT / "experiments" / f"{name}.py")
        if name not in PLACEHOLDERS and not any(path.is_file() for path in runnable):
            unknown.append(f"experiments.{name}")
    return unknown


def unknown_fields(text: str) -> list[str]:
    """Overrides of a configuration field that no configuration has."""
    configs = [importlib.import_module(f"configs.{path.stem}") for path in (ROOT / "configs").glob("[!_]*.py")]
    known = {field for config in configs for field in config.get_config()}
    fields = re.findall(r"--config\.(\w+)", "\n".join(_code(text)))
    return [field for field in fields if field not in known and field not in PLACEHOLDERS]


def unknown_names(text: str) -> list[str]:
    """Names `kg.NAME` that the package does not have."""
    return [name for name in re.findall(r"\bkg\.(\w+)", "\n".join(_code(text))) if name not in kg.__all__]


CHECKS = (missing_paths, unknown_commands, unknown_fields, unknown_names)
MISTAKES = {
    missing_paths: ("see `kvgraft_jax/gemma/moe.py`", "kvgraft_jax/gemma/moe.py"),
    unknown_commands: ("`bash workspace.sh fly` and `python -m experiments.flight`", "workspace.sh fly"),
    unknown_fields: ("```bash\npython --config.wings=2\n```", "wings"),
    unknown_names: ("`kg.fly()`", "fly"),
}


@pytest.mark.parametrize("document", DOCUMENTS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_document_passes(check, document):
    assert check(_text(document)) == []


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_planted_mistake_is_found(check):
    text, expected = MISTAKES[check]
    assert check(text)[0] == expected


def test_every_room_is_described():
    described = _text("WORKSPACE.md")
    rooms = [path for path in (ROOT / "kvgraft_jax").iterdir() if path.name not in ("__init__.py", "__pycache__")]
    rooms += [ROOT / name for name in ("configs", "experiments", "tests")]
    names = [str(path.relative_to(ROOT)) + "/" * path.is_dir() for path in rooms]
    assert [name for name in names if f"`{name}`" not in described] == []


def test_every_marker_is_described():
    described = _text("WORKSPACE.md")
    markers = re.findall(r'^  "(\w+): ', _text("pyproject.toml"), re.M)
    assert markers and [marker for marker in markers if f"| `{marker}` |" not in described] == []


def test_what_a_uri_can_say_is_described():
    from kvgraft_jax.checkpoints import load
    from kvgraft_jax.gemma import configurations
    from kvgraft_jax.text import chat

    names = [*configurations.CONFIGURATIONS, *chat._STYLES, *load._CUTS, "hf:", "gguf:", "orbax:", "package:"]
    names += [f"{key}=NAME" for keys in load._OPTIONS.values() for key in keys] + ["random:", "seed="]
    described = "\n".join(_code(_text("docs/checkpoints.md")))
    assert [name for name in names if name not in described] == []


def test_the_memory_table_is_right():
    from kvgraft_jax.gemma import configurations
    from kvgraft_jax.gemma import parameters as parameters_lib

    rows = re.findall(r"^\| `(gemma-[\w-]+)` \| ([\d.]+) \| ([\d.]+) \|$", _text("docs/checkpoints.md"), re.M)
    counts = {
        name: sum(math.prod(parameter.shape) for parameter in parameters_lib.parameters(config)) / 1e9
        for name, config in configurations.CONFIGURATIONS.items()
    }
    assert {row[0]: row[1:] for row in rows} == {name: (f"{n:.2f}", f"{2 * n:.1f}") for name, n in counts.items()}


def test_the_chat_example_runs(tmp_path, monkeypatch, capsys):
    from kvgraft_jax.text import chat as chat_lib
    from kvgraft_jax.text import tokenizer as tokenizer_lib

    monkeypatch.chdir(tmp_path)
    tokenizer = tokenizer_lib.from_json(tiny_tokenizers.tokenizer_json(), "tokenizer.json")
    chat = chat_lib.Chat(tokenizer, "gemma3")
    made = kg.load_model(tiny.URI.replace("vocab=512", f"vocab={tokenizer.vocab_size}"))
    model = dataclasses.replace(made, tokenizer=tokenizer, chat=chat)
    engine = kg.Engine(model, capacity=tiny.CAPACITY, width=tiny.WIDTH, kv_block=tiny.KV_BLOCK)
    (block,) = re.findall(r"^```python\n(.*?)^```", _text("docs/checkpoints.md"), re.M | re.S)
    names = dict(kg=kg, model=model, engine=engine, context="the code is four.", question=" what is the code?")
    exec(block, names)
    whole = chat.encode([kg.Message("user", names["context"] + names["question"])])
    assert len(block.splitlines()) == 5 and names["prefix_ids"] + names["suffix_ids"] == whole
    tokens, _ = engine.generate(engine.prefill(whole), max_new_tokens=64)
    assert names["tokens"] == tokens
    assert capsys.readouterr().out == chat.reply(tokens).content + "\n"


@pytest.mark.weights
@pytest.mark.slow
def test_the_readme_example_gives_the_code_and_equality(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", _text("README.md"), re.M | re.S)
    result = subprocess.run(
        [sys.executable, "-c", "".join(blocks)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    answer, *comparison = result.stdout.splitlines()
    (deposited,) = re.findall(r"lit by (\d{4}) lamps", blocks[0])
    assert answer.strip() == deposited
    assert sum(line.endswith(" equal") for line in comparison) == 3 and "DIFFERENT" not in result.stdout
    assert len(comparison) >= 8 + 8 and any(deposited in line for line in comparison)
