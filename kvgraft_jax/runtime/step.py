"""The step: one compiled program of fixed width through which every token goes, and the head that follows it.

A step runs W lanes at consecutive positions, of which the first `count` hold tokens. Prefill, decode and the tail
after a graft all use the same executable, so a token's bits do not depend on how its prompt was cut. The head turns a
fixed number of lanes into logits; it is its own program because most steps of a prefill need none.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
import dataclasses
import functools

import jax
from jax import sharding
import jax.numpy as jnp
import numpy as np

from kvgraft_jax import digest, errors
from kvgraft_jax.gemma import cache as cache_lib
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma import parameters as parameters_lib
from kvgraft_jax.gemma import rotary as rotary_lib
from kvgraft_jax.gemma import sharding as sharding_lib
from kvgraft_jax.gemma import transformer

DTYPES = ("bfloat16", "float32")

_MAX_LANES = 1 << 14  # Of a step or an attention block: far above any useful size.


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """Everything from which the two programs are built; equal configs share them.

    Attributes:
      model: the decoder.
      dtype: "bfloat16" or "float32".
      width: W, lanes of a step.
      kv_block: slots per attention block.
      head_lanes: lanes of a head call; 2 or more (a product with one row takes a slow path on CPU).
      mesh: devices over which parameters and cache are spread; None is one device.
    """

    model: config_lib.GemmaConfig
    dtype: str
    width: int
    kv_block: int
    head_lanes: int = 2
    mesh: sharding.Mesh | None = None

    def __post_init__(self):
        if self.dtype not in DTYPES:
            raise errors.ConfigError(f"dtype: got {self.dtype!r}, wanted one of {DTYPES}")
        if self.width < self.head_lanes:
            raise errors.ConfigError(f"width: got {self.width}, wanted {self.head_lanes} or more")
        if self.kv_block < 16 or self.kv_block % 16:
            raise errors.ConfigError(f"kv_block: got {errors.shown(self.kv_block)}, wanted a multiple of 16")
        for name, size in (("width", self.width), ("kv_block", self.kv_block)):
            if size > _MAX_LANES:
                raise errors.ConfigError(f"{name}: got {errors.shown(size)}, wanted at most {_MAX_LANES}")
        if self.head_lanes < 2:
            raise errors.ConfigError(f"head_lanes: got {self.head_lanes}, wanted 2 or more")

    def num_slots(self, capacity: int) -> int:
        """Returns S, the slots of a cache for `capacity` tokens: a step that begins near the end writes W rows."""
        return capacity + self.width

    def make_cache(self, capacity: int) -> cache_lib.Cache:
        """Returns a zeroed cache for `capacity` tokens."""
        return cache_lib.make_cache(self.model, self.num_slots(capacity), self.jnp_dtype, self.mesh)

    @property
    def jnp_dtype(self) -> jnp.dtype:
        """Returns the dtype as an object."""
        return jnp.dtype(self.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepResult:
    """What a step leaves.

    Attributes:
      hidden_TxD: [W, D] after the final norm; rows of idle lanes mean nothing.
      cache: rows start..start+W-1 written.
    """

    hidden_TxD: jax.Array
    cache: cache_lib.Cache


class Programs:
    """The jitted step and head of one `StepConfig`. Get them from `programs`, which builds each once per process.

    Attributes:
      step: (params, tables, cache, tokens_T int32 [W], start int32, count int32) -> StepResult; the cache is donated.
      head: (params, hidden_TxD [W, D], lane int32) -> head_lanes arrays float32 [V], the logits of the lanes from
        `lane` on, each in a buffer of its own; those past the last lane repeat it.
    """

    def __init__(self, config: StepConfig):
        self.config = config
        self._model = transformer.Transformer(config.model, config.jnp_dtype, config.kv_block)
        self.step = jax.jit(self._step, donate_argnames="cache")
        self.head = jax.jit(self._head)
        self._fingerprint = functools.lru_cache(maxsize=8)(self._lowered_digests)

    def _step(self, params, tables, cache, tokens_T, start, count) -> StepResult:
        hidden_TxD, cache = self._model.apply({"params": params}, tokens_T, tables, cache, start, count)
        mesh = self.config.mesh
        rows = functools.partial(sharding_lib.keep_rows, mesh)
        return StepResult(sharding_lib.keep_whole(mesh, hidden_TxD), jax.tree.map(rows, cache))

    def _head(self, params, hidden_TxD, lane) -> tuple[jax.Array, ...]:
        lane_B = lane + jnp.arange(self.config.head_lanes, dtype=jnp.int32)
        hidden_BxD = jnp.take(hidden_TxD, lane_B, axis=0, mode="clip")
        logits_BxV = self._model.apply({"params": params}, hidden_BxD, method=self._model.head)
        return tuple(sharding_lib.keep_whole(self.config.mesh, logits_BxV))

    @property
    def fingerprint(self) -> dict[str, str]:
        """SHA-256 of the StableHLO text of both programs, lowered at one canonical capacity.

        The text holds no file names and no weights, and the capacity of an engine is not in it. It is made again when
        options of jax have changed that may enter it.
        """
        return self._fingerprint(tracing_context())

    def _lowered_digests(self, _: Hashable) -> dict[str, str]:
        config, mesh, dtype = self.config, self.config.mesh, self.config.jnp_dtype
        num_slots = config.num_slots(4 * config.kv_block)

        def table(attention: config_lib.AttentionConfig) -> rotary_lib.RotaryTable:
            rows_SxR = _abstract((num_slots, attention.head_dim // 2), dtype, sharding_lib.whole(mesh))
            return rotary_lib.RotaryTable(rows_SxR, rows_SxR)

        parameters = parameters_lib.parameters(config.model)
        params = parameters_lib.nest(
            {p.path: _abstract(p.shape, dtype, sharding_lib.of_parameter(mesh, p)) for p in parameters}
        )
        tables = rotary_lib.RotaryTables(table(config.model.sliding), table(config.model.full))
        cache = jax.tree.map(
            lambda rows: _abstract(rows.shape, rows.dtype, sharding_lib.of_rows(mesh, rows.shape)),
            jax.eval_shape(lambda: cache_lib.make_cache(config.model, num_slots, dtype)),
        )
        scalar = _abstract((), jnp.int32, sharding_lib.whole(mesh))
        tokens_T = _abstract((config.width,), jnp.int32, sharding_lib.whole(mesh))
        hidden_TxD = _abstract((config.width, config.model.embed_dim), dtype, sharding_lib.whole(mesh))
        return {
            "step": _text_digest(self.step.lower(params, tables, cache, tokens_T, scalar, scalar)),
            "head": _text_digest(self.head.lower(params, hidden_TxD, scalar)),
        }


@functools.lru_cache(maxsize=16)
def programs(config: StepConfig) -> Programs:
    """Returns the step and head of `config`, compiled at most once per process and capacity."""
    return Programs(config)


def tracing_context() -> Hashable:
    """Returns what changes whenever options of jax do on which traced, lowered or compiled programs may depend.

    jit traces a function anew exactly if such an option has changed, including one that a context manager sets for only
    this thread. The traced form of a function that does nothing is therefore one object as long as none has.
    """
    traced = _nothing.trace(jax.ShapeDtypeStruct((), jnp.float32)).jaxpr
    return _Identity(traced), repr(jax.config.values)


@jax.jit
def _nothing(x: jax.Array) -> jax.Array:
    return x


@dataclasses.dataclass(frozen=True, eq=False)
class _Identity:
    """An object that is equal to itself alone, and lives as long as it is compared."""

    held: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)


def copy_cache(cache: cache_lib.Cache) -> cache_lib.Cache:
    """Copies a cache into buffers of its own, so that a step may take (and destroy) it while the original lives on."""
    return jax.tree.map(jnp.copy, cache)


def _abstract(shape: tuple[int, ...], dtype: jnp.dtype, place: sharding.Sharding | None = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)


def _text_digest(lowered) -> str:
    return digest.bytes_digest(lowered.as_text().encode())


@dataclasses.dataclass(frozen=True, eq=False)
class StepInput:
    """What one step reads, on the host.

    Attributes:
      tokens_T: int32 [W]; idle lanes hold zeros.
      start: position of the first lane.
      count: lanes that hold tokens.
    """

    tokens_T: np.ndarray
    start: np.int32
    count: np.int32


def cut(token_ids: Sequence[int], start: int, width: int) -> Iterator[StepInput]:
    """Cuts tokens at positions `start` and following into steps of `width` lanes, the last of them partly idle."""
    for first in range(0, len(token_ids), width):
        chunk = token_ids[first : first + width]
        tokens_T = np.zeros(width, np.int32)
        tokens_T[: len(chunk)] = chunk
        yield StepInput(tokens_T, np.int32(start + first), np.int32(len(chunk)))
