"""Choosing the next token from logits: the largest, or a draw that anyone can repeat from its seed and position.

A draw reads the logits of one sequence, and random bits that are a function of (seed, position, token id) and nothing
else. So a sample does not depend on the batch, on restarts, on earlier draws or on where a graft ended.
"""

from __future__ import annotations

from collections.abc import Hashable
import dataclasses
import functools
import math
import numbers
import operator

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from kvgraft_jax import errors
from kvgraft_jax.gemma import products
from kvgraft_jax.runtime import step as step_lib

_MOST_CHUNKS = 4  # Arrays are filled up until sums over them have at most this many chunks, of whole vectors.
_SMALLEST, _LARGEST = (float(limit) for limit in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_MOST = np.uint32(0xFFFFFFFF)
_NO_LIMIT = np.float32(np.inf)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    The filters apply in this order, each to what the one before it leaves:
      1. Tokens that the model suppresses, or that have no piece in the tokenizer, are left out.
      2. Logits are divided by `temperature`.
      3. The `top_k` largest are kept; of equal ones those of the lowest ids.
      4. The likeliest tokens are kept until their probability reaches `top_p`: a token is kept when the probability of
         those before it, in falling order and by rising id where logits are equal, is below `top_p`.
    One of the tokens kept is drawn in proportion to its probability. The arithmetic is float32.

    Attributes:
      temperature: above 1 evens the probabilities out, below 1 sharpens them; 0 takes the largest logit, the lowest id
        of equal ones, without any draw.
      top_k: most tokens that are kept; None keeps all.
      top_p: probability at which no further token is kept; 1.0 keeps all.
      seed: of the draws, 0 to 2**64 - 1. Draws at one position with one seed share their random bits.

    Raises:
      InputError: a value outside these ranges or of another type.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        temperature = _number(self.temperature)
        if temperature is None or not 0 <= temperature < math.inf:
            raise errors.InputError(
                f"temperature: got {errors.shown(self.temperature)}, wanted a finite number, 0 or more; 0 always takes "
                "the likeliest token, 1.0 leaves the model's probabilities as they are"
            )
        top_k = None if self.top_k is None else _integer(self.top_k)
        if self.top_k is not None and (top_k is None or top_k < 1):
            raise errors.InputError(
                f"top_k: got {errors.shown(self.top_k)}, wanted an int, 1 or more, or None to keep all tokens"
            )
        top_p = _number(self.top_p)
        if top_p is None or not 0 < top_p <= 1:
            raise errors.InputError(
                f"top_p: got {errors.shown(self.top_p)}, wanted a number above 0 and at most 1; 1.0 keeps all tokens, "
                "and temperature=0 always takes the likeliest"
            )
        seed = _integer(self.seed)
        if seed is None or not 0 <= seed < 1 << 64:
            raise errors.InputError(
                f"seed: got {errors.shown(self.seed)}, wanted an int from 0 to 2**64 - 1; take a larger one "
                "modulo 2**64"
            )
        for name, value in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p), ("seed", seed)):
            object.__setattr__(self, name, value)


