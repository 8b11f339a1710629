"""Operations that move a key unchanged, or seem to: which of the 65,536 bfloat16 patterns come out different."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from kvgraft_jax import determinism
from kvgraft_jax.gemma import rotary as rotary_lib

determinism.configure()


@dataclasses.dataclass(frozen=True)
class Transport:
    """One operation.

    Attributes:
      name: for tables.
      is_copy: whether it only moves bits, so that every finite pattern must survive.
      apply: bfloat16 [M] to bfloat16 [M].
    """

    name: str
    is_copy: bool
    apply: Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Changes:
    """How many patterns an operation changes.

    Attributes:
      nans, subnormals: of 254 each.
      negative_zero: of 1.
      others: of the 65,027 that are left: 0, normal numbers and infinities.
    """

    nans: int
    subnormals: int
    negative_zero: int
    others: int


def patterns() -> np.ndarray:
    """Returns every bfloat16 pattern once, in the order of their bits."""
    return np.arange(1 << 16, dtype=np.uint16).view(jnp.bfloat16)


def count_changes(transport: Transport) -> Changes:
    """Runs the operation on every pattern. Exact: exhaustive."""
    before = np.arange(1 << 16, dtype=np.uint16)
    after = np.asarray(transport.apply(jnp.asarray(before.view(jnp.bfloat16)))).view(np.uint16)
    changed = before != after
    magnitude = before & 0x7FFF
    is_nan, is_subnormal = magnitude > 0x7F80, (magnitude > 0) & (magnitude < 0x80)
    is_negative_zero = before == 0x8000
    others = ~(is_nan | is_subnormal | is_negative_zero)
    kinds = (is_nan, is_subnormal, is_negative_zero, others)
    return Changes(*(int((changed & kind).sum()) for kind in kinds))


# Whatever is an input where keys are moved in earnest is an input here, or the compiler would fold it away.
_INDEX = np.arange(1 << 16, dtype=np.int32)
_ONE, _ZERO = (np.full((1, 1), value, jnp.bfloat16) for value in (1, 0))


def _through_bits(x_M: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x_M, jnp.uint16), x_M.dtype)


def _updated(x_M: jax.Array, start: jax.Array) -> jax.Array:
    buffer = jnp.zeros(2 * x_M.shape[0], x_M.dtype)
    return lax.dynamic_slice(lax.dynamic_update_slice(buffer, x_M, (start,)), (start,), x_M.shape)


def _updated_as_bits(x_M: jax.Array, start: jax.Array) -> jax.Array:
    bits_M = lax.bitcast_convert_type(x_M, jnp.uint16)
    return lax.bitcast_convert_type(_updated(bits_M, start), x_M.dtype)


def _concatenated(x_M: jax.Array, other_M: jax.Array) -> jax.Array:
    return jnp.concatenate([x_M, other_M])


def _widen(x_M: jax.Array) -> jax.Array:
    return x_M.astype(jnp.float32)


def _narrow(x_M: jax.Array) -> jax.Array:
    return x_M.astype(jnp.bfloat16)


def _rotated(x_M: jax.Array, cos_TxR: jax.Array, sin_TxR: jax.Array) -> jax.Array:
    """Rotates every pattern as the engine does, with 1 as its partner."""
    pairs_TxNxH = jnp.stack([x_M, jnp.ones_like(x_M)], axis=1)[None]
    return rotary_lib.rotate(pairs_TxNxH, cos_TxR, sin_TxR)[0, :, 0]


def _blended(x_M: jax.Array, mask_M: jax.Array) -> jax.Array:
    return x_M * mask_M + jnp.zeros_like(x_M) * (jnp.ones_like(mask_M) - mask_M)


def _picked(x_M: jax.Array, one_hot: jax.Array) -> jax.Array:
    """Selects rows of 256 by a product with rows of the identity."""
    return jnp.dot(one_hot, x_M.reshape(-1, 256)).reshape(-1)


_jit_widen, _jit_narrow, _jit_concatenated = jax.jit(_widen), jax.jit(_narrow), jax.jit(_concatenated)


def _with(function: Callable[..., jax.Array], *inputs: np.ndarray) -> Callable[[jax.Array], jax.Array]:
    compiled = jax.jit(function)
    return lambda x_M: compiled(x_M, *inputs)


_ONES = np.ones(1 << 16, jnp.bfloat16)
TRANSPORTS = (
    Transport("device put and get", True, lambda x_M: jax.device_put(np.asarray(x_M))),
    Transport("jitted identity", True, _with(lambda x_M: x_M)),
    Transport("bits as uint16", True, _with(_through_bits)),
    Transport("where(mask)", True, _with(lambda x_M, mask_M: jnp.where(mask_M, x_M, jnp.zeros_like(x_M)), _ONES == 1)),
    Transport("dynamic_update_slice of uint16", True, _with(_updated_as_bits, np.int32(5))),
    Transport("dynamic_update_slice", True, _with(_updated, np.int32(5))),
    Transport("scatter", True, _with(lambda x_M, index_M: jnp.zeros_like(x_M).at[index_M].set(x_M), _INDEX)),
    Transport("gather", True, _with(lambda x_M, index_M: jnp.take(x_M, index_M, mode="clip"), _INDEX)),
    Transport("concatenate", True, lambda x_M: _jit_concatenated(x_M, _ONES)[: x_M.shape[0]]),
    Transport("to float32 and back", True, lambda x_M: _jit_narrow(_jit_widen(x_M))),
    Transport("reduce_precision", True, _with(lambda x_M: _narrow(lax.reduce_precision(_widen(x_M), 8, 7)))),
    Transport("product with 1", False, _with(lambda x_M, one_M: x_M * one_M, _ONES)),
    Transport("rotation by 0", False, _with(_rotated, _ONE, _ZERO)),
    Transport("blend by mask", False, _with(_blended, _ONES)),
    Transport("product with one-hot rows", False, _with(_picked, np.eye(256, dtype=jnp.bfloat16))),
    Transport("through float16", False, _with(lambda x_M: _narrow(x_M.astype(jnp.float16)))),
)
