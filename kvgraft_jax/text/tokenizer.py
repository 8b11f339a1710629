"""Text to token ids and back: one class over SentencePiece models, GGUF metadata and tokenizer.json files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import hashlib
import re
from typing import Any, Protocol

import numpy as np
import sentencepiece
import tokenizers

from kvgraft_jax import errors, token_ids
from kvgraft_jax.text import bpe_model, sentencepiece_model

_CANDIDATE = re.compile(r"<[^<>]*>")
_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
_LITERAL_SPACE = re.compile("(?<=[ \u2581])(?=\u2581)|(?<=\u2581)(?= )")
_GGUF = "tokenizer.ggml."
_GGUF_KINDS = {"tokens": tuple, "merges": tuple, "scores": np.ndarray, "token_type": np.ndarray}
_GGUF_NAMES = {int: "a token id", tuple: "texts", np.ndarray: "numbers"}


class Backend(Protocol):
    """What a tokenizer library does here. `encode` treats all text as plain: no control piece comes out of it."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...

    def piece(self, token: int) -> str: ...


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer whose control pieces come out of text only when asked for.

    Attributes:
      backend: the library that splits plain text.
      controls: id of each control piece, by spelling.
      bos_id, eos_id: begin and end of text.
      digest: SHA-256 (hex) of the model that decides how text is split.
    """

    backend: Backend
    controls: Mapping[str, int]
    bos_id: int
    eos_id: int
    digest: str

    @property
    def vocab_size(self) -> int:
        """Number of pieces."""
        return self.backend.vocab_size

    def encode(self, text: str, bos: bool = False, control: bool = False) -> list[int]:
        """Encodes `text` as token ids.

        Args:
          text: any text without lone surrogates.
          bos: whether position 0 is the begin-of-text token. Never more than one: a text that begins with it, which
            only `control` can see, gets no second one.
          control: whether control pieces spelled in the text, such as "<start_of_turn>", become their tokens. False
            treats them as any other text; use that for text that someone else wrote.

        Raises:
          InputError: not a text, or one that has no UTF-8 form.
        """
        if not isinstance(text, str):
            raise errors.InputError(f"text: got {type(text).__name__}, wanted str")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise errors.InputError(
                f"text: lone surrogate at character {error.start}; wanted text with a UTF-8 form"
            ) from None
        ids = self._encode_with_controls(text) if control else self.backend.encode(text)
        if not bos:
            return ids
        repeated = next((index for index, token in enumerate(ids) if token != self.bos_id), len(ids))
        return [self.bos_id, *ids[repeated:]]

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes `ids`; control pieces have no text, and bytes that are not UTF-8 become U+FFFD."""
        return self.backend.decode(self.check_ids(ids))

    def stream(self) -> Stream:
        """Opens a decoder that takes tokens one at a time, as a model generates them.

        Exact: the pieces of text that it gives, joined, are `decode` of all tokens, whatever they are.
        """
        return Stream(self)

    def piece(self, token: int) -> str:
        """Returns the spelling of one token, as in the vocabulary."""
        return self.backend.piece(token_ids.checked_one(token, self.vocab_size))

    def control_id(self, piece: str) -> int:
        """Returns the id of the control piece spelled `piece`; `TokenizerError` where the vocabulary has none."""
        if piece not in self.controls:
            raise errors.TokenizerError(
                f"control piece {piece!r}: not in this vocabulary; wanted that of the model whose template needs it"
            )
        return self.controls[piece]

    def check_ids(self, ids: Sequence[int]) -> list[int]:
        """Returns `ids` as Python ints; `InputError` for anything but a list of ids of this vocabulary."""
        return list(token_ids.check(ids, self.vocab_size))

    def check_prefix(self, prefix_ids: Sequence[int], text: str, control: bool = False) -> list[int]:
        """Checks that `text` begins with the tokens `prefix_ids`, and returns the ids after them.

        Args:
          prefix_ids: ids that were deposited; where they begin with the begin-of-text token, `text` gets one too.
          text: the whole text, the deposited part included.
          control: as in `encode`.

        Raises:
          SeamError: the ids differ; the message names the first place where they do.
        """
        prefix = self.check_ids(prefix_ids)
        ids = self.encode(text, bos=prefix[:1] == [self.bos_id], control=control)
        return self.after_prefix(prefix, ids)

    def after_prefix(self, prefix_ids: list[int], ids: list[int]) -> list[int]:
        """Returns what follows `prefix_ids` in `ids`; `SeamError` names the first token that differs."""
        if ids[: len(prefix_ids)] == prefix_ids:
            return ids[len(prefix_ids) :]
        place = next((i for i, (a, b) in enumerate(zip(prefix_ids, ids, strict=False)) if a != b), len(ids))
        theirs = self._spell(prefix_ids[place : place + 3])
        ours = self._spell(ids[place : place + 3])
        raise errors.SeamError(
            f"token {place} of {len(prefix_ids)}: the prefix has {theirs}, the whole text has {ours}. The tokenizer "
            "merges across the seam, or the texts differ: end the prefix where a word ends, before the white space"
        )

    def _spell(self, ids: list[int]) -> str:
        return " ".join(f"{self.piece(token)!r} ({token})" for token in ids) or "nothing"

    def _encode_with_controls(self, text: str) -> list[int]:
        ids, start = [], 0
        for match in _CANDIDATE.finditer(text):
            if match[0] in self.controls:
                ids += [*self.backend.encode(text[start : match.start()]), self.controls[match[0]]]
                start = match.end()
        return ids + self.backend.encode(text[start:])


