"""A small model as a repository of a server on this machine: fixtures of the tests of the Hub."""

from __future__ import annotations

import json

from huggingface_hub import constants as hub_constants
from huggingface_hub import utils as hub_utils
import pytest

from kvgraft_jax import errors
from kvgraft_jax.checkpoints import load
from kvgraft_jax.checkpoints.hf import hub as hub_lib
from tests import hub_server, small_checkpoints, tiny_tokenizers

NAME = hub_server.REPOSITORY
SOURCE = f"hf:{NAME}@{hub_server.COMMIT}"

tensors = small_checkpoints.tensors


@pytest.fixture(scope="module")
def made():
    """Returns a small model whose vocabulary is that of the small tokenizer."""
    return load.load_model(small_checkpoints.URI.replace("vocab=97", "vocab=420"))


@pytest.fixture(scope="module")
def published(tmp_path_factory, made, tensors):
    """Returns a repository's files: what is read, and much that is not."""
    directory = tmp_path_factory.mktemp("published")
    small_checkpoints.write_safetensors(directory, small_checkpoints.new_config(made.config), tensors, shards=3)
    (directory / "tokenizer.model").write_bytes(tiny_tokenizers.sentencepiece_model())
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1]}))
    (directory / "README.md").write_text("# A model")
    (directory / "flax_model.msgpack").write_bytes(bytes(64))
    (directory / "pytorch_model.bin").write_bytes(bytes(64))
    (directory / "original").mkdir()
    (directory / "original" / "model.safetensors").write_bytes(bytes(64))
    (directory / "original" / "config.json").write_text("{}")
    return directory


@pytest.fixture
def hub(published, tmp_path, monkeypatch):
    """Returns the server, with an empty cache and no token."""
    hub_utils.close_session()
    with hub_server.serve(published) as server:
        monkeypatch.setattr(hub_constants, "ENDPOINT", server.endpoint)
        template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(hub_constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(hub_constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
        monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "ours"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.chdir(tmp_path)
        yield server
        hub_utils.close_session()


def refused(match: str, name: str = NAME, kind: type[Exception] = errors.WeightsError) -> str:
    """Asserts that a name is refused; returns the message."""
    with pytest.raises(kind, match=match) as caught:
        hub_lib.find(name)
    return str(caught.value)
