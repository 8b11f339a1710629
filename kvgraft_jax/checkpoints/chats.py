"""Fits a checkpoint's tokenizer and chat template to its model, and makes the chat of them."""

from __future__ import annotations

from collections.abc import Sequence

from kvgraft_jax import errors
from kvgraft_jax.checkpoints import source as source_lib
from kvgraft_jax.text import chat as chat_lib
from kvgraft_jax.text import template as template_lib
from kvgraft_jax.text import template_files
from kvgraft_jax.text import tokenizer as tokenizer_lib

_MOST_SPARE_ROWS = 1024  # Of a table, without a piece of the tokenizer; released models have 64 at most.


def open_chat(
    style: str | None,
    tokenizer: tokenizer_lib.Tokenizer | None,
    templates: Sequence[template_files.Template],
    source: source_lib.Source,
) -> chat_lib.Chat | None:
    """Makes the chat of a model, in the style that was named or that its templates have; None without a tokenizer.

    Args:
      style: the name of a style, which goes before all templates; None names none.
      tokenizer: of the checkpoint.
      templates: of the checkpoint.
      source: the opened checkpoint.

    Raises:
      TokenizerError: tokenizer or style are not those of such a model.
    """
    config, origin = source.config, source.origin
    if tokenizer is None:
        if style is not None:
            raise errors.TokenizerError(
                f"{origin}: has no tokenizer, which the chat {style!r} needs; put tokenizer.model into it"
            )
        return None
    own = chat_lib.start_of_turn(config.family)
    if own not in tokenizer.controls:
        raise errors.TokenizerError(
            f"{origin}: got a tokenizer without the piece {own!r}, wanted that of a Gemma {config.family}: in a "
            "directory, put the model's own in place of the one found in it or beside it; convert a GGUF file again"
        )
    controls = set(tokenizer.controls.values())  # No text becomes one, so one without a row does no harm.
    without = [token for token in range(config.vocab_size, tokenizer.vocab_size) if token not in controls]
    if without:
        raise errors.TokenizerError(
            f"{origin}: got a tokenizer of {tokenizer.vocab_size} pieces, of which {len(without)} have no row among "
            f"the {config.vocab_size} of the model; wanted the model's own tokenizer"
        )
    if config.vocab_size - tokenizer.vocab_size > _MOST_SPARE_ROWS:  # Gemma 1 and 2 spell their turns as 3 does.
        raise errors.TokenizerError(
            f"{origin}: got a tokenizer of {tokenizer.vocab_size} pieces for {config.vocab_size} rows of the model, "
            f"wanted at most {_MOST_SPARE_ROWS} fewer; use the model's own tokenizer"
        )
    style = _style(templates, tokenizer, config.family) if style is None else style
    if chat_lib.family_of(style) not in (None, config.family):
        raise errors.TokenizerError(
            f"{origin}: got a chat with turns of Gemma {chat_lib.family_of(style)}, but the model is a Gemma "
            f"{config.family}; wanted the model's own template, or ?chat=NAME"
        )
    return chat_lib.Chat(tokenizer, style)


def _style(templates: Sequence[template_files.Template], tokenizer: tokenizer_lib.Tokenizer, family: int) -> str:
    """Returns the style in which all templates of a model write; "plain" without any."""
    found = {template.origin: template_lib.find_style(template, tokenizer, family) for template in templates}
    if len(set(found.values())) > 1:
        told = ", ".join(f"{origin} is {style!r}" for origin, style in found.items())
        raise errors.TokenizerError(f"{told}: two templates for one model; remove one of them, or use ?chat=NAME")
    return next(iter(found.values()), chat_lib.PLAIN)
