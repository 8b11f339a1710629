"""Finds the style of chat that a model's template writes: it is rendered, and every token has to agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import json
import os
import signal
import subprocess

from kvgraft_jax import children, device_memory, errors
from kvgraft_jax.text import chat as chat_lib
from kvgraft_jax.text import template_files, template_worker
from kvgraft_jax.text import tokenizer as tokenizer_lib

_WALL_SECONDS = 120
_SHOWN_BEFORE, _SHOWN = 60, 140

_STRANGE = "\u00dcber 3 < 4 & \"so\" {{ 'x' }} {% y %} \\n 'it''s'\r\n\tcode\u00a0\u2581_ \u65e5\u672c \U0001f600"
# A system text or None, then texts of user and model by turns.
_CONVERSATIONS: Mapping[str, tuple[str | None, Sequence[str]]] = {
    "one user message": (None, ["What is 2 + 3?"]),
    "system and user": ("Answer briefly.", ["What is 2 + 3?"]),
    "several turns": (None, ["What is 2 + 3?", "It is 5.", "And twice that?", "That is 10.", "Thanks."]),
    "system and several turns": ("Answer briefly.", ["What is 2 + 3?", "It is 5.", "And twice that?"]),
    "many turns": ("Count.", [str(number) for number in range(31)]),
    "white space at the end": (None, ["  What is 2 + 3?\n\n"]),
    "white space at the ends": (" \n Be brief.\n\n", ["\n  Hello \t\n", "  Hi\n\n there \n", " Bye \n\n "]),
    "unusual text": (_STRANGE, [_STRANGE, f"<think>{_STRANGE}</think> yes", _STRANGE]),
    "long text": ("word " * 400, ["word " * 400, "word " * 400, "word " * 400]),
    "an empty system text": ("", ["What is 2 + 3?"]),
}
_THOUGHTS = (
    "thoughts in earlier turns",
    (None, ["2 + 3?", "<|channel>thought\nFive.\n<channel|>It is 5.", "And 1 more?", "<|channel>6<channel|>6", "Yes"]),
)


@dataclasses.dataclass(frozen=True)
class _Probe:
    """A conversation, and how the template is asked for it.

    Attributes:
      name: for messages.
      messages: of the conversation.
      thinking: whether the model is to think.
      enable_thinking: what the template is given; None leaves it out.
    """

    name: str
    messages: Sequence[chat_lib.Message]
    thinking: bool = False
    enable_thinking: bool | None = None

    @property
    def variables(self) -> dict[str, object]:
        """Names that the template reads."""
        messages = [{"role": message.role, "content": message.content} for message in self.messages]
        asked = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        return {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True, **asked}


def find_style(template: template_files.Template, tokenizer: tokenizer_lib.Tokenizer, family: int) -> str:
    """Returns the style of `chat.Chat` whose prompts are those of the template, token for token.

    Each probe conversation (`_CONVERSATIONS`; for styles that can think, with thinking on and off, and with thoughts in
    earlier turns) is rendered by the template and encoded with its control pieces, and compared with what `Chat` makes.

    Args:
      template: of the model.
      tokenizer: of the model.
      family: of Gemma; only its styles and "plain" are tried.

    Raises:
      TokenizerError: the template cannot be parsed or rendered, or is none of the styles: the message names the first
        probe on which the closest style differs, and shows both prompts.
      ResourceError: the process that renders it cannot be started, is killed, or says that it lacks memory.
    """
    chats = [
        chat_lib.Chat(tokenizer, style)
        for style in chat_lib.styles(family)
        if all(piece in tokenizer.controls for piece in chat_lib.pieces(style))
    ]
    probes = {chat.style: list(_probes(chat.can_think, chat.style == chat_lib.PLAIN)) for chat in chats}
    asked = [probe for of_style in probes.values() for probe in of_style]
    answers = iter(_render(template, [probe.variables for probe in asked]))
    closest, agreed = "", -1
    for chat in chats:
        told = [_difference(chat, probe, next(answers)) for probe in probes[chat.style]]
        wrong = next((number for number, text in enumerate(told) if text), None)
        if wrong is None:
            return chat.style
        if wrong > agreed:
            closest, agreed = f"as {chat.style!r}, {told[wrong]}", wrong
    names = " or ".join(f"?chat={chat.style}" for chat in chats)
    raise errors.TokenizerError(
        f"{template.origin}: no style of this package writes its prompts: {closest}. To use a chat of this "
        f"package all the same, state {names} after the model's URI"
    )


def _probes(can_think: bool, is_plain: bool) -> Iterator[_Probe]:
    conversations = dict(_CONVERSATIONS) | (dict([_THOUGHTS]) if can_think else {})
    for name, (system, turns) in conversations.items():
        if is_plain and (system is not None or len(turns) > 1):
            continue
        roles = ("user", "assistant")
        messages = [chat_lib.Message(roles[number % 2], text) for number, text in enumerate(turns)]
        if system is not None:
            messages.insert(0, chat_lib.Message("system", system))
        yield _Probe(name, messages)
        if can_think:
            yield _Probe(f"{name}, thinking off", messages, enable_thinking=False)
            yield _Probe(f"{name}, thinking on", messages, thinking=True, enable_thinking=True)


def _difference(chat: chat_lib.Chat, probe: _Probe, answer: Mapping[str, str]) -> str:
    """Returns what is wrong with the template's prompt for a probe; "" where it is that of the chat."""
    if "error" in answer:
        return f"the probe {probe.name!r} cannot be rendered ({answer['error']})"
    theirs, ours = answer["text"], chat.render(probe.messages, thinking=probe.thinking)
    if chat.tokenizer.encode(theirs, control=True) == chat.encode(probe.messages, thinking=probe.thinking):
        return ""
    equal = len(os.path.commonprefix([theirs, ours]))
    start = max(0, equal - _SHOWN_BEFORE)
    theirs, ours = (errors.shown(text[start:], _SHOWN) for text in (theirs, ours))
    return f"the probe {probe.name!r} differs at character {equal}: the template has {theirs}, this package {ours}"


