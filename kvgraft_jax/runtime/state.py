"""The state of a context: its K/V blocks, its tokens and the logits of the next one."""

from __future__ import annotations

import dataclasses

import jax

from kvgraft_jax.gemma import cache as cache_lib
from kvgraft_jax.runtime import step as step_lib


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class State:
    """An immutable context. Nothing that the engine does with a state changes it.

    A state that continues another one shares with it the blocks that both have in common.

    Attributes:
      blocks: K/V of the tokens, a block for every `kv_block` positions. Slots 0..length-1 of full layers and
        first_row..length-1 of sliding layers are valid.
      token_ids: all tokens, from position 0.
      logits: float32 [V], of the token after the last.
      step_config: what the programs that made it were built from.
      weights: content digest of the weights that made it.
      exact: False after the graft of an artifact that another machine or program made; it stays False.
      first_row: oldest valid row of the sliding layers; above 0 after the graft of an artifact without the older ones.
    """

    blocks: tuple[cache_lib.CacheBlock, ...]
    token_ids: tuple[int, ...]
    logits: jax.Array
    step_config: step_lib.StepConfig
    weights: str
    exact: bool = True
    first_row: int = 0

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.token_ids)

    def __repr__(self) -> str:
        made = f"{self.step_config.model.name}, {self.step_config.dtype}{'' if self.exact else ', inexact'}"
        return f"State({self.length} tokens, {made})"
