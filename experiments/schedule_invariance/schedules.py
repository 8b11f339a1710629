"""Schedules: ways to bring one text into a cache that all must leave the same bits, drawn at random and carried out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import pathlib

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

import kvgraft_jax as kg
from kvgraft_jax import digest, errors
from kvgraft_jax.gemma import cache as cache_lib
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.grafting import compare, rows
from kvgraft_jax.grafting import manifest as manifest_lib
from kvgraft_jax.runtime import run as run_lib
from kvgraft_jax.runtime import step as step_lib

ZERO, BITS, HUGE, NAN = "zero", "random bits", "huge", "NaN"
GARBAGE = (ZERO, BITS, HUGE, NAN)
MEMORY, DISK = "memory", "disk"
SINGLES_EVERY = 10

_MAX_GRAFTS = 2


@dataclasses.dataclass(frozen=True)
class Leg:
    """A stretch of a schedule in one context.

    Attributes:
      capacity: of the context's engine.
      pieces: numbers of tokens, each read from a step of its own on; may be empty after a graft.
    """

    capacity: int
    pieces: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How one text is read.

    Attributes:
      legs: between two of them the context is captured and grafted into a fresh one.
      policy: of these captures.
      carrier: what the artifacts go through, memory or disk.
      garbage: what lies in the slots that hold no token.
      random_idle_lanes: idle lanes hold random tokens, else zeros.
      shuffled: widths of steps are drawn from the engine's shapes, and places of blocks from the whole cache; else the
        widths are those that the engine takes, and the blocks lie in order.
      seed: of tokens, widths, places and garbage.
    """

    legs: tuple[Leg, ...]
    policy: str = manifest_lib.VISIBLE_ROWS
    carrier: str = MEMORY
    garbage: str = ZERO
    random_idle_lanes: bool = False
    shuffled: bool = False
    seed: int = 0

    @property
    def num_grafts(self) -> int:
        """Grafts on the way."""
        return len(self.legs) - 1

    @property
    def trailing_singles(self) -> int:
        """Tokens at the end that are read one at a time."""
        pieces = [piece for leg in self.legs for piece in leg.pieces]
        return next((number for number, piece in enumerate(reversed(pieces)) if piece != 1), len(pieces))


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
    """What a schedule left.

    Attributes:
      sha256: of the visible K/V rows and of the logits at every checkpoint; "refused: ..." where there are none.
      full_sha256: of all K/V rows; "" where a graft brought only the visible ones.
      logits_sha256: of the logits after each checkpoint, in order of position.
      state: the context at the end; None where it was refused.
    """

    sha256: str
    full_sha256: str
    logits_sha256: tuple[str, ...]
    state: kg.State | None


class Checkpoints:
    """Hashes the logits after chosen positions while a text is being read."""

    def __init__(self, positions: Sequence[int]):
        self._positions = frozenset(positions)
        self._found: dict[int, jax.Array] = {}

    def look(self, runner: run_lib.Runner, hidden_TxD: jax.Array, piece: step_lib.Piece) -> None:
        """Takes the logits of the chosen ones among the positions that a step read, from lane 0 on."""
        for position in self._positions.intersection(range(piece.start, piece.start + len(piece.tokens))):
            (self._found[position],) = runner.heads(hidden_TxD, [position - piece.start])

    def copy(self) -> Checkpoints:
        """Returns a copy with the same findings that goes its own way from here."""
        copied = Checkpoints(tuple(self._positions))
        copied._found.update(self._found)
        return copied

    def hashes(self) -> tuple[str, ...]:
        """Returns the SHA-256 (hex) of each, in order of position."""
        return tuple(compare.logits_sha256(np.asarray(logits_V)) for _, logits_V in sorted(self._found.items()))


