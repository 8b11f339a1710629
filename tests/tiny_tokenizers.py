"""Small tokenizers in every file form, made on the spot, for the tests of text, turns and checkpoints."""

from __future__ import annotations

import functools
import io
import json

import numpy as np
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers

GEMMA4_CONTROLS = ("<|turn>", "<turn|>", "<|think|>", "<|channel>", "<channel|>", "<|tool_response>", '<|"|>')
CONTROLS = ("<mask>", "<start_of_turn>", "<end_of_turn>", *GEMMA4_CONTROLS)
_RUNS = ("\n", "\n\n", "\u2581\u2581", "\u2581\u2581\u2581", "<b>")
_TEXT = "the code of the depot is four; a user asks and the model answers. Hello hello world, what where when\n"


@functools.cache
def sentencepiece_model(controls_are_text: bool = True) -> bytes:
    """Makes a SentencePiece BPE model in the manner of Gemma's; its control pieces are user-defined where asked for."""
    stream = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([_TEXT.strip(), "ab cd ef gh ij kl mn op qr st uv wx yz 0123456789 HWA"] * 20),
        model_writer=stream,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        pad_piece="<pad>",
        eos_piece="<eos>",
        bos_piece="<bos>",
        control_symbols=[] if controls_are_text else list(CONTROLS),
        user_defined_symbols=[*(CONTROLS if controls_are_text else ()), *_RUNS],
        minloglevel=2,
    )
    return stream.getvalue()


@functools.cache
def gguf_metadata() -> dict[str, object]:
    """Returns the same vocabulary as in a GGUF file: runs with real spaces, the unknown piece typed as control."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
    pieces, scores, types = [], [], []
    for token in range(processor.vocab_size()):
        piece = processor.id_to_piece(token)
        kind = 6 if processor.is_byte(token) else 3 if processor.is_control(token) or token == 3 else 1
        if piece in CONTROLS:
            kind = 3
        elif piece in _RUNS:
            kind, piece = 4, piece.replace("\u2581", " ")
        pieces.append(piece.encode())
        scores.append(processor.get_score(token))
        types.append(kind)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tuple(pieces),
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_space_prefix": False,
    }


@functools.cache
def tokenizer_json() -> bytes:
    """Returns a tokenizer.json in the manner of Gemma's: byte fallback, some control pieces special and one not."""
    letters = sorted(set("\u2581" + _TEXT + "HWA0123456789"))
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", *CONTROLS, "<unused0>", "\n\n"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)] + letters
    merges = [("\u2581", "t"), ("h", "e"), ("\u2581t", "he"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("\u2581", "w")]
    pieces += ["".join(pair) for pair in merges]
    library = tokenizers.Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)}, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"
        )
    )
    library.normalizer = normalizers.Replace(" ", "\u2581")
    library.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    library.add_special_tokens([tokenizers.AddedToken(p, normalized=False) for p in pieces[:7]])
    plain = (*GEMMA4_CONTROLS, "<unused0>", "\n\n")
    library.add_tokens([tokenizers.AddedToken(p, normalized=False) for p in plain])
    library.post_processor = tokenizers.processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    document = json.loads(library.to_str())
    document["truncation"] = {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    return json.dumps(document).encode()


@functools.cache
def gguf_merges_metadata() -> dict[str, object]:
    """Returns the vocabulary of `tokenizer_json` as a GGUF file of Gemma 4 holds it."""
    document = json.loads(tokenizer_json())
    vocab, merges = document["model"]["vocab"], document["model"]["merges"]
    kinds = {token["id"]: 3 if token["special"] else 4 for token in document["added_tokens"]}
    pieces = sorted(vocab, key=vocab.get)
    types = [kinds.get(token, 6 if piece.startswith("<0x") else 1) for token, piece in enumerate(pieces)]
    return {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tuple(piece.encode() for piece in pieces),
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": tuple(" ".join(pair).encode() for pair in merges),
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
    }
