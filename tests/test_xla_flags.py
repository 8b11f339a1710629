"""XLA_FLAGS read as XLA reads it, and which flags a pin holds or refuses."""

from __future__ import annotations

import os

import pytest

from kvgraft_jax import digest, errors, xla_flags

REQUIRED = ("--xla_required=false",)


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("", ()),
        (" \t\r\n", ()),
        ("--a=1  --b\n--c=", ("--a=1", "--b", "--c=")),
        ("--a='x y' --b=\"p 'q' \\\"r\\\\\"", ("--a=x y", "--b=p 'q' \"r\\")),
        ("--a='\\' --b", ("--a=\\", "--b")),
        ("--a='open --b", ("--a=open --b",)),
        ("--a=x'y z'", ("--a=x'y",)),
        ("--a='1'--b=2", ("--a=1", "--b=2")),
        ("--a=1 word --b=2", ("--a=1",)),
        ("-a --b.c=1", ("-a", "--b.c=1")),
    ],
)
def test_text_is_split_as_xla_does(text, flags):
    assert xla_flags.parse(text) == flags
    assert xla_flags.parse(xla_flags.spell(flags)) == flags


def test_a_value_without_a_hyphen_is_a_file(monkeypatch, tmp_path):
    file = tmp_path / "flags"
    file.write_text("\n--a=1 --b")
    monkeypatch.setenv("XLA_FLAGS", str(file))
    assert xla_flags.in_environment() == ("--a=1", "--b")
    for value in (str(tmp_path), str(tmp_path / "none"), "word --a=1"):
        monkeypatch.setenv("XLA_FLAGS", value)
        with pytest.raises(errors.DeterminismError, match="name of a file"):
            xla_flags.in_environment()
    monkeypatch.setenv("XLA_FLAGS", " --a=1")
    assert xla_flags.in_environment() == ("--a=1",)


@pytest.mark.parametrize("spelling", ["--a", "--a=1", "--a=TRUE", "--a=True", "--a=true", "--a=01"])
def test_spellings_of_one_value_are_one(spelling):
    assert xla_flags.canonical(spelling) == "--a=true"


def test_values_that_differ_stay_apart():
    spellings = ("--a", "--a=", "--a=0", "--a=2", "--a=-1", "--a=truth", "--a=x", "--a=X", "--a=0.5", "--b")
    assert len({xla_flags.canonical(spelling) for spelling in spellings}) == len(spellings)


def test_repeats_and_order_stay_and_required_flags_stand_first():
    flags = ("--xla_b=1", "--xla_a=2", "--xla_required=0", "--xla_b=0", "--xla_b", "--xla_required=FALSE")
    wanted = ("--xla_required=false", "--xla_b=true", "--xla_a=2", "--xla_b=false", "--xla_b=true")
    assert xla_flags.deciding(flags, REQUIRED) == wanted
    assert xla_flags.deciding(flags[:2], REQUIRED) == ("--xla_b=true", "--xla_a=2")


def test_flags_that_only_dump_stay_out_and_paths_never_enter(tmp_path):
    file = tmp_path / "tiles.txt"
    file.write_text("tiles")
    flags = (
        "--xla_dump_to=/a",
        "--xla_dump_hlo_as_text",
        "--xla_gpu_dump_autotune_results_to=/b",
        "--xla_hlo_profile",
        f"--xla_gpu_load_autotune_results_from={file}",
        "--xla_gpu_gemm_autotuner_override_file=/not/there",
        f"--xla_gpu_cuda_data_dir={tmp_path}",
    )
    *files, folder = xla_flags.deciding(flags, ())
    assert files == [
        f"--xla_gpu_load_autotune_results_from=sha256:{digest.bytes_digest(b'tiles')}",
        "--xla_gpu_gemm_autotuner_override_file=(absent)",
    ]
    assert folder.startswith("--xla_gpu_cuda_data_dir=(a directory of sha256 ") and str(tmp_path) not in folder
    (tmp_path / "libdevice").write_text("another part of the compiler")
    assert xla_flags.deciding(flags, ())[2] != folder


@pytest.mark.parametrize(
    "flag",
    [
        "--xla_cpu_experimental_ynn_fusion_type=",
        "--xla_cpu_experimental_ynn_fusion_type=reduce",
        "--xla_cpu_experimental_ynn_fusion_type=-dot",
        "--xla_cpu_experimental_ynn_fusion_type=-LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
        "--xla_cpu_experimental_ynn_fusion_type=invalid",
        "--xla_cpu_use_onednn=true",
        "--xla_cpu_use_onednn",
        "--xla_cpu_use_xnnpack=1",
        "--xla_cpu_use_acl=T",
        "--xla_cpu_experimental_onednn_custom_call",
        "--xla_cpu_experimental_onednn_fusion_type=dot",
        "--xla_cpu_experimental_xnn_fusion_type=dot",
        "--xla_cpu_experimental_xnn_graph_fusion_mode=XNN_GRAPH_FUSION_MODE_GREEDY",
        "--xla_disable_hlo_passes=library-rewriter",
        "--xla_disable_all_hlo_passes=true",
        "--xla_enable_hlo_passes_only=dce",
        "--xla_flags_reset",
        "--xla_gpu_per_fusion_autotune_cache_dir=/a",
    ],
)
def test_flags_under_which_bits_depend_on_threads_or_may_change_are_refused_by_name(flag):
    with pytest.raises(errors.DeterminismError, match=f"XLA_FLAGS has {flag.partition('=')[0]}"):
        xla_flags.check(["--xla_a=1", flag, "--xla_b=1"])


@pytest.mark.parametrize(
    "flag",
    [
        "--xla_cpu_experimental_ynn_fusion_type=dot,reduce",
        "--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
        "--xla_cpu_experimental_ynn_fusion_type=+eltwise",
        "--xla_cpu_use_onednn=false",
        "--xla_cpu_use_xnnpack=0",
        "--xla_cpu_experimental_xnn_graph_fusion_mode=XNN_GRAPH_FUSION_MODE_DISABLED",
        "--xla_cpu_experimental_xnn_fusion_type=",
        "--xla_disable_hlo_passes=",
        "--xla_cpu_multi_thread_eigen=false",
    ],
)
def test_flags_that_leave_products_where_they_are_pass(flag):
    xla_flags.check([flag])


@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "NUL"])
def test_a_file_of_flags_that_is_no_plain_text_is_refused(tmp_path, monkeypatch, kind):
    path = tmp_path / "flags"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "NUL":
        path.write_bytes(b"--xla_cpu_max_isa=\0AVX\0")
    monkeypatch.setenv("XLA_FLAGS", "/dev/zero" if kind == "device" else str(path))
    with pytest.raises(errors.DeterminismError, match="contains a NUL" if kind == "NUL" else "no plain file"):
        xla_flags.in_environment()
