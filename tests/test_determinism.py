"""The XLA flags: set when the engine is imported, refused when late or contradicted, asserted on the backend."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

from kvgraft_jax import determinism, errors, remembered
from kvgraft_jax import engine as engine_lib
from tests import tiny

ROOT = pathlib.Path(__file__).parent.parent
FLAG = determinism.COMMON_FLAGS[0]


def run(code: str, flags: str = "") -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, PYTHONPATH=str(ROOT), XLA_FLAGS=flags)
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_importing_the_engine_sets_the_flags():
    done = run("import os, jax, kvgraft_jax; kvgraft_jax.Engine; print(os.environ['XLA_FLAGS'])", "--xla_dump_to=")
    assert done.stdout.split() == ["--xla_dump_to=", *determinism.required_flags(), determinism.CPU_DEFAULT], (
        done.stderr
    )


def test_a_running_backend_is_an_error_with_the_line_to_export():
    done = run("import jax; jax.devices(); import kvgraft_jax; kvgraft_jax.load_model")
    assert "DeterminismError" in done.stderr and f"export XLA_FLAGS={FLAG}" in done.stderr


def test_a_running_backend_with_the_flags_is_fine():
    done = run("import jax; jax.devices(); import kvgraft_jax; print(kvgraft_jax.Engine.__name__)", FLAG)
    assert done.stdout.strip() == "Engine" or len(determinism.required_flags()) > 1, done.stderr


def test_a_contradicting_flag_is_an_error():
    done = run("import kvgraft_jax; kvgraft_jax.Engine", "--xla_allow_excess_precision=true")
    assert "xla_allow_excess_precision=true, but" in done.stderr and "export XLA_FLAGS" in done.stderr


def test_a_backend_that_skips_roundings_is_noticed():
    code = "from kvgraft_jax import determinism; determinism.assert_in_force()"
    assert "skips bfloat16 roundings" in run(code).stderr


@pytest.mark.parametrize(
    "option",
    ["jax_enable_x64", "jax_disable_jit", "jax_disable_most_optimizations", "jax_no_tracing", "jax_no_execution"],
)
def test_options_that_change_programs_are_refused_at_every_call(option):
    engine = tiny.engine()
    state = engine.prefill([1, 2, 3])
    artifact = engine.capture(state)
    calls = (
        lambda: engine.prefill([1]),
        lambda: engine.extend(state, [1]),
        lambda: engine.generate(state),
        lambda: engine.prefill_many([[1]]),
        lambda: engine.extend_many([state], [[1]]),
        lambda: engine.generate_many([state]),
        lambda: engine.warm_up(),
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


def test_flags_in_force_stand_in_order_with_repeats_and_without_paths():
    code = "from kvgraft_jax import determinism as d; d.configure(); print(*d.flags_in_force())"
    flags = f"--xla_dump_to=/a --xla_b=2 {FLAG} --xla_b=3 --xla_a --xla_backend_extra_options=x --xla_b=2"
    extra = determinism.required_flags()[1:]
    given = ["--xla_b=2", "--xla_b=3", "--xla_a=true", "--xla_backend_extra_options=x", "--xla_b=2"]
    wanted = [FLAG, *extra, *given, determinism.CPU_DEFAULT]
    assert run(code, flags).stdout.split() == wanted


def test_flags_changed_after_the_import_are_refused():
    """The backend has read them already, so a pin with the new ones would not be true."""
    code = (
        "import os; from kvgraft_jax import determinism as d; d.configure(); import jax; jax.devices()\n"
        f"os.environ['XLA_FLAGS'] += ' {tiny.NATIVE_CPU_FLAG}'; d.configure(); d.environment(jax.devices()[0])"
    )
    assert "XLA_FLAGS changed after" in run(code).stderr


def test_the_environment_names_the_processor_and_the_library_under_native_kernels_too():
    found = determinism.environment(jax.devices()[0])
    assert found["jax"] and found["jaxlib"] and FLAG in found["xla_flags"] and found["device_kind"]
    assert found["cpu"]["architecture"] and found["cpu"]["model"] and found["cpu"]["instructions"]
    code = "from kvgraft_jax import determinism as d; import jax, json; d.configure()\n"
    code += "print(json.dumps(d.environment(jax.devices()[0])))"
    other = json.loads(run(code, tiny.NATIVE_CPU_FLAG).stdout)
    own = found.pop("xla_flags")
    assert determinism.CPU_DEFAULT in own
    own.remove(determinism.CPU_DEFAULT)
    assert other.pop("xla_flags") == [*own, tiny.NATIVE_CPU_FLAG]
    assert other == found


def test_another_build_of_the_library_has_another_digest(monkeypatch):
    own = determinism.library_digest()
    assert own == determinism.library_digest.__wrapped__()
    file_digest = remembered.file_digest
    monkeypatch.setattr(remembered, "file_digest", lambda path: file_digest(path)[::-1])
    assert determinism.library_digest.__wrapped__() != own
    monkeypatch.setattr(remembered, "file_digest", lambda path: (_ for _ in ()).throw(OSError("gone")))
    with pytest.raises(errors.DeterminismError, match="cannot be read .gone., .* install jax again"):
        determinism.library_digest.__wrapped__()


@pytest.mark.parametrize(
    ("architecture", "features", "wanted"),
    [
        ("x86_64", "smep smap sme fma avx2 amx_tile f16c sse4_2 umip", "amx_tile avx2 f16c fma sse4_2"),
        ("aarch64", "fp asimddp fphp svebf16 sme smef16f32 i8mm crc32", "asimddp fphp i8mm sme smef16f32 svebf16"),
        ("riscv64", "smep v", "smep v"),
    ],
)
def test_instructions_are_those_for_numbers(architecture, features, wanted):
    assert determinism.instructions(architecture, features.split()) == wanted.split()


def test_a_file_of_flags_takes_the_place_of_its_name(tmp_path):
    """Named with flags behind it, XLA would look for a file of that whole name and abort."""
    file = tmp_path / "my flags"
    file.write_text("--xla_cpu_max_isa='AVX2'\n\t--xla_dump_to=\"/some where\" no-flag --xla_never_read")
    code = "import os, jax, kvgraft_jax; kvgraft_jax.Engine; jax.devices(); print(os.environ['XLA_FLAGS'])\n"
    code += "from kvgraft_jax import determinism as d; print(*d.flags_in_force())"
    done = run(code, str(file))
    required, default = determinism.required_flags(), determinism.CPU_DEFAULT
    wanted = ['--xla_cpu_max_isa=AVX2 --xla_dump_to="/some where" ' + " ".join([*required, default])]
    in_force = " ".join([*required, "--xla_cpu_max_isa=AVX2", default])
    assert done.stdout.splitlines() == [*wanted, in_force], done.stderr
    assert run(code, str(file)).returncode == 0


def test_a_file_of_flags_that_is_not_there_is_an_error(tmp_path):
    done = run("import kvgraft_jax; kvgraft_jax.Engine", str(tmp_path / "none"))
    assert "DeterminismError: XLA_FLAGS: got" in done.stderr and "name of a file with flags" in done.stderr


def test_flags_of_equal_meaning_give_equal_pins(tmp_path):
    code = "from tests import no_thread_test, tiny; print(tiny.engine().pin.document['xla_flags'])"
    file = tmp_path / "flags"
    file.write_text(
        "--xla_cpu_enable_fast_min_max=FALSE --xla_allow_excess_precision=0 --xla_cpu_prefer_vector_width=128"
    )
    spellings = (
        "--xla_cpu_enable_fast_min_max=false --xla_cpu_prefer_vector_width=128",
        f"{FLAG} --xla_cpu_enable_fast_min_max=0 --xla_cpu_prefer_vector_width='128'",
        f'--xla_cpu_enable_fast_min_max="False" {FLAG}\t--xla_cpu_prefer_vector_width=0128 '
        f"--xla_dump_to=/elsewhere {FLAG}",
        str(file),
    )
    found = [run(code, spelling) for spelling in spellings]
    assert len({done.stdout for done in found}) == 1 and found[0].stdout.strip(), [done.stderr for done in found]
    other = run(code, "--xla_cpu_prefer_vector_width=128 --xla_cpu_enable_fast_min_max=true").stdout
    assert other.strip() and other != found[0].stdout


def test_the_flag_that_moves_products_to_eigen_is_refused_before_any_compute():
    code = "import kvgraft_jax, jax; kvgraft_jax.Engine"
    done = run(code, "--xla_cpu_experimental_ynn_fusion_type=")
    assert "DeterminismError: XLA_FLAGS has --xla_cpu_experimental_ynn_fusion_type=: it moves" in done.stderr


def test_assertion_passes_here():
    determinism.configure()
    determinism.assert_in_force()
    assert issubclass(errors.DeterminismError, errors.KVGraftError)


@pytest.mark.parametrize("spelling", ["false", "0", "False"])
def test_spellings_of_false_are_accepted(monkeypatch, spelling):
    monkeypatch.setenv("XLA_FLAGS", f"--xla_allow_excess_precision={spelling} " + " ".join(determinism.GPU_FLAGS))
    determinism.configure()
