"""Reads the tokenizer of a directory, and holds the files beside it to it: all have to tell of the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import pathlib
import re

from kvgraft_jax import digest, errors
from kvgraft_jax.text import sentencepiece_model
from kvgraft_jax.text import tokenizer as tokenizer_lib

_MODEL, _JSON = "tokenizer.model", "tokenizer.json"
_SETTINGS, _SPECIAL, _ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_LISTS = ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens")
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_PROBES = (
    "The code is 4 7 1 1.",
    "  two  spaces\n\n\tand a tab ",
    "\u00dcber \u65e5\u672c \U0001f600",
    "x=f(a)[0]; <b>bold</b>",
)
# Settings that would change which tokens a text becomes, by what does not.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "add_eos_token": (None, False),
    "add_prefix_space": (None, False),
    "do_lower_case": (None, False),
    "clean_up_tokenization_spaces": (None, False),
    "sp_model_kwargs": (None, {}),
}


def from_directory(directory: pathlib.Path) -> tokenizer_lib.Tokenizer | None:
    """Returns the tokenizer beside a downloaded checkpoint: tokenizer.model, else tokenizer.json, else None.

    Raises:
      TokenizerError: it cannot be read, or another file gives a token another id, adds one that the tokenizer does
        not have, or asks for another treatment of text; the message names the file and what it says.
    """
    for name, build in ((_MODEL, tokenizer_lib.from_sentencepiece), (_JSON, tokenizer_lib.from_json)):
        path = directory / name
        if path.is_file():
            tokenizer = build(path.read_bytes(), str(path))
            _check(directory, tokenizer, name)
            return tokenizer
    return None


def _check(directory: pathlib.Path, tokenizer: tokenizer_lib.Tokenizer, read: str) -> None:
    settings = read_object(directory / _SETTINGS)
    problems = [
        f"{_SETTINGS}: {key}: got {errors.shown(settings[key])}, wanted {accepted[-1]!r}"
        for key, accepted in _NEUTRAL.items()
        if key in settings and settings[key] not in accepted
    ]
    for name, document in ((_SETTINGS, settings), (_SPECIAL, read_object(directory / _SPECIAL))):
        begin = _content(document.get("bos_token"))
        if begin is not None and begin != tokenizer.piece(tokenizer.bos_id):
            problems.append(f"{name}: bos_token: got {begin!r}, wanted {tokenizer.piece(tokenizer.bos_id)!r}")
        problems += [
            f"{name}: {key}: {content!r} is not a piece"
            for key, content in _special(document)
            if not _is_piece(tokenizer, content)
        ]
    for name, content, token in _tokens(directory, settings):
        problem = _problem(tokenizer, content, token)
        if problem:
            problems.append(f"{name}: {problem}")
    if read == _MODEL and (directory / _JSON).is_file():
        problems += [f"{_JSON}: {problem}" for problem in _differences(tokenizer, directory / _JSON)]
    if problems:
        raise errors.TokenizerError(
            f"{directory}: {read} is used, but the files beside it list other tokens: "
            f"{'; '.join(problems[:8])}. Remove the file that is not of this model; for tokens that were added, keep "
            f"{_JSON} with them and remove {_MODEL}"
        )


def _tokens(directory: pathlib.Path, settings: Mapping[str, object]) -> Iterator[tuple[str, str, int]]:
    """Yields file, spelling and id of every token that the files beside a tokenizer add."""
    for content, token in read_object(directory / _ADDED).items():
        yield _ADDED, content, token
    decoder = settings.get("added_tokens_decoder")
    for token, entry in decoder.items() if isinstance(decoder, dict) else ():
        yield _SETTINGS, _content(entry), int(token) if token.isdecimal() else token


def _special(document: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yields key and spelling of every special token that a document names."""
    for key, value in document.items():
        if key in _LISTS:
            values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        else:
            values = (value,) if key.endswith("_token") and key != "unk_token" else ()
        for content in map(_content, values):
            if isinstance(content, str):
                yield key, content


def _is_piece(tokenizer: tokenizer_lib.Tokenizer, content: str) -> bool:
    """Returns whether a text is one piece, or a control piece of Gemma, which is never made of plain text."""
    if content in tokenizer.controls or sentencepiece_model.CONTROL_NAME.fullmatch(content):
        return True
    ids = tokenizer.encode(content)
    return len(ids) == 1 and tokenizer.piece(ids[0]) == content


def _problem(tokenizer: tokenizer_lib.Tokenizer, content: object, token: object) -> str:
    """Returns what is wrong with a token that another file tells of; "" for nothing."""
    if not isinstance(content, str) or type(token) is not int or token < 0:
        return f"got {errors.shown(content)} with the id {errors.shown(token)}, wanted a text and a number"
    if token >= tokenizer.vocab_size:
        # A control piece is never made of plain text, so one that the text part does not have does no harm.
        is_control = sentencepiece_model.CONTROL_NAME.fullmatch(content)
        return "" if is_control else f"adds {content!r} ({token}) behind the {tokenizer.vocab_size} pieces"
    piece = tokenizer.piece(token)
    is_byte = _BYTE.fullmatch(piece) and len(content) == 1  # Some exports spell the byte of a character as that.
    return "" if piece == content or is_byte else f"token {token} is {content!r}, not {piece!r}"


def _differences(tokenizer: tokenizer_lib.Tokenizer, path: pathlib.Path) -> Iterator[str]:
    other = tokenizer_lib.from_json(path.read_bytes(), str(path))
    for token in range(other.vocab_size):
        piece = other.backend.piece(token)
        problem = "" if piece is None else _problem(tokenizer, piece, token)
        if problem:
            yield problem
            return
    if other.vocab_size < tokenizer.vocab_size:
        yield f"has {other.vocab_size} pieces, not {tokenizer.vocab_size}"
        return
    for text in _PROBES:
        if other.encode(text) != tokenizer.encode(text):
            yield f"splits {text!r} into other tokens"
            return


def _content(entry: object) -> object:
    return entry.get("content") if isinstance(entry, dict) else entry


def read_object(path: pathlib.Path) -> Mapping[str, object]:
    """Returns the JSON object in a file that tells of text; empty where there is no such file.

    Raises:
      TokenizerError: it is something else.
    """
    if not path.is_file():
        return {}
    try:
        document = digest.parse_json(path.read_bytes())
    except ValueError as error:
        raise errors.TokenizerError(f"{path}: not readable as JSON ({error}); fetch it again") from None
    if not isinstance(document, dict):
        raise errors.TokenizerError(f"{path}: got a JSON {type(document).__name__}, wanted an object; fetch it again")
    return document
