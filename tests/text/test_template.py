"""A chat template is rendered: its style is taken where every token agrees, anything else is refused by name."""

from __future__ import annotations

import json
import sys

import pytest

from kvgraft_jax import errors
from kvgraft_jax.text import template as template_lib
from kvgraft_jax.text import template_files
from kvgraft_jax.text import tokenizer as tokenizer_lib
from tests import chat_templates, tiny_tokenizers

SPECIAL_TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>"}


def style_of(source: str, family: int, tokens: dict[str, str] = SPECIAL_TOKENS) -> str:
    tokenizer = tokenizer_lib.from_sentencepiece(tiny_tokenizers.sentencepiece_model(), "tokenizer.model")
    return template_lib.find_style(template_files.Template(source, tokens, "FILE"), tokenizer, family)


@pytest.mark.parametrize(("style", "family"), [*chat_templates.FAMILIES.items(), ("plain", 3), ("plain", 4)])
@pytest.mark.parametrize("form", ["sentencepiece", "json"])
def test_a_stock_template_is_accepted(style, family, form):
    tokenizer = (
        tokenizer_lib.from_sentencepiece(tiny_tokenizers.sentencepiece_model(), "tokenizer.model")
        if form == "sentencepiece"
        else tokenizer_lib.from_json(tiny_tokenizers.tokenizer_json(), "tokenizer.json")
    )
    template = template_files.Template(chat_templates.STOCK[style], SPECIAL_TOKENS, "FILE")
    assert template_lib.find_style(template, tokenizer, family) == style


@pytest.mark.parametrize(
    ("style", "old", "new", "probe"),
    [
        ("gemma3", "~ '\\n\\n'", "~ '\\n'", "system and user"),
        ("gemma3", "before, turns = '', messages", "before, turns = 'You are HelpBot.\\n\\n', messages", "one user"),
        ("gemma3", "'model' if turn.role == 'assistant' else turn.role", "turn.role", "several turns"),
        ("gemma3", "turn.content | trim", "turn.content", "white space at the end"),
        ("gemma3", "turn.content | trim", "turn.content.split('</think>')[-1] | trim", "unusual text"),
        ("gemma3", "turn.content | trim", "(turn.content | trim)[:1000]", "long text"),
        ("gemma3", "turn in turns", "turn in turns[:20]", "many turns"),
        ("gemma3", "{{- bos_token -}}", "", "one user message"),
        ("gemma3", "~ '<end_of_turn>\\n'", "~ '\\n<end_of_turn>\\n'", "one user message"),
        ("gemma3", "<start_of_turn>model\\n", "<start_of_turn>model", "one user message"),
        ("gemma3", "messages[0].content ~ '\\n\\n'", "''", "system and user"),
        ("gemma3", "{{- bos_token -}}", "{{- bos_token ~ strftime_now('%Y') -}}", "one user message"),
        ("gemma4", "'<|think|>\\n'", "'<|think|>'", "one user message, thinking on"),
        ("gemma4", "default(false)", "default(true)", "one user message"),
        ("gemma4", "without_thoughts(turn.content)", "turn.content | trim", "thoughts in earlier turns"),
        ("gemma4", "messages[0].content | trim if", "messages[0].content if", "white space at the ends"),
        ("gemma4", "messages[0].role in (", "messages[0].content and messages[0].role in (", "an empty system text"),
        ("gemma4-empty-thought", "thought\\n<channel|>", "thought<channel|>", "one user message"),
        ("gemma4-empty-thought", "{% if not thinks %}", "{% if true %}", "one user message, thinking on"),
        ("plain", "messages[0].content", "messages[0].content | trim", "white space at the end"),
        ("plain", "{{ messages[0].content }}", "### User: {{ messages[0].content }}", "one user message"),
    ],
)
def test_a_near_miss_is_refused(style, old, new, probe):
    source = chat_templates.STOCK[style]
    assert old in source
    with pytest.raises(
        errors.TokenizerError, match=f"FILE: no style of this package writes its prompts.*the probe '{probe}"
    ) as raised:
        style_of(source.replace(old, new), chat_templates.FAMILIES.get(style, 3))
    assert "the template has '" in str(raised.value)
    assert "?chat=" in str(raised.value)
    assert len(str(raised.value)) < 800


def test_both_prompts_are_shown_around_the_place_where_they_part():
    with pytest.raises(errors.TokenizerError) as raised:
        style_of(chat_templates.GEMMA3.replace("~ '\\n\\n'", "~ '\\n'"), 3)
    assert (
        "'system and user' differs at character 41: the template has "
        r"'<bos><start_of_turn>user\nAnswer briefly.\nWhat is 2 + 3?<end_of_turn>\n<start_of_turn>model\n', this "
        r"package '<bos><start_of_turn>user\nAnswer briefly.\n\nWhat is 2 + 3?<end_of_turn>\n<start_of_turn>model\n'"
    ) in str(raised.value)


@pytest.mark.parametrize("style", chat_templates.FAMILIES)
def test_a_template_of_the_other_family_is_refused(style):
    with pytest.raises(errors.TokenizerError, match="no style of this package writes its prompts"):
        style_of(chat_templates.STOCK[style], 7 - chat_templates.FAMILIES[style])


def test_what_the_reference_offers_to_templates():
    """Loop controls, blocks that mark answers, exceptions, dates, JSON, and blocks that take their line with them."""
    source = """\
{% for name in ['a'] %}
    {% if true %}{% break %}{% endif %}
{% endfor %}
{% generation %}
{{- bos_token -}}
{% endgeneration %}
{% set year, text = strftime_now('%Y'), {'a': 'ü<'} | tojson %}
{% if year | int > 2000 and text == '{"a": "ü<"}' %}
{{- messages[0].content -}}
{% endif %}
"""
    assert style_of(source, 3) == "plain"
    with pytest.raises(errors.TokenizerError, match="cannot be rendered.*TemplateError: not for you"):
        style_of("{{ raise_exception('not for you') }}", 3)


