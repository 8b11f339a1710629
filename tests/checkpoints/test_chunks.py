"""Parameters that lie in chunks: the values of the checkpoint, the digest of whole arrays, and one buffer on a CPU."""

from __future__ import annotations

import gc
import weakref

import jax
import numpy as np
import pytest

from kvgraft_jax import digest as digest_lib
from kvgraft_jax.checkpoints import assemble, load
from kvgraft_jax.checkpoints.hf import hub, safetensors_file
from kvgraft_jax.gemma import parameters as parameters_lib
from kvgraft_jax.runtime import model as model_lib
from tests import small_checkpoints

# Widths above the longest sum of either dtype; experts, per-layer inputs and heads are cut as well.
_WIDE = "vocab=97&embed=1280&hidden=1056&heads=24&kv_heads=2&head_dim=64&window=5&seed=3"
URIS = (
    f"random:gemma-4-26b-a4b?layers=6&experts=3&{_WIDE}",
    f"random:gemma-4-e2b?layers=5&per_layer=8&{_WIDE}",
)


@pytest.fixture(scope="module", params=URIS, ids=["26b-a4b", "e2b"])
def checkpoint(request, tmp_path_factory) -> str:
    """Returns the URI of safetensors files in float32."""
    made = load.load_model(request.param, "float32")
    config_json = small_checkpoints.gemma4_config(made.config)
    return small_checkpoints.write_safetensors(
        tmp_path_factory.mktemp("wide"), config_json, small_checkpoints.stored(made)
    )


def by_path(model: model_lib.Model) -> dict[str, parameters_lib.Leaf]:
    """Returns the leaves as they lie in the tree."""
    found, _ = jax.tree_util.tree_flatten_with_path(model.params, is_leaf=lambda node: isinstance(node, tuple))
    return {"/".join(key.key for key in path): leaf for path, leaf in found}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_chunks_hold_the_values_of_the_checkpoint_and_digests_are_those_of_whole_arrays(checkpoint, dtype):
    model = load.load_model(checkpoint, dtype)
    files = hub.find(checkpoint.removeprefix("hf:"))
    source = safetensors_file.open_directory(files.directory, files.names)
    leaves, digests, num_cut, dtype = by_path(model), {}, 0, np.dtype(dtype)
    found = parameters_lib.whole(model.config, model.params)
    for parameter in parameters_lib.parameters(model.config):
        rows = np.prod(parameter.stored_shape[:-1], dtype=int)
        wanted = source.read_rows(parameter.name, 0, rows).astype(np.float32).astype(dtype)
        if parameter.matrices:
            wanted = wanted.reshape(parameter.matrices, -1, parameter.stored_shape[-1]).swapaxes(1, 2)
        wanted = np.ascontiguousarray(wanted.reshape(parameter.shape))
        assert found[parameter.path].dtype == dtype
        assert found[parameter.path].tobytes() == wanted.tobytes(), parameter.path
        digests[parameter.path] = digest_lib.array_digest(wanted)
        leaf = leaves[parameter.path]
        assert isinstance(leaf, tuple) == bool(parameter.summed)
        shapes = tuple(chunk.shape for chunk in leaf) if parameter.summed else (leaf.shape,)
        assert shapes == parameter.chunk_shapes
        num_cut += len(shapes) > 1
    assert num_cut >= 8 and model.digest == assemble.params_digest(digests)
    assert len(leaves["embedder/embedding"]) == 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_on_a_cpu_no_parameter_lies_in_memory_twice(checkpoint, dtype, monkeypatch):
    buffers, make = [], assemble.aligned_empty

    def recorded(shape, dtype):
        array = make(shape, dtype)
        buffers.append((weakref.ref(array.base), array.nbytes, array.ctypes.data))
        return array

    monkeypatch.setattr(assemble, "aligned_empty", recorded)
    model = load.load_model(checkpoint, dtype)
    gc.collect()
    alive = [(start, start + size) for held, size, start in buffers if held() is not None]
    places = [(array.unsafe_buffer_pointer(), array.nbytes) for array in jax.tree.leaves(model.params)]
    inside = [any(start <= place and place + size <= stop for start, stop in alive) for place, size in places]
    copied = sum(size for (_, size), is_inside in zip(places, inside, strict=True) if not is_inside)
    held = sum(stop - start for start, stop in alive) + copied
    total = sum(size for _, size in places)
    assert held <= 1.001 * total
    # Kernels are cut along their first axis: their chunks are views of the buffer into which they were read.
    for path, leaf in by_path(model).items():
        if path.endswith("kernel"):
            starts = [chunk.unsafe_buffer_pointer() for chunk in leaf]
            assert starts == [starts[0] + sum(chunk.nbytes for chunk in leaf[:i]) for i in range(len(leaf))], path
