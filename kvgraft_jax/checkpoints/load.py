"""Loads a model from a URI: configuration, parameters on the device, tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Mapping
from urllib import parse

import flax
from jax import sharding
import jax.numpy as jnp
import numpy as np

from kvgraft_jax import determinism, device_memory, errors, host_memory
from kvgraft_jax.checkpoints import assemble, chats, package
from kvgraft_jax.checkpoints import random as random_lib
from kvgraft_jax.checkpoints import source as source_lib
from kvgraft_jax.checkpoints.gguf import file as gguf_file
from kvgraft_jax.checkpoints.hf import hub, safetensors_file
from kvgraft_jax.checkpoints.orbax import directory as orbax_directory
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma import configurations
from kvgraft_jax.gemma import sharding as sharding_lib
from kvgraft_jax.runtime import model as model_lib
from kvgraft_jax.text import chat as chat_lib
from kvgraft_jax.text import template_files, tokenizer_files
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
_SCHEMES = "hf:DIR, hf:OWNER/NAME, gguf:FILE, orbax:DIR, package:gemma-3-270m, or random:NAME?seed=0&layers=6"


def load_model(uri: str, dtype: str = "bfloat16", *, mesh: sharding.Mesh | None = None) -> model_lib.Model:
    """Loads the model at `uri`.

    Exact: bit-exact where `dtype` holds the stored values, else rounded once to nearest even.

    Args:
      uri: `hf:DIR` (config.json and safetensors), `hf:OWNER/NAME` or `hf:OWNER/NAME@REVISION` (a model of the Hugging
        Face Hub, from the local cache or downloaded; see `checkpoints.hf.hub.find`), `gguf:FILE`, `orbax:DIR` (as
        DeepMind publishes them; `?config=NAME` states which model it is), `package:gemma-3-270m` (the installed
        package), or `random:NAME?seed=0` for any released size (`gemma-3-270m` to `gemma-4-31b`), optionally cut with
        `layers`, `vocab`, `embed`, `hidden`, `heads`, `kv_heads`, `head_dim`, `window`, `experts` and `per_layer`; see
        `checkpoints.random.cut`. `?chat=NAME` after a name, directory or file states the style of `Chat`, which Orbax
        directories do not tell; otherwise it is that of the checkpoint's template, or "plain" without one.
      dtype: "bfloat16" or "float32".
      mesh: devices over which parameters and, later, caches are spread: `make_mesh(num_devices)`; None is the default
        device. It is part of the pin: other bits than on one device, but the same ones every time.

    Raises:
      ConfigError: a URI, dtype, mesh or configuration that is not accepted.
      DeterminismError: jax finds no device of the kind that was asked for.
      WeightsError: a checkpoint that is missing, unreadable or damaged, or that lacks tensors which the model needs.
      ResourceError: the parameters do not fit the memory that the device has free, or a download the disk; raised
        before either begins.
      TokenizerError: a tokenizer or chat template of another model or kind, or damaged.
    """
    as_dtype = _checked_dtype(dtype)
    determinism.start_backend()
    mesh = sharding_lib.check_mesh(mesh)
    if not isinstance(uri, str):
        raise errors.ConfigError(f"model URI: got {type(uri).__name__}, wanted {_SCHEMES}")
    scheme, colon, rest = uri.partition(":")
    if not colon or not rest or scheme not in ("hf", "gguf", "orbax", "package", "random"):
        raise errors.ConfigError(f"model URI: got {uri!r}, wanted {_SCHEMES}")
    options, found, chat = {}, None, None
    if scheme in _OPTIONS:
        rest, options = _query(rest, _OPTIONS[scheme])
    if "chat" in options:
        chat_lib.family_of(options["chat"])
    try:
        if scheme == "random":
            config, seed = _random_config(rest)
            weights = random_lib.initialise(config, seed, as_dtype, mesh)
        else:
            found = hub.find(rest) if scheme == "hf" else None
            source, chat = _open(scheme, rest, found, options)
            config, weights = source.config, assemble.assemble(source, as_dtype, mesh)
    except (OSError, MemoryError, RuntimeError) as error:
        typed = _typed(uri, error)
        if typed is None:
            raise
        raise typed from error
    host_memory.trim()
    return model_lib.Model(
        config=config,
        params=flax.core.freeze(weights.params),
        tokenizer=None if chat is None else chat.tokenizer,
        chat=chat,
        digest=weights.digest,
        dtype=dtype,
        uri=uri,
        source=found.source if found and found.source else uri,
        mesh=mesh,
    )


def _typed(uri: str, error: Exception) -> errors.KVGraftError | None:
    """Returns the typed error for a failure of the system; None for a mistake of the program."""
    told = f"{errors.shown(uri)}: cannot be read ({type(error).__name__}: {str(error)[:400]})"
    if device_memory.is_want(error):
        return errors.ResourceError(
            f"{told}: memory, threads or file handles ran out, and nothing is known against the files; end other "
            "programs, or raise the limit (ulimit -v, -u, -n), and load it again"
        )
    if isinstance(error, OSError):
        return errors.WeightsError(f"{told}; check the path, the disk and the rights of the files")
    return None


def _open(
    scheme: str, rest: str, found: hub.Files | None, options: Mapping[str, str]
) -> tuple[source_lib.Source, chat_lib.Chat | None]:
    """Opens the checkpoint, and its tokenizer with the prompt template."""
    source, tokenizer, templates = _open_parts(scheme, rest, found, options)
    return source, chats.open_chat(options.get("chat"), tokenizer, templates, source)


def _open_parts(
    scheme: str, rest: str, found: hub.Files | None, options: Mapping[str, str]
) -> tuple[source_lib.Source, tokenizer_lib.Tokenizer | None, list[template_files.Template]]:
    """Opens the checkpoint, its tokenizer and its chat templates (none where the chat was named)."""
    is_named = "chat" in options
    if found is not None:
        source = safetensors_file.open_directory(found.directory, found.names)
        templates = [] if is_named else template_files.from_directory(found.directory)
        return source, tokenizer_files.from_directory(found.directory), templates
    if scheme == "orbax":
        source = orbax_directory.open_directory(rest, options.get("config"))
        return source, orbax_directory.find_tokenizer(source), []
    source = gguf_file.open_file(str(package.find_file(rest)) if scheme == "package" else rest)
    metadata = source.header.metadata
    tokenizer = tokenizer_lib.from_gguf(metadata, source.origin)
    return source, tokenizer, [] if is_named else template_files.from_gguf(metadata, tokenizer, source.origin)


def _checked_dtype(dtype: str) -> np.dtype:
    if dtype == "float16":
        raise errors.ConfigError(
            "dtype: got 'float16', in which Gemma's activations overflow; wanted bfloat16 or float32"
        )
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise errors.ConfigError(f"dtype: got {dtype!r}, wanted one of {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def _query(rest: str, known: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """Splits at the last question mark: what stands in front of it, and the values after it."""
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