def _number(value: float) -> float | None:
    """Returns a real number as a float, infinite where it exceeds them; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _integer(value: int) -> int | None:
    try:
        return None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        return None


def draw(
    logits_V: jax.Array,
    position: int,
    sampling: Sampling,
    suppress_ids: tuple[int, ...] = (),
    num_pieces: int | None = None,
) -> int:
    """Draws the token at a position as `Sampling` states.

    Math: with e independent exponential draws, the token of the largest p / e is distributed as p. This is the
      Gumbel-max rule, whose scores are the logarithms of these.
    Exact: bit-exact: one logits row, position and sampling give one token, whatever else is drawn, in any process and
      under any options of jax for random numbers. At temperature 0, and with top_k 1, it is that of `argmax`.

    Args:
      logits_V: float32 [V] of one sequence.
      position: of the new token, below 2**32.
      sampling: temperature, filters and seed.
      suppress_ids: tokens that are never drawn; one or more others are left.
      num_pieces: tokens from this one on are never drawn; None means that all may be.

    Raises:
      WeightsError: a logit is NaN.
    """
    largest = argmax(logits_V, suppress_ids, num_pieces)
    if sampling.temperature == 0:
        return largest
    vocab_size = logits_V.shape[0]
    of_sequence = (_allowed(vocab_size, suppress_ids, num_pieces), np.uint32(position))
    one_V = logits_V.addressable_data(0)  # On a mesh each device holds the whole row.
    # Put on the device by name, so that it works where jax was told to refuse transfers that are not.
    given = jax.device_put(of_sequence + _parameters(sampling, vocab_size), one_V.sharding)
    return int(jax.device_get(_draw(one_V, *given)))


def argmax(logits_V: jax.Array, suppress_ids: tuple[int, ...], num_pieces: int | None = None) -> int:
    """Finds the lowest id of the largest logit, on the host: NumPy is much faster at it than XLA's CPU backend.

    Raises:
      WeightsError: a logit is NaN, so none is the largest.
    """
    on_host_V = np.asarray(jax.device_get(logits_V))[:num_pieces]
    suppress_ids = [token_id for token_id in suppress_ids if token_id < len(on_host_V)]
    if suppress_ids:
        on_host_V = on_host_V.copy()
        on_host_V[suppress_ids] = -np.inf
    token_id = int(on_host_V.argmax())  # The first NaN where there is one.
    if np.isnan(on_host_V[token_id]):
        raise errors.WeightsError(
            f"logit of token {token_id}: got NaN instead of a number, so no next token can be chosen; the weights are "
            "damaged or too large for their dtype: load the model with dtype='float32', or fetch its weights again"
        )
    return token_id


def fingerprint(vocab_size: int) -> str:
    """Returns the SHA-256 (hex) of the StableHLO text of the program that draws from `vocab_size` logits.

    It is made again when options of jax have changed that may enter the text.
    """
    return _fingerprint(vocab_size, step_lib.tracing_context())


@functools.lru_cache(maxsize=16)
def _fingerprint(vocab_size: int, _: Hashable) -> str:
    given = (_allowed(vocab_size, (), None), np.uint32(0), *_parameters(Sampling(), vocab_size))
    logits_V = jax.ShapeDtypeStruct((vocab_size,), jnp.float32)
    return step_lib.text_digest(_draw.lower(logits_V, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given)))


def fixed_draws(vocab_size: int) -> tuple[int, ...]:
    """Returns the tokens that the program draws from fixed logits, one with each filter and one with all of them.

    They are drawn once per process, and again when options of jax have changed on which the program may depend.
    """
    return _fixed_draws(vocab_size, step_lib.tracing_context())


@functools.lru_cache(maxsize=16)
def _fixed_draws(vocab_size: int, _: Hashable) -> tuple[int, ...]:
    logits_V = jax.device_put(((np.arange(vocab_size) * 7919) % 1021 / 64).astype(np.float32))
    # Strict filters, so that a program without one of them hardly gives the same tokens.
    filters = {}, {"top_k": 3}, {"top_p": 0.05}, {"temperature": 0.1}, {"temperature": 3.0, "top_k": 40, "top_p": 0.2}
    return tuple(draw(logits_V, seed, Sampling(seed=seed, **changes)) for seed, changes in enumerate(filters, 1))


@functools.lru_cache(maxsize=8)
def _allowed(vocab_size: int, suppress_ids: tuple[int, ...], num_pieces: int | None) -> np.ndarray:
    """Returns bool [V]: which tokens may be drawn."""
    is_allowed_V = np.arange(vocab_size) < (vocab_size if num_pieces is None else num_pieces)
    is_allowed_V[[token_id for token_id in suppress_ids if token_id < vocab_size]] = False
    is_allowed_V.flags.writeable = False
    return is_allowed_V


def _parameters(sampling: Sampling, vocab_size: int) -> tuple[np.generic, ...]:
    """Returns what the program takes of a sampling: temperature, top_k and top_p float32, words of the seed uint32."""
    top_k = _NO_LIMIT if sampling.top_k is None else np.float32(min(sampling.top_k, vocab_size))
    top_p = _NO_LIMIT if sampling.top_p == 1 else np.float32(max(sampling.top_p, _SMALLEST))
    temperature = np.float32(min(max(sampling.temperature, _SMALLEST), _LARGEST))
    high, low = divmod(sampling.seed, 1 << 32)
    return temperature, top_k, top_p, np.uint32(high), np.uint32(low)


@jax.jit
def _draw(logits_V, is_allowed_V, position, temperature, top_k, top_p, seed_high, seed_low) -> jax.Array:
    """Draws one token id, int32; a limit that is infinite leaves its filter out."""
    short = -logits_V.shape[0] % max(16, (1 << (logits_V.shape[0] - 1).bit_length()) // _MOST_CHUNKS)
    weight_V = weights(jnp.pad(logits_V, (0, short)), jnp.pad(is_allowed_V, (0, short)), temperature, top_k, top_p)
    score_V = weight_V / exponentials(weight_V.shape[0], position, seed_high, seed_low)
    id_V = jnp.arange(score_V.shape[0], dtype=jnp.int32)
    return jnp.min(jnp.where(score_V == jnp.max(score_V), id_V, score_V.shape[0]))


def weights(logits_V, is_allowed_V, temperature, top_k, top_p) -> jax.Array:
    """Computes the probabilities of the tokens that the filters keep, times a factor: float32 [V], 1 for the likeliest.

    The order of tokens is that of their logits, which a temperature does not change; a division could make some equal.

    Args:
      logits_V: float32 [V], V a multiple of 16.
      is_allowed_V: bool [V].
      temperature, top_k, top_p: float32; infinite top_k or top_p leave the filter out.
    """
    logits_V = jnp.where(is_allowed_V, logits_V, -jnp.inf)
    largest = jnp.max(logits_V)
    # Where both are infinite, their difference would be NaN.
    below_V = jnp.where(logits_V == largest, 0.0, logits_V - largest)
    weight_V = jnp.where(is_allowed_V, products.exp(below_V / temperature), 0.0)
    order_V = jnp.where(is_allowed_V, _order(logits_V), 0)
    weight_V = jnp.where(_first(order_V, is_allowed_V.astype(jnp.float32), top_k), weight_V, 0.0)
    return jnp.where(_first(order_V, weight_V, top_p * products.row_sum(weight_V)), weight_V, 0.0)


def exponentials(vocab_size: int, position, seed_high, seed_low) -> jax.Array:
    """Draws exponentially distributed numbers from threefry bits of (seed, position, token id): float32 [V] above 0.

    Exact: bit-exact in V: the number of a token id is the same for every V that is a multiple of 16.
    """
    bits_V = threefry(seed_high, seed_low, position, jnp.arange(vocab_size, dtype=jnp.uint32))
    # -log(1 - u), with u in the middle of one of 2**32 equal parts of (0, 1); taken from the nearer end, which keeps
    # all bits of the small ones, among which the smallest decides.
    end_V = (jnp.minimum(bits_V, ~bits_V).astype(jnp.float32) + 0.5) * 2.0**-32
    return -jnp.where(bits_V >> 31 == 0, jnp.log1p(-end_V), jnp.log(end_V))


def threefry(key_0, key_1, count_0, count_1) -> jax.Array:
    """Computes the first word of threefry-2x32 with 20 rounds; all words are uint32 and broadcast.

    Written out, it takes a third of the time of jax's own, whose rounds XLA's CPU backend runs as loops, and no option
    of jax for random numbers can give another.

    Math: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """
    keys = (key_0, key_1, key_0 ^ key_1 ^ jnp.uint32(0x1BD11BDA))
    x, y = count_0 + keys[0], count_1 + keys[1]
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            x = x + y
            y = (y << distance | y >> 32 - distance) ^ x
        x, y = x + keys[(group + 1) % 3], y + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x


def _order(x: jax.Array) -> jax.Array:
    """Returns uint32 numbers, 1 or more, in the order of float32 numbers; all that count as zero are one."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    size = bits & 0x7FFFFFFF
    bits = jnp.where(size < 0x00800000, 0, bits)  # Some processors take numbers below the normal ones for zero.
    return bits ^ jnp.where(bits >> 31 == 1, _MOST, jnp.uint32(0x80000000))


