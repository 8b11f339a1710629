"""Small artifacts, and what the storage tests do to their entries."""

import os
import shutil

import ml_dtypes
import numpy as np
import pytest

from kvgraft_jax import errors
from kvgraft_jax import pin as pin_lib
from kvgraft_jax.grafting import artifact as artifact_lib
from kvgraft_jax.grafting import container, storage

BF16 = ml_dtypes.bfloat16
PIN = pin_lib.Pin({"schema": pin_lib.SCHEMA, "kv_block": 16, "model": {"sliding": {"window": 3, "base": 10000.0}}})


def make_artifact(number=0, vocabulary=12, dtype=BF16):
    """Five tokens of a three-layer model; `number` makes it another artifact."""
    rng = np.random.default_rng(number)
    return artifact_lib.Artifact(
        policy="visible",
        token_ids=(2, 7, 7, 1, number),
        stacks=(
            artifact_lib.KVStack("sliding", (0, 2), 3, rng.standard_normal((2, 2, 2, 1, 4), np.float32).astype(dtype)),
            artifact_lib.KVStack("full", (1,), 0, rng.standard_normal((1, 2, 5, 1, 8), np.float32).astype(dtype)),
        ),
        logits_V=rng.standard_normal(vocabulary, np.float32),
        pin=PIN,
        provenance={"verifier": "exact-match", "tries": number},
    )


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Returns a directory with one entry, for tests that copy it before they damage it."""
    directory = tmp_path_factory.mktemp("stored")
    storage.save_artifact(make_artifact(), directory)
    return directory


@pytest.fixture
def entry(stored, tmp_path):
    """Returns the path of an entry that a test may damage."""
    artifact_id = make_artifact().artifact_id
    shutil.copytree(stored / artifact_id, tmp_path / artifact_id)
    return tmp_path / artifact_id


def files_of(entry):
    return sorted(path for path in entry.rglob("*") if path.is_file())


def reseal(entry):
    """Makes the seal fit what now lies in the entry, as an attacker would."""
    (entry / container.SEAL).unlink()
    container.seal(entry, entry.name)


def assert_refused(entry, field=""):
    with pytest.raises(errors.IntegrityError) as caught:
        storage.load_artifact(entry.parent, entry.name)
    assert caught.value.artifact == entry.name and entry.name in str(caught.value)
    assert field in caught.value.field + ": " + caught.value.reason, str(caught.value)


def scratch_directories(directory):
    return [name for name in os.listdir(directory) if name.startswith(".writing-")]
