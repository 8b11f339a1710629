"""The workspace script: what it says, the environment that it makes, and that no variable leads it elsewhere.

Environments are made in a small project with the script and a build backend of its own, without a network.
"""

from __future__ import annotations

import fcntl
import inspect
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PYPROJECT = """
[build-system]
requires = ["planted"]
build-backend = "hatch_build"
backend-path = ["."]
[project]
name = "kvgraft_jax"
[tool.hatch]
"""
BACKEND = """
import pathlib
import zipfile
import planted  # A build without isolation does not find it.

def build_editable(folder, config_settings=None, metadata_directory=None):
    dev = pathlib.Path("requirements-dev.txt").read_text().split()
    needs = [f"{requirement}; extra == 'dev'" for requirement in dev]
    return write_wheel(folder, "kvgraft_jax", "1.0", {"_kvgraft_jax.pth": str(pathlib.Path.cwd())}, needs)

"""
# What a command finds: its directory, the project, a dependency of the extra `dev`, and how Python runs.
PROBE = """
import os, sys, kvgraft_jax, planted
leaks = sorted({"BASH_ENV", "CDPATH", "ENV", "PYTEST_ADDOPTS", "VIRTUAL_ENV"} & set(os.environ))
print(os.getcwd(), kvgraft_jax.__file__, planted.__version__, sys.prefix, __debug__, leaks)
"""


def write_wheel(folder, name: str, version: str, files: dict[str, str], needs: list[str]) -> str:
    """Writes a wheel and returns its file name."""
    information = f"{name}-{version}.dist-info"
    metadata = [f"Name: {name}", f"Version: {version}", "Provides-Extra: dev", "Provides-Extra: weights"]
    metadata += [f"Requires-Dist: {need}" for need in needs]
    with zipfile.ZipFile(f"{folder}/{name}-{version}-py3-none-any.whl", "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file, text)
        wheel.writestr(f"{information}/METADATA", "\n".join(["Metadata-Version: 2.1", *metadata]) + "\n")
        wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{information}/RECORD", "")
    return f"{name}-{version}-py3-none-any.whl"


def _run(
    directory: pathlib.Path, *arguments: str, cwd: str | pathlib.Path = "/", **environment: str
) -> subprocess.CompletedProcess[str]:
    script = directory / "workspace.sh"
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON", "WORKERS"))
    }
    return subprocess.run(
        ["bash", str(script.relative_to(cwd)), *arguments],
        cwd=cwd,
        env={**inherited, "PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def _make_checkout(folder: pathlib.Path) -> dict[str, str]:
    """Makes the small project; returns the pip settings with which it installs offline."""
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "workspace.sh", folder)
    for name in ("", "-weights", "-lock"):
        (folder / f"requirements{name}.txt").touch()
    for name in ("-dev", "-peers"):
        (folder / f"requirements{name}.txt").write_text("planted\n")
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "hatch_build.py").write_text(BACKEND + inspect.getsource(write_wheel))
    (folder / "kvgraft_jax").mkdir()
    (folder / "kvgraft_jax" / "__init__.py").touch()
    # Stands in for the real one: says how it was called.
    (folder / "pytest.py").write_text("import os, sys\nprint(sys.argv[1:], os.environ.get('PYTEST_ADDOPTS'))\n")
    wheels = folder.parent / "wheels"
    wheels.mkdir()
    for version in ("0.9", "1.0", "1.1rc1"):
        write_wheel(wheels, "planted", version, {"planted.py": f"__version__ = {version!r}\n"}, [])
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": os.devnull}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> pathlib.Path:
    """Returns the small project, set up under every pip variable that would lead the installation elsewhere."""
    scratch = tmp_path_factory.mktemp("workspace").resolve()
    settings = _make_checkout(scratch / "checkout")
    for name in ("TARGET", "PREFIX", "ROOT", "EDITABLE", "REQUIREMENT", "PYTHON"):
        settings[f"PIP_{name}"] = str(scratch / "elsewhere")
    for name in ("USER", "NO_DEPS", "DRY_RUN", "PRE", "REQUIRE_VIRTUALENV"):
        settings[f"PIP_{name}"] = "1"
    settings |= {"PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_BINARY": ":all:"}  # pip reads this 0 as: without isolation.
    done = _run(scratch / "checkout", "python", "-c", PROBE, **settings)
    log = scratch / "checkout" / ".workspace" / "install.log"
    assert done.returncode == 0, done.stderr + log.read_text()
    assert done.stdout == _found(scratch / "checkout")
    assert not (scratch / "elsewhere").exists()
    return scratch / "checkout"


def _found(checkout: pathlib.Path) -> str:
    """Returns what PROBE prints where nothing is led elsewhere."""
    return f"{checkout} {checkout}/kvgraft_jax/__init__.py 1.0 {checkout}/.venv True []\n"


def test_alone_it_prints_every_command():
    result = _run(ROOT)
    assert result.returncode == 0
    commands = {"demo", "test", "lint", "format", "bench", "peers", "python", "lock"}
    assert commands <= {line.split()[0] for line in result.stdout.splitlines() if line.startswith("  ")}


def test_an_unknown_command_fails_with_the_usage():
    result = _run(ROOT, "tets")
    assert result.returncode == 2
    assert "'tets'" in result.stderr and "usage: bash workspace.sh" in result.stderr


def test_a_python_that_is_too_old_is_refused_before_anything_is_made(tmp_path):
    shutil.copy(ROOT / "workspace.sh", tmp_path)
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    result = _run(tmp_path, "test", PYTHON=str(old))
    assert result.returncode == 1
    assert "no Python >= 3.11 with venv and pip" in result.stderr and str(old) in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["python3.9", "workspace.sh"]