def test_the_begin_of_text_is_what_the_settings_call_so():
    with pytest.raises(errors.TokenizerError, match="the template has '<s>"):
        style_of(chat_templates.GEMMA3, 3, {"bos_token": "<s>"})
    with pytest.raises(errors.TokenizerError, match="differs at character 1: the template has '<start_of_turn>"):
        style_of(chat_templates.GEMMA3, 3, {})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for m in messages %}", "does not parse .TemplateSyntaxError"),
        ("{{ " + "(" * 5000, "does not parse"),
        ("{{ x.y.z }}", "UndefinedError"),
        ("{{ messages.__class__.__mro__ }}", "SecurityError"),
        ("{{ raise_exception.__globals__ }}{{ raise_exception.__globals__.x }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ 'x' * 10 ** 10 }}", "MemoryError"),
        ("{{ 'x' * 10 ** 6 }}", "writes 1000000 characters"),
        ("{% for a in range(10 ** 9) %}{% endfor %}", "Range too big"),
    ],
)
def test_a_broken_or_hostile_template_is_refused(source, message):
    with pytest.raises(errors.TokenizerError, match=message):
        style_of(source, 3)


def test_an_endless_template_is_ended():
    loop = "{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4
    with pytest.raises(errors.TokenizerError, match="FILE: the template took more than 10 seconds.*[?]chat=NAME"):
        style_of(loop, 3)


def test_a_process_that_cannot_start_is_no_fault_of_the_template(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(errors.ResourceError, match="the process that renders .* No such file"):
        style_of(chat_templates.GEMMA3, 3)


@pytest.mark.parametrize(
    ("ending", "kind", "message"),
    [
        ("kill -SEGV $$", errors.TokenizerError, "the template crashes the process that renders it, .* ended with -11"),
        ("echo 'KeyError: x' >&2; exit 1", errors.TokenizerError, "crashes .* ended with 1 and said 'KeyError: x'"),
        ("kill -KILL $$", errors.ResourceError, "could not do so .it ended with -9"),
        ('echo "RuntimeError: can\'t start new thread" >&2; exit 1', errors.ResourceError, "start new thread"),
        ("echo 'Cannot allocate memory' >&2; echo 'more' >&2; exit 1", errors.ResourceError, "said 'more'"),
        ("echo MemoryError >&2; exit 1", errors.ResourceError, "end other programs"),
    ],
)
def test_only_want_of_resources_is_called_so(tmp_path, monkeypatch, ending, kind, message):
    worker = tmp_path / "worker"
    worker.write_text(f"#!/bin/sh\ncat > {tmp_path}/request\n{ending}\n")
    worker.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(worker))
    with pytest.raises(kind, match=message):
        style_of(chat_templates.GEMMA3, 3)


def write(directory, **texts):
    for name, text in texts.items():
        (directory / name.replace("__", ".")).write_text(text)
    return template_files.from_directory(directory)


def settings(template: object, **more: object) -> str:
    return json.dumps({"chat_template": template, **more})


def test_which_file_goes_first(tmp_path):
    assert write(tmp_path) == []
    [found] = write(tmp_path, tokenizer_config__json=settings("a", bos_token={"content": "<s>"}, eos_token=None))
    assert (found.source, found.special_tokens["bos_token"]) == ("a", "<s>")
    assert "eos_token" not in found.special_tokens
    assert found.special_tokens["unk_token"] == "<unk>"
    [found] = write(tmp_path, chat_template__json=settings("a"))
    assert found.origin.endswith("tokenizer_config.json")
    assert [found.source for found in write(tmp_path, chat_template__json=settings("b"))] == ["a", "b"]
    [found] = write(tmp_path, chat_template__jinja="c")
    assert (found.source, found.special_tokens["bos_token"]) == ("c", "<s>")


def test_named_templates(tmp_path):
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    [found] = write(tmp_path, tokenizer_config__json=settings(named))
    assert found.source == "a"
    with pytest.raises(errors.TokenizerError, match="templates called .'tool_use'., none of them 'default'"):
        write(tmp_path, tokenizer_config__json=settings(named[1:]))
    with pytest.raises(errors.TokenizerError, match="wanted names and templates"):
        write(tmp_path, tokenizer_config__json=settings(["a"]))
    with pytest.raises(errors.TokenizerError, match="wanted a text in Jinja"):
        write(tmp_path, tokenizer_config__json=settings(7))


def test_templates_of_a_gguf_file():
    tokenizer = tokenizer_lib.from_gguf(tiny_tokenizers.gguf_metadata(), "x")
    metadata = tiny_tokenizers.gguf_metadata()
    key = "tokenizer.chat_template"
    assert template_files.from_gguf(metadata, tokenizer, "x") == []
    assert template_files.from_gguf(metadata | {key: "a"}, None, "x") == []
    [found] = template_files.from_gguf(metadata | {key: "a", key + ".tool_use": "b"}, tokenizer, "x")
    assert found.source == "a"
    assert found.special_tokens == {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
    }
    with pytest.raises(errors.TokenizerError, match="chat_template.tool_use, but not tokenizer.chat_template"):
        template_files.from_gguf(metadata | {key + ".tool_use": "b"}, tokenizer, "x")
    with pytest.raises(errors.TokenizerError, match="wanted a text"):
        template_files.from_gguf(metadata | {key: 7}, tokenizer, "x")
