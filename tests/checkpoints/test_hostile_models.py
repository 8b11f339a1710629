"""Checkpoints and URIs with values that no export writes: a typed error at once, whatever the field."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from experiments.bench import export
from kvgraft_jax import errors
from kvgraft_jax.checkpoints import load
from kvgraft_jax.gemma import config as config_lib
from tests import tiny

VALUES = (
    0,
    -1,
    10**30,
    10**400,
    3_000_000_000,
    float("nan"),
    float("inf"),
    "linear",
    None,
    True,
    [],
    [["x"]],
    {},
    1e999,
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Returns a small checkpoint that loads."""
    path = tmp_path_factory.mktemp("model")
    export.export(tiny.model(), path)
    assert load.load_model(f"hf:{path}").digest == tiny.model().digest
    return path


def fields(directory) -> list[str]:
    return sorted(json.loads((directory / "config.json").read_text()))


def test_any_value_in_any_field_loads_or_is_a_typed_error(directory, tmp_path):
    document = json.loads((directory / "config.json").read_text())
    for path in directory.iterdir():
        if path.name != "config.json":
            (tmp_path / path.name).hardlink_to(path)
    refused = 0
    for field in fields(directory):
        for value in VALUES:
            (tmp_path / "config.json").write_text(json.dumps({**document, field: value}))
            try:
                load.load_model(f"hf:{tmp_path}")
            except errors.KVGraftError:
                refused += 1
    assert refused > len(fields(directory)) * len(VALUES) // 2


@pytest.mark.parametrize(
    "change",
    [
        {"query_scale": float("inf")},
        {"query_scale": -1.0},
        {"norm_eps": float("nan")},
        {"final_softcap": float("inf")},
        {"bos_id": -2},
        {"stop_ids": (-1,)},
        {"vocab_size": 1 << 40},
    ],
)
def test_numbers_that_no_model_has(change):
    with pytest.raises(errors.ConfigError, match=next(iter(change))):
        dataclasses.replace(tiny.model().config, **change)


@pytest.mark.parametrize("count", [0, -1, 4_000_000_000])
def test_a_bomb_of_layers_is_refused_before_it_is_built(count):
    with pytest.raises(errors.ConfigError, match="number of layers"):
        config_lib.repeating_kinds(count)


@pytest.mark.parametrize(
    "uri",
    [
        "hf:~nobody-of-this-name/x",
        "gguf:~nobody-of-this-name/x",
        "random:gemma-3-270m?seed=" + "9" * 5000,
        "random:gemma-3-270m?vocab=" + "9" * 30,
        "random:gemma-3-270m?vocab=9999999999",
    ],
)
def test_uris(uri):
    with pytest.raises(errors.KVGraftError):
        load.load_model(uri)


def test_dtype_of_another_type():
    with pytest.raises(errors.ConfigError, match="dtype"):
        load.load_model(tiny.URI, dtype=["bfloat16"])


@pytest.mark.parametrize("scheme", ["hf", "gguf", "orbax"])
@pytest.mark.parametrize("path", ["x" * 5000, "x/" + "x" * 300, "/proc/self/mem/x"])
def test_paths_that_no_system_opens(scheme, path):
    with pytest.raises(errors.WeightsError) as caught:
        load.load_model(f"{scheme}:{path}")
    assert len(str(caught.value)) < 6000


def test_a_shard_with_a_name_that_no_system_opens(directory, tmp_path):
    (tmp_path / "config.json").hardlink_to(directory / "config.json")
    index = {"weight_map": {"a": "x" * 300}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(errors.WeightsError):
        load.load_model(f"hf:{tmp_path}")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"])
def test_files_that_cannot_be_read(directory, tmp_path, name):
    for path in directory.iterdir():
        (tmp_path / path.name).hardlink_to(path)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("/proc/self/mem")  # A file whose first byte is an input/output error, even to root.
    with pytest.raises(errors.WeightsError, match="cannot be read"):
        load.load_model(f"hf:{tmp_path}")


def test_tensors_that_cannot_be_read(directory, monkeypatch):
    def fail(*_, **__):
        raise PermissionError(13, "Permission denied", "model.safetensors")

    monkeypatch.setattr(np, "fromfile", fail)
    with pytest.raises(errors.WeightsError, match="cannot be read .*Permission denied: 'model.safetensors'"):
        load.load_model(f"hf:{directory}")