def _render(template: template_files.Template, probes: Sequence[Mapping[str, object]]) -> list[dict[str, str]]:
    """Renders the template's prompts in a process of its own: a template is someone else's program."""
    probes = [{**template.special_tokens, **variables} for variables in probes]
    request = json.dumps({"template": template.source, "probes": probes})
    try:
        done = subprocess.run(
            children.command(template_worker.__name__),
            input=request.encode(),
            capture_output=True,
            timeout=_WALL_SECONDS,
            env=children.environment(),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _unusable(template, f"took more than {_WALL_SECONDS} seconds") from None
    except OSError as error:
        raise _unstarted(template, str(error)) from error
    if done.returncode == -signal.SIGXCPU:
        raise _unusable(template, f"took more than {template_worker.SECONDS} seconds")
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        last = said.splitlines()[-1] if said else "nothing"
        ending = f"ended with {done.returncode} and said {errors.shown(last)}"
        is_want = device_memory.is_want(RuntimeError(said)) or last.startswith("MemoryError")
        if is_want or done.returncode == -signal.SIGKILL:  # The system kills where memory or time has run out.
            raise _unstarted(template, f"it {ending}")
        raise _unusable(template, f"crashes the process that renders it, which {ending}")
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise _unusable(template, f"does not parse ({answer['error']})")
    return answer["prompts"]


def _unusable(template: template_files.Template, reason: str) -> errors.TokenizerError:
    return errors.TokenizerError(
        f"{template.origin}: the template {reason}; mend it, or state the chat after the model's URI: ?chat=NAME"
    )


def _unstarted(template: template_files.Template, reason: str) -> errors.ResourceError:
    return errors.ResourceError(
        f"{template.origin}: the process that renders the template could not do so ({reason}); end other programs, or "
        "state the chat after the model's URI: ?chat=NAME"
    )
