"""The step, through which every token goes, compiled in a few widths, and the head that follows it.

A step runs T lanes, each with a token, its position and the sequence that it belongs to. Prefill, decode and the tail
after a graft all use it: wide steps read, narrow ones decode. A token's bits do not depend on the width, on the lane or
on who is in the other lanes. The head turns some lanes into logits; it is its own program because most steps of a
prefill need none.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
import dataclasses
import functools

import jax
from jax import sharding, stages
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
FEWEST_LANES, MOST_LANES = 2, 1 << 14
"""Of a step. A product with one row has another order of additions than all others."""

_HEAD_LANES = (2, 4, 8, 10, 16, 32)
_CANONICAL_LANES = 16  # Of the step whose text is the fingerprint of all.
_FIXED_COST_LANES = 24  # Reading the weights costs as much as the arithmetic of about this many lanes.


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """Everything from which the programs are built; equal configs share them.

    Attributes:
      model: the decoder.
      dtype: "bfloat16" or "float32".
      kv_block: slots per attention block.
      mesh: devices over which parameters and cache are spread; None is one device.
      width: the one width of every step where bits depend on it (`width_probe`); None where they do not.
    """

    model: config_lib.GemmaConfig
    dtype: str
    kv_block: int
    mesh: sharding.Mesh | None = None
    width: int | None = None

    def __post_init__(self):
        if self.dtype not in DTYPES:
            raise errors.ConfigError(f"dtype: got {self.dtype!r}, wanted one of {DTYPES}")
        if self.kv_block < 16 or self.kv_block % 16 or self.kv_block > MOST_LANES:
            raise errors.ConfigError(
                f"kv_block: got {errors.shown(self.kv_block)}, wanted a multiple of 16, at most {MOST_LANES}"
            )

    def num_blocks(self, num_tokens: int) -> int:
        """Returns the number of K/V blocks that hold this number of tokens."""
        return -(-num_tokens // self.kv_block)

    def make_cache(self, num_blocks: int) -> cache_lib.Cache:
        """Returns a zeroed cache of `num_blocks` blocks."""
        return cache_lib.make_cache(self.model, num_blocks, self.kv_block, self.jnp_dtype, self.mesh)

    @property
    def head_sizes(self) -> tuple[int, ...]:
        """Returns the numbers of lanes for which the head is compiled: one where bits depend on it."""
        return _HEAD_LANES if self.width is None else _HEAD_LANES[-1:]

    @property
    def jnp_dtype(self) -> jnp.dtype:
        """Returns the dtype as an object."""
        return jnp.dtype(self.dtype)


def plan_shapes(shapes: Sequence[int]) -> tuple[int, ...]:
    """Returns the widths of steps as a tuple.

    Raises:
      ConfigError: none, not in rising order, or one below 2 or above 16,384.
    """
    wanted = (
        f"wanted widths in rising order, each {FEWEST_LANES} to {MOST_LANES}, in a tuple or list of int such as "
        "(2, 10, 32, 256)"
    )
    if type(shapes) not in (tuple, list) or not shapes or any(type(width) is not int for width in shapes):
        raise errors.ConfigError(f"shapes: got {errors.shown(shapes)}, {wanted}")
    if list(shapes) != sorted(set(shapes)) or shapes[0] < FEWEST_LANES or shapes[-1] > MOST_LANES:
        raise errors.ConfigError(f"shapes: got {errors.shown(tuple(shapes))}, {wanted}")
    return tuple(shapes)


def choose_width(shapes: Sequence[int], num_tokens: int) -> int:
    """Returns the width that reads `num_tokens` tokens at the least cost a token, idle lanes and weights counted."""

    def cost(width: int) -> float:
        return (width + _FIXED_COST_LANES) / min(width, num_tokens)

    return min(shapes, key=cost)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepResult:
    """What a step leaves.

    Attributes:
      hidden_TxD: [T, D] after the final norm; rows of idle lanes mean nothing.
      cache: rows of all live lanes written.
    """

    hidden_TxD: jax.Array
    cache: cache_lib.Cache


class Programs:
    """The programs of one `StepConfig`, compiled per width and size of cache. Get them from `programs`.

    A step is several programs, called one after the other: the embedding, the layers, the final norm. Layers of one
    form share theirs, so compiling takes as long as two to four layers do. Inside `jax.jit` a step is one program,
    whose float32 bits can be others, because XLA then fuses across layers.

    Attributes:
      embed: (params, tables, lanes) -> `transformer.Embedded`.
      layers: the program of each layer: (its params, x_TxD, rotary, cache, vector_TxP, lanes) -> (x_TxD, cache); the
        arguments are those of `transformer.Block`, and the cache is donated.
      finish: (params, x_TxD) -> hidden_TxD.
      head: (params, hidden_TxD, lanes_B int32 [B]) -> B arrays float32 [V], the logits of these lanes, each in a
        buffer of its own.
    """

    def __init__(self, config: StepConfig):
        self.config = config
        self._model = transformer.Transformer(config.model, config.jnp_dtype, config.kv_block)
        self.head = jax.jit(self._head)
        self.embed, self.finish = jax.jit(self._embed), jax.jit(self._finish)
        self.layers = jit_layers(config, self._layer)
        self._fingerprint = functools.lru_cache(maxsize=8)(self._lowered_digests)

    def step(
        self, params: Mapping, tables: rotary_lib.RotaryTables, cache: cache_lib.Cache, lanes: cache_lib.Lanes
    ) -> StepResult:
        """Runs T lanes.

        Args:
          params: parameters of the decoder.
          tables: rotary tables that reach every position.
          cache: donated.
          lanes: on the device.
        """
        model, caches = self.config.model, list(cache.layers)
        embedded = self.embed(params, tables, lanes)
        x_TxD = embedded.x_TxD
        for index, run in enumerate(self.layers):
            owner, rotary = model.kv_layer(index), embedded.rotary[model.layer_kinds[index]]
            vector_TxP = embedded.vectors_TxP[index]
            x_TxD, caches[owner] = run(params[f"layer_{index}"], x_TxD, rotary, caches[owner], vector_TxP, lanes)
        return StepResult(self.finish(params, x_TxD), cache_lib.Cache(tuple(caches)))

    def _embed(self, params, tables, lanes) -> transformer.Embedded:
        embedded = self._model.apply({"params": params}, lanes, tables, method=self._model.embed)
        return jax.tree.map(self._keep_whole, embedded)

    def _layer(
        self, block: transformer.Block, params, x_TxD, rotary, cache, vector_TxP, lanes
    ) -> tuple[jax.Array, cache_lib.LayerCache]:
        x_TxD, cache = block.apply({"params": params}, x_TxD, rotary, cache, vector_TxP, lanes)
        rows = functools.partial(sharding_lib.keep_rows, self.config.mesh)
        return self._keep_whole(x_TxD), jax.tree.map(rows, cache)

    def _finish(self, params, x_TxD) -> jax.Array:
        return self._keep_whole(self._model.apply({"params": params}, x_TxD, method=self._model.finish))

    def _head(self, params, hidden_TxD, lanes_B) -> tuple[jax.Array, ...]:
        hidden_BxD = jnp.take(hidden_TxD, lanes_B, axis=0, mode="clip")
        logits_BxV = self._model.apply({"params": params}, hidden_BxD, method=self._model.head)
        return tuple(self._keep_whole(logits_BxV))

    def _keep_whole(self, array: jax.Array) -> jax.Array:
        return sharding_lib.keep_whole(self.config.mesh, array)

    @property
    def fingerprint(self) -> dict[str, str]:
        """SHA-256 of the StableHLO text of a whole step and of the head, lowered at one canonical width and cache.

        The text holds no file names and no weights, and widths and capacity of an engine are not in it, but for the
        width of a `StepConfig` that names one. It is made again when options of jax have changed that may enter it.
        """
        return self._fingerprint(tracing_context())

    def _lowered_digests(self, _: Hashable) -> dict[str, str]:
        config, mesh, dtype = self.config, self.config.mesh, self.config.jnp_dtype
        num_slots = 4 * config.kv_block

        def table(attention: config_lib.AttentionConfig) -> rotary_lib.RotaryTable:
            rows_SxR = _abstract((num_slots, attention.head_dim // 2), dtype, sharding_lib.whole(mesh))
            return rotary_lib.RotaryTable(rows_SxR, rows_SxR)

        def leaf(parameter: parameters_lib.Parameter) -> parameters_lib.Leaf:
            shapes = parameter.chunk_shapes
            places = [sharding_lib.of_parameter(mesh, parameter, shape) for shape in shapes]
            return parameter.leaf(
                [_abstract(*given) for given in zip(shapes, [dtype] * len(shapes), places, strict=True)]
            )

        params = parameters_lib.nest({p.path: leaf(p) for p in parameters_lib.parameters(config.model)})
        tables = rotary_lib.RotaryTables(table(config.model.sliding), table(config.model.full))
        cache = jax.tree.map(
            lambda rows: _abstract(rows.shape, rows.dtype, sharding_lib.of_rows(mesh, rows.shape)),
            jax.eval_shape(lambda: cache_lib.make_cache(config.model, 4, config.kv_block, dtype)),
        )
        place, width = sharding_lib.whole(mesh), config.width or _CANONICAL_LANES
        lanes = jax.tree.map(lambda given: _abstract(given.shape, given.dtype, place), lay_out((), ((0,),), width, 1))
        hidden_TxD = _abstract((width, config.model.embed_dim), dtype, place)
        lanes_B = _abstract((config.head_sizes[0],), jnp.int32, place)
        return {
            "step": text_digest(jax.jit(self.step).lower(params, tables, cache, lanes)),
            "head": text_digest(self.head.lower(params, hidden_TxD, lanes_B)),
        }


def jit_layers(config: StepConfig, run: Callable) -> list[Callable]:
    """Returns the program of each layer; layers of one form share theirs.

    Args:
      config: of the step.
      run: (block, params, x_TxD, rotary, cache, vector_TxP, lanes) to whatever the program gives; donates the cache.
    """
    model, found = config.model, {}
    blocks = [transformer.Block(model, index, config.jnp_dtype, config.kv_block) for index in range(model.num_layers)]
    for block in blocks:
        found.setdefault(block.form, jax.jit(functools.partial(run, block), donate_argnames="cache"))
    return [found[block.form] for block in blocks]


@functools.lru_cache(maxsize=16)
def programs(config: StepConfig) -> Programs:
    """Returns the programs of `config`, each compiled at most once per process, width and size of cache."""
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


def _abstract(shape: tuple[int, ...], dtype: jnp.dtype, place: sharding.Sharding | None = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)


def text_digest(lowered: stages.Lowered) -> str:
    """Returns the SHA-256 (hex) of a program's StableHLO text, in which no file names and no values stand."""
    return digest.bytes_digest(lowered.as_text().encode())


