"""Prompts: Gemma 3's and 4's turn templates or plain text, and the cut of a prompt into reusable prefix and suffix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import dataclasses
import re
from typing import NamedTuple

from kvgraft_jax import digest, errors
from kvgraft_jax.text import tokenizer as tokenizer_lib

GEMMA3 = "gemma3"
GEMMA4 = "gemma4"
GEMMA4_EMPTY_THOUGHT = "gemma4-empty-thought"
PLAIN = "plain"

_BOS = "<bos>"
_BLANK_LINE = "\n\n"
_THINK, _CHANNEL, _CHANNEL_END = "<|think|>", "<|channel>", "<channel|>"
_TOOL_RESPONSE = "<|tool_response>"
_THOUGHT = re.compile(r"<\|channel>.*?(?:<channel\|>|\Z)|<channel\|>", re.DOTALL)


class _Control(str):
    """A part of a prompt that is one control token; any other part is text, whatever it spells."""


@dataclasses.dataclass(frozen=True)
class _Turns:
    """How a style writes turns.

    Attributes:
      family: of Gemma, whose turns they are.
      start, end: around each turn.
      has_system_turn: system text is a turn of its own, else it stands in front of the first user text.
      can_think: the system turn may ask for thoughts, and thoughts of earlier turns are taken out.
      has_empty_thought: without thinking, the model's turn begins with a thought that is already closed.
      stops: further pieces at which the model gives the turn back.
    """

    family: int
    start: str
    end: str
    has_system_turn: bool = False
    can_think: bool = False
    has_empty_thought: bool = False
    stops: tuple[str, ...] = ()

    @property
    def pieces(self) -> tuple[str, ...]:
        """Returns every control piece that the style needs."""
        return (self.start, self.end, *((_THINK, _CHANNEL, _CHANNEL_END) if self.can_think else ()), *self.stops)


_GEMMA4_TURNS = _Turns(4, "<|turn>", "<turn|>", has_system_turn=True, can_think=True, stops=(_TOOL_RESPONSE,))
_STYLES = {
    PLAIN: None,
    GEMMA3: _Turns(3, "<start_of_turn>", "<end_of_turn>"),
    GEMMA4: _GEMMA4_TURNS,
    GEMMA4_EMPTY_THOUGHT: dataclasses.replace(_GEMMA4_TURNS, has_empty_thought=True),
}


def start_of_turn(family: int) -> str:
    """Returns the control piece that opens a turn in family `family` of Gemma; the other supported family has not."""
    return next(turns.start for turns in _STYLES.values() if turns is not None and turns.family == family)


def family_of(style: str) -> int | None:
    """Returns the family of Gemma whose turns a style writes; None for "plain".

    Raises:
      ConfigError: no style of this name.
    """
    if not isinstance(style, str) or style not in _STYLES:
        raise errors.ConfigError(f"chat style: got {style!r}, wanted one of {', '.join(map(repr, _STYLES))}")
    turns = _STYLES[style]
    return None if turns is None else turns.family


def styles(family: int) -> list[str]:
    """Lists the styles for a model of family `family`, "plain" last."""
    return sorted((style for style in _STYLES if family_of(style) in (None, family)), key=lambda style: style == PLAIN)


def pieces(style: str) -> tuple[str, ...]:
    """Lists every control piece that a tokenizer needs for `style`."""
    turns = _STYLES[style]
    return (_BOS,) if turns is None else (_BOS, *turns.pieces)


@dataclasses.dataclass(frozen=True)
class Message:
    """One message of a conversation.

    Attributes:
      role: "system" (first only), "user" or "model"; "assistant" is another word for "model".
      content: its text.
    """

    role: str
    content: str

    def __post_init__(self):
        for name, value in (("role", self.role), ("content", self.content)):
            _check_text(name, value)


class Split(NamedTuple):
    """A prompt cut in two: `prefix_ids + suffix_ids` are exactly the ids of the whole prompt."""

    prefix_ids: list[int]
    suffix_ids: list[int]


@dataclasses.dataclass(frozen=True)
class Chat:
    """How messages become a prompt.

    "gemma3" writes `<bos>`, then per turn `<start_of_turn>role`, a new line, the trimmed text, `<end_of_turn>` and a
    new line, then opens the model's turn; system text and a blank line stand in front of the first user text.

    "gemma4" (E2B, E4B) does so with `<|turn>` and `<turn|>`, but system text is a turn of its own, which begins with
    `<|think|>` and a new line when the model is to think; thoughts (`<|channel>` to `<channel|>`) are taken out of the
    model's earlier turns. "gemma4-empty-thought" (12B, 26B-A4B, 31B) also puts an empty thought at the start of the
    model's turn when it is not to think.

    "plain", for models without turns, writes `<bos>` and the text of one user message as it is.

    Text never becomes a control token, whatever it spells.

    Attributes:
      tokenizer: of the model.
      style: one of the names above.
    """

    tokenizer: tokenizer_lib.Tokenizer
    style: str

    def __post_init__(self):
        family_of(self.style)
        if self._style is not None:
            for piece in pieces(self.style):
                self.tokenizer.control_id(piece)

    @property
    def can_think(self) -> bool:
        """Returns whether prompts may ask for thoughts."""
        return self._style is not None and self._style.can_think

    @property
    def template_digest(self) -> str:
        """SHA-256 (hex) of the prompt that this template makes of placeholders."""
        shape = [Message("user", "{1}")]
        if self._style is not None:
            shape = [Message("system", "{0}"), *shape, Message("model", "{2}"), Message("user", "{3}")]
        document = {"style": self.style, "prompt": self.render(shape)}
        if self.can_think:
            shape[2] = Message("model", f"{_CHANNEL}{{4}}{_CHANNEL_END}{{2}}")
            document["thinking"] = self.render(shape, thinking=True)
        return digest.json_digest(document)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens with which the model ends its turn, or hands it over to a tool; the end of text is the first."""
        ends = () if self._style is None else (self._style.end, *self._style.stops)
        return (self.tokenizer.eos_id, *(self.tokenizer.control_id(piece) for piece in ends))

    def render(self, messages: Sequence[Message], *, thinking: bool = False) -> str:
        """Writes the prompt as text, ready for the model's answer.

        Only for reading: control pieces that a message spells look like real ones here. `encode` tells them apart.

        Raises:
          InputError: no list of messages, roles that do not alternate from user to user, a role that the style does
            not have, or thinking that is not a bool, or asked for where the style has none.
        """
        return "".join(self._prompt(messages, thinking))

    def encode(self, messages: Sequence[Message], *, thinking: bool = False) -> list[int]:
        """Encodes the prompt as token ids, with `<bos>` once, at position 0.

        Args:
          messages: an optional system message, then user and model by turns, user first and last.
          thinking: whether the model is to think before it answers.

        Raises:
          InputError: as `render`.
        """
        return self._ids(self._prompt(messages, thinking))

    def prefix(self, context: str, *, thinking: bool = False) -> list[int]:
        """Returns the ids of the part of a prompt that only `context`, the start of the user's text, decides.

        White space at the end of `context` is left to what follows: tokens begin with the space before a word.

        Raises:
          InputError: a context without text, or thinking where the style has none.
        """
        _check_text("context", context)
        trimmed = context.rstrip() if self._style is None else context.strip()
        if not trimmed:
            raise errors.InputError("context: got no text, wanted some to put in front of the question")
        parts = self._begin(None, thinking)
        return self._ids([*parts, trimmed] if self._style is None else [*parts, *self._open("user", trimmed)])

    def split(self, context: str, question: str, *, thinking: bool = False) -> Split:
        """Cuts the prompt of one user message `context + question` into `prefix(context)` and the rest.

        Exact: the two lists joined equal `encode([Message("user", context + question)])`, or an error is raised.

        Args:
          context: what will be deposited; not empty.
          question: what follows it, with the space or line break between the two.
          thinking: as in `encode`.

        Raises:
          InputError: a context without text, or thinking where the style has none.
          SeamError: the tokenizer merges the end of the context with the start of the question.
        """
        _check_text("question", question)
        prefix_ids = self.prefix(context, thinking=thinking)
        whole = self.encode([Message("user", context + question)], thinking=thinking)
        return Split(prefix_ids, self.tokenizer.after_prefix(prefix_ids, whole))

    def reply(self, token_ids: Sequence[int]) -> Message:
        """Reads the model's message from its tokens, without its thoughts; `InputError` for anything but token ids."""
        kept = self.tokenizer.check_ids(token_ids)
        if self.can_think:
            opens, closes = (self.tokenizer.control_id(piece) for piece in (_CHANNEL, _CHANNEL_END))
            while opens in kept:
                first = kept.index(opens)
                last = kept.index(closes, first) if closes in kept[first:] else len(kept) - 1
                del kept[first : last + 1]
        return Message("model", self.tokenizer.decode(kept).strip())

    @property
    def _style(self) -> _Turns | None:
        return _STYLES[self.style]

    def _ids(self, parts: Sequence[str]) -> list[int]:
        ids: list[int] = []
        for part in parts:
            is_control = isinstance(part, _Control)
            ids += [self.tokenizer.control_id(part)] if is_control else self.tokenizer.encode(part)
        return ids

    def _prompt(self, messages: Sequence[Message], thinking: bool) -> list[str]:
        """Returns the prompt in parts: control pieces, and the text between two of them."""
        system, turns = self._turns(messages)
        parts = self._begin(system, thinking)
        if self._style is None:
            return [*parts, turns[0].content]
        for turn in turns:
            parts += [*self._open(turn.role, turn.content), *self._close()]
        parts += self._open("model", "")
        if self._style.has_empty_thought and not thinking:
            parts += [_Control(_CHANNEL), "thought\n", _Control(_CHANNEL_END)]
        return parts

    def _begin(self, system: str | None, thinking: bool) -> list[str]:
        """Returns begin of text, and the system turn where there is one, with or without text."""
        if not isinstance(thinking, bool):
            raise errors.InputError(f"thinking: got {errors.shown(thinking)}, wanted True or False")
        if thinking and not self.can_think:
            raise errors.InputError(f"thinking: got True, but prompts of style {self.style!r} cannot ask for it")
        parts: list[str] = [_Control(_BOS)]
        if thinking:
            return [*parts, *self._open("system", ""), _Control(_THINK), f"\n{system or ''}", *self._close()]
        return parts if system is None else [*parts, *self._open("system", system), *self._close()]

    def _open(self, role: str, content: str) -> list[str]:
        return [_Control(self._style.start), f"{role}\n{content}"]

    def _close(self) -> list[str]:
        return [_Control(self._style.end), "\n"]

    def _turns(self, messages: Sequence[Message]) -> tuple[str | None, list[Message]]:
        """Returns the system turn's text or None, and the other turns, alternating, as they stand in the prompt."""
        if not isinstance(messages, Iterable):
            raise errors.InputError(f"messages: got {errors.shown(messages)}, wanted a list of Message")
        messages = list(messages)
        for message in messages:
            if not isinstance(message, Message):
                raise errors.InputError(f"messages: got a {type(message).__name__} among them, wanted Message")
        if self._style is None:
            if [message.role for message in messages] != ["user"]:
                raise errors.InputError(
                    f"messages: got roles {[message.role for message in messages]}, wanted one user message: "
                    "this model has no chat template"
                )
            return None, messages
        turns = [dataclasses.replace(m, role="model") if m.role == "assistant" else m for m in messages]
        system = turns.pop(0).content if turns and turns[0].role == "system" else None
        roles = [turn.role for turn in turns]
        if not roles or roles != ["user", "model"] * (len(roles) // 2) + ["user"]:
            raise errors.InputError(
                f"messages: got roles {[message.role for message in messages]}, wanted an optional system message, "
                "then user and model by turns, user first and last"
            )
        turns = [Message(turn.role, self._trimmed(turn)) for turn in turns]
        if system is None:
            return None, turns
        if self._style.has_system_turn:
            return system.strip(), turns
        return None, [Message("user", system + _BLANK_LINE + turns[0].content), *turns[1:]]

    def _trimmed(self, turn: Message) -> str:
        is_old_thought = self.can_think and turn.role == "model"
        return (_THOUGHT.sub("", turn.content) if is_old_thought else turn.content).strip()


def _check_text(name: str, value: str) -> None:
    if not isinstance(value, str):
        raise errors.InputError(f"{name}: got {type(value).__name__}, wanted str")