class Stream:
    """Text of tokens as they come, never half a character.

    A token is decoded with the one before it, because a tokenizer may drop a space at the beginning of a text. The text
    of a run of bytes, and of control pieces, which have none, comes with the token that ends the run: some libraries
    take all of a run back when its last bytes are not a character.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._controls = frozenset(tokenizer.controls.values())
        self._before: list[int] = []  # The last token whose text was given.
        self._held: list[int] = []  # Tokens after it.

    def push(self, token: int) -> str:
        """Takes the next token and returns the text that is certain now, "" where it may still change.

        Raises:
          InputError: no token id of this vocabulary.
        """
        self._held += self._tokenizer.check_ids([token])
        last = self._held[-1]
        if last in self._controls or _BYTE_PIECE.fullmatch(self._tokenizer.piece(last)):
            return ""
        text = self._text()
        self._before, self._held = [last], []
        return text

    def flush(self) -> str:
        """Returns the text still held, U+FFFD for bytes that are not a character; the next token begins anew."""
        text = self._text()
        self._before, self._held = [], []
        return text

    def _text(self) -> str:
        return self._tokenizer.decode(self._before + self._held)[len(self._tokenizer.decode(self._before)) :]


def from_sentencepiece(model: bytes, origin: str) -> Tokenizer:
    """Reads the tokenizer of a serialised SentencePiece model; `origin` names it in messages."""
    model = sentencepiece_model.isolate_controls(model)
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model)
        size = processor.vocab_size()
    except RuntimeError as error:
        raise errors.TokenizerError(f"{origin}: not a SentencePiece model ({error}); fetch the file again") from None
    controls = [token for token, is_control in enumerate(processor.is_control(list(range(size)))) if is_control]
    names = dict(zip(processor.id_to_piece(controls), controls, strict=True))
    digest = hashlib.sha256(model).hexdigest()
    return _tokenizer(_SentencePiece(processor), names, processor.bos_id(), processor.eos_id(), digest, origin)


def from_json(raw: bytes, origin: str) -> Tokenizer:
    """Reads the tokenizer of a tokenizer.json document; `origin` names it in messages."""
    try:
        library = tokenizers.Tokenizer.from_str(raw.decode())
    except MemoryError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise errors.TokenizerError(f"{origin}: no tokenizer.json ({error}); fetch the file again") from None
    library.no_truncation()
    library.no_padding()
    added = library.get_added_tokens_decoder()
    is_named = sentencepiece_model.CONTROL_NAME.fullmatch
    names = {token.content: index for index, token in added.items() if token.special or is_named(token.content)}
    plain = [name for name, index in names.items() if not added[index].special]
    library.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in plain])
    library.encode_special_tokens = True
    ids = (library.token_to_id(name) for name in ("<bos>", "<eos>"))
    bos_id, eos_id = (-1 if token is None else token for token in ids)
    return _tokenizer(
        _HuggingFace(library, library.get_vocab_size(with_added_tokens=True)),
        names,
        bos_id,
        eos_id,
        hashlib.sha256(raw).hexdigest(),
        origin,
    )


def from_gguf(metadata: Mapping[str, Any], origin: str) -> Tokenizer | None:
    """Reads the tokenizer in the metadata of a GGUF file; None where it holds none."""
    kind = metadata.get(_GGUF + "model", "no_vocab")
    if isinstance(kind, str) and kind == "no_vocab":
        return None
    if isinstance(kind, str) and kind == "gemma4":
        return _from_gguf_merges(metadata, origin)
    if not isinstance(kind, str) or kind != "llama":
        raise errors.TokenizerError(
            f"{origin}: {_GGUF}model: got {errors.shown(kind)}, wanted 'llama' or 'gemma4', those of Gemma 3 and 4"
        )
    wanted = ("tokens", "scores", "token_type", "unknown_token_id", "bos_token_id", "eos_token_id", "padding_token_id")
    pieces, scores_V, types_V, *special = _gguf_values(metadata, wanted, origin)
    if not len(pieces) == len(scores_V) == len(types_V) or not all(0 <= token < len(pieces) for token in special):
        raise errors.TokenizerError(
            f"{origin}: {len(pieces)} tokens, {len(scores_V)} scores, {len(types_V)} types and special ids {special} "
            "do not fit each other; convert the model again"
        )
    unk_id, bos_id, eos_id, pad_id = special
    model = sentencepiece_model.build(
        pieces,
        scores_V,
        types_V,
        unk_id=unk_id,
        bos_id=bos_id,
        eos_id=eos_id,
        pad_id=pad_id,
        add_space_prefix=bool(metadata.get(_GGUF + "add_space_prefix", True)),
    )
    return from_sentencepiece(model, origin)


def _from_gguf_merges(metadata: Mapping[str, Any], origin: str) -> Tokenizer:
    """Returns the byte-pair tokenizer of Gemma 4, in the form of a tokenizer.json."""
    wanted = ("tokens", "token_type", "merges", "unknown_token_id", "bos_token_id", "eos_token_id")
    pieces, types_V, merges, *special = _gguf_values(metadata, wanted, origin)
    try:
        pieces, merges = ([text.decode() for text in texts] for texts in (pieces, merges))
        fit = len(set(pieces)) == len(pieces) == len(types_V) and all(0 <= token < len(pieces) for token in special)
    except (AttributeError, TypeError, UnicodeDecodeError) as error:
        raise errors.TokenizerError(f"{origin}: tokens or merges that are not text ({error})") from None
    if not fit:
        raise errors.TokenizerError(
            f"{origin}: {len(pieces)} tokens, each to stand there once, {len(types_V)} types and special ids {special} "
            "do not fit each other; convert the model again"
        )
    document = bpe_model.build(pieces, [int(kind) for kind in types_V], merges, special[0])
    tokenizer = from_json(document, origin)
    if [tokenizer.bos_id, tokenizer.eos_id] != special[1:]:
        raise errors.TokenizerError(
            f"{origin}: begin and end of text are {special[1:]} in the metadata, but <bos> and <eos> are the tokens "
            f"{[tokenizer.bos_id, tokenizer.eos_id]}; convert the model again"
        )
    return tokenizer


def _gguf_values(metadata: Mapping[str, Any], wanted: Sequence[str], origin: str) -> list[Any]:
    missing = [_GGUF + key for key in wanted if _GGUF + key not in metadata]
    if missing:
        raise errors.TokenizerError(f"{origin}: metadata lacks {', '.join(missing)}; convert the model again")
    values = [metadata[_GGUF + key] for key in wanted]
    for key, value in zip(wanted, values, strict=True):
        kind = _GGUF_KINDS.get(key, int)
        if type(value) is not kind or (kind is np.ndarray and value.ndim != 1):
            got = errors.shown(value)
            raise errors.TokenizerError(
                f"{origin}: {_GGUF}{key}: got {got}, wanted {_GGUF_NAMES[kind]}; convert the model again"
            )
    return values


def _tokenizer(
    backend: Backend, controls: dict[str, int], bos_id: int, eos_id: int, digest: str, origin: str
) -> Tokenizer:
    if bos_id < 0 or eos_id < 0:
        raise errors.TokenizerError(f"{origin}: has no begin-of-text or no end-of-text piece; wanted that of Gemma")
    return Tokenizer(backend, controls, bos_id, eos_id, digest)


@dataclasses.dataclass(frozen=True)
class _SentencePiece:
    processor: sentencepiece.SentencePieceProcessor

    @property
    def vocab_size(self) -> int:
        return self.processor.vocab_size()

    def encode(self, text: str) -> list[int]:
        # Runs of spaces are pieces; a U+2581 that stands in the text itself belongs to no such run.
        parts = _LITERAL_SPACE.split(text) if "\u2581" in text else [text]
        return [token for part in parts for token in self.processor.encode(part, out_type=int)]

    def decode(self, ids: list[int]) -> str:
        return self.processor.decode(ids)

    def piece(self, token: int) -> str:
        return self.processor.id_to_piece(token)


@dataclasses.dataclass(frozen=True)
class _HuggingFace:
    library: tokenizers.Tokenizer
    vocab_size: int

    def encode(self, text: str) -> list[int]:
        return self.library.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self.library.decode(ids, skip_special_tokens=True)

    def piece(self, token: int) -> str:
        return self.library.id_to_token(token)
