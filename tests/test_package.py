"""The package as others install it: what its wheel holds and needs, and a graft without the checkout."""

from __future__ import annotations

from collections.abc import Iterable
import importlib.metadata
import os
import pathlib
import subprocess
import sys
import sysconfig
import venv
import zipfile

from packaging import requirements, utils
import pytest

import kvgraft_jax
from tests import tiny

ROOT = pathlib.Path(__file__).parents[1]
EXTRAS = ("weights", "dev", "gpu")
OFFLINE = ("--no-deps", "--no-index", "--no-build-isolation")

# Deposits with the argument "deposit"; with an artifact id, grafts it in this other process and compares.
SCRIPT = f"""
import sys
import kvgraft_jax as kg
assert "jax" not in sys.modules and kg.__version__
engine = kg.Engine(kg.load_model({tiny.URI!r}, dtype="bfloat16"), capacity=160, width=8, kv_block=16)
text, rest = list(range(3, 40)), [5, 7]
if sys.argv[1] == "deposit":
    print(kg.save_artifact(engine.capture(engine.prefill(text)), "artifacts"))
else:
    grafted = engine.graft(kg.load_artifact("artifacts", sys.argv[1]))
    comparison = kg.compare(engine.prefill(text + rest), engine.extend(grafted, rest))
    print(kg.__file__, comparison.equal, *sys.path, sep="\\n")
"""


def _run(*command: object, cwd: pathlib.Path = ROOT) -> str:
    """Returns what a command prints; fails with all that it said."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _build_wheel(source: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    _run(sys.executable, "-m", "pip", "wheel", *OFFLINE, f"--wheel-dir={folder}", source)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
    """Returns the wheel of the checkout."""
    return _build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installation(tmp_path_factory, wheel) -> pathlib.Path:
    """Returns an environment with the wheel in it, which takes the dependencies from this interpreter's environment."""
    folder = tmp_path_factory.mktemp("elsewhere") / "venv"
    venv.create(folder, symlinks=True)
    _run(sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", *OFFLINE, wheel)
    (site,) = folder.glob("lib/python*/site-packages")
    # Only the folders: what this environment adds with .pth files, a checkout for example, is not followed.
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    return folder


def _listed(lines: Iterable[str]) -> set[tuple[str, frozenset[str], str]]:
    """Requirements as name, extras and range; comments and the markers of extras are left out."""
    texts = [line.partition("#")[0].partition(";")[0].strip() for line in lines]
    parsed = [requirements.Requirement(text) for text in texts if text]
    return {(utils.canonicalize_name(item.name), frozenset(item.extras), str(item.specifier)) for item in parsed}


def test_the_wheel_holds_the_library_alone(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    library = [path for path in (ROOT / "kvgraft_jax").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert names == {path.relative_to(ROOT).as_posix() for path in library}


def test_its_metadata_are_those_of_the_checkout(installation):
    (site,) = installation.glob("lib/python*/site-packages")
    (found,) = importlib.metadata.distributions(name="kvgraft_jax", path=[str(site)])
    assert found.version == kvgraft_jax.__version__
    assert found.metadata["License-Expression"] == "Apache-2.0" and found.metadata["Requires-Python"] == ">=3.11"
    assert set(found.metadata.get_all("Provides-Extra")) == set(EXTRAS)
    for extra, file in {"": "requirements.txt", **{extra: f"requirements-{extra}.txt" for extra in EXTRAS}}.items():
        declared = [line for line in found.requires if line.partition("extra == ")[2].strip("'\"") == extra]
        assert declared and _listed(declared) == _listed((ROOT / file).read_text().splitlines()), file


def test_the_source_distribution_builds_the_same_wheel(tmp_path, wheel):
    _run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path)
    (source,) = tmp_path.glob("*.tar.gz")
    again = _build_wheel(source, tmp_path / "again")
    assert again.name == wheel.name and again.read_bytes() == wheel.read_bytes()


@pytest.mark.slow
def test_it_deposits_and_grafts_without_the_checkout(tmp_path, installation):
    python = installation / "bin" / "python"
    artifact_id = _run(python, "-I", "-c", SCRIPT, "deposit", cwd=tmp_path).strip()
    file, is_equal, *paths = _run(python, "-I", "-c", SCRIPT, artifact_id, cwd=tmp_path).splitlines()
    assert is_equal == "True"
    assert pathlib.Path(file).is_relative_to(installation)
    assert not any(pathlib.Path(path).is_relative_to(ROOT) and "site-packages" not in path for path in paths)
