"""Four virtual CPU devices: the same tokens as on one, one hash on the mesh, and the mesh in the pin."""

from __future__ import annotations

import json
import math
import os
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from experiments.bench import export
from kvgraft_jax import engine as engine_lib
from kvgraft_jax import errors
from kvgraft_jax.checkpoints import load
from kvgraft_jax.gemma import cache as cache_lib
from kvgraft_jax.gemma import sharding as sharding_lib
from kvgraft_jax.grafting import compare, storage
from kvgraft_jax.runtime import step as step_lib
from tests import small_checkpoints, tiny

ROOT = pathlib.Path(__file__).parents[2]
DEVICES = 4
# Two key/value heads cannot be divided by four and lie whole on every device; four can, and so can experts.
URIS = (
    "random:gemma-3-27b?seed=0&layers=7&vocab=512&embed=64&hidden=96&heads=8&kv_heads=2&head_dim=32&window=24",
    "random:gemma-4-26b-a4b?seed=1&layers=6&vocab=512&embed=64&hidden=96&heads=8&kv_heads=4&head_dim=32&window=24"
    "&experts=8",
)


def measured(uri: str, num_devices: int, store: str) -> dict:
    """Returns what a process with `num_devices` devices finds; runs in a process of its own."""
    mesh = sharding_lib.make_mesh(num_devices)
    model = load.load_model(uri, "float32", mesh=mesh)
    engine = engine_lib.Engine(model, capacity=tiny.CAPACITY, width=tiny.WIDTH, kv_block=tiny.KV_BLOCK)
    token_ids = tiny.tokens(60)
    state = engine.prefill(token_ids)
    tokens, after = engine.generate(state, max_new_tokens=12, stop_ids=())
    begun = engine.prefill(token_ids[:37])
    artifact_id = storage.save_artifact(engine.capture(begun), store)
    again = engine.graft(storage.load_artifact(store, artifact_id))
    for token_id in token_ids[37:]:
        again = engine.extend(again, [token_id])
    leaves, kinds = jax.tree.leaves(model.params), after.blocks[0].kinds
    runner, num_blocks = engine.runner, len(after.blocks)
    lanes = step_lib.lay_out([step_lib.Piece(0, 0, (3,))], [range(num_blocks)], tiny.WIDTH, tiny.KV_BLOCK)
    cache = engine.step_config.make_cache(num_blocks)
    lowered = jax.jit(runner.programs.step).lower(
        runner.params, runner.tables, cache, jax.device_put(lanes, runner.place)
    )
    shapes = re.findall(r"= \w+\[([\d,]+)\]\S* all-gather\(", lowered.compile().as_text())
    return {
        "tokens": tokens,
        "digest": model.digest,
        "one_hash": compare.hashes(again) == compare.hashes(state),
        "mesh": engine.pin.document.get("mesh"),
        "artifact_id": artifact_id,
        "largest_gather": max((math.prod(map(int, shape.split(","))) for shape in shapes), default=0),
        "devices": sorted({len(leaf.devices()) for leaf in leaves}),
        "share": sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves) / sum(leaf.nbytes for leaf in leaves),
        "cache_share": kinds[0].addressable_shards[0].data.nbytes / kinds[0].nbytes,
        "cache_bytes": [
            sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(held))
            for held in (cache, after.blocks)
        ],
        "planned_bytes": cache_lib.device_bytes(model.config, num_blocks, tiny.KV_BLOCK, np.dtype(np.float32), mesh),
    }


