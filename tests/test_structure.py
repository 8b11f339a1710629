"""The shape of the repository, checked: file sizes, docstrings, one-way imports, no machine paths.

Every check takes a root directory and returns its findings as "file:line: what is wrong", so that each is also run on
a planted violation: a check that cannot fail proves nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
import graphlib
import os
import pathlib
import subprocess
import sys
import tempfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]
MAX_LINES = 399
# A file or folder imports only itself and what stands before it. The package comes last: its public names are lazy.
ROOMS = (
    *("errors", "notation", "digest", "paths", "progress", "forks", "remembered", "children", "token_ids"),
    *("xla_flags", "determinism", "host_memory", "device_memory", "pin", "text"),
    *("gemma.config", "gemma.configurations", "gemma.products", "gemma.parameters", "gemma.sharding", "gemma.rotary"),
    *("gemma.cache", "gemma.pallas_product", "gemma.layers", "gemma.attention", "gemma.experts", "gemma.per_layer"),
    "gemma.transformer",
    *("runtime.model", "runtime.step", "runtime.sampling", "runtime.run", "runtime.state", "runtime.workspace"),
    *("runtime.batch", "runtime.plans", "runtime.contexts"),
    *("checkpoints.fields", "checkpoints.files", "checkpoints.source", "checkpoints.assemble", "checkpoints.chats"),
    *("checkpoints.hf", "checkpoints.gguf", "checkpoints.orbax", "checkpoints.package", "checkpoints.random"),
    *("checkpoints.load", "grafting", "relocation"),
    *("self_test", "thread_test", "width_probe", "identity", "engine"),
)
PROJECT = ("kvgraft_jax", "configs", "experiments", "tests")


def _files(root: pathlib.Path) -> list[pathlib.Path]:
    """Returns all files that belong to the repository: not hidden (except .ci), not generated."""
    found = []
    for directory, below, names in os.walk(root):
        below[:] = [
            name for name in below if name == ".ci" or not name.startswith(".") and name not in ("out", "__pycache__")
        ]
        found += [pathlib.Path(directory) / name for name in names]
    return sorted(found)


def _modules(root: pathlib.Path) -> dict[str, pathlib.Path]:
    """Dotted name to file, for every Python file of the project."""
    found = {}
    for path in _files(root):
        if path.suffix == ".py":
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _imports(path: pathlib.Path, modules: dict[str, pathlib.Path]) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that a file imports, inside functions too; `from a import b` is a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                known = f"{base}.{alias.name}" in modules or base.split(".")[0] in PROJECT
                yield node.lineno, f"{base}.{alias.name}" if known else base


def _rank(module: str) -> int | None:
    """Returns the place in the one-way order; None for a module without one."""
    top, _, rest = module.partition(".")
    if top == "kvgraft_jax" and rest:
        place = [i for i, room in enumerate(ROOMS) if f"{rest}.".startswith(f"{room}.") or room.startswith(f"{rest}.")]
        return place[0] if place else None
    return len(ROOMS) + PROJECT.index(top)


def long_files(root: pathlib.Path) -> list[str]:
    """Python files of 400 lines or more."""
    sizes = {path: len(path.read_text().splitlines()) for path in _modules(root).values()}
    return [
        f"{path.relative_to(root)}:{size}: {size} lines, wanted at most {MAX_LINES}; split it"
        for path, size in sizes.items()
        if size > MAX_LINES
    ]


def missing_docstrings(root: pathlib.Path) -> list[str]:
    """Modules without a docstring, and public functions and classes of the library without one."""
    found = []
    for module, path in _modules(root).items():
        source = path.read_text()
        tree = ast.parse(source)
        if source.strip() and not ast.get_docstring(tree):
            found.append(f"{path.relative_to(root)}:1: the module has no docstring")
        for node in tree.body if module.startswith("kvgraft_jax") else ():
            is_definition = isinstance(node, ast.FunctionDef | ast.ClassDef)
            if is_definition and not node.name.startswith("_") and not ast.get_docstring(node):
                found.append(f"{path.relative_to(root)}:{node.lineno}: {node.name} is public and has no docstring")
    return found


def wrong_way_imports(root: pathlib.Path) -> list[str]:
    """Imports of a later room, of names instead of modules, and anything but ml_collections in a configuration."""
    found = []
    modules = _modules(root)
    for module, path in modules.items():
        is_project = module.split(".")[0] in PROJECT
        if is_project and _rank(module) is None:
            found.append(f"{path.relative_to(root)}:1: {module} has no place in ROOMS")
            continue
        for line, target in _imports(path, modules):
            where = f"{path.relative_to(root)}:{line}: "
            top = target.split(".")[0]
            if module.startswith("configs.") and top not in ("ml_collections", "__future__"):
                found.append(f"{where}a configuration imports {target}, wanted only ml_collections")
            elif target.startswith("."):
                found.append(f"{where}relative import {target}; write the module in full")
            elif top in PROJECT and target not in modules:
                if module == "kvgraft_jax":  # Its business is names: it declares the public ones.
                    continue
                found.append(f"{where}{target} is not a module; import modules, not names")
            elif top in PROJECT and is_project and (_rank(target) is None or _rank(target) > _rank(module)):
                found.append(f"{where}{module} imports {target}, which comes after it in {ROOMS}")
    return found


def import_cycles(root: pathlib.Path) -> list[str]:
    """Modules that import each other, directly or around a circle."""
    modules = _modules(root)
    lines = {
        name: {target: line for line, target in _imports(path, modules) if target in modules}
        for name, path in modules.items()
    }
    try:
        graphlib.TopologicalSorter(lines).prepare()
    except graphlib.CycleError as error:
        imported, importer = error.args[1][:2]
        where = f"{modules[importer].relative_to(root)}:{lines[importer][imported]}"
        return [f"{where}: import cycle {' < '.join(error.args[1])}"]
    return []


def _machine_folders() -> tuple[str, ...]:
    """Folders of the machine that this runs on: around the checkout, around its user's home, for scratch files."""
    own = (ROOT.resolve(), pathlib.Path.home().resolve() / "x", pathlib.Path(tempfile.gettempdir()).resolve() / "x")
    around = {folder for path in own for folder in path.parents if len(folder.parts) > 1}
    shared = {pathlib.Path("/", name) for name in ("usr", "bin", "dev", "etc", "opt", "proc", "var")}
    return tuple(sorted(f"{folder}/" for folder in around - shared))


