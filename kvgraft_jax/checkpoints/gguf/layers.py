"""What the GGUF metadata of Gemma 3 and 4 say in the same way: sizes, layer kinds, decimal numbers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvgraft_jax.checkpoints import fields as fields_lib
from kvgraft_jax.checkpoints.gguf import header as gguf_header
from kvgraft_jax.gemma import config as config_lib


def vocab_size(fields: fields_lib.Fields, tensors: Mapping[str, gguf_header.StoredTensor]) -> int:
    """Counts the rows of the embedding table; notes metadata that says otherwise."""
    rows = tensors["token_embd.weight"].shape[0]
    fields.only("vocab_size", rows)
    return rows


def rotary_base(fields: fields_lib.Fields, key: str, default: float | None = None) -> float:
    """Reads theta under `key`, above 1."""
    base = decimal(fields.real(key, default))
    if base > 1:
        return base
    fields.wrong(key, base, "a number above 1")
    return 1e4


def layer_kinds(fields: fields_lib.Fields, num_layers: int, default: int | None) -> tuple[str, ...]:
    """Reads every layer's kind from a flag per layer (true slides) or a period; one must be there without a default."""
    key = "attention.sliding_window_pattern"
    pattern = fields.take(key, default)
    if isinstance(pattern, np.ndarray) and pattern.shape == (num_layers,) and not set(pattern.tolist()) - {0, 1}:
        return tuple(config_lib.SLIDING if is_sliding else config_lib.FULL for is_sliding in pattern.tolist())
    if type(pattern) is int and pattern >= 1:
        return config_lib.repeating_kinds(num_layers, pattern)
    fields.wrong(key, pattern, f"a period or {num_layers} flags")
    return config_lib.repeating_kinds(num_layers)


def decimal(number: float) -> float:
    """Returns the shortest decimal that rounds to the stored float32: 1e-6, where the file holds 9.99999997e-7."""
    return float(str(np.float32(number)))
