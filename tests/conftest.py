"""Test switches: XLA flags before jax, strict promotion, and the markers `weights` and `gpu` that may skip a test."""

from __future__ import annotations

from kvgraft_jax import determinism

determinism.configure()  # Before anything can start a jax backend.

from collections.abc import Iterator  # noqa: E402

import jax  # noqa: E402
import pytest  # noqa: E402

from kvgraft_jax import thread_test  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(autouse=True, scope="session")
def no_thread_test() -> Iterator[None]:
    """Leaves out the child processes of the thread test, seconds for each of the suite's many programs.

    `test_thread_test.py` runs it, and so does every engine in a process of its own that another test starts.
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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Counts what was left out, by marker."""
    reasons = [report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", [])]
    for reason in sorted(set(reasons)):
        terminalreporter.write_line(f"{reasons.count(reason)} skipped: {reason}")
