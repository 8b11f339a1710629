"""The test switches themselves: what --no-weights and the gpu marker leave out is named, counted, and never set up."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import jax
import pytest

from tests import conftest

ROOT = pathlib.Path(__file__).parents[1]
PLANTED = """
import jax
import jax.numpy as jnp
import pytest

@pytest.fixture
def weights():
    raise RuntimeError("weights were loaded")

@pytest.mark.weights
@pytest.mark.parametrize("layer", [0, 1])
def test_real(weights, layer):
    pass

@pytest.mark.gpu
def test_on_gpu():
    assert jax.default_backend() == "gpu"

def test_rank_promotion_raises():
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.zeros((2, 3)) + jnp.zeros((3,))

def test_dtype_promotion_raises():
    with pytest.raises(Exception, match="strict"):
        jnp.zeros((2,), jnp.bfloat16) + jnp.zeros((2,), jnp.float32)
"""


def _run_planted(directory: pathlib.Path, *options: str) -> str:
    (directory / "test_planted.py").write_text(PLANTED)
    settings = f"--config-file={ROOT / 'pyproject.toml'}", f"--rootdir={directory}", "-p", "tests.conftest"
    command = [sys.executable, "-m", "pytest", *settings, "-p", "no:cacheprovider", str(directory), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout


def test_no_weights_names_and_counts_what_it_skips(tmp_path):
    output = _run_planted(tmp_path, "--no-weights", "-m", "not gpu")
    assert "test_planted.py::test_real[0] - Skipped: weights: --no-weights was given" in output
    assert "test_planted.py::test_real[1]" in output
    assert "2 skipped: weights: --no-weights was given" in output
    assert "2 passed, 2 skipped, 1 deselected" in output.splitlines()[-1]


def test_weights_run_by_default(tmp_path):
    output = _run_planted(tmp_path, "-m", "weights")
    assert output.count("RuntimeError: weights were loaded") >= 2
    assert "2 errors" in output.splitlines()[-1]


def test_gpu_tests_are_skipped_by_name_without_a_gpu(tmp_path):
    output = _run_planted(tmp_path, "-m", "gpu")
    assert "1 passed" in output or "test_planted.py::test_on_gpu - Skipped: gpu: jax runs on cpu" in output


def test_a_misspelt_marker_is_an_error(tmp_path):
    (tmp_path / "test_misspelt.py").write_text("import pytest\n\n@pytest.mark.weight\ndef test_a():\n    pass\n")
    assert "'weight' not found in `markers`" in _run_planted(tmp_path)


@pytest.mark.skipif(not pathlib.Path("/proc/self/maps").exists(), reason="mappings: this system does not list them")
def test_programs_are_dropped_once_they_take_too_many_mappings(monkeypatch):
    program = jax.jit(lambda x: x + 1)
    program(1)
    monkeypatch.setattr(conftest, "_MOST_MAPPINGS", 1_000_000)
    conftest.pytest_runtest_teardown()
    assert program._cache_size() == 1
    monkeypatch.setattr(conftest, "_MOST_MAPPINGS", 10)
    conftest.pytest_runtest_teardown()
    assert program._cache_size() == 0 and program(1) == 2