def _first(order_V: jax.Array, weight_V: jax.Array, limit: jax.Array) -> jax.Array:
    """Finds the tokens whose predecessors weigh less than `limit` together: bool [V].

    Args:
      order_V: uint32 [V]; larger ones precede smaller ones, and lower ids higher ones among equals.
      weight_V: float32 [V], 0 or more.
      limit: float32, above 0; infinite finds all.
    """
    size, is_limited = order_V.shape[0], jnp.isfinite(limit)
    rank_V = ~order_V
    last = _reaching(rank_V, weight_V, limit, _MOST, is_limited)
    is_last_V = rank_V == last
    is_tie = products.row_sum(is_last_V.astype(jnp.float32)) > 1
    tie_rank_V = jnp.where(is_last_V, jnp.arange(1, size + 1, dtype=jnp.uint32), jnp.where(rank_V < last, 0, _MOST))
    return tie_rank_V <= _reaching(tie_rank_V, weight_V, limit, size, is_limited & is_tie)


def _reaching(rank_V: jax.Array, weight_V: jax.Array, limit: jax.Array, most: int, is_sought: jax.Array) -> jax.Array:
    """Finds the lowest uint32 rank up to which weights add up to `limit`; `most` where none does or none is sought.

    Sorting would take several times as long. A sum in one order of additions, of numbers that are not negative, never
    falls when one of them grows, so bisection finds the rank.
    """

    def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        is_reached = products.row_sum(jnp.where(rank_V <= middle, weight_V, 0.0)) >= limit
        return jnp.where(is_reached, low, middle + 1), jnp.where(is_reached, middle, high)

    high = jnp.uint32(most)
    return lax.while_loop(lambda bounds: bounds[0] < bounds[1], halve, (jnp.where(is_sought, 0, high), high))[0]
