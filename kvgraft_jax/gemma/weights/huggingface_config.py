"""Reads the public config.json of a Gemma 3 model, with its old and new keys, into a `GemmaConfig`.

A missing key means the class default of `transformers`. A key that this reader does not know, or a value that this
model does not compute, is an error: a model that silently ignored it would give other numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
import pathlib
from typing import Any

from kvgraft_jax import errors
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma.weights import files

_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256.0,
    "sliding_window": 4096,
    "pad_token_id": 0,
    "bos_token_id": 2,
}

_MAY_BE_NULL = ("pad_token_id", "bos_token_id")

# Only this value is computed; another one changes the numbers.
_FIXED = {
    "hidden_activation": ("gelu_pytorch_tanh", None),
    "hidden_act": ("gelu_pytorch_tanh", None),
    "tie_word_embeddings": (True,),
    "attention_bias": (False,),
    "attn_logit_softcapping": (None,),
    "use_bidirectional_attention": (False, None),
    "quantization_config": (None,),
}

_SOFTCAP_KEY = "final_logit_softcapping"
_ROTARY_KEYS = {"rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq"}
_KIND_KEYS = {"layer_types", "sliding_window_pattern", "_sliding_window_pattern"}
_WITHOUT_EFFECT = {
    "architectures",
    "attention_dropout",
    "cache_implementation",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "model_type",
    "name_or_path",
    "torch_dtype",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
    "_name_or_path",
    "_attn_implementation_autoset",
}
_KINDS = {"sliding_attention": config_lib.SLIDING, "full_attention": config_lib.FULL}


def read_config(directory: pathlib.Path) -> config_lib.GemmaConfig:
    """The configuration in `directory`/config.json, with the stop tokens of generation_config.json where present.

    Raises:
      WeightsError: no readable config.json.
      ConfigError: another architecture, or keys and values that this model does not compute; all are listed.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise errors.WeightsError(f"{directory}: holds no config.json; wanted a directory as downloaded from the Hub")
    document = files.read_json(path)
    generation_path = directory / "generation_config.json"
    generation = files.read_json(generation_path) if generation_path.is_file() else {}
    try:
        return parse_config(document, directory.resolve().name, generation.get("eos_token_id"))
    except errors.ConfigError as error:
        raise errors.ConfigError(f"{path}: {error}") from None


def parse_config(document: Mapping[str, Any], name: str, stop: int | list[int] | None = None) -> config_lib.GemmaConfig:
    """The configuration that a config.json document describes.

    Args:
      document: the whole document, or that of a multimodal model with a `text_config`.
      name: name of the result.
      stop: stop token(s) that go before those of the document.
    """
    text = document
    if document.get("model_type") == "gemma3":
        text = document.get("text_config")
        if not isinstance(text, dict):
            raise errors.ConfigError("text_config: missing; wanted the text part of a Gemma 3 model")
    kind = text.get("model_type")
    if kind != "gemma3_text":
        raise errors.ConfigError(f"model_type: got {kind!r}, wanted 'gemma3_text', or 'gemma3' with a text_config")
    problems = _problems(text)
    if problems:
        raise errors.ConfigError("this would give other numbers than the model was made for: " + "; ".join(problems))
    values = {key: text.get(key, default) for key, default in _DEFAULTS.items()}
    for key, default in _DEFAULTS.items():
        if values[key] is None and key in _MAY_BE_NULL:
            values[key] = default
        if isinstance(values[key], bool) or not isinstance(values[key], (int, type(default))):
            raise errors.ConfigError(f"{key}: got {values[key]!r}, wanted a number such as {default}")
    if stop is None:
        stop = document.get("eos_token_id", text.get("eos_token_id"))
    stop = [1] if stop is None else stop if isinstance(stop, list) else [stop]
    if not stop or any(type(token) is not int for token in stop):
        raise errors.ConfigError(f"eos_token_id: got {stop!r}, wanted one or more token ids")
    softcap = text.get(_SOFTCAP_KEY)
    if softcap is not None and type(softcap) not in (int, float):
        raise errors.ConfigError(f"{_SOFTCAP_KEY}: got {softcap!r}, wanted a number or null")
    head = values["num_key_value_heads"], values["head_dim"]
    return config_lib.GemmaConfig(
        name=name,
        vocab_size=values["vocab_size"],
        embed_dim=values["hidden_size"],
        hidden_dim=values["intermediate_size"],
        num_heads=values["num_attention_heads"],
        layer_kinds=_layer_kinds(text, values["num_hidden_layers"]),
        sliding=config_lib.AttentionConfig(*head, _rotary(text, "sliding_attention"), values["sliding_window"]),
        full=config_lib.AttentionConfig(*head, _rotary(text, "full_attention")),
        query_scale=float(values["query_pre_attn_scalar"]) ** -0.5,
        final_softcap=None if softcap is None else float(softcap),
        norm_eps=float(values["rms_norm_eps"]),
        max_positions=values["max_position_embeddings"],
        pad_id=values["pad_token_id"],
        bos_id=values["bos_token_id"],
        stop_ids=tuple(stop),
    )


