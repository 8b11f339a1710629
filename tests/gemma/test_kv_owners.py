"""Which layers own keys and values: bytes per token, what a manifest lists, and layers too few or too many."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest

from kvgraft_jax import engine as engine_lib
from kvgraft_jax import errors
from kvgraft_jax.checkpoints import load
from kvgraft_jax.gemma import cache as cache_lib
from kvgraft_jax.gemma import configurations
from kvgraft_jax.grafting import artifact as artifact_lib
from kvgraft_jax.grafting import compare, storage
from tests import small_checkpoints, tiny

# Keys and values in 16 bits: (sliding layers x heads x width + full layers x heads x width) x 4 bytes.
BYTES_PER_TOKEN = {
    "gemma-3-270m": 18 * 256 * 4,
    "gemma-3-1b": 26 * 256 * 4,
    "gemma-3-4b": 34 * 4 * 256 * 4,
    "gemma-3-12b": 48 * 8 * 256 * 4,
    "gemma-3-27b": 62 * 16 * 128 * 4,
    "gemma-4-e2b": (12 * 256 + 3 * 512) * 4,
    "gemma-4-e4b": (20 * 2 * 256 + 4 * 2 * 512) * 4,
    "gemma-4-12b": 344_064,
    "gemma-4-31b": (50 * 16 * 256 + 10 * 4 * 512) * 4,
    "gemma-4-26b-a4b": (25 * 8 * 256 + 5 * 2 * 512) * 4,
}
# Of the cut models: sliding and full layers that own keys and values. In e2b layers 5 to 9 read those of 3 and 4, in
# e4b 7 to 11 those of 6 and 5.
OWNERS = {
    "gemma-3-4b": ((0, 1, 2, 3, 4, 6), (5,)),
    "gemma-4-e2b": ((0, 1, 2, 3), (4,)),
    "gemma-4-e4b": ((0, 1, 2, 3, 4, 6), (5,)),
    "gemma-4-12b": ((0, 1, 2, 3, 4), (5,)),
    "gemma-4-31b": ((0, 1, 2, 3, 4), (5,)),
}


@pytest.mark.parametrize("name", configurations.CONFIGURATIONS)
def test_bytes_per_token(name):
    config, dtype = configurations.get(name), jnp.dtype("bfloat16")
    assert cache_lib.make_cache(config, 1, 2, dtype).nbytes == 2 * BYTES_PER_TOKEN[name]
    assert cache_lib.make_cache(config, 1, 1, jnp.dtype("float32")).nbytes == 2 * BYTES_PER_TOKEN[name]


@pytest.mark.parametrize("name", OWNERS)
def test_the_manifest_lists_the_owners_and_nothing_else_is_grafted(name, tmp_path):
    model = load.load_model(small_checkpoints.SMALL_URIS[name])
    engine = engine_lib.Engine(model, capacity=64, width=8, kv_block=16)
    state = engine.prefill([token_id % 97 for token_id in tiny.tokens(40)])
    artifact = engine.capture(state, policy="full")
    listed = {stack["kind"]: tuple(stack["layers"]) for stack in artifact.manifest["stacks"]}
    assert tuple(listed[kind] for kind in ("sliding", "full")) == OWNERS[name]
    loaded = storage.load_artifact(tmp_path, storage.save_artifact(artifact, tmp_path))
    assert compare.hashes(engine.graft(loaded), policy="full") == compare.hashes(state, policy="full")
    for stacks in (fewer(artifact.stacks), more(artifact.stacks, model.config.num_layers), artifact.stacks[:1]):
        with pytest.raises(errors.IntegrityError, match=r"layers \(.*\), wanted"):
            engine.graft(dataclasses.replace(artifact, stacks=stacks))


def fewer(stacks: tuple[artifact_lib.KVStack, ...]) -> tuple[artifact_lib.KVStack, ...]:
    """Without the first layer of the sliding ones."""
    return tuple(
        dataclasses.replace(stack, layers=stack.layers[1:], kv_Lx2xSxKxH=stack.kv_Lx2xSxKxH[1:])
        if stack.kind == "sliding"
        else stack
        for stack in stacks
    )


def more(stacks: tuple[artifact_lib.KVStack, ...], num_layers: int) -> tuple[artifact_lib.KVStack, ...]:
    """With one more full layer, behind the model's last."""
    return tuple(
        dataclasses.replace(
            stack,
            layers=(*stack.layers, num_layers),
            kv_Lx2xSxKxH=stack.kv_Lx2xSxKxH[[*range(len(stack.layers)), -1]],
        )
        if stack.kind == "full"
        else stack
        for stack in stacks
    )
