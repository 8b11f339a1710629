"""Capture: a state becomes an artifact, the rows of its layers copied to the host bit by bit."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses

import jax
import numpy as np

from kvgraft_jax import errors
from kvgraft_jax import pin as pin_lib
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.grafting import artifact as artifact_lib
from kvgraft_jax.grafting import manifest, rows
from kvgraft_jax.runtime import state as state_lib


@dataclasses.dataclass(frozen=True)
class CapturePlan:
    """Which rows of which layers a capture takes: rows start..length-1 of `layers`, per attention kind."""

    kind: str
    layers: tuple[int, ...]
    start: int


def plan_capture(state: state_lib.State, policy: str) -> tuple[CapturePlan, ...]:
    """Returns the rows that a policy keeps of a state.

    "visible" keeps what the next token can still see: the last window - 1 rows of sliding layers, all rows of full
    ones. "full" keeps every row.

    Raises:
      ConfigError: unknown policy.
      WindowError: "full" of a state whose older sliding rows were never restored.
    """
    if policy not in manifest.POLICIES:
        raise errors.ConfigError(f"policy: got {policy!r}, wanted one of {manifest.POLICIES}")
    if policy == manifest.ALL_ROWS and state.first_row:
        raise errors.WindowError(
            f"policy 'full' needs rows 0 to {state.length - 1} of every sliding layer, but this state was grafted from "
            f"an artifact that begins at row {state.first_row} there; capture 'visible', or prefill the text again"
        )
    plans = []
    for kind in state.step_config.model.kinds:
        start = 0 if policy == manifest.ALL_ROWS else first_visible_row(kind.attention, state.length)
        plans.append(CapturePlan(kind.name, kind.layers, start))
    return tuple(plans)


def first_visible_row(attention: config_lib.AttentionConfig, length: int) -> int:
    """Returns the oldest row that the token at position `length` can see."""
    return 0 if attention.window is None else max(0, length - (attention.window - 1))


def read_stacks(state: state_lib.State, policy: str) -> tuple[artifact_lib.KVStack, ...]:
    """Copies the rows that a policy keeps to the host.

    Exact: bit-exact.

    Raises:
      CaptureError: a row holds NaN or an infinity; and what `plan_capture` raises.
    """
    stacks, dtype = [], state.step_config.jnp_dtype
    for index, plan in enumerate(plan_capture(state, policy)):
        kv_Lx2xSxKxH = rows.read_rows(state.blocks, index, plan.start, state.length, dtype)
        stacks.append(artifact_lib.KVStack(plan.kind, plan.layers, plan.start, kv_Lx2xSxKxH))
    return tuple(stacks)


def capture(
    state: state_lib.State,
    pin: pin_lib.Pin,
    provenance: Mapping[str, str | int],
    *,
    policy: str = manifest.VISIBLE_ROWS,
) -> artifact_lib.Artifact:
    """Captures a state as an artifact.

    Args:
      state: what to deposit.
      pin: of the engine that made it.
      provenance: flat notes: who, why, digest of the source.
      policy: one of `manifest.POLICIES`.

    Returns:
      Token ids, K/V rows, next-token logits, pin and provenance, on the host.

    Raises:
      CaptureError: the state is not exact, so the pin does not tell what made its rows; or a row or logit is NaN or
        infinite.
      WindowError: see `plan_capture`.
    """
    if not state.exact:
        raise errors.CaptureError(
            "this state was grafted from an artifact of another machine or program, so its rows are not what this "
            "engine's pin says; prefill the text here and capture that"
        )
    return artifact_lib.Artifact(
        policy, state.token_ids, read_stacks(state, policy), np.array(jax.device_get(state.logits)), pin, provenance
    )