VARIABLES = {
    "BASH_ENV": "BASH_ENV",
    "BASH_FUNC_cd%%": "() { builtin cd DECOYS/checkout; }",
    "BASH_FUNC_grep%%": "() { false; }",
    "CDPATH": "DECOYS",
    "ENV": "BASH_ENV",
    "POSIXLY_CORRECT": "1",
    "PYTEST_ADDOPTS": "-k nothing",
    "PYTHONHOME": "/nowhere",
    "PYTHONOPTIMIZE": "1",
    "PYTHONPATH": "DECOYS/checkout",
    "PYTHONPLATLIBDIR": "nowhere",
    "PYTHONSAFEPATH": "1",
    "PYTHONUSERBASE": "DECOYS/base",
    "SHELLOPTS": "keyword:noglob",
    "VIRTUAL_ENV": "DECOYS",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIABLES)
def test_no_variable_leads_it_elsewhere(checkout, tmp_path, name):
    decoy = tmp_path / "decoys" / "checkout"
    (decoy / "kvgraft_jax").mkdir(parents=True)
    (decoy / "kvgraft_jax" / "__init__.py").touch()
    (decoy / "planted.py").write_text("__version__ = 'another'\n")
    shutil.copy(ROOT / "workspace.sh", decoy)
    startup = tmp_path / "startup"
    startup.write_text("grep() { false; }\n")
    value = VARIABLES[name].replace("DECOYS", str(decoy.parent)).replace("BASH_ENV", str(startup))
    done = _run(checkout, "python", "-c", PROBE, cwd=checkout.parent, **{name: value})
    assert (done.returncode, done.stdout, done.stderr) == (0, _found(checkout), "")


@pytest.mark.slow
def test_test_is_pytest_over_everything_in_two_processes(checkout):
    settings = "'-v', '-n', '2', '--dist', 'loadfile', '--durations', '10'"
    assert _run(checkout, "test", PYTEST_ADDOPTS="-k nothing").stdout == f"[{settings}] None\n"
    assert _run(checkout, "test", "-m", "not slow").stdout == f"[{settings}, '-m', 'not slow'] None\n"
    assert _run(checkout, "test", WORKERS="1").stdout == f"[{settings.replace('2', '1')}] None\n"


@pytest.mark.slow
def test_it_says_that_it_waits_for_another_set_up(checkout):
    command = ["bash", str(checkout / "workspace.sh"), "python", "-c", "print('done')"]
    with open(checkout / ".workspace" / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stderr.readline() == "workspace: waiting for another set-up of this checkout\n"
    assert process.communicate(timeout=60) == ("done\n", "")


@pytest.mark.slow
def test_a_failed_installation_starts_over_and_a_moved_checkout_is_set_up_again(tmp_path):
    checkout = tmp_path.resolve() / "checkout"
    settings = _make_checkout(checkout)
    developers = checkout / "requirements-dev.txt"
    developers.write_text("absent\n")
    failed = _run(checkout, "python", "-c", PROBE, **settings)
    assert failed.returncode == 1 and failed.stdout == ""
    assert "No matching distribution found for absent" in failed.stderr
    assert "what pip said is in .workspace/install.log" in failed.stderr
    assert not (checkout / ".venv" / "installed").exists()

    developers.write_text("planted\n")
    (checkout / ".venv" / "leftover").touch()
    mended = _run(checkout, "python", "-c", PROBE, **settings)
    assert mended.stdout == _found(checkout) and "creating .venv" in mended.stderr
    assert not (checkout / ".venv" / "leftover").exists()

    moved = _run(checkout.rename(tmp_path / "moved"), "python", "-c", PROBE, **settings)
    assert moved.stdout == _found(tmp_path.resolve() / "moved") and "creating .venv" in moved.stderr


@pytest.mark.slow
def test_peers_follow_constraints_and_a_pip_configuration_cannot_divert_them(tmp_path):
    checkout = tmp_path.resolve() / "checkout"
    settings = _make_checkout(checkout)
    (tmp_path / "constraint.txt").write_text("planted<1\n")
    configuration = "[global]\nno-index = yes\nfind-links = {}\n[install]\nuser = yes\nno-deps = yes\ndry-run = yes\n"
    (tmp_path / "pip.conf").write_text(configuration.format(settings["PIP_FIND_LINKS"]))
    done = _run(
        checkout, "peers", PIP_CONFIG_FILE=str(tmp_path / "pip.conf"), PIP_CONSTRAINT=str(tmp_path / "constraint.txt")
    )
    assert done.returncode == 0, done.stderr + (checkout / ".workspace" / "install.log").read_text()
    command = [checkout / ".venv-peers" / "bin" / "python", "-I", "-c", "import planted; print(planted.__version__)"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "0.9\n"


def test_the_whole_check_is_lint_and_then_all_tests_of_its_own_checkout(tmp_path):
    for place in ("own", "decoy"):
        (tmp_path / place / ".ci").mkdir(parents=True)
        shutil.copy(ROOT / ".ci" / "run", tmp_path / place / ".ci")
        (tmp_path / place / "workspace.sh").write_text(f'echo {place} "$@"\n')
    done = subprocess.run(
        ["bash", ".ci/run"],
        cwd=tmp_path / "own",
        env={**os.environ, "CDPATH": str(tmp_path / "decoy")},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "own lint\nown test\n", "")
