"""The thread test: once per machine, library, flags and program; other bits on other threads are refused."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re

import jax
import pytest

from kvgraft_jax import determinism, errors, thread_test
from tests import tiny

ROOT = pathlib.Path(__file__).parents[1]
CHECK = thread_test.check  # As it was before conftest left it out.


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """Returns a cache directory of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    thread_test._check.cache_clear()
    yield tmp_path / "cache"
    thread_test._check.cache_clear()


@pytest.fixture
def runs(monkeypatch) -> list[int]:
    """Threads of the children that were run; all find the same."""
    found: list[int] = []
    monkeypatch.setattr(thread_test, "_run", lambda config, threads: found.append(threads) or "same")
    return found


def check() -> None:
    """Runs the test for the small engine, as if in a new process."""
    thread_test._check.cache_clear()
    CHECK(tiny.engine().step_config, jax.devices()[0])


@pytest.mark.slow
def test_two_children_agree_and_that_is_remembered(monkeypatch):
    check()
    monkeypatch.setattr(thread_test, "_run", lambda *_: pytest.fail("a child ran"))
    check()


def test_other_bits_on_other_threads_are_refused_every_time(monkeypatch):
    monkeypatch.setattr(thread_test, "_run", lambda config, threads: f"{threads}" * 64)
    for _ in range(2):
        with pytest.raises(errors.DeterminismError, match="other bits on 1 thread than on 3"):
            check()


def test_it_runs_again_for_another_library_flag_or_program(monkeypatch, runs):
    check()
    check()
    assert runs == [1, 3]
    monkeypatch.setattr(determinism, "library_digest", lambda: "0" * 64)
    check()
    assert len(runs) == 4
    monkeypatch.setattr(determinism, "flags_in_force", lambda: ["--xla_another=true"])
    check()
    assert len(runs) == 6
    CHECK(tiny.engine(kv_block=32).step_config, jax.devices()[0])
    assert len(runs) == 8


def test_without_a_cache_directory_it_runs_once_per_process(cache, runs):
    cache.write_text("a file in its place")
    check()
    CHECK(tiny.engine().step_config, jax.devices()[0])
    assert runs == [1, 3]
    check()
    assert runs == [1, 3, 1, 3]


def test_a_damaged_entry_is_no_proof(cache, runs):
    check()
    (entry,) = (cache / "kvgraft_jax" / "remembered").iterdir()
    entry.write_bytes(entry.read_bytes().replace(b"true", b"True"))
    check()
    assert len(runs) == 4


def test_a_machine_that_runs_no_child_is_warned_of_and_asked_again(cache, monkeypatch):
    with monkeypatch.context() as patch:
        for executable in ("/nowhere/python", "/bin/false"):
            patch.setattr(thread_test.sys, "executable", executable)
            with pytest.warns(errors.KVGraftWarning, match=r"not compared with those on 1 thread"):
                check()
    assert [path for path in cache.rglob("*") if path.is_file()] == []
    ran: list[int] = []
    monkeypatch.setattr(thread_test, "_run", lambda config, threads: ran.append(threads) or "same")
    check()
    assert ran == [1, 3]
    assert [path for path in cache.rglob("*") if path.is_file()] != []  # Where an entry would have been seen.


@pytest.mark.slow
def test_the_library_that_the_refused_flag_chooses_would_be_found(monkeypatch, tmp_path):
    """Eigen shards products by thread; here its flag gets past the list of refused ones."""
    (tmp_path / "sitecustomize.py").write_text(
        "from kvgraft_jax import xla_flags\nxla_flags.check = lambda flags: None\n"
    )
    config = tiny.engine("float32").step_config  # This process's backend runs before the flag is set.
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path}")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_experimental_ynn_fusion_type=")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, embed_dim=640, hidden_dim=2048))
    monkeypatch.setattr(determinism, "flags_in_force", lambda: ["--xla_cpu_experimental_ynn_fusion_type="])
    message = "other bits on 1 thread than on 3|one at a time|than steps of 2"
    if "amx_tile" not in determinism.cpu_description()["instructions"]:
        with pytest.raises(errors.DeterminismError, match=message):
            CHECK(config, jax.devices()[0])
        return
    try:
        CHECK(config, jax.devices()[0])
    except errors.DeterminismError as error:
        assert re.search(message, str(error))
    else:
        pytest.skip("on this processor with AMX that library gave equal bits on 1 thread and on 3")