_IMPORTS = "import json; from tests import no_thread_test; from tests.gemma import test_mesh as t"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with four devices, and threads enough (NPROC) that one which waits for the others starves none."""
    flags = f"--xla_force_host_platform_device_count={DEVICES}"
    environment = dict(os.environ, XLA_FLAGS=flags, JAX_PLATFORMS="cpu", NPROC="16")
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(("uri", "cache_share"), [(URIS[0], 1), (URIS[1], 1 / DEVICES)])
def test_same_tokens_one_hash_and_a_pin_that_says_so(uri, cache_share, tmp_path):
    call = f"t.measured({uri!r}, 4, {str(tmp_path)!r})"
    code = f"{_IMPORTS}; print(json.dumps({call}))"
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    spread, alone = json.loads(done.stdout), measured(uri, 1, str(tmp_path / "alone"))
    assert spread["tokens"] == alone["tokens"] and spread["digest"] == alone["digest"]
    assert spread["one_hash"] and alone["one_hash"]
    assert (spread["mesh"], alone["mesh"]) == ({"model": DEVICES}, None)
    assert (spread["devices"], alone["devices"]) == ([DEVICES], [1])
    assert spread["largest_gather"] <= tiny.WIDTH * 512  # activations and logits at most, no parameter
    assert spread["share"] < 0.4 and alone["share"] == 1 and spread["cache_share"] == cache_share
    assert all(found["cache_bytes"] == [found["planned_bytes"]] * 2 for found in (spread, alone))
    model = load.load_model(uri, "float32")
    engine = engine_lib.Engine(model, capacity=tiny.CAPACITY, width=tiny.WIDTH, kv_block=tiny.KV_BLOCK)
    artifact = storage.load_artifact(tmp_path, spread["artifact_id"])
    with pytest.raises(errors.PinMismatch, match="mesh"):
        engine.graft(artifact)
    assert not engine.graft(artifact, allow_inexact=True).exact


def digest_on_mesh(uri: str) -> str:
    """Loads a checkpoint over all devices: its digest and how many hold it; runs in a process of its own."""
    model = load.load_model(uri, mesh=sharding_lib.make_mesh(DEVICES))
    (kernel,) = model.params["layer_0"]["mlp"]["gate_proj"]["kernel"]
    return f"{model.digest} {len(kernel.devices())} {kernel.addressable_shards[0].data.shape[1] / kernel.shape[1]}"


# Lengths that are cut into several chunks, and heads that do and do not divide: four key/value heads and a single one.
WIDE = "vocab=512&embed=1280&hidden=2304&heads=8&head_dim=64&window=24"
MANY_HEADS = f"random:gemma-3-27b?seed=0&layers=6&kv_heads=4&{WIDE}"
ONE_HEAD = f"random:gemma-3-270m?seed=0&layers=6&kv_heads=1&{WIDE}"


def hashes_by_width(uri: str, dtype: str, num_devices: int) -> dict[str, list[str]]:
    """Hashes of logits and K/V rows of one text, read at several widths; runs in a process of its own."""
    model = load.load_model(uri, dtype, mesh=sharding_lib.make_mesh(num_devices))
    found = {}
    for shapes in ((2,), (10,), (33,), (2, 10, 33)):
        engine = engine_lib.Engine(model, capacity=tiny.CAPACITY, shapes=shapes, kv_block=tiny.KV_BLOCK)
        assert engine.shapes == shapes
        read = compare.hashes(engine.prefill(tiny.tokens(78)), policy="full")
        found[str(shapes)] = [read.logits_sha256, read.kv_sha256]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("uri", [MANY_HEADS, ONE_HEAD], ids=["many heads", "one head"])
def test_every_width_leaves_the_same_bits_on_the_mesh(uri, dtype):
    call = f"t.hashes_by_width({uri!r}, {dtype!r}, {DEVICES})"
    code = f"{_IMPORTS}; print(json.dumps({call}))"
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 4 and len(set(map(tuple, found.values()))) == 1


def test_a_checkpoint_is_spread_as_it_is_read(tmp_path):
    made = load.load_model(small_checkpoints.URI)
    uri = small_checkpoints.write_safetensors(
        tmp_path, small_checkpoints.new_config(made.config), export.tensors(made), shards=2
    )
    done = run("-c", f"from tests.gemma import test_mesh; print(test_mesh.digest_on_mesh({uri!r}))")
    assert done.stdout.split() == [made.digest, str(DEVICES), str(1 / DEVICES)], done.stderr


def test_a_mesh_that_cannot_be_is_refused():
    for wanted in (0, len(jax.devices()) + 1, True, "4", 10**5000):
        with pytest.raises(errors.ConfigError, match="mesh: got .*, the devices of jax"):
            sharding_lib.make_mesh(wanted)
    assert sharding_lib.make_mesh(1) is None
    one = jax.devices()[:1]
    explicit = jax.sharding.Mesh(one, ("model",), axis_types=(jax.sharding.AxisType.Explicit,))
    none = jax.sharding.Mesh(np.array([], object), ("model",))
    twice = jax.sharding.Mesh(np.array(one * 2), ("model",))
    grid = jax.sharding.Mesh(np.array([one]), ("batch", "model"))
    point = jax.sharding.Mesh(np.array(one[0]), ())
    for mesh in (jax.sharding.Mesh(one, ("batch",)), explicit, none, twice, grid, point, 4):
        with pytest.raises(errors.ConfigError, match="mesh: got .*make_mesh"):
            load.load_model(tiny.URI, mesh=mesh)
    assert load.load_model(tiny.URI, mesh=jax.sharding.Mesh(one, ("model",))).mesh is None


def test_graft_exactness_runs_on_a_mesh_in_both_processes(tmp_path):
    small = ("--config=configs/exactness_small.py", "--config.samples=4", "--config.max_tokens=200")
    done = run("-m", "experiments.graft_exactness", *small, f"--mesh={DEVICES}", f"--out={tmp_path}")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["samples"] == result["decode_sha256_equal"] == 4 and result["kl_nats_max"] == 0
    assert result["pin"]["mesh"] == {"model": DEVICES} and result["recipient_pin_id"] == result["pin_id"]
