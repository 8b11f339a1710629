"""Reads the metadata of a Gemma 3 or 4 GGUF file into a `GemmaConfig`."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses

from kvgraft_jax import errors
from kvgraft_jax.checkpoints import fields as fields_lib
from kvgraft_jax.checkpoints.gguf import gemma3 as gguf_gemma3
from kvgraft_jax.checkpoints.gguf import gemma4 as gguf_gemma4
from kvgraft_jax.checkpoints.gguf import header as gguf_header
from kvgraft_jax.gemma import config as config_lib

_PARSERS = {"gemma3": gguf_gemma3.parse, "gemma4": gguf_gemma4.parse}
# What changes tokens or greedy decoding, by what does not.
_NEUTRAL = {
    "tokenizer.ggml.add_eos_token": (False,),
    "tokenizer.ggml.remove_extra_whitespaces": (False,),
    "general.sampling.penalty_repeat": (1.0,),
    "general.sampling.mirostat": (0,),
}
_OLLAMA_KEYS = ("vision.", "audio.", "mm.", "rope.local.", "rope.global.")
_OLLAMA_TENSORS = ("v.", "a.", "mm.")
_TURN_ENDS = (b"<eos>", b"<end_of_turn>", b"<turn|>", b"<|tool_response>")


def parse_config(header: gguf_header.Header) -> config_lib.GemmaConfig:
    """Reads the configuration that the metadata of a file describes.

    Raises:
      ConfigError: another architecture, missing keys, or keys and values that this model does not compute.
      WeightsError: no embedding table.
    """
    try:
        return _parse(header)
    except errors.ConfigError as error:
        raise errors.ConfigError(f"{header.path}: {error}") from None


def _parse(header: gguf_header.Header) -> config_lib.GemmaConfig:
    architecture = header.metadata.get("general.architecture")
    kind = header.metadata.get("general.type", "model")
    if not isinstance(kind, str) or kind != "model":
        raise errors.ConfigError(
            f"general.type: got {errors.shown(kind)}, wanted 'model': this file holds no whole model; merge an adapter "
            "into its model and convert that (llama-export-lora), or name the file of the model itself"
        )
    if not isinstance(architecture, str) or architecture not in _PARSERS:
        raise errors.ConfigError(
            f"general.architecture: got {errors.shown(architecture)}, wanted {' or '.join(map(repr, _PARSERS))}"
        )
    if "token_embd.weight" not in header.tensors:
        raise errors.WeightsError(f"{header.path}: holds no token_embd.weight; wanted the weights of a language model")
    prefix = architecture + "."
    signs = [key for key in header.metadata if key.startswith(tuple(prefix + name for name in _OLLAMA_KEYS))]
    signs += [name for name in header.tensors if name.startswith(_OLLAMA_TENSORS)]
    if signs:
        raise errors.ConfigError(
            f"{', '.join(signs[:3])}{', ...' if len(signs) > 3 else ''}: this is a file as Ollama makes it, with "
            "images and other names in it. Use a GGUF file that llama.cpp made (with convert_hf_to_gguf.py, or one "
            "published as such), which keeps the text model by itself"
        )
    fields = fields_lib.Fields(
        {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    )
    settings = fields_lib.Fields(header.metadata)
    for key, accepted in _NEUTRAL.items():
        settings.only(key, *accepted)
    fields.problems += settings.problems
    for key in ("padding", "bos", "eos", "eot"):
        token = header.metadata.get(f"tokenizer.ggml.{key}_token_id", 0)
        if type(token) is not int:
            fields.wrong(f"tokenizer.ggml.{key}_token_id", token, "a token id")
    config = _PARSERS[architecture](fields, str(header.metadata.get("general.name", header.path.stem)), header.tensors)
    return dataclasses.replace(
        config,
        pad_id=header.metadata.get("tokenizer.ggml.padding_token_id", 0),
        bos_id=header.metadata.get("tokenizer.ggml.bos_token_id", 2),
        stop_ids=_stop_ids(header.metadata),
    )


def _stop_ids(metadata: Mapping[str, gguf_header.Value]) -> tuple[int, ...]:
    found = {metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")} - {None}
    if "tokenizer.chat_template" in metadata:
        tokens = metadata.get("tokenizer.ggml.tokens", ())
        found |= {tokens.index(piece) for piece in _TURN_ENDS if isinstance(tokens, tuple) and piece in tokens}
    return tuple(sorted(found)) or (1,)
