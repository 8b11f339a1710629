"""Stock chat templates of each style, written from what the styles are, and near misses of them."""

from __future__ import annotations

PLAIN = "{{ bos_token }}{{ messages[0].content }}"

GEMMA3 = """\
{{- bos_token -}}
{% if messages[0].role == 'system' %}
    {% set before, turns = messages[0].content ~ '\\n\\n', messages[1:] %}
{% else %}
    {% set before, turns = '', messages %}
{% endif %}
{% for turn in turns %}
    {% if (turn.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('user and model do not alternate') -}}
    {% endif %}
    {{- '<start_of_turn>' ~ ('model' if turn.role == 'assistant' else turn.role) ~ '\\n' -}}
    {{- (before if loop.first else '') ~ turn.content | trim ~ '<end_of_turn>\\n' -}}
{% endfor %}
{% if add_generation_prompt %}
    {{- '<start_of_turn>model\\n' -}}
{% endif %}
"""

_GEMMA4 = """\
{% macro without_thoughts(text) %}
    {% set kept = namespace(text='') %}
    {% for part in text.split('<channel|>') %}
        {% set kept.text = kept.text ~ part.split('<|channel>')[0] %}
    {% endfor %}
    {{- kept.text | trim -}}
{% endmacro %}
{{- bos_token -}}
{% set thinks, has_system = enable_thinking | default(false), messages[0].role in ('system', 'developer') %}
{% if thinks or has_system or tools %}
    {{- '<|turn>system\\n' ~ ('<|think|>\\n' if thinks else '') -}}
    {{- (messages[0].content | trim if has_system else '') ~ '<turn|>\\n' -}}
{% endif %}
{% for turn in (messages[1:] if has_system else messages) %}
    {% if turn.role == 'assistant' %}
        {{- '<|turn>model\\n' ~ without_thoughts(turn.content) ~ '<turn|>\\n' -}}
    {% else %}
        {{- '<|turn>' ~ turn.role ~ '\\n' ~ turn.content | trim ~ '<turn|>\\n' -}}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
    {{- '<|turn>model\\n' -}}
    EMPTY_THOUGHT
{% endif %}
"""
GEMMA4 = _GEMMA4.replace("EMPTY_THOUGHT", "")
GEMMA4_EMPTY_THOUGHT = _GEMMA4.replace(
    "EMPTY_THOUGHT", "{% if not thinks %}{{- '<|channel>thought\\n<channel|>' -}}{% endif %}"
)

STOCK = {"plain": PLAIN, "gemma3": GEMMA3, "gemma4": GEMMA4, "gemma4-empty-thought": GEMMA4_EMPTY_THOUGHT}
FAMILIES = {"gemma3": 3, "gemma4": 4, "gemma4-empty-thought": 4}
