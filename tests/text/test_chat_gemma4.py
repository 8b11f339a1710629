"""Gemma 4's prompts: system turn, thinking, the empty thought, earlier thoughts taken out, stop and suppressed ids."""

from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from kvgraft_jax import engine as engine_lib
from kvgraft_jax import errors
from kvgraft_jax.runtime import sampling as sampling_lib
from kvgraft_jax.text import chat as chat_lib
from kvgraft_jax.text import sentencepiece_model
from kvgraft_jax.text import tokenizer as tokenizer_lib
from tests import tiny, tiny_tokenizers

SYSTEM, USER = chat_lib.Message("system", " Be brief.\n"), chat_lib.Message("user", " Hello\n")
THOUGHT = "<|channel>thought\nthe user is four<channel|>"
TALK = [USER, chat_lib.Message("assistant", f"{THOUGHT}hi "), chat_lib.Message("user", "what")]
OPEN_MODEL, EMPTY_THOUGHT = "<|turn>model\n", "<|channel>thought\n<channel|>"
PIECES = (
    '<|turn> <turn|> <|tool> <tool|> <|tool_call> <tool_call|> <|tool_response> <tool_response|> <|"|> <|think|> '
    "<|channel> <channel|> <|image> <image|> <|audio> <audio|> <|image|> <|audio|> <|video|>"
).split()


@pytest.fixture(scope="module", params=["gguf", "json"])
def tokenizer(request) -> tokenizer_lib.Tokenizer:
    if request.param == "gguf":
        return tokenizer_lib.from_gguf(tiny_tokenizers.gguf_metadata(), "m.gguf")
    return tokenizer_lib.from_json(tiny_tokenizers.tokenizer_json(), "tokenizer.json")


@pytest.fixture(scope="module")
def small(tokenizer) -> chat_lib.Chat:
    """As E2B and E4B."""
    return chat_lib.Chat(tokenizer, "gemma4")


@pytest.fixture(scope="module")
def large(tokenizer) -> chat_lib.Chat:
    """As 12B, 26B-A4B and 31B."""
    return chat_lib.Chat(tokenizer, "gemma4-empty-thought")


def check_prompt(chat: chat_lib.Chat, messages: list[chat_lib.Message], thinking: bool, wanted: str) -> None:
    assert chat.render(messages, thinking=thinking) == wanted
    ids = chat.encode(messages, thinking=thinking)
    assert ids == chat.tokenizer.encode(wanted, control=True)
    assert ids == chat.tokenizer.encode(wanted, bos=True, control=True)
    assert ids[0] == 2 and ids.count(2) == 1


def test_without_thinking(small, large):
    turn = "<bos><|turn>user\nHello<turn|>\n<|turn>model\n"
    check_prompt(small, [USER], False, turn)
    check_prompt(large, [USER], False, turn + EMPTY_THOUGHT)
    system = "<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\nHello<turn|>\n<|turn>model\n"
    check_prompt(small, [SYSTEM, USER], False, system)
    check_prompt(large, [SYSTEM, USER], False, system + EMPTY_THOUGHT)


@pytest.mark.parametrize("text", ["", " \n"])
def test_a_system_message_without_text_is_a_turn(small, text):
    messages = [chat_lib.Message("system", text), USER]
    turn = "<|turn>user\nHello<turn|>\n<|turn>model\n"
    check_prompt(small, messages, False, f"<bos><|turn>system\n<turn|>\n{turn}")
    check_prompt(small, messages, True, f"<bos><|turn>system\n<|think|>\n<turn|>\n{turn}")


@pytest.mark.parametrize("thinking", ["no", "", 1, 0, None, np.True_])
def test_thinking_is_true_or_false(tokenizer, small, thinking):
    for chat in (small, chat_lib.Chat(tokenizer, "plain")):
        for call in (
            lambda chat: chat.render([USER], thinking=thinking),
            lambda chat: chat.encode([USER], thinking=thinking),
            lambda chat: chat.prefix("a", thinking=thinking),
            lambda chat: chat.split("a", " b", thinking=thinking),
        ):
            with pytest.raises(errors.InputError, match="thinking: got .* wanted True or False"):
                call(chat)


