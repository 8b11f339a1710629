"""The workspace script without any installation: what it says alone, to a mistake, and to a Python that is too old."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess

ROOT = pathlib.Path(__file__).parents[1]


def _run(directory: pathlib.Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(directory / "workspace.sh"), *arguments],
        cwd="/",
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


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