def draw(
    number: int, seed: int, num_tokens: int, shapes: Sequence[int], capacities: Sequence[int], single_steps: int
) -> Schedule:
    """Draws schedule `number`: 0 is the plain one; every tenth ends in `single_steps` or more single tokens."""
    if number == 0:
        return Schedule((Leg(capacities[0], (num_tokens,)),))
    rng = np.random.default_rng((seed, number))
    longest_piece = int(rng.choice(shapes)) * int(rng.choice((1, 4, 16)))
    is_single = number % SINGLES_EVERY == 1
    singles = int(rng.integers(single_steps, min(num_tokens, 2 * single_steps))) if is_single else 0
    places = [0]
    while places[-1] < num_tokens - singles:
        piece = 1 if rng.random() < 0.1 else int(rng.integers(1, longest_piece + 1))
        places.append(min(num_tokens - singles, places[-1] + piece))
    places += range(num_tokens - singles + 1, num_tokens + 1)
    late = (
        1.0 - rng.random(int(rng.integers(0, _MAX_GRAFTS + 1))) ** 2
    )  # More often where the window leaves rows behind.
    grafts = sorted(np.ceil(late * num_tokens).astype(int).tolist())
    legs = []
    for low, high in zip([0, *grafts], [*grafts, num_tokens], strict=True):
        inner = [place for place in places if low < place < high]
        pieces = tuple(np.diff([low, *inner, high]).tolist()) if high > low else ()
        legs.append(Leg(int(rng.choice(capacities)), pieces))
    return Schedule(
        tuple(legs),
        policy=str(rng.choice(manifest_lib.POLICIES)),
        carrier=str(rng.choice((MEMORY, MEMORY, DISK))),
        garbage=str(rng.choice(GARBAGE)),
        random_idle_lanes=bool(rng.integers(2)),
        shuffled=True,
        seed=int(rng.integers(1 << 31)),
    )


def run(
    schedule: Schedule,
    engines: Mapping[int, kg.Engine],
    token_ids: Sequence[int],
    checkpoints: Sequence[int],
    store: pathlib.Path,
) -> Outcome:
    """Carries a schedule out.

    Args:
      schedule: what to do.
      engines: by capacity.
      token_ids: the text.
      checkpoints: positions after which the logits are hashed; the last position is one of them.
      store: folder for artifacts that go through the disk.
    """
    rng = np.random.default_rng(schedule.seed)
    watch = Checkpoints(checkpoints)
    engine, state = None, None
    try:
        for leg in schedule.legs:
            if state is not None:
                policy = manifest_lib.VISIBLE_ROWS if state.first_row else schedule.policy
                artifact = engine.capture(state, policy=policy)
                if schedule.carrier == DISK:
                    artifact = kg.load_artifact(store, kg.save_artifact(artifact, store))
                state = engines[leg.capacity].graft(artifact)
            engine = engines[leg.capacity]
            state = _read_leg(schedule, leg, engine, state, token_ids, watch, rng)
    except errors.KVGraftError as error:
        return refused(error)
    return outcome(state, watch)


def _read_leg(
    schedule: Schedule,
    leg: Leg,
    engine: kg.Engine,
    state: kg.State | None,
    token_ids: Sequence[int],
    watch: Checkpoints,
    rng: np.random.Generator,
) -> kg.State:
    """Reads on from a state, in a cache of its own that holds garbage wherever no token is."""
    config, runner = engine.step_config, engine.runner
    first_row, read = (state.first_row, state.length) if state else (0, 0)
    num_places = config.num_blocks(engine.capacity)
    cache, places = config.make_cache(num_places), np.arange(num_places)
    if schedule.shuffled:
        places = rng.permutation(num_places)
    for place, block in zip(places, state.blocks if state else (), strict=False):
        cache = cache_lib.put_block(cache, block, np.int32(place), config.model, config.mesh)
    cache = fill_unused(cache, config, places, first_row, read, schedule.garbage, rng)
    # The places behind the last token of the leg belong to nobody.
    own = places[: config.num_blocks(read + sum(leg.pieces))].tolist()
    table = [own + [0] * (num_places - len(own))]
    result = None
    for piece in leg.pieces:
        tokens = token_ids[read : read + piece]
        result = feed(runner, cache, table, tokens, read, watch, schedule=schedule, rng=rng)
        cache, read = result.cache, read + piece
    logits_V = run_lib.next_logits(runner, result) if result else state.logits
    return make_state(engine, cache, places, token_ids[:read], logits_V, first_row)


