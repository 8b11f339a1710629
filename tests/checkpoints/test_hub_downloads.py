"""Downloads of models of the Hub that end early, damaged, without space, or before anything large is fetched."""

from __future__ import annotations

import errno
import json
import pathlib
import shutil

import huggingface_hub
from huggingface_hub import constants as hub_constants
import pytest

from kvgraft_jax import errors
from kvgraft_jax.checkpoints.hf import hub as hub_lib
from tests import hub_server, small_checkpoints
from tests.checkpoints import published as published_model

NAME, SOURCE = published_model.NAME, published_model.SOURCE
made, tensors, published, hub = (
    published_model.made,
    published_model.tensors,
    published_model.published,
    published_model.hub,
)
refused = published_model.refused


def test_a_download_that_breaks_off_goes_on(hub, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)
    hub.cut, hub.cuts = 1000, 2
    assert hub_lib.find(NAME).source == SOURCE
    files = [path for path in hub.requests if path.startswith("GET") and "/api/agent" not in path]
    assert len(files) == 2 + 7 + 2  # The rest of what broke off; the client also asks for things of its own.
    other = f"{NAME}@next"
    hub.revisions["next"] = hub_server.OTHER_COMMIT
    hub.cuts = 1000
    (pathlib.Path(hub_constants.HF_HUB_CACHE) / "models--owner--model").rename("elsewhere")
    refused("the connection to .* failed .*; load it again", other)


def test_a_download_that_ends_early(hub):
    hub.cut, hub.declares_less = 10, True
    refused("a file did not arrive whole.*; load it again")
    hub.cut = 0
    assert hub_lib.find(NAME).source == SOURCE


def test_wrong_bytes_are_refused_and_their_file_named(hub):
    hub.flipped = True
    message = refused("safetensors: has SHA-256 [0-9a-f]{64}, but the Hub's file has [0-9a-f]{64}; delete .* and load")
    blob = pathlib.Path(message.split("delete ")[1].split(" and load")[0])
    hub.flipped = False
    refused("has SHA-256")  # In the cache it stays wrong.
    while True:
        blob.unlink()
        try:
            found = hub_lib.find(NAME)
        except errors.WeightsError as error:
            blob = pathlib.Path(str(error).split("delete ")[1].split(" and load")[0])
        else:
            break
    assert found.source == SOURCE


def test_no_space(hub, monkeypatch):
    hub.sizes["model-00002-of-00003.safetensors"] = 10**18
    refused("bytes are to be downloaded, [0-9]+ are free; free some space in .*HF_HUB_CACHE", kind=errors.ResourceError)
    assert not [name for name in hub.downloads() if name.endswith("safetensors")]
    for error in (OSError(errno.ENOSPC, "full"), RuntimeError("I/O error: No space left on device (os error 28)")):

        def full(*_, raised=error, **__):
            raise raised

        monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
        monkeypatch.setattr(hub_lib, "_NOT_CACHED", (*hub_lib._NOT_CACHED, type(error)))
        refused("the disk is full; free some space", kind=errors.ResourceError)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (RuntimeError("can't start new thread"), errors.ResourceError, "start new thread.*nothing is known against"),
        (OSError(errno.EMFILE, "Too many open files"), errors.ResourceError, "ulimit"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), errors.ResourceError, "memory"),
        (MemoryError(), errors.ResourceError, "memory"),
        (RuntimeError("I/O error: Too many open files (os error 24)"), errors.ResourceError, "file handles"),
        (RuntimeError("I/O error: broken pipe"), errors.WeightsError, "storage behind the Hub failed .*load it again"),
        (RuntimeError("Data processing error: x"), errors.WeightsError, "storage behind the Hub failed"),
        (json.JSONDecodeError("Expecting value", "<html>", 0), errors.WeightsError, "client of the Hub failed"),
        (OSError(errno.EACCES, "Permission denied"), errors.WeightsError, "cannot be written"),
        (RuntimeError("a mistake"), RuntimeError, "a mistake"),
        (ValueError("a mistake"), ValueError, "a mistake"),
        (TypeError("a mistake"), TypeError, "a mistake"),
    ],
)
def test_what_fails_while_the_client_downloads(hub, monkeypatch, error, kind, message):
    def fail(*_, local_files_only, **__):
        raise hub_lib.hub_errors.LocalEntryNotFoundError("not cached") if local_files_only else error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    refused(message, kind=kind)
    with pytest.raises(kind) as caught:
        hub_lib.find(NAME)
    assert type(caught.value) is kind


def test_a_cache_that_cannot_be_written(hub, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(tmp_path / "file"))
    refused("the cache .*/file cannot be written .*; set HF_HUB_CACHE to another")


def test_a_model_that_is_refused_costs_no_download_of_weights(hub, tmp_path, published):
    other = tmp_path / "llama"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (other / "model.safetensors").write_bytes(bytes(64))
    hub.directories[hub_server.COMMIT] = other
    refused("llama", kind=errors.ConfigError)
    assert hub.downloads() == ["config.json"]


def test_files_that_would_change_the_model_are_seen_before_anything_large_is_fetched(hub, tmp_path, published):
    other = tmp_path / "adapted"
    shutil.copytree(published, other)
    (other / "adapter_model.safetensors").write_bytes(bytes(64))
    hub.directories[hub_server.COMMIT] = other
    refused(r"holds an adapter beside the weights \(adapter_model.safetensors\)")
    assert not [name for name in hub.downloads() if name.endswith("safetensors")]


def test_an_index_that_lists_what_the_repository_lacks(hub, tmp_path, made, tensors):
    other = tmp_path / "lacks"
    small_checkpoints.write_safetensors(other, small_checkpoints.new_config(made.config), tensors, shards=2)
    (other / "model-00002-of-00002.safetensors").unlink()
    hub.directories[hub_server.COMMIT] = other
    refused("its model.safetensors.index.json lists .*model-00002.*which it does not hold")
    (other / "model.safetensors.index.json").unlink()
    hub.directories[hub_server.COMMIT], hub.revisions["next"] = hub.directory, hub_server.OTHER_COMMIT
    hub.directories[hub_server.OTHER_COMMIT] = other
    refused("holds neither model.safetensors nor model.safetensors.index.json", f"{NAME}@next")
