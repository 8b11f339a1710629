"""Loads a model from a URI: configuration, parameters on the device, tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Mapping
import pathlib
from urllib import parse

import flax
from jax import sharding
import jax.numpy as jnp
import numpy as np

from kvgraft_jax import errors, host_memory
from kvgraft_jax.checkpoints import assemble, files, package
from kvgraft_jax.checkpoints import random as random_lib
from kvgraft_jax.checkpoints import source as source_lib
from kvgraft_jax.checkpoints.gguf import file as gguf_file
from kvgraft_jax.checkpoints.hf import safetensors_file
from kvgraft_jax.checkpoints.orbax import directory as orbax_directory
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma import configurations
from kvgraft_jax.gemma import sharding as sharding_lib
from kvgraft_jax.runtime import model as model_lib
from kvgraft_jax.text import chat as chat_lib
from kvgraft_jax.text import tokenizer as tokenizer_lib

_DTYPES = {"bfloat16": np.dtype(jnp.bfloat16), "float32": np.dtype(np.float32)}
_CUTS = (
    "layers",
    "vocab",
    "embed",
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "window",
    "experts",
    "per_layer",
)
_OPTIONS = {"hf": ("chat",), "gguf": ("chat",), "orbax": ("config", "chat")}
_SCHEMES = "hf:DIR, gguf:FILE, orbax:DIR, package:gemma-3-270m, or random:NAME?seed=0&layers=6"
_MALFORMED = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_MOST_SPARE_ROWS = 1024  # Of a table, without a piece of the tokenizer; released models have 64 at most.
_TEMPLATE_FILES = ("tokenizer_config.json", "chat_template.jinja", "chat_template.json")


def load_model(uri: str, dtype: str = "bfloat16", *, mesh: sharding.Mesh | None = None) -> model_lib.Model:
    """Loads the model at `uri`.

    Exact: bit-exact where `dtype` holds the stored values, else rounded once to nearest even.

    Args:
      uri: `hf:DIR` (config.json and safetensors), `gguf:FILE`, `orbax:DIR` (as DeepMind publishes them;
        `?config=NAME` states which model it is), `package:gemma-3-270m` (the installed package), or
        `random:NAME?seed=0` for any released size (`gemma-3-270m` to `gemma-4-31b`), optionally cut with `layers`,
        `vocab`, `embed`, `hidden`, `heads`, `kv_heads`, `head_dim`, `window`, `experts` and `per_layer`; see
        `weights.random_init.cut`. `?chat=NAME` after a directory or file states the style of `Chat`, which Orbax
        directories do not tell; otherwise it is that of the checkpoint's template, or "plain" without one.
      dtype: "bfloat16" or "float32".
      mesh: devices over which parameters and, later, caches are spread: `make_mesh(num_devices)`; None is the default
        device. It is part of the pin: other bits than on one device, but the same ones every time.

    Raises:
      ConfigError: a URI, dtype, mesh or configuration that is not accepted.
      WeightsError: a checkpoint that is missing, unreadable or damaged, or that lacks tensors which the model needs.
      ResourceError: the parameters do not fit the memory that the device has free; raised before they are loaded.
      TokenizerError: a tokenizer or chat template of another model or kind, or damaged.
    """
    as_dtype = _checked_dtype(dtype)
    mesh = sharding_lib.checked_mesh(mesh)
    if not isinstance(uri, str):
        raise errors.ConfigError(f"model URI: got {type(uri).__name__}, wanted {_SCHEMES}")
    scheme, colon, rest = uri.partition(":")
    if not colon or not rest or scheme not in ("hf", "gguf", "orbax", "package", "random"):
        raise errors.ConfigError(f"model URI: got {uri!r}, wanted {_SCHEMES}")
    if scheme == "random":
        config, seed = _random_config(rest)
        weights = random_lib.initialise(config, seed, as_dtype, mesh)
        return model_lib.Model(config, flax.core.freeze(weights.params), None, None, weights.digest, dtype, uri, mesh)
    options = {}
    if scheme in _OPTIONS:
        rest, options = _query(rest, _OPTIONS[scheme])
    if "chat" in options:
        chat_lib.family_of(options["chat"])
    try:
        source, chat = _open(uri, scheme, rest, options)
        weights = assemble.assemble(source, as_dtype, mesh)
    except OSError as error:
        raise errors.WeightsError(
            f"{errors.shown(uri)}: cannot be read ({type(error).__name__}: {str(error)[:400]}); "
            "check the path, the disk and the rights of the files"
        ) from error
    host_memory.trim()
    tokenizer = None if chat is None else chat.tokenizer
    return model_lib.Model(
        source.config, flax.core.freeze(weights.params), tokenizer, chat, weights.digest, dtype, uri, mesh
    )


def _open(
    uri: str, scheme: str, rest: str, options: Mapping[str, str]
) -> tuple[source_lib.Source, chat_lib.Chat | None]:
    """The opened checkpoint, and its tokenizer with the prompt template."""
    try:
        source, tokenizer, template = _open_parts(scheme, rest, options)
        return source, _chat(options.get("chat"), tokenizer, template, source)
    except errors.KVGraftError:
        raise
    except _MALFORMED as error:
        raise errors.WeightsError(
            f"{uri}: its configuration, header or tokenizer holds a value of a kind that no export writes "
            f"({type(error).__name__}: {str(error)[:200]}); export or download it again"
        ) from error


def _open_parts(
    scheme: str, rest: str, options: Mapping[str, str]
) -> tuple[source_lib.Source, tokenizer_lib.Tokenizer | None, str]:
    """The opened checkpoint, its tokenizer and its chat template ("" where it has none, or the chat was named)."""
    if scheme == "hf":
        source = safetensors_file.open_directory(rest)
        directory = pathlib.Path(source.origin)
        return source, tokenizer_lib.from_directory(directory), "" if "chat" in options else _template(directory)
    if scheme == "orbax":
        source = orbax_directory.open_directory(rest, options.get("config"))
        return source, orbax_directory.find_tokenizer(source), ""
    source = gguf_file.open_file(str(package.find_file(rest)) if scheme == "package" else rest)
    metadata = source.header.metadata
    template = str(metadata.get("tokenizer.chat_template", ""))
    return source, tokenizer_lib.from_gguf(metadata, source.origin), template


def _checked_dtype(dtype: str) -> np.dtype:
    if dtype == "float16":
        raise errors.ConfigError(
            "dtype: got 'float16', in which Gemma's activations overflow; wanted bfloat16 or float32"
        )
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise errors.ConfigError(f"dtype: got {dtype!r}, wanted one of {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def _query(rest: str, known: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """What stands in front of the last question mark, and the values after it."""
    head, mark, query = rest.rpartition("?")
    if not mark:
        return rest, {}
    try:
        pairs = parse.parse_qsl(query, keep_blank_values=True, strict_parsing=True)
    except ValueError as error:
        raise errors.ConfigError(
            f"model URI: query {query!r}: {error}; wanted key=value&key=value after a '?', which no path may have"
        ) from None
    values: dict[str, str] = {}
    for key, text in pairs:
        if key not in known or key in values:
            raise errors.ConfigError(
                f"model URI: got {key!r} twice or unknown, wanted {', '.join(known)}; a '?' begins these"
            )
        values[key] = text
    return head, values


def _random_config(rest: str) -> tuple[config_lib.GemmaConfig, int]:
    name, options = _query(rest, ("seed", *_CUTS))
    values: dict[str, int] = {}
    for key, text in options.items():
        if not (text.isascii() and text.isdecimal() and len(text) < 11):
            raise errors.ConfigError(f"model URI: {key}: got {text[:40]!r}, wanted a whole number of at most 10 digits")
        values[key] = int(text)
    seed = values.pop("seed", 0)
    return random_lib.cut(configurations.get(name), **values), seed


def _template(directory: pathlib.Path) -> str:
    """The chat template in a directory, or "" where it has none."""
    for name in _TEMPLATE_FILES:
        path = directory / name
        if path.is_file():
            found = _text(path) if path.suffix == ".jinja" else files.read_json(path).get("chat_template")
            if found:
                return str(found)
    return ""


def _text(path: pathlib.Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise errors.TokenizerError(f"{path}: is not UTF-8 text ({error}); fetch it again, or use ?chat=NAME") from None


def _chat(
    style: str | None, tokenizer: tokenizer_lib.Tokenizer | None, template: str, source: source_lib.Source
) -> chat_lib.Chat | None:
    """The chat of a model, in the style that was named or that its template has; None without a tokenizer.

    Raises:
      TokenizerError: tokenizer or style are not those of such a model.
    """
    config, origin = source.config, source.origin
    if tokenizer is None:
        if style is not None:
            raise errors.TokenizerError(
                f"{origin}: has no tokenizer, which the chat {style!r} needs; put tokenizer.model into it"
            )
        return None
    own = chat_lib.start_of_turn(config.family)
    if own not in tokenizer.controls:
        raise errors.TokenizerError(
            f"{origin}: got a tokenizer without the piece {own!r}, wanted that of a Gemma {config.family}: in a "
            "directory, put the model's own in place of the one found in it or beside it; convert a GGUF file again"
        )
    controls = set(tokenizer.controls.values())  # No text becomes one, so one without a row does no harm.
    without = [token for token in range(config.vocab_size, tokenizer.vocab_size) if token not in controls]
    if without:
        raise errors.TokenizerError(
            f"{origin}: got a tokenizer of {tokenizer.vocab_size} pieces, of which {len(without)} have no row among "
            f"the {config.vocab_size} of the model; wanted the model's own tokenizer"
        )
    if config.vocab_size - tokenizer.vocab_size > _MOST_SPARE_ROWS:  # Gemma 1 and 2 spell their turns as 3 does.
        raise errors.TokenizerError(
            f"{origin}: got a tokenizer of {tokenizer.vocab_size} pieces for {config.vocab_size} rows of the model, "
            f"wanted at most {_MOST_SPARE_ROWS} fewer; use the model's own tokenizer"
        )
    style = _style(template, config, origin) if style is None else style
    if chat_lib.family_of(style) not in (None, config.family):
        raise errors.TokenizerError(
            f"{origin}: got a chat with turns of Gemma {chat_lib.family_of(style)}, but the model is a Gemma "
            f"{config.family}; wanted the model's own template, or ?chat=NAME"
        )
    return chat_lib.Chat(tokenizer, style)


def _style(template: str, config: config_lib.GemmaConfig, origin: str) -> str:
    if not template:
        return chat_lib.PLAIN
    if "<|turn>" in template:  # Gemma 4; the sizes with per-layer embeddings go without the empty thought.
        return chat_lib.GEMMA4_EMPTY_THOUGHT if config.per_layer is None else chat_lib.GEMMA4
    if "<start_of_turn>" in template:
        return chat_lib.GEMMA3
    raise errors.TokenizerError(
        f"{origin}: has a chat template without <start_of_turn> or <|turn>; wanted that of Gemma 3 or Gemma 4, or "
        "?chat=NAME"
    )
