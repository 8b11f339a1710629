"""What every checkpoint format offers to the assembler: a configuration, tensor shapes, and rows of one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from kvgraft_jax.gemma import config as config_lib


class Source(Protocol):
    """An opened checkpoint whose header has been checked against the file size; no tensor has been read.

    Attributes:
      origin: the file or directory, for messages.
      config: the model that it holds.
      shapes: stored shape of each tensor, by public name without prefix; tensors of other modalities are left out.
    """

    origin: str
    config: config_lib.GemmaConfig
    shapes: Mapping[str, tuple[int, ...]]

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Reads rows `start` to `stop` of a tensor seen as a matrix [rows, columns]; a vector is one row.

        Exact: the stored values (dequantised in float32), as float32, float16 or bfloat16.
        """
        ...


def mismatches(
    wanted: Mapping[str, tuple[int, ...]],
    optional: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    labels: Mapping[str, str],
) -> list[str]:
    """Lists what of a checkpoint does not fit, one line each: missing, unexpected, or of the wrong shape.

    Args:
      wanted, optional: shapes by name; the latter may be missing.
      found: shapes by name, as stored.
      labels: what to call those that were found, where that is not their name.
    """
    problems = [f"missing: {name}, wanted shape {shape}" for name, shape in wanted.items() if name not in found]
    for name, shape in found.items():
        want, label = wanted.get(name, optional.get(name)), labels.get(name, name)
        if want is None:
            problems.append(f"unexpected: {label}, shape {shape}")
        elif shape != want:
            problems.append(f"wrong shape: {label}: got {shape}, wanted {want}")
    return problems
