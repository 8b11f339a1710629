"""The XLA flags: set when the engine is imported, refused when late or contradicted, asserted on the backend."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import jax
import pytest

from kvgraft_jax import determinism, errors
from kvgraft_jax import engine as engine_lib
from tests import tiny

ROOT = pathlib.Path(__file__).parent.parent
FLAG = determinism.COMMON_FLAGS[0]


def run(code: str, flags: str = "") -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, PYTHONPATH=str(ROOT), XLA_FLAGS=flags)
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_importing_the_engine_sets_the_flags():
    done = run("import os, jax, kvgraft_jax; kvgraft_jax.Engine; print(os.environ['XLA_FLAGS'])", "--xla_dump_to=")
    assert done.stdout.split() == ["--xla_dump_to=", *determinism.required_flags()], done.stderr


def test_a_running_backend_is_an_error_with_the_line_to_export():
    done = run("import jax; jax.devices(); import kvgraft_jax; kvgraft_jax.load_model")
    assert "DeterminismError" in done.stderr and f'export XLA_FLAGS="{FLAG}' in done.stderr


def test_a_running_backend_with_the_flags_is_fine():
    done = run("import jax; jax.devices(); import kvgraft_jax; print(kvgraft_jax.Engine.__name__)", FLAG)
    assert done.stdout.strip() == "Engine" or len(determinism.required_flags()) > 1, done.stderr


def test_a_contradicting_flag_is_an_error():
    done = run("import kvgraft_jax; kvgraft_jax.Engine", "--xla_allow_excess_precision=true")
    assert "xla_allow_excess_precision=true, but" in done.stderr and "export XLA_FLAGS" in done.stderr


def test_a_backend_that_skips_roundings_is_noticed():
    code = "from kvgraft_jax import determinism; determinism.assert_in_force()"
    assert "skips bfloat16 roundings" in run(code).stderr


@pytest.mark.parametrize("option", ["jax_enable_x64", "jax_disable_jit", "jax_disable_most_optimizations"])
def test_options_that_change_programs_are_refused_at_every_call(option):
    engine = tiny.engine()
    state = engine.prefill([1, 2, 3])
    artifact = engine.capture(state)
    calls = (
        lambda: engine.prefill([1]),
        lambda: engine.extend(state, [1]),
        lambda: engine.generate(state),
        lambda: engine.score([1]),
        lambda: engine.capture(state),
        lambda: engine.graft(artifact),
        lambda: engine_lib.Engine(tiny.model(), capacity=64),
    )
    try:
        jax.config.update(option, True)
        for call in calls:
            with pytest.raises(errors.DeterminismError, match=option):
                call()
    finally:
        jax.config.update(option, False)


def test_flags_changed_while_a_backend_ran_are_refused():
    code = f"import os, jax; jax.devices(); os.environ['XLA_FLAGS'] = {FLAG!r}; import kvgraft_jax; kvgraft_jax.Engine"
    assert "nobody can tell which flags" in run(code, FLAG + " --xla_cpu_max_isa=SSE4_2").stderr


def test_flags_in_force_are_sorted_and_without_paths():
    code = "from kvgraft_jax import determinism as d; d.configure(); print(*d.flags_in_force())"
    flags = f"--xla_dump_to=/a --xla_b=1 {FLAG} --xla_b=2 --xla_a"
    extra = determinism.required_flags()[1:]
    assert run(code, flags).stdout.split() == sorted(["--xla_a", FLAG, "--xla_b=2", *extra])


def test_flags_changed_after_the_import_are_refused():
    """The backend has read them already, so a pin with the new ones would not be true."""
    code = (
        "import os; from kvgraft_jax import determinism as d; d.configure(); import jax; jax.devices()\n"
        f"os.environ['XLA_FLAGS'] += ' {determinism.PORTABLE_CPU_FLAG}'; d.configure(); d.environment(jax.devices()[0])"
    )
    assert "XLA_FLAGS changed after" in run(code).stderr


@pytest.mark.skipif(determinism.environment(jax.devices()[0])["platform"] != "cpu", reason="needs jax on the CPU")
def test_the_environment_names_the_cpu_unless_its_kernels_are_portable():
    found = determinism.environment(jax.devices()[0])
    assert found["jax"] and found["jaxlib"] and FLAG in found["xla_flags"] and found["device_kind"]
    assert found["cpu"]["architecture"] and found["cpu"]["model"] and found["cpu"]["instructions"]
    code = "from kvgraft_jax import determinism as d; import jax; d.configure()\n"
    code += "print(d.environment(jax.devices()[0])['cpu'])"
    assert run(code, determinism.PORTABLE_CPU_FLAG).stdout.strip() == "None"


def test_assertion_passes_here():
    determinism.configure()
    determinism.assert_in_force()
    assert issubclass(errors.DeterminismError, errors.KVGraftError)


@pytest.mark.parametrize("spelling", ["false", "0", "False"])
def test_spellings_of_false_are_accepted(monkeypatch, spelling):
    monkeypatch.setenv("XLA_FLAGS", f"--xla_allow_excess_precision={spelling} " + " ".join(determinism.GPU_FLAGS))
    determinism.configure()
