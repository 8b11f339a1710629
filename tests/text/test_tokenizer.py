"""Tokenizers: reference ids, control pieces only on request, one begin-of-text token, and seams that do not fit."""

from __future__ import annotations

import json
import pathlib
import random

import pytest

from kvgraft_jax import errors
from kvgraft_jax.checkpoints import package
from kvgraft_jax.checkpoints.gguf import header as gguf_header
from kvgraft_jax.text import tokenizer as tokenizer_lib
from kvgraft_jax.text import tokenizer_files
from tests import tiny_tokenizers

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
STRINGS = json.loads((GOLDEN / "tokenizer_strings.json").read_text())
FORMS = ("gguf", "gguf merges", "sentencepiece", "json")


@pytest.fixture(scope="module")
def real() -> tokenizer_lib.Tokenizer:
    header = gguf_header.read_header(package.find_file(package.NAME))
    return tokenizer_lib.from_gguf(header.metadata, str(header.path))


@pytest.fixture(scope="module", params=FORMS)
def tiny(request) -> tokenizer_lib.Tokenizer:
    if request.param == "gguf":
        return tokenizer_lib.from_gguf(tiny_tokenizers.gguf_metadata(), "m.gguf")
    if request.param == "gguf merges":
        return tokenizer_lib.from_gguf(tiny_tokenizers.gguf_merges_metadata(), "m.gguf")
    if request.param == "json":
        return tokenizer_lib.from_json(tiny_tokenizers.tokenizer_json(), "tokenizer.json")
    return tokenizer_lib.from_sentencepiece(tiny_tokenizers.sentencepiece_model(), "tokenizer.model")


@pytest.mark.weights
def test_reference_strings(real):
    assert len(STRINGS) == 38
    for string in STRINGS:
        ids = string["ids_llama_cpp"]
        assert real.encode(string["text"], control=True) == ids, string["text"]
        if "<start_of_turn>" in string["text"]:
            assert real.encode(string["text"]) != ids
        else:
            assert real.encode(string["text"]) == ids
            # A literal U+2581 is a space to the vocabulary: the one character that does not come back.
            assert real.decode(ids) == string["text"].replace("\u2581", " ")


@pytest.mark.weights
def test_reference_prompts(real):
    for prompt in json.loads((GOLDEN / "reference.json").read_text())["prompts"]:
        assert real.encode(prompt["prompt"], bos=True) == prompt["ids"]


@pytest.mark.weights
def test_real_pieces(real):
    assert (real.vocab_size, real.bos_id, real.eos_id) == (262_144, 2, 1)
    for piece, token in {"<pad>": 0, "<mask>": 4, "<unused0>": 6, "<start_of_turn>": 105, "<end_of_turn>": 106}.items():
        assert real.controls[piece] == token and real.piece(token) == piece
    assert real.controls["<start_of_image>"] == 255_999 and "<table>" not in real.controls
    assert real.encode("<table>") == [168] == real.encode("<table>", control=True)
    assert real.piece(138) == "\u2581\u2581"


@pytest.mark.weights
def test_round_trip_of_random_text(real):
    draw = random.Random(0)
    parts = [
        " ",
        "  ",
        "    ",
        "a",
        "the",
        "\n",
        "\n\n",
        "\t",
        "<b>",
        "<bos>",
        "é",
        "日本",
        "🏳️‍🌈",
        ".",
        "1",
        "\x00",
        "<",
    ]
    for _ in range(300):
        text = "".join(draw.choice(parts) for _ in range(draw.randint(0, 40)))
        ids = real.encode(text)
        assert real.decode(ids) == text
        assert not set(ids) & set(real.controls.values())


def test_round_trip(tiny):
    for text in (
        "",
        " ",
        "the  code",
        "hello\n\nworld",
        "  the   depot",
        "日本 é \x00",
        "<bos>the<end_of_turn>",
        "a < b > c",
    ):
        assert tiny.decode(tiny.encode(text)) == text
        assert tiny.decode(tiny.encode(text, bos=True)) == text


