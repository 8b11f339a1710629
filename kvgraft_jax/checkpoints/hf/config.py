"""Reads the public config.json and generation_config.json of any Gemma 3 or 4 into a `GemmaConfig`."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import pathlib
from typing import Any

from kvgraft_jax import errors
from kvgraft_jax.checkpoints import fields as fields_lib
from kvgraft_jax.checkpoints import files
from kvgraft_jax.checkpoints.hf import beside
from kvgraft_jax.checkpoints.hf import gemma3 as huggingface_gemma3
from kvgraft_jax.checkpoints.hf import gemma4 as huggingface_gemma4
from kvgraft_jax.gemma import config as config_lib

# The text model inside a multimodal one, by the type of the whole.
_TEXT_TYPES = {"gemma3": "gemma3_text", "gemma4": "gemma4_text", "gemma4_unified": "gemma4_unified_text"}

# Settings of the whole: read there, or without effect on the text.
_OF_THE_WHOLE = ("tie_word_embeddings", "quantization_config", "bos_token_id", "pad_token_id")
# Only in a text part, though the reader of Gemma 4 knows none of them.
_OF_THE_TEXT = ("query_pre_attn_scalar", "rope_local_base_freq", "rope_scaling", "rope_theta")

_WITHOUT_EFFECT = (
    "architectures",
    "attention_dropout",
    "cache_implementation",
    "chunk_size_feed_forward",
    "dtype",
    "id2label",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "model_type",
    "name_or_path",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
    "_name_or_path",
    "_attn_implementation_autoset",
)


def read_config(directory: pathlib.Path) -> config_lib.GemmaConfig:
    """Reads `directory`/config.json, with the special tokens of generation_config.json where present.

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
    beside.check_generation(generation, document, str(directory))
    try:
        return parse_config(document, directory.resolve().name, generation)
    except errors.ConfigError as error:
        raise errors.ConfigError(f"{path}: {error}") from None


def parse_config(
    document: Mapping[str, Any], name: str, generation: Mapping[str, Any] | None = None
) -> config_lib.GemmaConfig:
    """Returns the configuration that a config.json document describes.

    A missing key means the class default of `transformers`. A key that is not known here, or a value that this model
    does not compute, is an error: a model that silently ignored it would give other numbers.

    Args:
      document: the whole document; that of a multimodal model holds a `text_config`.
      name: name of the result.
      generation: the generation_config.json document; its stop tokens go before those of `document`.

    Raises:
      ConfigError: another architecture, or keys and values that this model does not compute; all are listed.
    """
    whole_type = document.get("model_type")
    if not isinstance(whole_type, str | None):
        raise errors.ConfigError(f"model_type: got {errors.shown(whole_type)}, wanted the name of one")
    text = document.get("text_config") if whole_type in _TEXT_TYPES else document
    if not isinstance(text, dict):
        raise errors.ConfigError(f"text_config: got {text!r}, wanted the text part of the {whole_type} model")
    wanted = _TEXT_TYPES.get(whole_type)
    text_type = text.get("model_type", wanted)
    if text_type not in _TEXT_TYPES.values() or wanted not in (None, text_type):
        known = [repr(kind) for pair in _TEXT_TYPES.items() for kind in pair]
        raise errors.ConfigError(
            f"model_type: got {whole_type!r} with the text part {text_type!r}, wanted one of {', '.join(known)}"
        )
    is_part = text is not document
    around = {key: value for key, value in document.items() if is_part and key not in _OF_THE_WHOLE}
    fields = fields_lib.Fields(text, around)
    fields.ignore(_WITHOUT_EFFECT)
    fields.reserve(_OF_THE_TEXT)
    if is_part:
        whole = fields_lib.Fields(document)
        whole.only("tie_word_embeddings", True, None)
        whole.only("quantization_config", None)
        fields.problems += whole.problems
    stop_ids = _token_ids(fields, "eos_token_id", [generation or {}, document, text])
    suppress_ids = _token_ids(fields, "suppress_tokens", [generation or {}])
    if text_type == "gemma3_text":
        config = huggingface_gemma3.parse(fields, name)
    else:
        config = huggingface_gemma4.parse(fields, name, is_unified=text_type == "gemma4_unified_text")
    suppress_ids = tuple(token for token in suppress_ids if token < config.vocab_size)
    return dataclasses.replace(config, stop_ids=stop_ids or (1,), suppress_ids=suppress_ids)


def _token_ids(fields: fields_lib.Fields, key: str, documents: list[Mapping[str, Any]]) -> tuple[int, ...]:
    """Returns the token ids under `key` in the first document that has them."""
    fields.ignore([key])
    found = [document[key] for document in documents if document.get(key) is not None]
    if not found:
        return ()
    ids = found[0] if isinstance(found[0], list) else [found[0]]
    if any(type(token) is not int for token in ids) or (key == "eos_token_id" and not ids):
        fields.wrong(key, found[0], "token ids")
    return tuple(ids)
