"""DeepMind's Orbax checkpoints: every layout, by old and new Orbax, gives the same model; bad ones are refused."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest

from kvgraft_jax import engine as engine_lib
from kvgraft_jax import errors
from kvgraft_jax.checkpoints import assemble, load
from kvgraft_jax.checkpoints.orbax import directory as orbax_directory
from kvgraft_jax.checkpoints.orbax import names as deepmind_names
from kvgraft_jax.gemma import configurations
from kvgraft_jax.runtime import model as model_lib
from tests import orbax_checkpoints as written
from tests import tiny_tokenizers

WRITERS = {
    "old": written.write_old,
    "old files": functools.partial(written.write_old, use_ocdbt=False),
    "standard": written.write_standard,
    "new": written.write_new,
    "new files": functools.partial(written.write_new, use_ocdbt=False, use_zarr3=False),
    "new zarr3 files": functools.partial(written.write_new, use_ocdbt=False),
    "many chunks": functools.partial(written.write_old, chunk_bytes=200),
}
EXTRA = {
    "embedder/mm_input_projection/w": np.ones((2, 2), np.float32),
    "embedder/mm_soft_embedding_norm/scale": np.ones(2, np.float32),
    "embedder/audio_input_projection/w": np.ones((2, 2), np.float32),
}
TOWERS = {
    "SigLiPFromPatches_0/siglip_encoder": {"pos_embedding": np.ones((2, 2), np.float32)},
    "PatchInputVariablePoolingEncoder_0/_model/vit/transformer/stacked_layers/block/attn/q_einsum": {
        "w": np.ones((2, 2), np.int32)
    },
    "AudioEncoder/encoder/conformer": {"w": np.ones(2, np.float32)},
}


@pytest.fixture(autouse=True)
def small_sizes_are_known(monkeypatch):
    for kind in written.KINDS:
        monkeypatch.setitem(configurations.CONFIGURATIONS, f"small-{kind}", written.config(kind))


@pytest.fixture(scope="module")
def flat_files(tmp_path_factory) -> pathlib.Path:
    """Returns a sound checkpoint in plain files."""
    directory = tmp_path_factory.mktemp("sound") / "gemma"
    written.write_old(directory, written.flat(written.arrays("gemma3")), use_ocdbt=False)
    return directory


@pytest.mark.parametrize(
    "kind, layout_name, writer",
    [
        ("gemma3", "flat", "old"),
        ("gemma3", "stacked", "new"),
        ("gemma3", "nested", "standard"),
        ("dense", "flat", "old files"),
        ("dense", "stacked", "many chunks"),
        ("dense", "nested", "new files"),
        ("shared", "flat", "many chunks"),
        ("shared", "nested", "new zarr3 files"),
        ("experts", "flat", "many chunks"),
        ("experts", "stacked", "standard"),
        ("experts", "nested", "old"),
    ],
)
def test_same_model_from_every_layout(tmp_path, monkeypatch, kind, layout_name, writer):
    monkeypatch.setattr(assemble, "_CHUNK_ELEMENTS", 100)  # several row blocks for each tensor
    WRITERS[writer](tmp_path / "m", written.LAYOUTS[layout_name](written.arrays(kind)))
    loaded = load.load_model(f"orbax:{tmp_path / 'm'}")
    assert loaded.config == written.config(kind)
    assert loaded.digest == written.weights(kind).digest
    assert loaded.tokenizer is None and loaded.chat is None


@pytest.mark.parametrize("kind", ["gemma3", "dense", "shared", "experts"])
def test_equal_logits(tmp_path, kind):
    written.write_old(tmp_path / "m", written.flat(written.arrays(kind)))
    loaded = load.load_model(f"orbax:{tmp_path / 'm'}")
    made = model_lib.Model(
        written.config(kind), written.weights(kind).params, None, None, loaded.digest, "bfloat16", "made", "made"
    )
    ours, theirs = (
        engine_lib.Engine(each, capacity=16, width=4, kv_block=16).prefill([2, 5, 8, 13, 21]).logits
        for each in (loaded, made)
    )
    assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("wrap", ["rlx", "params", "both"])
def test_wrappers_and_other_modalities_are_left_out(tmp_path, wrap):
    prefix = "transformer/" if wrap == "params" else "rlx_networks/policy_network/transformer/"
    tree = written.flat(written.arrays("gemma3") | EXTRA, prefix) | TOWERS
    written.write_old(tmp_path / "m", tree if wrap == "rlx" else {"params": tree})
    assert load.load_model(f"orbax:{tmp_path / 'm'}").digest == written.weights("gemma3").digest


def test_nested_towers_are_left_out(tmp_path):
    tree = written.nested(written.arrays("gemma3") | EXTRA)
    tree |= {"vision_encoder": TOWERS["SigLiPFromPatches_0/siglip_encoder"], "audio_encoder": {"w": np.ones(2)}}
    written.write_standard(tmp_path / "m", {"params": tree})
    assert load.load_model(f"orbax:{tmp_path / 'm'}").digest == written.weights("gemma3").digest


def test_keys_and_values_of_sharing_layers_may_be_there(tmp_path):
    arrays = written.arrays("shared")
    for name in ("attn/kv_einsum/w", "attn/key_norm/scale"):
        for layer in range(5, 10):
            arrays[f"layer_{layer}/{name}"] = arrays[f"layer_{layer - 5}/{name}"]
    written.write_old(tmp_path / "m", written.flat(arrays))
    assert load.load_model(f"orbax:{tmp_path / 'm'}").digest == written.weights("shared").digest
    arrays["layer_7/attn/kv_einsum/w"] = arrays["layer_7/attn/kv_einsum/w"][:, :1]
    written.write_old(tmp_path / "n", written.flat(arrays))
    with pytest.raises(errors.WeightsError, match=r"wrong shape: transformer/layer_7/attn/kv_einsum.w: got \(2, 1, "):
        load.load_model(f"orbax:{tmp_path / 'n'}")


def test_deepmind_tables_end_before_the_image_token(flat_files, monkeypatch):
    small = written.config("gemma3")
    monkeypatch.setattr(orbax_directory, "_DEEPMIND_VOCAB", written.VOCAB_SIZE)
    monkeypatch.setitem(configurations.CONFIGURATIONS, small.name, dataclasses.replace(small, vocab_size=424))
    loaded = load.load_model(f"orbax:{flat_files}")
    assert loaded.config.vocab_size == written.VOCAB_SIZE
    assert loaded.digest == written.weights("gemma3").digest


def test_one_read_holds_few_chunks(tmp_path):
    written.write_old(tmp_path / "m", written.flat(written.arrays("shared")), chunk_bytes=200)
    source = orbax_directory.open_directory(str(tmp_path / "m"))
    stored = written.arrays("shared")
    table = stored["embedder/input_embedding"]
    chunk = source.arrays["embedder/input_embedding"].store.chunk_layout.read_chunk.shape[0]
    assert 1 < chunk < 12
    rows = source.read_rows("embed_tokens.weight", 2 * chunk - 1, 2 * chunk + 1)
    assert np.array_equal(rows, table[2 * chunk - 1 : 2 * chunk + 1])
    assert (source._block.start, len(source._block.rows)) == (chunk, 2 * chunk)
    q_NxDxH = stored["layer_4/attn/q_einsum/w"]
    rows = source.read_rows("layers.4.self_attn.q_proj.weight", 18, 30)
    assert np.array_equal(rows, q_NxDxH[1].T[2:14])


def test_which_model_it_is(tmp_path, flat_files, monkeypatch):
    uri = f"orbax:{flat_files}"
    twin = dataclasses.replace(written.config("gemma3"), name="of Gemma 4", layer_scalar=True)
    monkeypatch.setitem(configurations.CONFIGURATIONS, twin.name, twin)
    assert load.load_model(uri).config.name == "small-gemma3"
    assert load.load_model(f"{uri}?config=small-gemma3").digest == written.weights("gemma3").digest
    with pytest.raises(errors.ConfigError, match="model name: got 'gemma-9'"):
        load.load_model(f"{uri}?config=gemma-9")
    monkeypatch.setitem(configurations.CONFIGURATIONS, "twin", written.config("gemma3"))
    with pytest.raises(errors.ConfigError, match="more than one of small-gemma3, small-gemma3; state"):
        load.load_model(uri)
    monkeypatch.undo()
    with pytest.raises(errors.ConfigError, match=r"Gemma 3 with 8 layers of width 24, which is none of gemma-3-270m, "):
        load.load_model(uri)


def test_one_error_lists_all_arrays(tmp_path):
    arrays = written.arrays("dense")
    del arrays["layer_0/mlp/linear"], arrays["final_norm/scale"]
    arrays["layer_1/attn/_query_norm/scale"] = arrays.pop("layer_1/attn/query_norm/scale")
    arrays["layer_2/attn/q_einsum/w"] = arrays["layer_2/attn/q_einsum/w"].transpose(0, 2, 1)
    arrays["layer_3/skip_scale"] = np.ones(1, np.int32)
    arrays["layer_5/attn/kv_einsum/w"] = np.stack([arrays.pop("layer_5/attn/k_einsum/w")] * 2)
    arrays["step"] = np.ones((), np.float32)
    written.write_old(tmp_path / "m", written.nested(arrays))
    with pytest.raises(errors.WeightsError) as caught:
        load.load_model(f"orbax:{tmp_path / 'm'}")
    for line in (
        "9 array(s) do not fit the configuration 'small-dense'",
        "missing: layer_0/mlp/linear, wanted shape (20, 24)",
        "missing: final_norm/scale, wanted shape (24,)",
        "missing: layer_1/attn/query_norm/scale",
        "unexpected: layer_1.attn._query_norm.scale, shape (8,)",
        "wrong shape: layer_2.attn.q_einsum.w: got (4, 8, 24), wanted (4, 24, 8)",
        "wrong dtype: layer_3.skip_scale: got int32",
        "missing: layer_5/attn/k_einsum, wanted shape (1, 24, 16)",
        "unexpected: layer_5.attn.kv_einsum.w",
        "unexpected: step, shape ()",
    ):
        assert line in str(caught.value)


def test_stacked_errors_name_the_layer(tmp_path):
    arrays = written.arrays("gemma3")
    for layer in (1, 7):
        arrays[f"layer_{layer}/mlp/linear"] = np.ones((20, 23), written.BF16)
    del arrays["layer_6/post_ffw_norm/scale"]
    written.write_old(tmp_path / "m", written.stacked(arrays))
    with pytest.raises(errors.WeightsError) as caught:
        load.load_model(f"orbax:{tmp_path / 'm'}")
    assert "3 array(s)" in str(caught.value)
    assert "missing: layer_6/post_ffw_norm/scale" in str(caught.value)
    key = "transformer/stacked_layers/attention_type_1/mlp/linear.w"
    assert f"wrong shape: {key} of layer 7: got (20, 23), wanted (20, 24)" in str(caught.value)


def test_stacks_of_another_period_are_refused(tmp_path):
    arrays = written.arrays("shared")
    own = [f"layer_{layer}/" for layer in range(5)] + ["embedder/", "final_norm/"]
    arrays = {name: array for name, array in arrays.items() if name.startswith(tuple(own))}
    written.write_old(tmp_path / "five", written.stacked(arrays, period=5))
    with pytest.raises(errors.WeightsError, match=r"attention types \[0, 1, 2, 3, 4\], wanted 0 to 5"):
        load.load_model(f"orbax:{tmp_path / 'five'}?config=small-shared")
    six = written.stacked(written.arrays("experts"))
    written.write_old(tmp_path / "six", six)
    with pytest.raises(errors.WeightsError, match="'small-shared' has another pattern"):
        load.load_model(f"orbax:{tmp_path / 'six'}?config=small-shared")


def test_fused_queries_and_double_names_are_refused(tmp_path):
    arrays = written.arrays("gemma3")
    fused = arrays | {"layer_0/attn/qkv_einsum/w": np.ones((3, 4, 24, 16), written.BF16)}
    written.write_old(tmp_path / "fused", written.flat(fused))
    with pytest.raises(errors.WeightsError, match="qkv_einsum.*as many key/value heads as query heads"):
        load.load_model(f"orbax:{tmp_path / 'fused'}")
    twice = written.flat(arrays) | {"layer_0": {"mlp": {"linear": arrays["layer_0/mlp/linear"]}}}
    written.write_old(tmp_path / "twice", twice)
    with pytest.raises(errors.WeightsError, match="both hold layer_0/mlp/linear"):
        load.load_model(f"orbax:{tmp_path / 'twice'}")


def test_foreign_directories_are_refused(tmp_path):
    for path, message in (
        (tmp_path / "none", "does not exist; wanted a directory that Orbax"),
        (tmp_path, "0 directories in it hold an Orbax"),
    ):
        with pytest.raises(errors.WeightsError, match=message):
            load.load_model(f"orbax:{path}")
    written.write_old(tmp_path / "a", {"dense": {"kernel": np.ones((2, 2), np.float32)}})
    with pytest.raises(errors.WeightsError, match=r"no embedder/input_embedding .* its 1 arrays \(dense.kernel, "):
        load.load_model(f"orbax:{tmp_path / 'a'}")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with pytest.raises(errors.WeightsError, match="2 directories in it hold"):
        load.load_model(f"orbax:{tmp_path}")
    written.write_old(tmp_path / "towers", TOWERS)
    with pytest.raises(errors.WeightsError, match="holds no array of a text decoder"):
        load.load_model(f"orbax:{tmp_path / 'towers'}")


@pytest.mark.parametrize("damage", ["cut", "gone", "header"])
def test_truncated_plain_files_are_refused(tmp_path, flat_files, damage):
    shutil.copytree(flat_files, tmp_path / "m")
    array = tmp_path / "m" / "transformer" / "layer_3" / "mlp" / "linear.w"
    file = array / (".zarray" if damage == "header" else "0.0")
    if damage == "gone":
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(errors.WeightsError, match="layer_3/mlp/linear.w.*truncated|truncated.*layer_3/mlp/linear.w"):
        load.load_model(f"orbax:{tmp_path / 'm'}")


@pytest.mark.parametrize("damage", ["manifest", "data"])
def test_truncated_databases_are_refused(tmp_path, damage):
    written.write_old(tmp_path / "m", written.flat(written.arrays("gemma3")))
    for file in [tmp_path / "m" / "manifest.ocdbt"] if damage == "manifest" else (tmp_path / "m").glob("**/d/*"):
        os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(errors.WeightsError, match="truncated"):
        load.load_model(f"orbax:{tmp_path / 'm'}")


def test_tokenizer_inside_or_beside(tmp_path, flat_files):
    shutil.copytree(flat_files, tmp_path / "m")
    (tmp_path / "tokenizer_gemma4.model").write_bytes(b"of the other family")
    assert load.load_model(f"orbax:{tmp_path / 'm'}").tokenizer is None
    (tmp_path / "tokenizer_gemma3.model").write_bytes(tiny_tokenizers.sentencepiece_model())
    loaded = load.load_model(f"orbax:{tmp_path / 'm'}")
    assert loaded.tokenizer.encode("hello") and loaded.chat is not None
    (tmp_path / "m" / "tokenizer.model").write_bytes(b"no model")
    with pytest.raises(errors.TokenizerError, match="tokenizer.model"):
        load.load_model(f"orbax:{tmp_path / 'm'}")


@pytest.mark.parametrize("name", ["gemma-3-27b", "gemma-4-e2b", "gemma-4-12b", "gemma-4-31b", "gemma-4-26b-a4b"])
def test_released_shapes(name):
    config = configurations.get(name)
    places = deepmind_names.places(config)
    by_array = {place.array: place.array_shape for place in places.values()}
    wanted = {
        "gemma-3-27b": {"layer_5/attn/kv_einsum": (2, 16, 5376, 128), "layer_0/attn/_key_norm/scale": (128,)},
        "gemma-4-e2b": {
            "layer_15/mlp/gating_einsum": (2, 12288, 1536),
            "layer_34/attn/kv_einsum": (2, 1, 1536, 512),
            "embedder/per_layer_embeddings": (262144, 35, 256),
            "embedder/per_layer_model_projection": (1536, 35, 256),
        },
        "gemma-4-12b": {"layer_5/attn/k_einsum": (1, 3840, 512)},
        "gemma-4-31b": {"layer_59/attn/q_einsum": (32, 5376, 512), "layer_0/attn/attn_vec_einsum": (32, 256, 5376)},
        "gemma-4-26b-a4b": {"layer_0/mlp/gating_einsum": (128, 2, 704, 2816), "layer_0/mlp2/linear": (2112, 2816)},
    }[name]
    assert {array: by_array.get(array) for array in wanted} == wanted


def test_a_save_that_was_not_finished_blocks_nothing(tmp_path, flat_files):
    good, torn = tmp_path / "m" / "default", tmp_path / "m" / "default.orbax-checkpoint-tmp-17"
    shutil.copytree(flat_files, good)
    shutil.copytree(flat_files, torn)
    whole = load.load_model(f"orbax:{tmp_path / 'm'}").digest
    assert whole == load.load_model(f"orbax:{good}").digest
    shutil.rmtree(good)
    for named in (tmp_path / "m", torn):
        with pytest.raises(
            errors.WeightsError, match="holds only default.orbax-checkpoint-tmp-17, which Orbax had not"
        ):
            load.load_model(f"orbax:{named}")


def test_want_of_file_handles_is_no_damage(tmp_path, flat_files, monkeypatch):
    def fail(*_, **__):
        raise ValueError("RESOURCE_EXHAUSTED: Error opening file: Too many open files")

    monkeypatch.setattr(orbax_directory.tensorstore, "open", fail)
    with pytest.raises(errors.ResourceError, match="cannot be opened, because memory, threads or file handles ran out"):
        load.load_model(f"orbax:{flat_files}")


_FORK = """
import os, pathlib, signal, sys, tempfile, warnings
import numpy as np
warnings.simplefilter("ignore")
from kvgraft_jax import errors
from kvgraft_jax.checkpoints import load
from kvgraft_jax.gemma import configurations
from kvgraft_jax.grafting import orbax_arrays
from tests import orbax_checkpoints as written
configurations.CONFIGURATIONS["small-gemma3"] = written.config("gemma3")
if "after a load" in sys.argv:
    load.load_model(sys.argv[1])
