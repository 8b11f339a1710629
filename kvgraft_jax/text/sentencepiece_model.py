"""Builds a SentencePiece model in memory from a list of pieces, and keeps its control pieces out of plain text."""

from __future__ import annotations

from collections.abc import Sequence
import re
import struct

import numpy as np

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4

_SPACE = "\u2581".encode()
_BPE = 2

# Names that Gemma's files mark as control in one format and as user-defined text in another.
CONTROL_NAME = re.compile(
    r"<(?:pad|eos|bos|mask|start_of_turn|end_of_turn|start_of_image|end_of_image|image_soft_token|unused\d+"
    # Gemma 4: the bar is at the side of the brackets that opens or closes; the string quote and the rest have both.
    r"|\|(?:turn|tool|tool_call|tool_response|channel|image|audio)"
    r"|(?:turn|tool|tool_call|tool_response|channel|image|audio)\|"
    r"|\|(?:think|image|audio|video|\")\|)>"
)
_UNTYPED_CONTROL = re.compile(
    rb"(\x0a.(?:" + CONTROL_NAME.pattern.encode() + rb")\x15.{4}\x18)[" + bytes([NORMAL, USER_DEFINED]) + rb"]",
    re.DOTALL,
)


def build(
    pieces: Sequence[bytes],
    scores_V: np.ndarray,
    types_V: np.ndarray,
    *,
    unk_id: int,
    bos_id: int,
    eos_id: int,
    pad_id: int,
    add_space_prefix: bool,
) -> bytes:
    """Builds a serialised SentencePiece BPE model with byte fallback from these pieces.

    Two repairs for pieces that come from GGUF metadata: user-defined runs of spaces are spelled with U+2581 again, and
    the unknown piece has the type unknown, not control.

    Args:
      pieces: V spellings, UTF-8.
      scores_V: merge priorities, float32.
      types_V: piece types, the numbers of SentencePiece.
      unk_id, bos_id, eos_id, pad_id: ids of the special pieces.
      add_space_prefix: whether text is encoded with a space in front.
    """
    types = types_V.tolist()
    types[unk_id] = UNKNOWN
    packed = np.ascontiguousarray(scores_V, "<f4").tobytes()
    parts = []
    for index, (piece, kind) in enumerate(zip(pieces, types, strict=True)):
        if kind == USER_DEFINED and not piece.strip(b" "):
            piece = piece.replace(b" ", _SPACE)
        body = b"\x0a%b%b\x15%b\x18%c" % (_varint(len(piece)), piece, packed[4 * index : 4 * index + 4], kind)
        parts.append(b"\x0a%b%b" % (_varint(len(body)), body))
    trainer = _number(3, _BPE) + _number(4, len(pieces)) + _number(35, 1)
    for field, number in ((40, unk_id), (41, bos_id), (42, eos_id), (43, pad_id)):
        trainer += _number(field, number)
    for field, number in ((45, unk_id), (46, bos_id), (47, eos_id), (48, pad_id)):
        trainer += _bytes(field, pieces[number])
    normalizer = _bytes(1, b"identity") + _number(3, int(add_space_prefix)) + _number(4, 0) + _number(5, 1)
    return b"".join(parts) + _bytes(2, trainer) + _bytes(3, normalizer)


def isolate_controls(model: bytes) -> bytes:
    """Types Gemma's control pieces as control in a serialised model, so that no plain text encodes to them."""
    return _UNTYPED_CONTROL.sub(lambda match: match[1] + bytes([CONTROL]), model)


def _varint(number: int) -> bytes:
    if number < 128:
        return struct.pack("B", number)
    return struct.pack("B", number & 127 | 128) + _varint(number >> 7)


def _number(field: int, number: int) -> bytes:
    return _varint(field << 3) + _varint(number)


def _bytes(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content
