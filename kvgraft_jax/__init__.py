"""kvgraft_jax: byte-exact K/V grafts for frozen Gemma models.

The public names below are loaded on first use, so that importing the package imports no jax; the first one that needs
the engine sets the XLA flags on which exactness rests.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvgraft_jax.checkpoints.load import Model, load_model
    from kvgraft_jax.engine import Engine
    from kvgraft_jax.errors import (
        ArtifactNotFound,
        BatchError,
        CapacityError,
        CaptureError,
        ConfigError,
        DeterminismError,
        InputError,
        IntegrityError,
        KVGraftError,
        KVGraftWarning,
        PinMismatch,
        ResourceError,
        SeamError,
        StorageError,
        TokenizerError,
        WeightsError,
        WindowError,
    )
    from kvgraft_jax.gemma.sharding import make_mesh
    from kvgraft_jax.grafting.artifact import Artifact
    from kvgraft_jax.grafting.compare import Comparison, compare
    from kvgraft_jax.grafting.storage import list_artifacts, load_artifact, save_artifact
    from kvgraft_jax.grafting.verify import Verification
    from kvgraft_jax.pin import Pin, diff
    from kvgraft_jax.runtime.sampling import Sampling
    from kvgraft_jax.runtime.state import State
    from kvgraft_jax.text.chat import Message

__version__ = "0.1.0"

_ERRORS = (
    "ArtifactNotFound",
    "BatchError",
    "CapacityError",
    "CaptureError",
    "ConfigError",
    "DeterminismError",
    "InputError",
    "IntegrityError",
    "KVGraftError",
    "KVGraftWarning",
    "PinMismatch",
    "ResourceError",
    "SeamError",
    "StorageError",
    "TokenizerError",
    "WeightsError",
    "WindowError",
)
_HOMES = {
    "Engine": "engine",
    "Message": "text.chat",
    "Model": "runtime.model",
    "load_model": "checkpoints.load",
    "make_mesh": "gemma.sharding",
    "Sampling": "runtime.sampling",
    "State": "runtime.state",
    "Artifact": "grafting.artifact",
    "Comparison": "grafting.compare",
    "compare": "grafting.compare",
    "list_artifacts": "grafting.storage",
    "load_artifact": "grafting.storage",
    "save_artifact": "grafting.storage",
    "Verification": "grafting.verify",
    "Pin": "pin",
    "diff": "pin",
    **{name: "errors" for name in _ERRORS},
}

__all__ = list(_HOMES)


def __getattr__(name: str):
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if home.startswith(("gemma.", "runtime.", "checkpoints.", "engine")):
        importlib.import_module("kvgraft_jax.engine")  # sets the XLA flags while no backend runs
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
