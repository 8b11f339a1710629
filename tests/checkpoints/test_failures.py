"""Only what proves damage says damage: want of resources is called that, and a mistake of the program stays itself."""

from __future__ import annotations

import errno
import subprocess
import sys

import numpy as np
import pytest

from kvgraft_jax import device_memory, errors
from kvgraft_jax.checkpoints import assemble, load
from kvgraft_jax.checkpoints.gguf import config as gguf_config
from kvgraft_jax.text import tokenizer as tokenizer_lib
from tests import small_checkpoints, tiny_tokenizers


@pytest.fixture(scope="module")
def uris(tmp_path_factory):
    made = load.load_model(small_checkpoints.URI)
    root, stored = tmp_path_factory.mktemp("models"), small_checkpoints.stored(made)
    return {
        "hf": small_checkpoints.write_safetensors(root / "hf", small_checkpoints.new_config(made.config), stored),
        "gguf": small_checkpoints.write_gguf(root / "m.gguf", made.config, stored),
    }


@pytest.mark.parametrize("scheme", ["hf", "gguf"])
@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (OSError(errno.EMFILE, "Too many open files"), errors.ResourceError, "nothing is known against the files"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), errors.ResourceError, "ulimit"),
        (RuntimeError("can't start new thread"), errors.ResourceError, "threads"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes"), errors.ResourceError, "memory"),
        (MemoryError(), errors.ResourceError, "memory"),
        (PermissionError(errno.EACCES, "Permission denied"), errors.WeightsError, "the rights of the files"),
        (TypeError("a mistake"), TypeError, "a mistake"),
        (RuntimeError("a mistake"), RuntimeError, "a mistake"),
        (KeyError("a mistake"), KeyError, "a mistake"),
        (ValueError("a mistake"), ValueError, "a mistake"),
    ],
)
def test_what_fails_while_a_model_loads(uris, monkeypatch, scheme, error, kind, message):
    def fail(*_, **__):
        raise error

    for owner, name in ((assemble, "assemble"), (load, "_open_parts")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(kind, match=message) as caught:
                load.load_model(uris[scheme])
            assert type(caught.value) is kind
            assert "download" not in str(caught.value) and "etch" not in str(caught.value)


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_a_limit_of_the_process_is_seen(limit):
    code = f"""
import resource, psutil
from kvgraft_jax import errors
from kvgraft_jax.checkpoints import load
load.load_model("random:gemma-3-270m?layers=1&vocab=8")
used = psutil.Process().memory_info()
limit = resource.{limit}
most = (used.vms if limit == resource.RLIMIT_AS else used.data) + 300_000_000
resource.setrlimit(limit, (most, most))
try:
    load.load_model("random:gemma-3-270m")
except errors.ResourceError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "needs 536196352 bytes" in done.stdout and "free" in done.stdout


def test_without_a_limit_of_the_process_nothing_is_subtracted():
    assert device_memory._process_limits() == []


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("general.type", "adapter", "general.type: got 'adapter'.*merge an adapter"),
        ("general.type", ["model"], "general.type"),
        ("general.architecture", ["gemma3"], "general.architecture"),
        (
            "gemma3.vision.block_count",
            27,
            "vision.block_count: this is a file as Ollama makes it.*llama.cpp made",
        ),
        ("gemma3.rope.local.freq_base", 1e4, "as Ollama makes it"),
        ("gemma3.mm.tokens_per_image", 256, "as Ollama makes it"),
        ("tokenizer.ggml.add_eos_token", True, "tokenizer.ggml.add_eos_token: got True, wanted False"),
        ("general.sampling.penalty_repeat", 1.5, "penalty_repeat: got 1.5"),
    ],
)
def test_metadata_that_change_what_a_file_means(tmp_path, key, value, message):
    made = load.load_model(small_checkpoints.URI)
    path = tmp_path / "sha256-0123"
    small_checkpoints.write_gguf(path, made.config, small_checkpoints.stored(made))
    header = gguf_config.gguf_header.read_header(path)
    value = np.array(value) if isinstance(value, list) else value
    changed = gguf_config.gguf_header.Header(path, dict(header.metadata) | {key: value}, header.tensors)
    with pytest.raises(errors.ConfigError, match=f"sha256-0123: .*{message}"):
        gguf_config.parse_config(changed)


@pytest.mark.parametrize("value", [7, "x", True, 1.5, (b"x",), np.zeros(3), np.zeros((2, 2)), ()])
@pytest.mark.parametrize("form", ["gguf_metadata", "gguf_merges_metadata"])
def test_any_value_in_a_tokenizer_of_a_gguf_file_is_a_typed_error(form, value):
    metadata = getattr(tiny_tokenizers, form)()
    for key in metadata:
        if type(value) is type(metadata[key]) or key.endswith("add_space_prefix"):
            continue
        with pytest.raises(errors.TokenizerError, match=key):
            tokenizer_lib.from_gguf(metadata | {key: value}, "x")
