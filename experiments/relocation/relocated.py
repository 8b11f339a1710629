"""A deposit moved to other positions, the context that is fresh there, and how the two differ.

Nothing of this is the engine's: it grafts at the own position and refuses every other. Slots are places here, and the
rotary tables say which positions they stand for.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from experiments.relocation import real_keys
import kvgraft_jax as kg
from kvgraft_jax.gemma import cache as cache_lib
from kvgraft_jax.gemma import rotary as rotary_lib
from kvgraft_jax.grafting import compare
from kvgraft_jax.grafting import graft as graft_lib
from kvgraft_jax.relocation import keys
from kvgraft_jax.runtime import run as run_lib

PREROTARY = "prerotary"
WAYS = (keys.REROTATE, keys.UNROTATE, PREROTARY)


@dataclasses.dataclass(frozen=True, eq=False)
class Context:
    """A document in a cache, and what followed it.

    Attributes:
      kv_bits: bit patterns of the document's keys and values, per layer: ([T, K, H], [T, K, H]), unsigned.
      logits_TxV: float32, after each token of the tail.
    """

    kv_bits: Sequence[tuple[np.ndarray, np.ndarray]]
    logits_TxV: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Difference:
    """Of two contexts of the same tokens.

    Attributes:
      bits_Lx2, elements_Lx2: bits that differ and elements with such a bit, of each layer's keys and values.
      kl_nats_T: KL divergence of the second from the first after each token of the tail, float64.
      argmax_agree: how many of these tokens are followed by the same one.
    """

    bits_Lx2: np.ndarray
    elements_Lx2: np.ndarray
    kl_nats_T: np.ndarray
    argmax_agree: int


def shifted(engine: kg.Engine, tables: rotary_lib.RotaryTables, shift: int) -> run_lib.Runner:
    """Moves the engine's runner: slot s at position s + shift, with the same programs and other rows of the table."""
    rows = slice(shift, shift + engine.capacity)
    moved = jax.tree.map(lambda table_SxR: table_SxR[rows], tables)
    return dataclasses.replace(engine.runner, tables=moved, prepare=None)


def fresh(engine: kg.Engine, runner: run_lib.Runner, document: Sequence[int], tail: Sequence[int]) -> Context:
    """Reads a text from slot 0 on with a runner."""
    return read_tail(runner, run_lib.run(runner, _empty(engine), document, 0).cache, tail, len(document))


def relocated(engine: kg.Engine, artifact: kg.Artifact, k_raw: Sequence[np.ndarray], shift: int, way: str) -> kg.State:
    """Returns the state of an artifact moved by `shift`, labelled inexact unless it stays where it was.

    At shift 0 stored keys are copied, by the engine's own graft; keys from before rotation are rotated there too.

    Exact: at shift 0, whatever the way. No claim elsewhere.

    Args:
      engine: where it goes; a runner of `shifted` by the same number reads on from it.
      artifact: every row of a text.
      k_raw: its keys before rotation, per layer [T, K, H].
      shift: d, 0 or more.
      way: one of `WAYS`.
    """
    state = engine.graft(artifact)
    if shift == 0 and way != PREROTARY:
        return state
    scheme, stacks = real_keys.SCHEMES[engine.model.dtype], []
    for stack in artifact.stacks:
        table = real_keys.make_table(engine.model.config.attention(stack.layers[0]), artifact.length + shift)
        kv_Lx2xSxKxH = np.array(stack.kv_Lx2xSxKxH)
        rows = kv_Lx2xSxKxH.shape[2:]
        position_T = np.repeat(np.asarray(stack.positions), rows[1])
        for layer, k_rot_SxKxH in zip(stack.layers, kv_Lx2xSxKxH[:, 0], strict=True):
            if way == PREROTARY:
                k_raw_TxH = jnp.asarray(k_raw[layer].reshape(-1, rows[2]))
                moved_TxH = keys.fresh_key(k_raw_TxH, table, position_T + shift, scheme)
            else:
                k_rot_TxH = jnp.asarray(k_rot_SxKxH.reshape(-1, rows[2]))
                moved_TxH = keys.moved_key(k_rot_TxH, table, position_T, position_T + shift, scheme, way)
            k_rot_SxKxH[:] = np.asarray(moved_TxH).reshape(rows)
        stacks.append(dataclasses.replace(stack, kv_Lx2xSxKxH=kv_Lx2xSxKxH))
    blocks = graft_lib.apply_graft(dataclasses.replace(artifact, stacks=tuple(stacks)), engine.step_config.kv_block)
    return dataclasses.replace(state, blocks=blocks, exact=shift == 0)


def read_on(engine: kg.Engine, runner: run_lib.Runner, state: kg.State, tail: Sequence[int]) -> Context:
    """Reads a tail after a state with a runner, in a cache of its own."""
    config, cache = engine.step_config, _empty(engine)
    for index, block in enumerate(state.blocks):
        cache = cache_lib.put_block(cache, block, np.int32(index), config.model, config.mesh)
    return read_tail(runner, cache, tail, state.length)


def read_tail(runner: run_lib.Runner, cache: cache_lib.Cache, tail: Sequence[int], start: int) -> Context:
    """Copies the document's rows out of a cache, then gives the cache away to a run over the tail from slot `start`."""

    def bits(array_JxSxKxH: jax.Array) -> np.ndarray:
        rows_TxKxH = np.array(array_JxSxKxH).reshape(-1, *array_JxSxKxH.shape[2:])[:start]
        return rows_TxKxH.view(np.uint16 if rows_TxKxH.itemsize == 2 else np.uint32)

    kv_bits = [(bits(layer.k_rot_JxSxKxH), bits(layer.v_JxSxKxH)) for layer in cache.layers]
    return Context(kv_bits, run_lib.score(runner, cache, tail, start))


def _empty(engine: kg.Engine) -> cache_lib.Cache:
    return engine.step_config.make_cache(engine.step_config.num_blocks(engine.capacity))


def difference(wanted: Context, found: Context) -> Difference:
    """Tells how `found` differs from `wanted`."""
    unequal = [
        [a ^ b for a, b in zip(*layers, strict=True)] for layers in zip(wanted.kv_bits, found.kv_bits, strict=True)
    ]
    logits = list(zip(wanted.logits_TxV, found.logits_TxV, strict=True))
    return Difference(
        bits_Lx2=np.array([[np.bitwise_count(bits).sum(dtype=np.int64) for bits in layer] for layer in unequal]),
        elements_Lx2=np.array([[np.count_nonzero(bits) for bits in layer] for layer in unequal]),
        kl_nats_T=np.array([compare.kl_nats(wanted_V, found_V) for wanted_V, found_V in logits]),
        argmax_agree=sum(bool(np.argmax(wanted_V) == np.argmax(found_V)) for wanted_V, found_V in logits),
    )