def feed(
    runner: run_lib.Runner,
    cache: cache_lib.Cache,
    table: Sequence[Sequence[int]],
    token_ids: Sequence[int],
    start: int,
    watch: Checkpoints,
    *,
    schedule: Schedule | None = None,
    rng: np.random.Generator | None = None,
) -> run_lib.RunResult:
    """Like `run_lib.run`, with a look at every step and, where a schedule wants it, random widths and idle lanes."""
    done = 0
    while done < len(token_ids):
        left, idle = len(token_ids) - done, ()
        width = step_lib.choose_width(runner.shapes, left)
        if schedule is not None and schedule.shuffled:
            width = _draw_width(runner.shapes, left, rng)
        piece = step_lib.Piece(0, start + done, tuple(token_ids[done : done + width]))
        if schedule is not None and schedule.random_idle_lanes:
            idle = rng.integers(0, runner.programs.config.model.vocab_size, width - len(piece.tokens))
        result = runner.step(cache, [piece], table, width, idle_tokens=idle)
        cache, done = result.cache, done + len(piece.tokens)
        watch.look(runner, result.hidden_TxD, piece)
    return run_lib.RunResult(cache, result.hidden_TxD, len(piece.tokens) - 1)


def _draw_width(shapes: Sequence[int], num_tokens: int, rng: np.random.Generator) -> int:
    """Draws a width: any may come, those of many idle lanes less often."""
    filled = np.array([min(width, num_tokens) / width for width in shapes])
    return int(rng.choice(shapes, p=filled / filled.sum()))


def make_state(
    engine: kg.Engine,
    cache: cache_lib.Cache,
    places: Sequence[int],
    token_ids: Sequence[int],
    logits_V: jax.Array,
    first_row: int = 0,
) -> kg.State:
    """Makes the state of an engine that read `token_ids` into the blocks of `cache` at these places."""
    config = engine.step_config
    own = places[: config.num_blocks(len(token_ids))]
    return kg.State(
        blocks=tuple(cache_lib.take_block(cache, np.int32(place), config.model, config.mesh) for place in own),
        token_ids=tuple(token_ids),
        logits=logits_V,
        step_config=config,
        weights=engine.model.digest,
        first_row=first_row,
    )


def outcome(state: kg.State, watch: Checkpoints) -> Outcome:
    """Hashes a context at its end."""
    logits = (*watch.hashes(), compare.logits_sha256(np.asarray(state.logits)))
    try:
        visible = compare.hashes(state).kv_sha256
        full = "" if state.first_row else compare.hashes(state, policy=manifest_lib.ALL_ROWS).kv_sha256
    except errors.CaptureError as error:  # NaN where a token's row should be.
        return dataclasses.replace(refused(error), logits_sha256=logits, state=state)
    full_sha256 = full and digest.json_digest({"kv": full, "logits": logits})
    return Outcome(digest.json_digest({"kv": visible, "logits": logits}), full_sha256, logits, state)


def refused(error: Exception) -> Outcome:
    """Makes the outcome of a schedule that ended in an error."""
    return Outcome(f"refused: {type(error).__name__}: {error}", "", (), None)


def fill_unused(
    cache: cache_lib.Cache,
    config: step_lib.StepConfig,
    places: Sequence[int],
    first_row: int,
    length: int,
    garbage: str,
    rng: np.random.Generator,
) -> cache_lib.Cache:
    """Fills every slot that does not hold a token's row with garbage, whole blocks too; the cache is donated.

    Exact: bit-exact copy of the others.

    Args:
      cache: any.
      config: of its programs.
      places: of the blocks of a context, in order of position; those of all other blocks may follow.
      first_row: oldest valid row of the sliding layers.
      length: slots of positions from here on are buried, in all layers.
      garbage: one of `GARBAGE`.
      rng: source of random bits.
    """
    position_JxS = np.full((cache.num_blocks, config.kv_block), length)  # Of a block that belongs to nobody.
    own = list(places[: config.num_blocks(length)])
    position_JxS[own] = np.arange(len(own) * config.kv_block).reshape(-1, config.kv_block)
    is_row_LxJxS = [
        (position_JxS >= (first_row if kind == config_lib.SLIDING else 0)) & (position_JxS < length)
        for kind in config.model.layer_kinds[: config.model.num_kv_layers]
    ]
    trash = jax.tree.map(lambda array: _garbage(garbage, array, rng), cache)
    return _fill(cache, trash, is_row_LxJxS)


