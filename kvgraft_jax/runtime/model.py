"""A frozen model: configuration, parameters on the device, tokenizer and chat, and the digest of its weights."""

from __future__ import annotations

import dataclasses

import flax
from jax import sharding

from kvgraft_jax import errors
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.text import chat as chat_lib
from kvgraft_jax.text import tokenizer as tokenizer_lib


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Model:
    """A frozen model, ready to run.

    Attributes:
      config: what it is made of.
      params: immutable nested tree as in `gemma.parameters`, on the default device or spread over the mesh.
      tokenizer: None where the checkpoint has none.
      chat: its prompt template; None without a tokenizer.
      digest: SHA-256 (hex) of the parameters: equal weights in equal dtype give one digest, whatever the file format.
      dtype: "bfloat16" or "float32".
      uri: as it was given to `load_model`.
      source: where the weights came from: `hf:OWNER/NAME@COMMIT` for a model of the Hugging Face Hub, else the URI.
        Neither pin nor artifact holds it: equal files give equal ones, wherever they lie.
      mesh: devices over which it is spread; None is the default device.
    """

    config: config_lib.GemmaConfig
    params: flax.core.FrozenDict
    tokenizer: tokenizer_lib.Tokenizer | None
    chat: chat_lib.Chat | None
    digest: str
    dtype: str
    uri: str
    source: str
    mesh: sharding.Mesh | None = None

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end generation: those of the configuration, and those with which the chat ends a turn."""
        return tuple(dict.fromkeys((*self.config.stop_ids, *(self.chat.stop_ids if self.chat else ()))))

    def __repr__(self) -> str:
        return f"Model({errors.printable(self.uri)}, {self.dtype}, digest {self.digest[:16]})"