@dataclasses.dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one sequence, in one step.

    Attributes:
      row: of the table.
      start: position of the first.
      tokens: their ids.
    """

    row: int
    start: int
    tokens: tuple[int, ...]


def lay_out(
    pieces: Sequence[Piece],
    table: Sequence[Sequence[int]],
    width: int,
    kv_block: int,
    *,
    idle_tokens: Sequence[int] = (),
    one_width: bool = False,
) -> cache_lib.Lanes:
    """Lays pieces out in the lanes of a step, one after the other: what the program reads, on the host.

    Args:
      pieces: of different rows, together at most `width` tokens.
      table: cache blocks of every row, all of one length.
      width: lanes of the step.
      kv_block: slots of a block.
      idle_tokens: what the idle lanes hold, instead of zeros.
      one_width: where bits depend on the number of lanes, so that a lane attends in one company only: with all lanes
        of the step or, in a step of few lanes, by itself.
    """
    tokens_T, positions_T, rows_T, live_T, singles_T = (np.zeros(width, np.int32) for _ in range(5))
    writes_Tx4, pieces_Tx2 = np.zeros((width, 4), np.int32), np.zeros((width, 2), np.int32)
    num_writes = num_singles = num_pieces = lane = 0
    for piece in pieces:
        count = len(piece.tokens)
        lanes = slice(lane, lane + count)
        tokens_T[lanes], rows_T[lanes], live_T[lanes] = piece.tokens, piece.row, 1
        positions_T[lanes] = np.arange(piece.start, piece.start + count)
        if width < cache_lib.FEWEST_FOR_PIECES or (count == 1 and not one_width):
            singles_T[num_singles : num_singles + count] = range(lane, lane + count)
            num_singles += count
        else:
            pieces_Tx2[num_pieces] = lane, count
            num_pieces += 1
        position, stop = piece.start, piece.start + count
        while position < stop:
            block, slot = divmod(position, kv_block)
            length = min(kv_block - slot, stop - position)
            writes_Tx4[num_writes] = table[piece.row][block], slot, lane + position - piece.start, length
            num_writes, position = num_writes + 1, position + length
        lane += count
    tokens_T[lane : lane + len(idle_tokens)] = idle_tokens
    counts_3 = np.array([num_writes, num_singles, num_pieces], np.int32)
    table_BxJ = np.asarray(table, np.int32)
    return cache_lib.Lanes(
        tokens_T, positions_T, rows_T, live_T, table_BxJ, writes_Tx4, singles_T, pieces_Tx2, counts_3
    )


def cut(token_ids: Sequence[int], start: int, shapes: Sequence[int]) -> Iterator[tuple[int, Piece]]:
    """Cuts tokens at positions `start` and following into steps: the width of each, and what it reads."""
    done = 0
    while done < len(token_ids):
        width = choose_width(shapes, len(token_ids) - done)
        yield width, Piece(0, start + done, tuple(token_ids[done : done + width]))
        done += width


def head_lanes(lanes: Sequence[int], sizes: Sequence[int] = _HEAD_LANES) -> Iterator[np.ndarray]:
    """Cuts lanes into calls of the head, each of a number of lanes that has a program; the last is repeated to fill."""
    for first in range(0, len(lanes), sizes[-1]):
        some = list(lanes[first : first + sizes[-1]])
        size = next(size for size in sizes if size >= len(some))
        yield np.array(some + some[-1:] * (size - len(some)), np.int32)