def _garbage(kind: str, array: jax.Array, rng: np.random.Generator) -> np.ndarray:
    """Makes bit patterns in the shape of a cache array."""
    unsigned = _unsigned(np.dtype(array.dtype))
    dtype = np.dtype(jnp.bfloat16) if array.dtype == np.uint16 else np.dtype(array.dtype)  # bits, or floats
    if kind == BITS:
        return rng.integers(0, np.iinfo(unsigned).max, array.shape, unsigned, endpoint=True)
    value = {ZERO: 0.0, HUGE: float(jnp.finfo(dtype).max), NAN: float("nan")}[kind]
    return np.full(array.shape, value, dtype).view(unsigned)


def _unsigned(dtype: np.dtype) -> type:
    return {2: np.uint16, 4: np.uint32}[dtype.itemsize]


@functools.partial(jax.jit, donate_argnames="cache")
def _fill(cache: cache_lib.Cache, trash: cache_lib.Cache, is_row_LxJxS: list[jax.Array]) -> cache_lib.Cache:
    def mixed(is_row_JxS: jax.Array, old_JxSxKxH: jax.Array, new_JxSxKxH: jax.Array) -> jax.Array:
        bits_JxSxKxH = lax.bitcast_convert_type(old_JxSxKxH, new_JxSxKxH.dtype)  # A choice of floats may rewrite NaN.
        chosen_JxSxKxH = jnp.where(is_row_JxS[:, :, None, None], bits_JxSxKxH, new_JxSxKxH)
        return lax.bitcast_convert_type(chosen_JxSxKxH, old_JxSxKxH.dtype)

    layers = zip(is_row_LxJxS, cache.layers, trash.layers, strict=True)
    return cache_lib.Cache(
        tuple(jax.tree.map(functools.partial(mixed, is_row_JxS), old, new) for is_row_JxS, old, new in layers)
    )


def first_difference(reference: Outcome, other: Outcome, checkpoints: Sequence[int]) -> dict[str, str | int]:
    """Finds where two outcomes of one text first differ: earliest position, then lowest layer, then key or value.

    Returns:
      Flat notes for a report; without a position where one of the two was refused.
    """
    if reference.state is None or other.state is None:
        return {"error": (reference if reference.state is None else other).sha256}
    found, length, config = [], reference.state.length, reference.state.step_config
    unsigned = np.dtype(_unsigned(np.dtype(config.dtype)))
    for index, kind in enumerate(config.model.kinds):
        states = (reference.state, other.state)
        low = max(state.first_row for state in states) if kind.name == config_lib.SLIDING else 0
        a_Lx2xTxKxH, b_Lx2xTxKxH = (rows.read_rows(state.blocks, index, low, length, unsigned) for state in states)
        num_Lx2xT = (a_Lx2xTxKxH != b_Lx2xTxKxH).sum(axis=(3, 4))
        for layer, num_2xT in zip(kind.layers, num_Lx2xT, strict=True):
            for what, num_T in zip(("key", "value"), num_2xT, strict=True):
                if num_T.any():
                    first = int(np.flatnonzero(num_T)[0])
                    found.append((low + first, layer, what, kind.name, int(num_T[first])))
    notes: dict[str, str | int] = {}
    if found:
        notes = dict(zip(("position", "layer", "what", "kind", "elements"), min(found), strict=True))
    logits = zip((*checkpoints, length - 1), reference.logits_sha256, other.logits_sha256, strict=True)
    parted = [position for position, ours, theirs in logits if ours != theirs]
    return {**notes, "logits_after_position": parted[0] if parted else "equal"}