if "after a save" in sys.argv:
    orbax_arrays.save(pathlib.Path(tempfile.mkdtemp()) / "arrays", {"x": np.zeros(3, np.float32)})
child = os.fork()
if not child:
    signal.alarm(120)
    try:
        print(load.load_model(sys.argv[1]).digest, flush=True)
    except errors.ResourceError as error:
        print(error, flush=True)
    os._exit(0)
sys.exit(os.waitpid(child, 0)[1])
"""


@pytest.mark.parametrize("when", ["before", "after a load", "after a save"])
def test_a_forked_worker_loads_or_is_told_to_be_spawned(flat_files, when):
    command = [sys.executable, "-c", _FORK, f"orbax:{flat_files}", when]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    if when == "before":
        assert done.stdout.strip() == load.load_model(f"orbax:{flat_files}").digest
    else:
        assert "was forked from one that had already used TensorStore" in done.stdout and "'spawn'" in done.stdout


_JOB = """
import sys, jax
jax.distributed.initialize(f"localhost:{sys.argv[2]}", 2, int(sys.argv[3]))
jax.devices()  # Both processes have to be there before jax knows its devices.
from kvgraft_jax.checkpoints import load
from kvgraft_jax.gemma import configurations
from tests import orbax_checkpoints as written
configurations.CONFIGURATIONS["small-gemma3"] = written.config("gemma3")
if sys.argv[3] == "0":
    print(load.load_model(sys.argv[1]).digest, flush=True)
sys.stdin.read()  # Both stay until both are done.
"""


@pytest.mark.slow
def test_a_process_of_a_distributed_job_loads_without_the_others(flat_files):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        command = [sys.executable, "-c", _JOB, f"orbax:{flat_files}", str(free.getsockname()[1])]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(subprocess.Popen([*command, rank], **pipes)) for rank in "01"]
        for job in jobs:
            stack.callback(job.kill)
        timer = threading.Timer(60, jobs[0].kill)
        stack.callback(timer.cancel)
        timer.start()
        assert jobs[0].stdout.readline().strip() == load.load_model(f"orbax:{flat_files}").digest
