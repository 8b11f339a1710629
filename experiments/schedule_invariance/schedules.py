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
from kvgraft_jax.grafting import compare
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
      seed: of tokens and garbage.
    """

    legs: tuple[Leg, ...]
    policy: str = manifest_lib.VISIBLE_ROWS
    carrier: str = MEMORY
    garbage: str = ZERO
    random_idle_lanes: bool = False
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

    def look(self, runner: run_lib.Runner, hidden_TxD: jax.Array, read: step_lib.StepInput) -> None:
        """Takes the logits of the chosen ones among the positions that a step read."""
        for position in self._positions.intersection(range(read.start, read.start + read.count)):
            result = run_lib.RunResult(None, hidden_TxD, position - int(read.start))
            self._found[position] = run_lib.next_logits(runner, result)

    def copy(self) -> Checkpoints:
        """Returns a copy with the same findings that goes its own way from here."""
        copied = Checkpoints(tuple(self._positions))
        copied._found.update(self._found)
        return copied

    def hashes(self) -> tuple[str, ...]:
        """Returns the SHA-256 (hex) of each, in order of position."""
        return tuple(compare.logits_sha256(np.asarray(logits_V)) for _, logits_V in sorted(self._found.items()))


def draw(number: int, seed: int, num_tokens: int, width: int, capacities: Sequence[int], single_steps: int) -> Schedule:
    """Draws schedule `number`: 0 is the plain one; every tenth ends in `single_steps` or more single tokens."""
    if number == 0:
        return Schedule((Leg(capacities[0], (num_tokens,)),))
    rng = np.random.default_rng((seed, number))
    longest_piece = width * int(rng.choice((1, 4, 16)))
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
    idle_rng = rng if schedule.random_idle_lanes else None
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
            cache = engine.step_config.make_cache(engine.capacity) if state is None else state.cache
            first_row, read = (state.first_row, state.length) if state else (0, 0)
            cache = fill_unused(cache, engine.model.config, first_row, read, schedule.garbage, rng)
            result = None
            for piece in leg.pieces:
                result = feed(engine.runner, cache, token_ids[read : read + piece], read, watch, idle_rng)
                cache, read = result.cache, read + piece
            logits_V = run_lib.next_logits(engine.runner, result) if result else state.logits
            state = make_state(engine, cache, token_ids[:read], logits_V, first_row)
    except errors.KVGraftError as error:
        return refused(error)
    return outcome(state, watch)


def feed(
    runner: run_lib.Runner,
    cache: cache_lib.Cache,
    token_ids: Sequence[int],
    start: int,
    watch: Checkpoints,
    idle_rng: np.random.Generator | None = None,
) -> run_lib.RunResult:
    """Like `run_lib.run`, with a look at every step and, given `idle_rng`, random tokens in idle lanes."""
    config = runner.programs.config
    for read in step_lib.cut(token_ids, start, config.width):
        if idle_rng is not None:
            read.tokens_T[read.count :] = idle_rng.integers(0, config.model.vocab_size, config.width - read.count)
        result = runner.programs.step(runner.params, runner.tables, cache, read.tokens_T, read.start, read.count)
        cache = result.cache
        watch.look(runner, result.hidden_TxD, read)
    return run_lib.RunResult(cache, result.hidden_TxD, int(read.count) - 1)


def make_state(
    engine: kg.Engine, cache: cache_lib.Cache, token_ids: Sequence[int], logits_V: jax.Array, first_row: int = 0
) -> kg.State:
    """Makes the state of an engine that read `token_ids` into `cache`."""
    return kg.State(
        cache=cache,
        token_ids=tuple(token_ids),
        logits=logits_V,
        step_config=engine.step_config,
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
    config: config_lib.GemmaConfig,
    first_row: int,
    length: int,
    garbage: str,
    rng: np.random.Generator,
) -> cache_lib.Cache:
    """Fills every slot that does not hold a token's row with garbage; the cache is donated.

    Exact: bit-exact copy of the others.

    Args:
      cache: any.
      config: of its model.
      first_row: oldest valid row of the sliding layers.
      length: slots from here on are buried, in all layers.
      garbage: one of `GARBAGE`.
      rng: source of random bits.
    """
    firsts = [
        np.int32(first_row if kind == config_lib.SLIDING else 0) for kind in config.layer_kinds[: config.num_kv_layers]
    ]
    trash = jax.tree.map(lambda array: _garbage(garbage, array, rng), cache)
    return _fill(cache, trash, firsts, np.int32(length))


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
def _fill(
    cache: cache_lib.Cache, trash: cache_lib.Cache, firsts: list[jax.Array], length: jax.Array
) -> cache_lib.Cache:
    def layer(old: cache_lib.LayerCache, new: cache_lib.LayerCache, first: jax.Array) -> cache_lib.LayerCache:
        return jax.tree.map(functools.partial(mixed, first), old, new)

    def mixed(first: jax.Array, old_SxKxH: jax.Array, new_SxKxH: jax.Array) -> jax.Array:
        slot_S = jnp.arange(old_SxKxH.shape[0], dtype=jnp.int32)
        is_row_S = (slot_S >= first) & (slot_S < length)
        bits_SxKxH = lax.bitcast_convert_type(old_SxKxH, new_SxKxH.dtype)  # A choice between floats may rewrite NaN.
        chosen_SxKxH = jnp.where(is_row_S[:, None, None], bits_SxKxH, new_SxKxH)
        return lax.bitcast_convert_type(chosen_SxKxH, old_SxKxH.dtype)

    return cache_lib.Cache(tuple(map(layer, cache.layers, trash.layers, firsts)))


def first_difference(reference: Outcome, other: Outcome, checkpoints: Sequence[int]) -> dict[str, str | int]:
    """Finds where two outcomes of one text first differ: earliest position, then lowest layer, then key or value.

    Returns:
      Flat notes for a report; without a position where one of the two was refused.
    """
    if reference.state is None or other.state is None:
        return {"error": (reference if reference.state is None else other).sha256}
    found = []
    model = reference.state.step_config.model
    layers = zip(
        model.layer_kinds[: model.num_kv_layers], reference.state.cache.layers, other.state.cache.layers, strict=True
    )
    for number, (kind, ours, theirs) in enumerate(layers):
        low = max(reference.state.first_row, other.state.first_row) if kind == config_lib.SLIDING else 0
        for what, a_SxKxH, b_SxKxH in (
            ("key", ours.k_rot_SxKxH, theirs.k_rot_SxKxH),
            ("value", ours.v_SxKxH, theirs.v_SxKxH),
        ):
            unsigned = _unsigned(np.dtype(a_SxKxH.dtype))
            rows = slice(low, reference.state.length)
            differs_SxKxH = np.asarray(a_SxKxH)[rows].view(unsigned) != np.asarray(b_SxKxH)[rows].view(unsigned)
            places = np.flatnonzero(differs_SxKxH.any(axis=(1, 2)))
            if places.size:
                elements = int(differs_SxKxH[places[0]].sum())
                found.append((low + int(places[0]), number, what, kind, elements))
    notes: dict[str, str | int] = {}
    if found:
        notes = dict(zip(("position", "layer", "what", "kind", "elements"), min(found), strict=True))
    logits = zip((*checkpoints, reference.state.length - 1), reference.logits_sha256, other.logits_sha256, strict=True)
    parted = [position for position, ours, theirs in logits if ours != theirs]
    return {**notes, "logits_after_position": parted[0] if parted else "equal"}
