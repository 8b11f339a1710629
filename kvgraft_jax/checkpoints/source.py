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
        """Rows `start` to `stop` of a tensor seen as a matrix [rows, columns]; a vector is one row.

        Exact: the stored values (dequantised in float32), as float32, float16 or bfloat16.
        """
        ...