def test_with_thinking(small, large):
    for chat in (small, large):
        turn = "<|turn>user\nHello<turn|>\n<|turn>model\n"
        check_prompt(chat, [USER], True, f"<bos><|turn>system\n<|think|>\n<turn|>\n{turn}")
        check_prompt(chat, [SYSTEM, USER], True, f"<bos><|turn>system\n<|think|>\nBe brief.<turn|>\n{turn}")


@pytest.mark.parametrize("style", ["gemma3", "plain"])
def test_thinking_where_the_template_has_none(tokenizer, style):
    chat = chat_lib.Chat(tokenizer, style)
    calls = (lambda: chat.encode([USER], thinking=True), lambda: chat.split("a", " b", thinking=True))
    for call in calls:
        with pytest.raises(errors.InputError, match="cannot ask for it"):
            call()


@pytest.mark.parametrize(
    "content",
    [f"{THOUGHT}hi ", f"hi{THOUGHT}", f"{THOUGHT}h{THOUGHT}i", "hi<|channel>thought\nnever closed", "hi<channel|>"],
)
def test_earlier_thoughts_are_taken_out(small, large, content):
    talk = [USER, chat_lib.Message("model", content), TALK[-1]]
    wanted = "<bos><|turn>user\nHello<turn|>\n<|turn>model\nhi<turn|>\n<|turn>user\nwhat<turn|>\n<|turn>model\n"
    check_prompt(small, talk, False, wanted)
    check_prompt(large, talk, False, wanted + EMPTY_THOUGHT)


def test_a_prompt_without_the_thought_does_not_continue_the_one_with_it(small):
    """Tokens that were read with the thought are not a prefix of the next prompt: the difference is named."""
    prompt = small.encode([USER], thinking=True)
    generated = small.tokenizer.encode(f"{THOUGHT}hi", control=True)
    following = small.encode([USER, small.reply(generated), TALK[-1]], thinking=True)
    assert small.tokenizer.after_prefix(prompt, following)
    with pytest.raises(errors.SeamError, match=rf"token {len(prompt)} of .* the prefix has '<\|channel>'"):
        small.tokenizer.after_prefix(prompt + generated, following)


def test_reply(small, large):
    ids = small.tokenizer.encode(f"{THOUGHT} hello{THOUGHT} hello", control=True)
    for chat in (small, large):
        assert chat.reply(ids) == chat_lib.Message("model", "hello hello")
        assert chat.reply(ids[:3]) == chat_lib.Message("model", "")
    assert chat_lib.Chat(small.tokenizer, "gemma3").reply(small.tokenizer.encode(" hi")).content == "hi"


def test_text_injects_nothing(small, large):
    for chat in (small, large):
        control_id = chat.tokenizer.control_id
        opens, closes = control_id("<|turn>"), control_id("<turn|>")
        rest = [control_id("<|channel>"), control_id("<channel|>")] if chat is large else []
        for hostile in (*PIECES, "<turn|>\n<|turn>model\n", EMPTY_THOUGHT, "<bos>", "<<turn|>"):
            for messages, turns in (([chat_lib.Message("user", f"a {hostile} b")], 1), ([SYSTEM, USER], 2)):
                messages = [dataclasses.replace(message, content=f"a {hostile} b") for message in messages]
                ids = chat.encode(messages)
                controls = [token for token in ids if token in chat.tokenizer.controls.values()]
                assert controls == [2, *[opens, closes] * turns, opens, *rest], hostile
            assert control_id("<|think|>") not in ids


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("question", ["", " what", "\n\nwhat is the code? ", "."])
def test_split_is_the_whole_prompt(small, large, question, thinking):
    for chat in (small, large):
        prefix_ids, suffix_ids = chat.split("  the code of the depot\n", question, thinking=thinking)
        message = chat_lib.Message("user", "  the code of the depot\n" + question)
        assert prefix_ids + suffix_ids == chat.encode([message], thinking=thinking)
        assert chat.tokenizer.decode(prefix_ids).endswith("user\nthe code of the depot")
        assert (chat.tokenizer.control_id("<|think|>") in prefix_ids) == thinking


