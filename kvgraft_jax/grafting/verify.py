"""Verification: an artifact's rows and logits against those of its tokens, read again."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from kvgraft_jax.grafting import artifact as artifact_lib
from kvgraft_jax.grafting import differences, rows
from kvgraft_jax.runtime import state as state_lib


@dataclasses.dataclass(frozen=True)
class Verification:
    """What a second reading of an artifact's tokens showed; true where all was equal.

    Attributes:
      artifact_id: of the artifact.
      difference: the first row or logit that differs; None where every bit agrees.
    """

    artifact_id: str
    difference: str | None

    @property
    def equal(self) -> bool:
        """Returns whether every row and logit agrees in every bit."""
        return self.difference is None

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        found = "equal to a second reading" if self.equal else f"DIFFERENT from a second reading: {self.difference}"
        return f"artifact {self.artifact_id}: {found}"


def verify(artifact: artifact_lib.Artifact, state: state_lib.State) -> Verification:
    """Compares every row and logit of an artifact with those of a state that has just read the same tokens.

    Args:
      artifact: one that fits the state's model: `graft.plan_graft` was satisfied.
      state: of its tokens, with all rows.
    """
    own, dtype = [], state.step_config.jnp_dtype
    for index, stack in enumerate(artifact.stacks):
        kv_Lx2xSxKxH = rows.read_rows(state.blocks, index, stack.start, state.length, dtype)
        own.append(differences.Rows(stack.kind, stack.layers, stack.start, kv_Lx2xSxKxH))
    logits_V = np.asarray(jax.device_get(state.logits))
    difference = differences.first(artifact.stacks, artifact.logits_V, own, logits_V)
    return Verification(artifact.artifact_id, difference)
