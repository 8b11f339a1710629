"""Own-position graft: an artifact's rows are copied into a fresh cache at the positions where they were computed."""

from __future__ import annotations

import jax
from jax import sharding

from kvgraft_jax import errors
from kvgraft_jax import pin as pin_lib
from kvgraft_jax.gemma import cache as cache_lib
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma import sharding as sharding_lib
from kvgraft_jax.grafting import artifact as artifact_lib
from kvgraft_jax.grafting import capture, rows
from kvgraft_jax.runtime import run as run_lib
from kvgraft_jax.runtime import state as state_lib
from kvgraft_jax.runtime import step as step_lib

MACHINE_FIELDS = (
    "cpu",
    "device_kind",
    "head_lanes",  # Of older pins.
    "jax",
    "jaxlib",
    "kv_block",
    "library",
    "mesh",
    "platform",
    "program",
    "rotary_tables",
    "schema",
    "self_test",
    "width",
    "xla_flags",
)
"""Pin fields in which an artifact may differ when an inexact graft is asked for: the machine and the program, never
the model, its weights, its dtype or its tokens."""


def plan_graft(
    artifact: artifact_lib.Artifact,
    pin: pin_lib.Pin,
    config: step_lib.StepConfig,
    capacity: int,
    *,
    position: int = 0,
    allow_inexact: bool = False,
) -> bool:
    """Checks that an artifact may be grafted, before anything is allocated.

    Args:
      artifact: what to graft.
      pin: of the engine.
      config: what the engine's programs are built from.
      capacity: tokens that the engine's cache holds.
      position: where the artifact's first token shall stand.
      allow_inexact: accept differences in `MACHINE_FIELDS`.

    Returns:
      Whether the graft is bit-exact.

    Raises:
      PinMismatch: made under another pin; names every field that differs and is not allowed to.
      InputError: a position other than the artifact's own.
      CapacityError: more tokens than slots.
      IntegrityError: tokens, layers, rows or shapes that this model does not have.
      WindowError: the sliding rows do not reach back as far as the next token sees.
    """
    if not isinstance(artifact, artifact_lib.Artifact):
        raise errors.InputError(f"artifact: {errors.mistaken(artifact, 'Artifact')}")
    if type(allow_inexact) is not bool:
        raise errors.InputError(f"allow_inexact: got {errors.shown(allow_inexact)}, wanted True or False")
    differences = pin_lib.diff(pin, artifact.pin)
    refused = [d for d in differences if not (allow_inexact and d.field.split(".")[0] in MACHINE_FIELDS)]
    if refused:
        raise errors.PinMismatch(artifact.artifact_id, refused)
    if type(position) is not int or position != 0:
        raise errors.InputError(
            f"position: got {errors.shown(position)}, wanted 0: keys are stored after rotary encoding, so a graft "
            "anywhere but at its own position is not bit-exact and is refused"
        )
    run_lib.plan_capacity(0, artifact.length, capacity, "of the artifact")
    model = config.model
    if max(artifact.token_ids) >= model.vocab_size:
        raise _foreign(artifact, "token_ids", f"got {max(artifact.token_ids)}, wanted 0 to {model.vocab_size - 1}")
    if len(artifact.logits_V) != model.vocab_size:
        raise _foreign(artifact, "logits", f"{len(artifact.logits_V)} entries, wanted {model.vocab_size}")
    stacks = {stack.kind: stack for stack in artifact.stacks}
    for kind in model.kinds:
        stack = stacks.pop(kind.name, None)
        if stack is None or stack.layers != kind.layers:
            held = stack.layers if stack else ()
            raise _foreign(artifact, kind.name, f"layers {held}, wanted {kind.layers}")
        heads = (kind.attention.num_kv_heads, kind.attention.head_dim)
        wanted = (len(kind.layers), 2, artifact.length - stack.start, *heads)
        if stack.shape != wanted or stack.dtype != config.dtype:
            raise _foreign(
                artifact, kind.name, f"{stack.dtype}{list(stack.shape)}, wanted {config.dtype}{list(wanted)}"
            )
        needed = capture.first_visible_row(kind.attention, artifact.length)
        if stack.start > needed:
            raise errors.WindowError(
                f"artifact {artifact.artifact_id}: {kind.name} layers begin at row {stack.start}, but the next token "
                f"sees rows from {needed} on; deposit the text again"
            )
    for name, stack in stacks.items():
        raise _foreign(artifact, name, f"layers {stack.layers}, wanted none")
    return not differences


def apply_graft(
    artifact: artifact_lib.Artifact, kv_block: int, mesh: sharding.Mesh | None = None
) -> tuple[cache_lib.CacheBlock, ...]:
    """Returns blocks that hold the artifact's rows at their own positions.

    Exact: bit-exact copy of every row.
    """
    kinds = [rows.place_rows(stack.kv_Lx2xSxKxH, stack.start, kv_block, mesh) for stack in artifact.stacks]
    return tuple(cache_lib.CacheBlock(block) for block in zip(*kinds, strict=True))


def graft(
    artifact: artifact_lib.Artifact, config: step_lib.StepConfig, weights: str, *, exact: bool
) -> state_lib.State:
    """Restores the captured state in a fresh context; `exact` is what `plan_graft` returned."""
    sliding_starts = [stack.start for stack in artifact.stacks if stack.kind == config_lib.SLIDING]
    return state_lib.State(
        blocks=apply_graft(artifact, config.kv_block, config.mesh),
        token_ids=artifact.token_ids,
        logits=jax.device_put(artifact.logits_V, sharding_lib.whole(config.mesh)),
        step_config=config,
        weights=weights,
        exact=exact,
        first_row=max(sliding_starts, default=0),
    )


def _foreign(artifact: artifact_lib.Artifact, field: str, reason: str) -> errors.IntegrityError:
    return errors.IntegrityError(artifact.artifact_id, field, reason)
