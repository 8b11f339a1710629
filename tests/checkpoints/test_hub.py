"""Models of the Hub by name, with the real client against a server on this machine: names, cache, token, errors."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

from huggingface_hub import constants as hub_constants
from huggingface_hub import utils as hub_utils
import pytest

import kvgraft_jax as kg
from kvgraft_jax import errors, progress
from kvgraft_jax.checkpoints import load
from kvgraft_jax.checkpoints.hf import hub as hub_lib
from tests import hub_server, small_checkpoints, tiny
from tests.checkpoints import published as published_model

NAME, SOURCE = published_model.NAME, published_model.SOURCE
made, tensors, published, hub = (
    published_model.made,
    published_model.tensors,
    published_model.published,
    published_model.hub,
)
refused = published_model.refused
URI = f"hf:{NAME}"
ROOT = pathlib.Path(__file__).parents[2]


def cached(hub) -> pathlib.Path:
    """Returns the snapshot in the cache."""
    folder = f"models--{NAME.replace('/', '--')}"
    return pathlib.Path(hub_constants.HF_HUB_CACHE) / folder / "snapshots" / hub_server.COMMIT


def test_a_download_and_a_directory_are_one_model(hub, published, tmp_path):
    ours = load.load_model(f"{URI}?chat=gemma3")
    theirs = load.load_model(f"hf:{published}?chat=gemma3")
    assert (ours.uri, ours.source) == (f"{URI}?chat=gemma3", SOURCE)
    assert theirs.uri == theirs.source == f"hf:{published}?chat=gemma3"
    assert ours.digest == theirs.digest and ours.tokenizer.digest == theirs.tokenizer.digest
    ids = []
    for number, each in enumerate((ours, theirs)):
        engine = kg.Engine(each, capacity=32, width=tiny.WIDTH, kv_block=tiny.KV_BLOCK)
        captured = engine.capture(engine.prefill([2, 5, 8, 13, 21]))
        ids.append((engine.pin.id, engine.pin.document, kg.save_artifact(captured, tmp_path / str(number))))
    assert ids[0] == ids[1]


def test_only_what_is_read_is_downloaded_and_only_once(hub, published):
    found = hub_lib.find(NAME)
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    texts = ["config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.model"]
    assert hub.downloads() == sorted([*texts, *shards])
    assert found.names == {path.name for path in published.iterdir() if path.is_file()}
    assert found.source == SOURCE and found.directory == cached(hub)
    hub.requests.clear()
    assert hub_lib.find(NAME) == hub_lib.find(f"{NAME}@main") == hub_lib.find(f"{NAME}@{hub_server.COMMIT}") == found
    assert hub.requests == []


def test_a_revision_is_its_own_snapshot(hub, tmp_path, made, tensors):
    other = tmp_path / "other"
    small_checkpoints.write_safetensors(other, small_checkpoints.new_config(made.config), tensors)
    hub.revisions |= {"refs/pr/1": hub_server.OTHER_COMMIT, "v1.0": hub_server.COMMIT}
    hub.directories[hub_server.OTHER_COMMIT] = other
    found = hub_lib.find(f"{NAME}@refs/pr/1")
    assert found.source == f"hf:{NAME}@{hub_server.OTHER_COMMIT}"
    assert found.names == {"config.json", "model.safetensors"}
    assert hub_lib.find(f"{NAME}@v1.0").source == SOURCE


def test_a_directory_comes_first(hub, tmp_path):
    assert hub_lib.find(NAME).source == SOURCE
    (tmp_path / NAME).mkdir(parents=True)
    for name in (NAME, f"./{NAME}", f"{tmp_path}/{NAME}", f"../{tmp_path.name}/{NAME}"):
        found = hub_lib.find(name)
        assert (found.source, found.names) == (None, frozenset()) and found.directory.samefile(tmp_path / NAME)
        assert found.directory.is_absolute()
    (tmp_path / NAME / "config.json").write_text("{}")
    assert hub_lib.find(NAME).names == {"config.json"}
    refused("config.json: is a file; wanted a directory", f"{NAME}/config.json")


@pytest.mark.parametrize("name", [f"./{NAME}", f"../{NAME}", f"/nowhere/{NAME}", f"~/nowhere/{NAME}"])
def test_marks_of_a_directory_are_never_a_name_on_the_hub(hub, name):
    message = refused("there is no such directory; wanted a directory with config.json", name)
    assert "Hub" not in message and hub.requests == []
    refused("there is no such home directory", "~nobody-here/a", kind=errors.InputError)


@pytest.mark.parametrize("name", ["s3://bucket/x", "https://host/owner/model", "gs:/bucket/x"])
def test_an_address_is_no_name(hub, name):
    refused(f"hf:: got '{name}'; only local paths can be used, no addresses", name, kind=errors.InputError)
    assert hub.requests == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("model", "'model', wanted OWNER/NAME"),
        ("a/b/c", "'a/b/c', wanted OWNER/NAME"),
        ("owner/", "Repo id must use alphanumeric"),
        ("/".join(("owner", "..")), "Repo id must use"),
        ("owner/a..b", "Cannot have -- or .."),
        ("owner/mo del", "Repo id must use"),
        ("owner/" + "a" * 97, "Repo id must use"),
        ("ówner/model", "Repo id must use"),
        ("owner/model.git", "cannot end by"),
        (f"{NAME}@", "its revision is ''"),
        (f"{NAME}@../main", "its revision is '../main'"),
        (f"{NAME}@a/../b", "its revision is 'a/../b'"),
        (f"{NAME}@a b", "its revision is 'a b'"),
        (f"{NAME}@/main", "its revision is '/main'"),
        (f"{NAME}@main@2", "its revision is 'main@2'"),
        (f"{NAME}@a\n", r"its revision is 'a\\n'"),
        (f"{NAME}@-a", "its revision is '-a'"),
    ],
)
def test_names_are_checked_before_any_request(hub, name, reason):
    message = refused(reason, name)
    assert "there is no directory" in message and "or OWNER/NAME@REVISION" in message
    assert hub.requests == [] and not pathlib.Path(hub_constants.HF_HUB_CACHE).exists()


def test_what_is_missing_names_both_readings(hub):
    message = refused("there is none of that name, or it is private; .*hf auth login", "owner/none")
    assert message.startswith(f"hf:owner/none: there is no directory {pathlib.Path.cwd() / 'owner/none'}, and ")
    message = refused("it has no revision 'v9'; name a branch", f"{NAME}@v9")
    assert f"there is no directory {pathlib.Path.cwd() / NAME}@v9" in message
    refused("it has no revision", f"{NAME}@{'a' * 40}")


def test_gated_and_private_models_need_a_token(hub, monkeypatch):
    for setting in ("is_gated", "is_private"):
        setattr(hub, setting, True)
        for token in (None, "hf_wrong"):
            if token:
                monkeypatch.setenv("HF_TOKEN", token)
            refused(
                f"it is gated; accept its terms at {hub.endpoint}/{NAME}, then run `hf auth login`, or set HF_TOKEN"
                if setting == "is_gated"
                else "none of that name, or it is private; check the name, or run `hf auth login`, or set HF_TOKEN"
            )
        monkeypatch.delenv("HF_TOKEN")
        setattr(hub, setting, False)
    hub.is_gated = hub.is_private = True
    monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
    assert hub_lib.find(NAME).source == SOURCE
    assert hub.authorizations and set(hub.authorizations) == {None}  # The storage is another host.


@pytest.mark.parametrize(
    ("status", "match"), [(401, "refuses access.*HF_TOKEN"), (403, "refuses access"), (500, "try again later")]
)
def test_other_refusals(hub, status, match):
    hub.refused = status
    refused(match)


def test_without_a_network_the_cache_is_enough(hub, monkeypatch):
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    refused("is not whole in the cache .*/cache, and HF_HUB_OFFLINE forbids.*unset HF_HUB_OFFLINE")
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", False)
    found = hub_lib.find(NAME)
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    assert hub_lib.find(NAME) == found
    shard = found.directory / "model-00002-of-00003.safetensors"
    shard.unlink()
    refused("HF_HUB_OFFLINE forbids")
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", False)
    hub.requests.clear()
    assert hub_lib.find(NAME) == found and shard.is_file()
    assert hub.downloads() in ([], [shard.name])


def test_a_server_that_is_down(hub, monkeypatch):
    monkeypatch.setattr(hub_constants, "ENDPOINT", "http://127.0.0.1:9")
    message = refused(r"the connection to http://127.0.0.1:9 failed \(ConnectError")
    assert "check the network, the proxy and HF_ENDPOINT" in message


@pytest.mark.parametrize("address", ["nowhere", "ftp://127.0.0.1", "http://[", "http://127.0.0.1:port", "http://"])
def test_an_address_that_is_none(hub, monkeypatch, address):
    monkeypatch.setattr(hub_constants, "ENDPOINT", address)
    refused("HF_ENDPOINT is .*; set it to an address that begins with http or https")


@pytest.mark.parametrize("address", ["ftp://127.0.0.1", "http://127.0.0.1:port", "127.0.0.1:port"])
def test_an_address_of_a_proxy_that_is_none(hub, monkeypatch, address):
    monkeypatch.setenv("https_proxy", address)
    refused("the proxy for https is .*; set it to an address that begins with http or https or socks5")


def test_an_address_of_a_proxy(hub, monkeypatch):
    monkeypatch.setenv("https_proxy", "127.0.0.1:9")
    assert hub_lib.find(NAME).source == SOURCE  # NO_PROXY names this machine.


def test_a_token_that_is_none(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_tökén")
    refused("HF_TOKEN")


def test_a_cache_of_an_older_client_has_no_list_of_files(hub, monkeypatch):
    found = hub_lib.find(NAME)
    listing = found.directory.parents[1] / "trees"
    (listing / f"{hub_server.COMMIT}.json").unlink()
    forget_listings()
    hub.requests.clear()
    assert hub_lib.find(NAME) == found and hub.downloads() == []  # The Hub tells; the files are there.
    (listing / f"{hub_server.COMMIT}.json").unlink()
    forget_listings()
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    with pytest.warns(errors.KVGraftWarning, match="are taken for all of them"):
        alone = hub_lib.find(NAME)
    assert alone.source == SOURCE and alone.names == found.names - {
        "README.md",
        "flax_model.msgpack",
        "pytorch_model.bin",
    }


def forget_listings() -> None:
    """Lets the client read its lists of files anew, as another process would."""
    from huggingface_hub import _tree_cache

    _tree_cache._IN_MEMORY_TREE_CACHE.clear()


def test_a_bar_on_a_terminal(hub, monkeypatch, capsys):
    monkeypatch.setattr(progress, "is_terminal", lambda: True)
    hub_lib.find(NAME)
    assert "complete: 100%" in capsys.readouterr().err
    hub.revisions["main"], hub.directories[hub_server.OTHER_COMMIT] = hub_server.OTHER_COMMIT, hub.directory
    with hub_utils.disable_progress_bars():
        hub_lib.find(f"{NAME}@{hub_server.OTHER_COMMIT}")
    assert "complete" not in capsys.readouterr().err


LOAD = """
import os, sys
if sys.argv[1] == "none":
    sys.stderr = None