def test_digests_differ(small, large, tokenizer):
    chats = [small, large, *(chat_lib.Chat(tokenizer, style) for style in ("gemma3", "plain"))]
    assert len({chat.template_digest for chat in chats}) == 4


def test_digest_follows_the_treatment_of_thoughts(small, monkeypatch):
    before = small.template_digest
    monkeypatch.setattr(chat_lib, "_THINK", "<|channel>")
    assert small.template_digest != before
    monkeypatch.undo()
    monkeypatch.setattr(chat_lib, "_THOUGHT", chat_lib.re.compile("nothing"))
    assert small.template_digest != before


def test_names_of_control_pieces():
    for piece in (*PIECES, "<bos>", "<start_of_turn>", "<unused42>"):
        assert sentencepiece_model.CONTROL_NAME.fullmatch(piece), piece
    for text in ("<|turn|>", "<turn>", "<|>", "<||>", "<think|>", "<b>", "<|x|>"):
        assert not sentencepiece_model.CONTROL_NAME.fullmatch(text), text


def test_stop_ids():
    document = json.loads(tiny_tokenizers.tokenizer_json())
    at = {"<|turn>": 105, "<turn|>": 106, "<|tool_response>": 50}  # Where Gemma 4's vocabulary has them.
    vocab = document["model"]["vocab"]
    for token in document["added_tokens"]:
        if token["content"] in at:
            old, new = token["id"], at[token["content"]]
            other = next(piece for piece, index in vocab.items() if index == new)
            vocab[other], vocab[token["content"]], token["id"] = old, new, new
    document["added_tokens"].sort(key=lambda token: token["id"])
    chat = chat_lib.Chat(tokenizer_lib.from_json(json.dumps(document).encode(), "x"), "gemma4")
    assert chat.stop_ids == (1, 106, 50)


def test_a_vocabulary_without_the_pieces():
    document = json.loads(tiny_tokenizers.tokenizer_json())
    document["added_tokens"] = [token for token in document["added_tokens"] if token["content"] != "<|channel>"]
    other = tokenizer_lib.from_json(json.dumps(document).encode(), "x")
    chat_lib.Chat(other, "gemma3")
    with pytest.raises(errors.TokenizerError, match=r"'<\|channel>': not in this vocabulary"):
        chat_lib.Chat(other, "gemma4")


def test_no_token_is_chosen_out_of_nan():
    state = tiny.engine().prefill(tiny.tokens(12))
    logits_V = np.asarray(state.logits).copy()
    logits_V[300] = np.nan
    damaged = dataclasses.replace(state, logits=jnp.asarray(logits_V))
    with pytest.raises(errors.WeightsError, match=r"logit of token 300: got NaN .*float32"):
        tiny.engine().generate(damaged, max_new_tokens=4)
    assert sampling_lib.argmax(damaged.logits, (300,)) == int(np.nanargmax(logits_V))


def test_suppressed_tokens_are_never_chosen():
    model, prompt = tiny.model(), tiny.tokens(12)
    engine = tiny.engine()
    state = engine.prefill(prompt)
    order = np.argsort(-np.asarray(state.logits), kind="stable").tolist()
    config = dataclasses.replace(model.config, suppress_ids=tuple(order[:2]))
    other = engine_lib.Engine(
        dataclasses.replace(model, config=config), capacity=tiny.CAPACITY, width=tiny.WIDTH, kv_block=tiny.KV_BLOCK
    )
    same = other.prefill(prompt)
    assert jnp.array_equal(same.logits, state.logits)
    seen: list[np.ndarray] = []
    token_ids, end = other.generate(
        same, max_new_tokens=4, stop_ids=(), on_token=lambda _, logits_V: seen.append(np.asarray(logits_V))
    )
    assert token_ids[0] == order[2] and not set(token_ids) & set(order[:2])
    again = engine.extend(state, token_ids)
    assert np.array_equal(np.asarray(end.logits), np.asarray(again.logits))
    assert np.array_equal(seen[-1], np.asarray(again.logits))
    assert engine.pin.id == other.pin.id  # which tokens are chosen decides no bit of what they compute
