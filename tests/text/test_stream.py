"""The text of tokens one at a time: joined, it is that of all of them at once, and no piece holds half a character."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraft_jax import errors
from kvgraft_jax.text import tokenizer as tokenizer_lib
from tests import tiny_tokenizers

FORMS = {
    "sentencepiece": lambda: tokenizer_lib.from_sentencepiece(tiny_tokenizers.sentencepiece_model(), "x"),
    "json": lambda: tokenizer_lib.from_json(tiny_tokenizers.tokenizer_json(), "x"),
    "space in front": lambda: tokenizer_lib.from_gguf(
        tiny_tokenizers.gguf_metadata() | {"tokenizer.ggml.add_space_prefix": True}, "x"
    ),
    "merges": lambda: tokenizer_lib.from_gguf(tiny_tokenizers.gguf_merges_metadata(), "x"),
}
TEXTS = (
    " hello the code",
    "hello",
    "  two  spaces",
    "\u00e9 \u65e5\u672c\U0001f600x",
    "\U0001f600\U0001f600",
    "<b>the</b>\n\n",
)


@pytest.fixture(scope="module", params=FORMS)
def tokenizer(request):
    return FORMS[request.param]()


def pieces(tokenizer, ids):
    stream = tokenizer.stream()
    return [*(stream.push(token) for token in ids), stream.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_texts(tokenizer, text):
    for ids in (tokenizer.encode(text), tokenizer.encode(text, bos=True)):
        found = pieces(tokenizer, ids)
        assert "".join(found) == tokenizer.decode(ids) == text
        assert not any("\ufffd" in piece for piece in found)


def test_a_word_comes_at_once(tokenizer):
    ids = tokenizer.encode("hello the code")
    assert "".join(pieces(tokenizer, ids)[:-1]) == "hello the code"
    assert all(pieces(tokenizer, ids)[:-1])


def test_a_character_of_several_tokens_comes_whole(tokenizer):
    ids = tokenizer.encode("\U0001f600 the")
    found = pieces(tokenizer, ids)
    assert len(ids) >= 5
    assert next(filter(str.strip, found)).startswith("\U0001f600")


def test_control_pieces_have_no_text(tokenizer):
    turn = tokenizer.control_id("<|turn>")
    ids = [tokenizer.bos_id, turn, *tokenizer.encode(" the"), turn, *tokenizer.encode(" code"), turn]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_bytes_that_are_no_character(tokenizer):
    halves = tokenizer.encode("\U0001f600")[-4:]
    stream = tokenizer.stream()
    assert [stream.push(token) for token in halves[:2]] == ["", ""]
    assert stream.flush() == "\ufffd\ufffd" == tokenizer.decode(halves[:2])
    assert stream.flush() == ""
    assert "".join(map(stream.push, tokenizer.encode("hello"))) == "hello"  # A new text.


@pytest.mark.parametrize("seed", range(40))
def test_any_tokens(tokenizer, seed):
    """Bytes in any order, control pieces among them, words: the pieces joined are the text of the whole."""
    rng = np.random.default_rng(seed)
    usual = rng.integers(0, tokenizer.vocab_size, 60)
    controls = rng.choice(list(tokenizer.controls.values()), 60)
    of_bytes = [token for token in range(tokenizer.vocab_size) if tokenizer.piece(token).startswith("<0x")]
    ids = np.choose(rng.integers(0, 3, 60), [usual, controls, rng.choice(of_bytes, 60)]).tolist()
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_no_token(tokenizer):
    stream = tokenizer.stream()
    for token in (-1, tokenizer.vocab_size, "a", True):
        with pytest.raises(errors.InputError, match="token.id"):
            stream.push(token)
    assert stream.flush() == ""
