"""Finds the chat template of a checkpoint: in the files of a directory, or in the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import pathlib

from kvgraft_jax import errors
from kvgraft_jax.text import tokenizer as tokenizer_lib
from kvgraft_jax.text import tokenizer_files

_JINJA, _SETTINGS, _LEGACY = "chat_template.jinja", "tokenizer_config.json", "chat_template.json"
_DEFAULT = "default"
_GGUF = "tokenizer.chat_template"
_GGUF_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_SPECIAL_TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}


@dataclasses.dataclass(frozen=True)
class Template:
    """A chat template.

    Attributes:
      source: Jinja.
      special_tokens: what it reads under names such as `bos_token`.
      origin: where it stands.
    """

    source: str
    special_tokens: Mapping[str, str]
    origin: str


def from_directory(directory: pathlib.Path) -> list[Template]:
    """Reads the templates that a directory holds for the model.

    As in `transformers`, chat_template.jinja goes before what the JSON files say. Those are two kinds of file for two
    readers, the processor and the tokenizer, so both templates are returned where both have one.

    Raises:
      TokenizerError: a file that cannot be read, or named templates among which none is "default".
    """
    settings = tokenizer_files.read_object(directory / _SETTINGS)
    tokens = _special_tokens(settings)
    path = directory / _JINJA
    if path.is_file():
        return [Template(_text(path), tokens, str(path))]
    found = []
    legacy = tokenizer_files.read_object(directory / _LEGACY)
    for path, document in ((directory / _SETTINGS, settings), (directory / _LEGACY, legacy)):
        source = _default(document.get("chat_template"), path)
        if source and all(source != template.source for template in found):
            found.append(Template(source, tokens, str(path)))
    return found


def from_gguf(metadata: Mapping[str, object], tokenizer: tokenizer_lib.Tokenizer | None, origin: str) -> list[Template]:
    """Reads the template in the metadata of a GGUF file; none where there is no tokenizer.

    Raises:
      TokenizerError: a template that is not text, or named ones without that which has no name.
    """
    source = metadata.get(_GGUF)
    named = sorted(key for key in metadata if key.startswith(_GGUF + "."))
    if tokenizer is None or (source is None and not named):
        return []
    if source is None:
        raise errors.TokenizerError(
            f"{origin}: holds {', '.join(named)[:200]}, but not {_GGUF}, the one that is used; use ?chat=NAME"
        )
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _GGUF_TOKENS.items()}
    tokens = {name: tokenizer.piece(token) for name, token in ids.items() if token is not None}
    return [Template(source, tokens, f"{origin}: {_GGUF}")] if _checked(source, f"{origin}: {_GGUF}") else []


def _default(found: object, path: pathlib.Path) -> str:
    """Reads the template under `chat_template`: the text there, or the default of a list or mapping of named ones."""
    if isinstance(found, list):
        if not all(isinstance(entry, dict) and {"name", "template"} <= set(entry) for entry in found):
            raise errors.TokenizerError(f"{path}: chat_template: got {errors.shown(found)}, wanted names and templates")
        found = {str(entry["name"]): entry["template"] for entry in found}
    if isinstance(found, dict):
        if found and _DEFAULT not in found:
            raise errors.TokenizerError(
                f"{path}: chat_template: got templates called {errors.shown(sorted(found))}, none of them "
                f"{_DEFAULT!r}, the one that is used; state the chat: ?chat=NAME"
            )
        found = found.get(_DEFAULT)
    return "" if found is None else _checked(found, f"{path}: chat_template")


def _checked(source: object, origin: str) -> str:
    if not isinstance(source, str):
        raise errors.TokenizerError(f"{origin}: got {errors.shown(source)}, wanted a text in Jinja, or ?chat=NAME")
    return source


def _special_tokens(settings: Mapping[str, object]) -> dict[str, str]:
    """Returns the special tokens by name: those of Gemma, unless the settings have others."""
    tokens = dict(_SPECIAL_TOKENS)
    for name, value in settings.items():
        value = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(value, str):
            tokens[name] = value
        elif name in tokens and value is None:
            del tokens[name]
    return tokens


def _text(path: pathlib.Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise errors.TokenizerError(f"{path}: is not UTF-8 text ({error}); fetch it again, or use ?chat=NAME") from None
