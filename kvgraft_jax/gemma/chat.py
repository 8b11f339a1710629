"""Prompts: Gemma 3's turn template or plain text, and the cut of a prompt into a reusable prefix and its suffix."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
from typing import NamedTuple

from kvgraft_jax import digest, errors
from kvgraft_jax.gemma import tokenizer as tokenizer_lib

GEMMA3 = "gemma3"
PLAIN = "plain"

_BOS, _START, _END = "<bos>", "<start_of_turn>", "<end_of_turn>"
_BLANK_LINE = "\n\n"


@dataclasses.dataclass(frozen=True)
class Message:
    """One message of a conversation.

    Attributes:
      role: "system" (first only), "user" or "model"; "assistant" is another word for "model".
      content: its text.
    """

    role: str
    content: str


class Split(NamedTuple):
    """A prompt cut in two: `prefix_ids + suffix_ids` are exactly the ids of the whole prompt."""

    prefix_ids: list[int]
    suffix_ids: list[int]


@dataclasses.dataclass(frozen=True)
class Chat:
    """How messages become a prompt.

    "gemma3" writes `<bos>`, then per turn `<start_of_turn>role`, a new line, the trimmed text, `<end_of_turn>` and a
    new line, then opens the model's turn; system text and a blank line stand in front of the first user text. "plain",
    for models without turns, writes `<bos>` and the text of one user message as it is.

    Text never becomes a control token, whatever it spells.

    Attributes:
      tokenizer: of the model.
      style: "gemma3" or "plain".
    """

    tokenizer: tokenizer_lib.Tokenizer
    style: str

    def __post_init__(self):
        if self.style not in (GEMMA3, PLAIN):
            raise errors.ConfigError(f"chat style: got {self.style!r}, wanted {GEMMA3!r} or {PLAIN!r}")
        if self.style == GEMMA3:
            for piece in (_BOS, _START, _END):
                self.tokenizer.control_id(piece)

    @property
    def template_digest(self) -> str:
        """SHA-256 (hex) of the prompt that this template makes of placeholders."""
        shape = [Message("user", "{1}")]
        if self.style == GEMMA3:
            shape = [Message("system", "{0}"), *shape, Message("model", "{2}"), Message("user", "{3}")]
        return digest.json_digest({"style": self.style, "prompt": self.render(shape)})

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt as text, ready for the model's answer.

        Only for reading: control pieces that a message spells look like real ones here. `encode` tells them apart.

        Raises:
          InputError: no message, roles that do not alternate from user to user, or a role that the style does not have.
        """
        turns = self._turns(messages)
        if self.style == PLAIN:
            return _BOS + turns[0].content
        closed = "".join(f"{_START}{turn.role}\n{turn.content}{_END}\n" for turn in turns)
        return f"{_BOS}{closed}{_START}model\n"

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """The prompt as token ids, with `<bos>` once, at position 0; the same errors as `render`."""
        turns = self._turns(messages)
        if self.style == PLAIN:
            return self.tokenizer.encode(turns[0].content, bos=True)
        ids = [self.tokenizer.bos_id]
        for turn in turns:
            ids += self._open(turn.role, turn.content) + self._close()
        return ids + self._open("model", "")

    def prefix(self, context: str) -> list[int]:
        """Ids of the part of a prompt that `context`, at the start of the user's text, decides alone.

        White space at the end of `context` is left to what follows: tokens begin with the space before a word.

        Raises:
          InputError: a context without text.
        """
        context = self._trimmed(context)
        if self.style == PLAIN:
            return self.tokenizer.encode(context, bos=True)
        return [self.tokenizer.bos_id, *self._open("user", context)]

    def split(self, context: str, question: str) -> Split:
        """Cuts the prompt of one user message `context + question` into `prefix(context)` and the rest.

        Exact: the two lists joined equal `encode([Message("user", context + question)])`, or an error is raised.

        Args:
          context: what will be deposited; not empty.
          question: what follows it, with the space or line break between the two.

        Raises:
          InputError: a context without text.
          SeamError: the tokenizer merges the end of the context with the start of the question.
        """
        prefix_ids = self.prefix(context)
        whole = self.encode([Message("user", context + question)])
        return Split(prefix_ids, self.tokenizer.after_prefix(prefix_ids, whole))

    def _trimmed(self, context: str) -> str:
        context = context.rstrip() if self.style == PLAIN else context.strip()
        if not context:
            raise errors.InputError("context: got no text, wanted some to put in front of the question")
        return context

    def _open(self, role: str, content: str) -> list[int]:
        return [self.tokenizer.control_id(_START), *self.tokenizer.encode(f"{role}\n{content}")]

    def _close(self) -> list[int]:
        return [self.tokenizer.control_id(_END), *self.tokenizer.encode("\n")]

    def _turns(self, messages: Sequence[Message]) -> list[Message]:
        """User and model turns, alternating, as they stand in the prompt."""
        if self.style == PLAIN:
            if [message.role for message in messages] != ["user"]:
                raise errors.InputError(
                    f"messages: got roles {[message.role for message in messages]}, wanted one user message: "
                    "this model has no chat template"
                )
            return list(messages)
        turns = [dataclasses.replace(m, role="model") if m.role == "assistant" else m for m in messages]
        system = ""
        if turns and turns[0].role == "system":
            system = turns.pop(0).content + _BLANK_LINE
        roles = [turn.role for turn in turns]
        if not roles or roles != ["user", "model"] * (len(roles) // 2) + ["user"]:
            raise errors.InputError(
                f"messages: got roles {[message.role for message in messages]}, wanted an optional system message, "
                "then user and model by turns, user first and last"
            )
        turns = [Message(turn.role, turn.content.strip()) for turn in turns]
        return [Message("user", system + turns[0].content), *turns[1:]]