def machine_paths(root: pathlib.Path) -> list[str]:
    """Paths of the machine that this runs on, in any text file."""
    found = []
    folders = _machine_folders()
    for path in _files(root):
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(lines, 1):
            found += [f"{path.relative_to(root)}:{number}: {folder}" for folder in folders if folder in line]
    return found


CHECKS = (long_files, missing_docstrings, wrong_way_imports, import_cycles, machine_paths)
VIOLATIONS = {
    "long": (long_files, {"kvgraft_jax/pin.py": "\n" * 400}, "kvgraft_jax/pin.py:400"),
    "no module docstring": (missing_docstrings, {"tests/test_a.py": "x = 1\n"}, "tests/test_a.py:1"),
    "no function docstring": (missing_docstrings, {"kvgraft_jax/pin.py": '"""Pin."""\ndef f(): ...\n'}, "pin.py:2: f"),
    "no class docstring": (missing_docstrings, {"kvgraft_jax/pin.py": '"""Pin."""\nclass C: ...\n'}, "pin.py:2: C"),
    "later room": (
        wrong_way_imports,
        {"kvgraft_jax/pin.py": "def f():\n    from kvgraft_jax import engine\n", "kvgraft_jax/engine.py": ""},
        "kvgraft_jax/pin.py:2: kvgraft_jax.pin imports kvgraft_jax.engine",
    ),
    "library imports the whole package": (
        wrong_way_imports,
        {"kvgraft_jax/__init__.py": "", "kvgraft_jax/pin.py": "import kvgraft_jax\n"},
        "kvgraft_jax/pin.py:1",
    ),
    "library imports an experiment": (
        wrong_way_imports,
        {"kvgraft_jax/engine.py": "import experiments.demo\n", "experiments/demo.py": ""},
        "kvgraft_jax/engine.py:1",
    ),
    "later file of one folder": (
        wrong_way_imports,
        {"kvgraft_jax/gemma/layers.py": "from kvgraft_jax.gemma import cache, attention\n"}
        | {f"kvgraft_jax/gemma/{name}.py": "" for name in ("attention", "cache")},
        "kvgraft_jax.gemma.layers imports kvgraft_jax.gemma.attention",
    ),
    "folder imports the file that opens it": (
        wrong_way_imports,
        {
            "kvgraft_jax/checkpoints/hf/config.py": "from kvgraft_jax.checkpoints import load\n",
            "kvgraft_jax/checkpoints/load.py": "",
        },
        "kvgraft_jax.checkpoints.hf.config imports kvgraft_jax.checkpoints.load",
    ),
    "unknown room": (wrong_way_imports, {"kvgraft_jax/extras/a.py": ""}, "kvgraft_jax/extras/a.py:1"),
    "relative import": (wrong_way_imports, {"kvgraft_jax/pin.py": "from . import errors\n"}, "kvgraft_jax/pin.py:1"),
    "name import": (
        wrong_way_imports,
        {"kvgraft_jax/pin.py": "from kvgraft_jax.errors import E\n", "kvgraft_jax/errors.py": ""},
        "kvgraft_jax/pin.py:1: kvgraft_jax.errors.E is not a module",
    ),
    "configuration": (wrong_way_imports, {"configs/a.py": "import numpy\n"}, "configs/a.py:1"),
    "cycle": (
        import_cycles,
        {
            "kvgraft_jax/gemma/a.py": "from kvgraft_jax.gemma import b\n",
            "kvgraft_jax/gemma/b.py": "import os\nfrom kvgraft_jax.gemma import c\n",
            "kvgraft_jax/gemma/c.py": "import kvgraft_jax.gemma.a\n",
        },
        ": import cycle kvgraft_jax.gemma.",
    ),
    "machine path": (machine_paths, {"README.md": f"\nsee {pathlib.Path.home().resolve()}/main\n"}, "README.md:2"),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_repository_passes(check):
    findings = check(ROOT)
    assert not findings, "\n" + "\n".join(findings)


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_planted_violation_is_found(tmp_path, name):
    check, files, expected = VIOLATIONS[name]
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    findings = check(tmp_path)
    assert len(findings) == 1 and expected in findings[0], findings


def test_every_check_has_a_planted_violation():
    assert {check for check, _, _ in VIOLATIONS.values()} == set(CHECKS)


def test_importing_the_package_imports_no_jax():
    code = "import kvgraft_jax, sys; print([name for name in sys.modules if name.partition('.')[0] in ('jax', 'flax')])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_every_public_name_resolves():
    import kvgraft_jax as kg

    assert kg.__all__
    assert [name for name in kg.__all__ if getattr(kg, name, None) is None] == []
