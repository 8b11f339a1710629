"""A model's tokenizer and chat: foreign ones are refused, a URI may name the chat, its stop tokens end decoding."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import numpy as np
import pytest

from kvgraft_jax import engine as engine_lib
from kvgraft_jax import errors
from kvgraft_jax.checkpoints import load
from kvgraft_jax.gemma import configurations
from kvgraft_jax.text import tokenizer as tokenizer_lib
from tests import chat_templates, small_checkpoints, tiny, tiny_tokenizers
from tests import orbax_checkpoints as written

PIECES = {3: "<start_of_turn>", 4: "<|turn>"}
FOREIGN = {3: "'<start_of_turn>'.*wanted that of a Gemma 3", 4: r"'<\|turn>'.*wanted that of a Gemma 4"}
STYLES = {3: "gemma3", 4: "gemma4"}
KINDS = {3: "gemma3", 4: "dense"}


@pytest.fixture(autouse=True)
def small_sizes_are_known(monkeypatch):
    for kind in KINDS.values():
        monkeypatch.setitem(configurations.CONFIGURATIONS, f"small-{kind}", written.config(kind))


def hugging_face(directory: pathlib.Path, family: int, vocab: int = 420) -> str:
    name = {3: "gemma-3-4b", 4: "gemma-4-12b"}[family]
    made = load.load_model(small_checkpoints.SMALL_URIS[name].replace("vocab=97", f"vocab={vocab}"))
    document = (small_checkpoints.new_config if family == 3 else small_checkpoints.gemma4_config)(made.config)
    return small_checkpoints.write_safetensors(directory, document, small_checkpoints.stored(made))


def orbax(directory: pathlib.Path, family: int) -> str:
    written.write_old(directory, written.flat(written.arrays(KINDS[family])), use_ocdbt=False)
    return f"orbax:{directory}"


def tokenizer_of(family: int) -> bytes:
    """Returns a tokenizer.json of only that family."""
    document = json.loads(tiny_tokenizers.tokenizer_json())
    other = PIECES[7 - family]
    document["added_tokens"] = [token for token in document["added_tokens"] if token["content"] != other]
    return json.dumps(document).encode()


@pytest.mark.parametrize("family", [3, 4])
def test_a_tokenizer_of_the_other_family(tmp_path, family):
    uri = hugging_face(tmp_path / "m", family)
    (tmp_path / "m" / "tokenizer.json").write_bytes(tokenizer_of(family))
    assert load.load_model(uri).chat.style == "plain"
    (tmp_path / "m" / "tokenizer.json").write_bytes(tokenizer_of(7 - family))
    with pytest.raises(errors.TokenizerError, match=FOREIGN[family]):
        load.load_model(uri)


@pytest.mark.parametrize("family", [3, 4])
def test_a_tokenizer_beside_an_orbax_directory_is_that_of_the_model(tmp_path, family):
    uri = orbax(tmp_path / "m", family)
    (tmp_path / "tokenizer.model").write_bytes(tiny_tokenizers.sentencepiece_model())
    assert load.load_model(uri).tokenizer is not None
    foreign = tiny_tokenizers.sentencepiece_model().replace(PIECES[family].encode(), b"x" * len(PIECES[family]))
    (tmp_path / "tokenizer.model").write_bytes(foreign)
    with pytest.raises(errors.TokenizerError, match=FOREIGN[family]):
        load.load_model(uri)


def test_a_tokenizer_with_more_pieces_than_the_model(tmp_path):
    uri = hugging_face(tmp_path / "m", 3, vocab=97)
    (tmp_path / "m" / "tokenizer.model").write_bytes(tiny_tokenizers.sentencepiece_model())
    with pytest.raises(errors.TokenizerError, match="420 pieces, of which .* no row among the 97 of the model"):
        load.load_model(uri)


def test_a_tokenizer_with_far_fewer_pieces_than_the_model(tmp_path):
    """As that of Gemma 2 beside Gemma 3, whose turns are spelled alike: its ids are others."""
    uri = hugging_face(tmp_path / "m", 3, vocab=420 + 1025)
    (tmp_path / "m" / "tokenizer.model").write_bytes(tiny_tokenizers.sentencepiece_model())
    with pytest.raises(errors.TokenizerError, match="420 pieces for 1445 rows of the model, wanted at most 1024 fewer"):
        load.load_model(uri)


def test_a_template_that_is_no_text(tmp_path):
    uri = hugging_face(tmp_path / "m", 3)
    (tmp_path / "m" / "tokenizer.model").write_bytes(tiny_tokenizers.sentencepiece_model())
    (tmp_path / "m" / "chat_template.jinja").write_bytes(b"<start_of_turn>\xff")
    with pytest.raises(errors.TokenizerError, match="chat_template.jinja: is not UTF-8"):
        load.load_model(uri)
    assert load.load_model(f"{uri}?chat=gemma3").chat.style == "gemma3"


def test_a_gguf_file_may_have_its_chat_named(tmp_path):
    made = load.load_model(small_checkpoints.SMALL_URIS["gemma-3-4b"].replace("vocab=97", "vocab=420"))
    metadata = {
        name: [item.decode() for item in value]
        if isinstance(value, tuple)
        else value.tolist()
        if isinstance(value, np.ndarray)
        else value
        for name, value in tiny_tokenizers.gguf_metadata().items()
    }
    uri = small_checkpoints.write_gguf(
        tmp_path / "m.gguf", made.config, small_checkpoints.stored(made), metadata=metadata
    )
    assert load.load_model(uri).chat.style == "plain"
    assert load.load_model(f"{uri}?chat=gemma3").chat.style == "gemma3"


def test_a_control_piece_after_the_end_of_the_table(tmp_path):
    """As <image_soft_token> of the text-only sizes, which have no row for it: no text becomes it."""
    document = json.loads(tiny_tokenizers.tokenizer_json())
    size = tokenizer_lib.from_json(json.dumps(document).encode(), "x").vocab_size
    added = document["added_tokens"][-1] | {"id": size, "content": "<image_soft_token>", "special": True}
    document["added_tokens"].append(added)
    uri = hugging_face(tmp_path / "m", 3, vocab=size)
    (tmp_path / "m" / "tokenizer.json").write_text(json.dumps(document))
    loaded = load.load_model(uri)
    assert (loaded.config.vocab_size, loaded.tokenizer.vocab_size) == (size, size + 1)


@pytest.mark.parametrize("family", [3, 4])
def test_a_template_of_the_other_family(tmp_path, family):
    uri = hugging_face(tmp_path / "m", family)
    (tmp_path / "m" / "tokenizer.model").write_bytes(tiny_tokenizers.sentencepiece_model())
    (tmp_path / "m" / "chat_template.jinja").write_text(chat_templates.STOCK[STYLES[7 - family]])
    with pytest.raises(errors.TokenizerError, match="no style of this package writes its prompts"):
        load.load_model(uri)


@pytest.mark.parametrize("form", [hugging_face, orbax])
def test_the_uri_names_the_chat(tmp_path, form):
    uri = form(tmp_path / "m", 4)
    with pytest.raises(errors.TokenizerError, match="has no tokenizer, which the chat 'gemma4' needs"):
        load.load_model(f"{uri}?chat=gemma4")
    (tmp_path / "m" / "tokenizer.model").write_bytes(tiny_tokenizers.sentencepiece_model())
    plain, turns, thought = (
        load.load_model(f"{uri}{query}") for query in ("", "?chat=gemma4", "?chat=gemma4-empty-thought")
    )
    assert [loaded.chat.style for loaded in (plain, turns, thought)] == ["plain", "gemma4", "gemma4-empty-thought"]
    assert turns.digest == plain.digest
    with pytest.raises(errors.TokenizerError, match="turns of Gemma 3"):
        load.load_model(f"{uri}?chat=gemma3")
    with pytest.raises(errors.ConfigError, match="got 'chatml', wanted one of 'plain', 'gemma3', 'gemma4', 'gemma4-e"):
        load.load_model(f"{uri}?chat=chatml")
    for query in ("?cat=gemma4", "?chat", "?chat=gemma4&chat=gemma4"):
        with pytest.raises(errors.ConfigError, match="model URI"):
            load.load_model(uri + query)


def test_chat_and_configuration_of_an_orbax_directory(tmp_path):
    uri = orbax(tmp_path / "m", 3)
    (tmp_path / "tokenizer.model").write_bytes(tiny_tokenizers.sentencepiece_model())
    loaded = load.load_model(f"{uri}?config=small-gemma3&chat=gemma3")
    assert (loaded.config.name, loaded.chat.style) == ("small-gemma3", "gemma3")


def test_the_chat_named_goes_before_the_template(tmp_path):
    uri = hugging_face(tmp_path / "m", 4)
    (tmp_path / "m" / "tokenizer.model").write_bytes(tiny_tokenizers.sentencepiece_model())
    (tmp_path / "m" / "chat_template.jinja").write_text(chat_templates.GEMMA4_EMPTY_THOUGHT)
    assert load.load_model(uri).chat.style == "gemma4-empty-thought"
    assert load.load_model(f"{uri}?chat=gemma4").chat.style == "gemma4"


def test_what_ends_the_turn_ends_decoding(tmp_path):
    uri = orbax(tmp_path / "m", 3)
    (tmp_path / "tokenizer.model").write_bytes(tiny_tokenizers.sentencepiece_model())
    plain, turns = (load.load_model(f"{uri}{query}") for query in ("", "?chat=gemma3"))
    end = turns.tokenizer.control_id("<end_of_turn>")
    assert (plain.stop_ids, turns.stop_ids) == ((1,), (1, end))
    assert dataclasses.replace(plain, chat=None, tokenizer=None).stop_ids == plain.config.stop_ids
    engine = engine_lib.Engine(turns, capacity=32, width=tiny.WIDTH, kv_block=tiny.KV_BLOCK)
    state = engine.prefill([2, 5, 8])
    logits_V = np.zeros(turns.config.vocab_size, np.float32)
    logits_V[end] = 1
    assert engine.generate(dataclasses.replace(state, logits=logits_V), max_new_tokens=3)[0] == []
    assert engine.generate(dataclasses.replace(state, logits=logits_V), max_new_tokens=1, stop_ids=())[0] == [end]
