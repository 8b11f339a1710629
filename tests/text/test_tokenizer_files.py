"""Files beside a tokenizer tell of the same tokens, or are refused by name."""

from __future__ import annotations

import json

import pytest

from kvgraft_jax import errors
from kvgraft_jax.text import tokenizer as tokenizer_lib
from kvgraft_jax.text import tokenizer_files
from tests import tiny_tokenizers

SIZE = 420
MODEL = tokenizer_lib.from_sentencepiece(tiny_tokenizers.sentencepiece_model(), "tokenizer.model")
TURN = MODEL.control_id("<start_of_turn>")


@pytest.fixture(params=["tokenizer.model", "tokenizer.json"])
def directory(tmp_path, request):
    content = tiny_tokenizers.sentencepiece_model if request.param.endswith("model") else tiny_tokenizers.tokenizer_json
    (tmp_path / request.param).write_bytes(content())
    return tmp_path


def read(directory, **documents):
    for name, document in documents.items():
        (directory / f"{name}.json").write_text(json.dumps(document))
    return tokenizer_files.from_directory(directory)


def test_what_agrees_is_no_error(directory):
    whole = read(directory)
    turn = whole.control_id("<start_of_turn>")
    entry = {"content": "<start_of_turn>", "special": True}
    found = read(
        directory,
        # As Gemma 3 has them: the image token stands behind the pieces of the text.
        added_tokens={"<image_soft_token>": whole.vocab_size, "<start_of_turn>": turn},
        special_tokens_map={"bos_token": {"content": "<bos>"}, "eos_token": "<end_of_turn>", "unk_token": "<unk>"},
        tokenizer_config={
            "bos_token": "<bos>",
            "added_tokens_decoder": {str(turn): entry},
            "additional_special_tokens": ["<start_of_turn>", "<image_soft_token>"],
            "extra_special_tokens": {"image_token": "<image_soft_token>"},
            "clean_up_tokenization_spaces": False,
            "sp_model_kwargs": {},
            "add_eos_token": False,
            "model_max_length": 10**30,
        },
    )
    assert found.digest == whole.digest


@pytest.mark.parametrize(
    ("name", "document", "message"),
    [
        ("added_tokens", {"<my_tool>": 5000}, "added_tokens.json: adds '<my_tool>' .5000. behind the"),
        ("added_tokens", {"<my_tool>": 20}, "added_tokens.json: token 20 is '<my_tool>', not"),
        ("added_tokens", {"<my_tool>": "x"}, "wanted a text and a number"),
        ("added_tokens", ["<my_tool>"], "got a JSON list, wanted an object"),
        (
            "tokenizer_config",
            {"added_tokens_decoder": {"5000": {"content": "<my_tool>"}}},
            "tokenizer_config.json: adds '<my_tool>' .5000.",
        ),
        ("tokenizer_config", {"added_tokens_decoder": {"x": {"content": "<my_tool>"}}}, "wanted a text and a number"),
        ("tokenizer_config", {"bos_token": "<s>"}, "tokenizer_config.json: bos_token: got '<s>', wanted '<bos>'"),
        ("tokenizer_config", {"pad_token": "[PAD]"}, "tokenizer_config.json: pad_token: '.PAD.' is not a piece"),
        ("tokenizer_config", {"extra_special_tokens": {"a_token": "<my_tool>"}}, "'<my_tool>' is not a piece"),
        ("tokenizer_config", {"add_eos_token": True}, "add_eos_token: got True, wanted False"),
        ("tokenizer_config", {"do_lower_case": True}, "do_lower_case"),
        ("tokenizer_config", {"sp_model_kwargs": {"enable_sampling": True}}, "sp_model_kwargs"),
        ("tokenizer_config", {"clean_up_tokenization_spaces": True}, "clean_up_tokenization_spaces"),
        ("special_tokens_map", {"bos_token": {"content": "<s>"}}, "special_tokens_map.json: bos_token: got '<s>'"),
        ("special_tokens_map", {"additional_special_tokens": ["<my_tool>"]}, "'<my_tool>' is not a piece"),
    ],
)
def test_what_adds_or_renames_tokens_is_refused(directory, name, document, message):
    with pytest.raises(errors.TokenizerError, match=message):
        read(directory, **{name: document})


def test_both_forms_of_one_tokenizer(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(tiny_tokenizers.sentencepiece_model())
    (tmp_path / "tokenizer.json").write_bytes(tiny_tokenizers.tokenizer_json())
    with pytest.raises(errors.TokenizerError, match="tokenizer.model is used, but .* tokenizer.json: token [0-9]+ is"):
        tokenizer_files.from_directory(tmp_path)
    document = twin()
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    assert tokenizer_files.from_directory(tmp_path).digest == MODEL.digest
    document["normalizer"] = {"type": "Lowercase"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(errors.TokenizerError, match="tokenizer.json: splits 'The code is 4 7 1 1.' into other tokens"):
        tokenizer_files.from_directory(tmp_path)
    document = twin()
    vocab = document["model"]["vocab"]
    vocab["y"], vocab["z"] = vocab["z"], vocab["y"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(errors.TokenizerError, match="tokenizer.json: token [0-9]+ is '[yz]', not '[zy]'"):
        tokenizer_files.from_directory(tmp_path)


def twin() -> dict:
    """Returns the tokenizer.json of the pieces of the SentencePiece model, which merge as theirs do."""
    pieces = [MODEL.piece(token) for token in range(SIZE)]
    known = set(pieces)
    merges = [
        [piece[:cut], piece[cut:]]
        for piece in pieces
        if not piece.startswith("<")
        for cut in range(1, len(piece))
        if piece[:cut] in known and piece[cut:] in known
    ]
    document = json.loads(tiny_tokenizers.tokenizer_json())
    document["model"] |= {"vocab": {piece: token for token, piece in enumerate(pieces)}, "merges": merges}
    shared = [token for token in document["added_tokens"] if token["content"] in known]
    plain = ("\n", "\n\n", "\u2581\u2581", "\u2581\u2581\u2581", "<b>")
    shared += [shared[0] | {"content": piece, "special": False} for piece in plain if piece != "\n\n"]
    document["added_tokens"] = sorted(
        (token | {"id": pieces.index(token["content"])} for token in shared), key=lambda token: token["id"]
    )
    return document