elif sys.argv[1] == "closed":
    os.close(2)
elif sys.argv[1] == "full":
    sys.stderr = open("/dev/full", "w")
    sys.stderr.isatty = lambda: True
import kvgraft_jax as kg
try:
    print(kg.load_model(f"hf:{sys.argv[2]}").source)
except kg.KVGraftError as error:
    print(type(error).__name__, error)
sys.stdout.flush()
os._exit(0)  # Python itself complains of a full stderr when it ends.
"""


@pytest.mark.parametrize("stderr", ["usual", "none", "closed", "full"])
def test_environment_variables_of_a_new_process(hub, tmp_path, stderr):
    hub.is_gated = hub.is_private = True
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "home"),
        "HF_TOKEN": hub_server.TOKEN,
        "PYTHONPATH": str(ROOT),
    }
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE"):
        environment.pop(name, None)

    def loaded(**changes: str) -> str:
        command = [sys.executable, "-c", LOAD, stderr, NAME]
        done = subprocess.run(
            command,
            env=environment | changes,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=120,
        )
        assert done.returncode == 0
        return done.stdout.decode().strip()

    assert loaded() == SOURCE
    assert (tmp_path / "home" / "hub").is_dir() and not (tmp_path / "cache").exists()
    if stderr == "usual":
        hub.requests.clear()
        assert loaded(HF_HUB_OFFLINE="1") == SOURCE
        assert loaded(HF_ENDPOINT="http://127.0.0.1:9") == SOURCE
        assert loaded(HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(tmp_path / "cache")).startswith(
            "WeightsError hf:owner/model"
        )
        assert hub.requests == []
