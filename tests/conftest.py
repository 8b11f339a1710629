"""Test switches: XLA flags before jax, strict promotion, and the markers `weights` and `gpu` that may skip a test.

All processes of a run share one cache of compiled programs, since compiling takes most of the time. A process
that grafts what another one left compiles for itself.
"""

from __future__ import annotations

import atexit
import os
import pathlib
import shutil
import tempfile

if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # The other processes of this run inherit it.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="kvgraft_jax-compiled-")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

from kvgraft_jax import determinism  # noqa: E402

determinism.configure()  # Before anything can start a jax backend.

from collections.abc import Iterator  # noqa: E402

import jax  # noqa: E402
import pytest  # noqa: E402

from kvgraft_jax import thread_test  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

_MOST_MAPPINGS = 20_000


@pytest.fixture(autouse=True, scope="session")
def no_thread_test() -> Iterator[None]:
    """Leaves out the child processes of the thread test, seconds for each of the suite's many programs.

    `test_thread_test.py` runs it, and so do the commands that other tests start.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thread_test, "check", lambda config, device: None)
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --no-weights."""
    parser.addoption("--no-weights", action="store_true", help="skip the tests marked `weights`, naming each")


@pytest.hookimpl(tryfirst=True)  # Before fixtures, which may load the weights.
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test that this run leaves out, with the marker as the reason."""
    if item.get_closest_marker("weights") and item.config.getoption("--no-weights"):
        pytest.skip("weights: --no-weights was given")
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip(f"gpu: jax runs on {jax.default_backend()}")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Drops compiled programs once they take too many memory mappings: at 65,530 Linux gives no more, and LLVM crashes.

    A program takes about a hundred, so those of some files fit together. Later tests find theirs in the run's cache.
    """
    mappings = pathlib.Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > _MOST_MAPPINGS:
        jax.clear_caches()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Counts what was left out, by marker."""
    reasons = [report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", [])]
    for reason in sorted(set(reasons)):
        terminalreporter.write_line(f"{reasons.count(reason)} skipped: {reason}")