def test_control_pieces_only_on_request(tiny):
    for piece, token in tiny.controls.items():
        assert token not in tiny.encode(f"the {piece} code") + tiny.encode(piece)
        assert tiny.encode(f"the{piece}code", control=True) == [*tiny.encode("the"), token, *tiny.encode("code")]
        assert tiny.encode(f"<{piece}>", control=True) == [*tiny.encode("<"), token, *tiny.encode(">")]
    assert {"<bos>", "<eos>", "<pad>", *tiny_tokenizers.CONTROLS} <= set(tiny.controls)
    assert tiny.encode("<start_of_turn") == tiny.encode("<start_of_turn", control=True)
    with pytest.raises(errors.TokenizerError, match="'<b>'"):
        tiny.control_id("<b>")


def test_begin_of_text_exactly_once(tiny):
    plain = tiny.encode("the code")
    assert tiny.encode("the code", bos=True) == [2, *plain]
    assert tiny.encode("<bos>the code", bos=True, control=True) == [2, *plain]
    assert tiny.encode("<bos><bos>the code", bos=True, control=True) == [2, *plain]
    assert tiny.encode("<bos>the code", control=True) == [2, *plain]
    assert tiny.encode("", bos=True) == [2]
    assert tiny.encode("<bos>the", bos=True).count(2) == 1


def test_gguf_and_sentencepiece_agree():
    gguf, model = (
        tokenizer_lib.from_gguf(tiny_tokenizers.gguf_metadata(), "m.gguf"),
        tokenizer_lib.from_sentencepiece(tiny_tokenizers.sentencepiece_model(), "tokenizer.model"),
    )
    draw = random.Random(1)
    for _ in range(200):
        text = "".join(
            draw.choice([" ", "  ", "the", "code", "\n", "é", "<b>", "<eos>", "x", "\u2581"]) for _ in range(20)
        )
        assert gguf.encode(text) == model.encode(text), text
    assert gguf.controls == model.controls


@pytest.mark.parametrize("made", [tiny_tokenizers.gguf_metadata, tiny_tokenizers.gguf_merges_metadata])
def test_control_pieces_that_a_gguf_file_types_as_text_are_controls(made):
    types = made()["tokenizer.ggml.token_type"].copy()
    pieces = made()["tokenizer.ggml.tokens"]
    turns = [token for token, piece in enumerate(pieces) if piece in (b"<start_of_turn>", b"<|turn>")]
    types[turns] = 1
    tokenizer = tokenizer_lib.from_gguf(made() | {"tokenizer.ggml.token_type": types}, "m.gguf")
    assert turns and set(turns) <= set(tokenizer.controls.values())
    assert not set(turns) & set(tokenizer.encode("<start_of_turn> <|turn>"))


def _with(token: int, piece: bytes) -> tuple[bytes, ...]:
    """Returns the pieces with another one in place of one."""
    pieces = list(tiny_tokenizers.gguf_merges_metadata()["tokenizer.ggml.tokens"])
    pieces[token] = piece
    return tuple(pieces)


def test_merges_of_a_gguf_file_and_tokenizer_json_agree():
    gguf = tokenizer_lib.from_gguf(tiny_tokenizers.gguf_merges_metadata(), "m.gguf")
    document = tokenizer_lib.from_json(tiny_tokenizers.tokenizer_json(), "tokenizer.json")
    draw = random.Random(2)
    pieces = [
        " ",
        "  ",
        "the",
        "hello",
        "code",
        "\n",
        "\n\n",
        "é",
        "<|turn>",
        "<eos>",
        "x",
        "\u2581",
        "<unused0>",
        "!?",
    ]
    for _ in range(200):
        text = "".join(draw.choice(pieces) for _ in range(20))
        for control in (False, True):
            ids = gguf.encode(text, control=control)
            assert ids == document.encode(text, control=control), text
            assert gguf.decode(ids) == document.decode(ids)
    assert gguf.controls == document.controls and (gguf.bos_id, gguf.eos_id) == (2, 1)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": (b"he llo x",)}, "no tokenizer.json"),
        ({"tokenizer.ggml.merges": (b"absent piece",)}, "no tokenizer.json"),
        ({"tokenizer.ggml.unknown_token_id": 10**6}, "1000000"),
        ({"tokenizer.ggml.token_type": tiny_tokenizers.np.zeros(3, "i4")}, "3 types"),
        ({"tokenizer.ggml.bos_token_id": 5}, "begin and end of text are [5, 1]"),
        ({"tokenizer.ggml.tokens": (b"\xff",)}, "not text"),
        ({"tokenizer.ggml.tokens": _with(20, b"<bos>")}, "each to stand there once"),
        ({"tokenizer.ggml.tokens": _with(21, b"<0x41>")}, "each to stand there once"),
    ],
)
def test_broken_merges(change, named):
    metadata = tiny_tokenizers.gguf_merges_metadata() | change
    metadata = {key: value for key, value in metadata.items() if value is not None}
    with pytest.raises(errors.TokenizerError, match="m.gguf") as caught:
        tokenizer_lib.from_gguf(metadata, "m.gguf")
    assert named in str(caught.value)


