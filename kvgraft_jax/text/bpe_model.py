"""Writes the tokenizer.json of a byte-pair vocabulary that a GGUF file of Gemma 4 holds as tokens and merges."""

from __future__ import annotations

from collections.abc import Sequence
import json

from kvgraft_jax.text import sentencepiece_model


def build(pieces: Sequence[str], types: Sequence[int], merges: Sequence[str], unk_id: int) -> bytes:
    """Builds the document: spaces become U+2581, text without a piece falls back to bytes, nothing is put in front.

    Args:
      pieces: spelling of each id.
      types: kind of each id; 3 is a control piece, 4 one that is cut out of the text before anything is merged. A
        control piece of Gemma that is typed 1, as some exports do, is one all the same.
      merges: pairs of pieces in order of rank, each pair joined by a space.
      unk_id: the piece for what no other spells.

    Returns:
      UTF-8 JSON.
    """
    cut_out = (sentencepiece_model.CONTROL, sentencepiece_model.USER_DEFINED)
    types = [
        sentencepiece_model.CONTROL
        if kind == sentencepiece_model.NORMAL and sentencepiece_model.CONTROL_NAME.fullmatch(piece)
        else kind
        for piece, kind in zip(pieces, types, strict=True)
    ]
    added = [
        {
            "id": token,
            "content": piece,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == sentencepiece_model.CONTROL,
        }
        for token, (piece, kind) in enumerate(zip(pieces, types, strict=True))
        if kind in cut_out
    ]
    space = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": added,
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
            "decoder": {"type": "Sequence", "decoders": [space, {"type": "ByteFallback"}, {"type": "Fuse"}]},
            "model": {
                "type": "BPE",
                "unk_token": pieces[unk_id],
                "fuse_unk": True,
                "byte_fallback": True,
                "vocab": {piece: token for token, piece in enumerate(pieces)},
                "merges": [merge.split(" ") for merge in merges],
            },
        },
        ensure_ascii=False,
    ).encode()