def _problems(text: Mapping[str, Any]) -> list[str]:
    known = {_SOFTCAP_KEY} | _DEFAULTS.keys() | _FIXED.keys() | _ROTARY_KEYS | _KIND_KEYS | _WITHOUT_EFFECT
    unknown = {key: value for key, value in text.items() if key not in known and value is not None}
    problems = [f"unknown key {key} = {value!r}" for key, value in unknown.items()]
    for key, accepted in _FIXED.items():
        if key in text and text[key] not in accepted:
            problems.append(f"{key} = {text[key]!r}, wanted {accepted[0]!r}")
    return problems


def _layer_kinds(text: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    names = text.get("layer_types")
    if names is None:
        period = text.get("sliding_window_pattern", text.get("_sliding_window_pattern"))
        period = 6 if period is None else period
        if not isinstance(period, int) or period < 1:
            raise errors.ConfigError(f"sliding_window_pattern: got {period!r}, wanted a number of layers")
        return config_lib.repeating_kinds(num_layers, period)
    if not isinstance(names, list) or any(name not in _KINDS for name in names) or len(names) != num_layers:
        raise errors.ConfigError(f"layer_types: got {names!r}, wanted {num_layers} names out of {', '.join(_KINDS)}")
    return tuple(_KINDS[name] for name in names)


def _rotary(text: Mapping[str, Any], kind: str) -> config_lib.RotaryConfig:
    is_full = kind == "full_attention"
    rope = dict(text.get("rope_scaling") or {}) if is_full else {}
    parameters = text.get("rope_parameters")
    if parameters is not None:
        if not isinstance(parameters, dict) or set(parameters) - set(_KINDS):
            raise errors.ConfigError(f"rope_parameters: got {parameters!r}, wanted entries {', '.join(_KINDS)}")
        rope = {**(parameters.get(kind) or {}), **rope}
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    rope_type = rope.pop("rope_type", None) or "default"
    base = rope.pop("rope_theta", None)
    if base is None:
        base = text.get("rope_theta" if is_full else "rope_local_base_freq")
    if base is None:
        base = 1e6 if is_full else 1e4
    scale = rope.pop("factor", 1.0) if rope_type == "linear" else 1.0
    if rope_type not in ("default", "linear") or rope:
        raise errors.ConfigError(
            f"rotary encoding of {kind}: got type {rope_type!r} with {rope}, wanted 'default', or 'linear' and factor"
        )
    for key, value in (("rope_theta", base), ("factor", scale)):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise errors.ConfigError(f"rotary encoding of {kind}: {key}: got {value!r}, wanted a number")
    return config_lib.RotaryConfig(float(base), float(scale))