def test_digest_is_that_of_the_content(tiny):
    assert len(tiny.digest) == 64
    first = tokenizer_lib.from_gguf(tiny_tokenizers.gguf_metadata(), "a.gguf")
    assert first.digest == tokenizer_lib.from_gguf(dict(tiny_tokenizers.gguf_metadata()), "b.gguf").digest
    scores_V = tiny_tokenizers.gguf_metadata()["tokenizer.ggml.scores"].copy()
    scores_V[-1] -= 1
    changed = {**tiny_tokenizers.gguf_metadata(), "tokenizer.ggml.scores": scores_V}
    assert tokenizer_lib.from_gguf(changed, "a.gguf").digest != first.digest


def test_prefix_check(tiny):
    deposited = tiny.encode("the code of", bos=True)
    assert tiny.check_prefix(deposited, "the code of the depot") == tiny.encode(" the depot")
    assert tiny.check_prefix(tiny.encode("the code"), "the code") == []
    with pytest.raises(errors.SeamError, match=r"token \d of \d: the prefix has .*, the whole text has .*hello'"):
        tiny.check_prefix(tiny.encode("the hell", bos=True), "the hello")
    with pytest.raises(errors.SeamError, match="the whole text has nothing"):
        tiny.check_prefix(deposited, "the code")


@pytest.mark.weights
def test_seam_of_the_real_vocabulary(real):
    assert real.check_prefix(real.encode("The capital", bos=True), "The capital of") == real.encode(" of")
    with pytest.raises(errors.SeamError, match=r"token 1 of 2: the prefix has 'capi' .*, the whole text has 'capital'"):
        real.check_prefix(real.encode("capi", bos=True), "capital")


def test_input_that_is_no_text(tiny):
    with pytest.raises(errors.InputError, match="lone surrogate at character 1"):
        tiny.encode("a\ud800")
    with pytest.raises(errors.InputError, match="got bytes, wanted str"):
        tiny.encode(b"a")
    for token in (-1, tiny.vocab_size):
        with pytest.raises(errors.InputError, match="token.id"):
            tiny.decode([token])
        with pytest.raises(errors.InputError, match="token.id"):
            tiny.piece(token)
    for ids in (None, "ab", 7, ["a"], [[1]], [1.7], [True], [10**5000]):
        with pytest.raises(errors.InputError, match="token.id"):
            tiny.decode(ids)
        with pytest.raises(errors.InputError, match="token.id"):
            tiny.check_prefix(ids, "the code")


def test_directories(tmp_path):
    assert tokenizer_files.from_directory(tmp_path) is None
    (tmp_path / "tokenizer.json").write_bytes(tiny_tokenizers.tokenizer_json())
    from_json = tokenizer_files.from_directory(tmp_path)
    assert from_json.encode("hello hello hello world the", bos=True)[0] == 2
    assert len(from_json.encode("hello hello hello world the")) > 4  # no truncation
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.model").write_bytes(tiny_tokenizers.sentencepiece_model())
    assert tokenizer_files.from_directory(tmp_path).digest != from_json.digest


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json"])
@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b"version https://git-lfs.github.com/spec/v1\n"])
def test_broken_files(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(errors.TokenizerError, match=name):
        tokenizer_files.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokenizer.ggml.model": "gpt2"}, "'gpt2'"),
        ({"tokenizer.ggml.scores": None}, "tokenizer.ggml.scores"),
        ({"tokenizer.ggml.scores": tiny_tokenizers.np.zeros(3, "f4")}, "3 scores"),
        ({"tokenizer.ggml.bos_token_id": 10**6}, "1000000"),
    ],
)
def test_broken_metadata(change, named):
    metadata = {key: value for key, value in (tiny_tokenizers.gguf_metadata() | change).items() if value is not None}
    with pytest.raises(errors.TokenizerError, match="m.gguf") as caught:
        tokenizer_lib.from_gguf(metadata, "m.gguf")
    assert named in str(caught.value)
    assert tokenizer_lib.from_gguf({}, "m.gguf") is None
