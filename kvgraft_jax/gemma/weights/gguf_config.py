"""Reads the metadata of a Gemma 3 GGUF file into a `GemmaConfig`.

What the metadata leaves out follows from the architecture: every sixth layer is full, sliding layers have rotary base
10000, and the query scale is head_dim^-0.5, except in the 27B, which is known by its 62 layers.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvgraft_jax import errors
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma.weights import gguf_header

_ARCHITECTURE = "gemma3"
_REQUIRED = (
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "rope.freq_base",
)
_FLOATS = ("attention.layer_norm_rms_epsilon", "rope.freq_base")
_OPTIONAL = (
    "attention.sliding_window_pattern",
    "attention.value_length",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "rope.dimension_count",
    "rope.freq_base_swa",
    "rope.scaling.factor",
    "rope.scaling.type",
    "vocab_size",
)
_LAYERS_OF_27B = 62


def parse_config(header: gguf_header.Header) -> config_lib.GemmaConfig:
    """The configuration that the metadata of a file describes.

    Raises:
      ConfigError: another architecture, missing keys, or keys and values that this model does not compute.
    """
    try:
        return _parse(header)
    except errors.ConfigError as error:
        raise errors.ConfigError(f"{header.path}: {error}") from None


def _parse(header: gguf_header.Header) -> config_lib.GemmaConfig:
    architecture = header.metadata.get("general.architecture")
    if architecture != _ARCHITECTURE:
        raise errors.ConfigError(f"general.architecture: got {architecture!r}, wanted {_ARCHITECTURE!r}")
    prefix = _ARCHITECTURE + "."
    values = {k.removeprefix(prefix): v for k, v in header.metadata.items() if k.startswith(prefix)}
    if "token_embd.weight" not in header.tensors:
        raise errors.WeightsError(f"{header.path}: holds no token_embd.weight; wanted the weights of a language model")
    vocab_size = header.tensors["token_embd.weight"].shape[0]
    problems = _problems(values, vocab_size)
    if problems:
        raise errors.ConfigError(f"metadata {prefix}*: " + "; ".join(problems))
    for key in ("padding", "bos", "eos", "eot"):
        token = header.metadata.get(f"tokenizer.ggml.{key}_token_id", 0)
        if type(token) is not int:
            raise errors.ConfigError(f"tokenizer.ggml.{key}_token_id: got {token!r}, wanted a token id")
    layers, heads = values["block_count"], values["attention.head_count"]
    width, head_dim = values["embedding_length"], values["attention.key_length"]
    kv_heads = values["attention.head_count_kv"]
    scale = values["rope.scaling.factor"] if values.get("rope.scaling.type", "none") == "linear" else 1.0
    full_rotary = config_lib.RotaryConfig(_decimal(values["rope.freq_base"]), _decimal(scale))
    local_rotary = config_lib.RotaryConfig(_decimal(values.get("rope.freq_base_swa", 1e4)))
    return config_lib.GemmaConfig(
        name=str(header.metadata.get("general.name", header.path.stem)),
        vocab_size=vocab_size,
        embed_dim=width,
        hidden_dim=values["feed_forward_length"],
        num_heads=heads,
        layer_kinds=_layer_kinds(values.get("attention.sliding_window_pattern", 6), layers),
        sliding=config_lib.AttentionConfig(kv_heads, head_dim, local_rotary, values["attention.sliding_window"]),
        full=config_lib.AttentionConfig(kv_heads, head_dim, full_rotary),
        query_scale=float(width // heads if layers == _LAYERS_OF_27B else head_dim) ** -0.5,
        norm_eps=_decimal(values["attention.layer_norm_rms_epsilon"]),
        max_positions=values["context_length"],
        pad_id=header.metadata.get("tokenizer.ggml.padding_token_id", 0),
        bos_id=header.metadata.get("tokenizer.ggml.bos_token_id", 2),
        stop_ids=_stop_ids(header.metadata),
    )


def _problems(values: Mapping[str, gguf_header.Value], vocab_size: int) -> list[str]:
    problems = [f"missing {key}" for key in _REQUIRED if key not in values]
    problems += [f"unknown key {key}" for key in values if key not in _REQUIRED + _OPTIONAL]
    problems += [
        f"{key}: got {values[key]!r}, wanted a number"
        for key in _REQUIRED
        if key in values and type(values[key]) is not (float if key in _FLOATS else int)
    ]
    head_dim = values.get("attention.key_length")
    wanted = {
        "attention.value_length": (head_dim,),
        "rope.dimension_count": (head_dim,),
        "vocab_size": (vocab_size,),
        "attn_logit_softcapping": (0.0,),
        "final_logit_softcapping": (0.0,),
        "rope.scaling.type": ("none", "linear"),
    }
    problems += [
        f"{key}: got {values[key]!r}, wanted {' or '.join(map(str, accepted))}"
        for key, accepted in wanted.items()
        if key in values and values[key] not in accepted
    ]
    if values.get("rope.scaling.type") == "linear" and "rope.scaling.factor" not in values:
        problems.append("missing rope.scaling.factor")
    return problems


def _layer_kinds(pattern: gguf_header.Value, layers: int) -> tuple[str, ...]:
    if isinstance(pattern, np.ndarray) and pattern.shape == (layers,):
        return tuple(config_lib.SLIDING if is_sliding else config_lib.FULL for is_sliding in pattern.tolist())
    if isinstance(pattern, int) and pattern >= 1:
        return config_lib.repeating_kinds(layers, pattern)
    raise errors.ConfigError(f"attention.sliding_window_pattern: got {pattern!r}, wanted a period or {layers} flags")


def _stop_ids(metadata: Mapping[str, gguf_header.Value]) -> tuple[int, ...]:
    found = {metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")} - {None}
    if "tokenizer.chat_template" in metadata:
        tokens = metadata.get("tokenizer.ggml.tokens", ())
        found |= {tokens.index(piece) for piece in (b"<eos>", b"<end_of_turn>") if piece in tokens}
    return tuple(sorted(found)) or (1,)


def _decimal(number: int | float) -> float:
    """The shortest decimal that rounds to the stored float32: 1e-6, where the file holds 9.99999997e-7."""
    return float(str(np.float32(number)))
