"""Sampling: the filters against a plain reference, the draws' distribution, and what a draw may depend on."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys

import jax
from jax.extend import random
import jax.numpy as jnp
import numpy as np
import pytest

import kvgraft_jax as kg
from kvgraft_jax import errors
from kvgraft_jax.runtime import sampling as sampling_lib

ROOT = pathlib.Path(__file__).parents[2]
BORDER = 1e-5  # Float32 sums of a thousand probabilities are much nearer to the true ones than this.

# What another process draws, and the bytes of what decides it.
SCRIPT = """
import hashlib, json
from kvgraft_jax import determinism
determinism.configure()
import jax
import numpy as np
from kvgraft_jax.runtime import sampling
from tests.runtime import test_sampling
logits_V = jax.numpy.asarray(test_sampling.random_logits(1000))
if len(jax.devices()) > 1:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("device",))
    logits_V = jax.device_put(logits_V, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
print(json.dumps(test_sampling.outcome(logits_V)), len(jax.devices()))
"""


def random_logits(vocab_size: int, seed: int = 0) -> np.ndarray:
    return (4 * np.random.default_rng(seed).standard_normal(vocab_size)).astype(np.float32)


def outcome(logits_V: jax.Array) -> list:
    """Returns draws of every kind, and the draws that decide them, as float32 bits."""
    settings = (
        sampling_lib.Sampling(seed=7),
        sampling_lib.Sampling(0.6, top_k=40, top_p=0.9, seed=2**63 + 5),
        sampling_lib.Sampling(1.5, top_p=0.7),
    )
    tokens = [sampling_lib.draw(logits_V, position, s, (3,), 990) for s in settings for position in range(20)]
    exponentials_V = jax.jit(sampling_lib.exponentials, static_argnums=0)(64, *np.array([5, 1, 2], np.uint32))
    return [*tokens, *np.asarray(exponentials_V).view(np.int32).tolist()]


def kept(logits_V, *, is_allowed_V=None, temperature=1.0, top_k=None, top_p=1.0) -> np.ndarray:
    """Returns bool [V]: what the filters of the library keep."""
    sampling = sampling_lib.Sampling(temperature, top_k, top_p)
    logits_V = jnp.asarray(logits_V, jnp.float32)
    is_allowed_V = jnp.ones(logits_V.shape, bool) if is_allowed_V is None else jnp.asarray(is_allowed_V)
    numbers = sampling_lib._parameters(sampling, logits_V.shape[0])[:3]
    return np.asarray(jax.jit(sampling_lib.weights)(logits_V, is_allowed_V, *numbers)) > 0


def reference(logits_V, is_allowed_V, temperature, top_k, top_p) -> tuple[np.ndarray, np.ndarray]:
    """Returns bool [V] twice, by sorting in float64: which tokens the filters keep, and which stand at a border."""
    order = [i for i in np.argsort(-logits_V.astype(np.float64), kind="stable") if is_allowed_V[i]][:top_k]
    exponents = logits_V[order].astype(np.float64) / temperature
    p = np.exp(exponents - exponents.max())
    before = np.concatenate([[0.0], np.cumsum(p / p.sum())[:-1]])
    is_kept_V, is_border_V = np.zeros((2, len(logits_V)), bool)
    is_kept_V[order] = (before < top_p) | (top_p == 1)
    is_border_V[order] = (np.abs(before - top_p) < BORDER) & (top_p < 1)
    return is_kept_V, is_border_V


@pytest.mark.parametrize("vocab_size", [16, 37, 1000])
def test_the_filters_keep_what_a_plain_reference_keeps(vocab_size):
    rng = np.random.default_rng(vocab_size)
    borders, sizes = 0, set()
    for _ in range(150):
        logits_V = random_logits(vocab_size, int(rng.integers(1 << 30)))
        if rng.random() < 0.7:  # Ties, zeros of both signs among them.
            logits_V = (np.round(logits_V * 2) / 2).astype(np.float32)
        is_allowed_V = rng.random(vocab_size) < rng.choice([0.3, 1.0])
        is_allowed_V[rng.integers(vocab_size)] = True
        temperature = float(rng.choice([0.5, 1.0, 1.7]))
        top_k = None if rng.random() < 0.3 else int(rng.integers(1, vocab_size + 5))
        top_p = 1.0 if rng.random() < 0.3 else float(rng.uniform(0.01, 0.999))
        wanted_V, is_border_V = reference(logits_V, is_allowed_V, temperature, top_k, top_p)
        found_V = kept(logits_V, is_allowed_V=is_allowed_V, temperature=temperature, top_k=top_k, top_p=top_p)
        np.testing.assert_array_equal(found_V | is_border_V, wanted_V | is_border_V)
        borders += is_border_V.any()
        sizes.add(int(found_V.sum()))
    assert borders <= 3 and len(sizes) > 10


def test_of_equal_logits_the_lowest_ids_are_kept():
    def ids(logits_V, **filters) -> list[int]:
        return np.flatnonzero(kept(logits_V, **filters)).tolist()

    equal_V = np.zeros(64)
    equal_V[::2] = -0.0
    assert ids(equal_V, top_k=5) == [0, 1, 2, 3, 4]
    assert ids(equal_V, top_p=0.5) == list(range(32))
    assert ids(equal_V, top_p=0.50001) == list(range(33))
    assert ids(equal_V, top_k=32, top_p=0.25) == list(range(8))
    is_allowed_V = np.arange(64) % 3 == 1
    assert ids(equal_V, top_k=3, is_allowed_V=is_allowed_V) == [1, 4, 7]
    assert ids([0.0, 2.0, 1.0, 1.0, 2.0, 1.0], top_k=4) == [1, 2, 3, 4]
    assert ids([0.0, 2.0, 1.0, 1.0, 2.0, 1.0], top_k=1) == [1]
    assert ids([1e-45, 0.0, -1e-45, 1e-40], top_k=2) == [0, 1]  # Below the normal numbers: counted as zero.


def test_a_temperature_makes_no_logits_equal_that_are_not():
    # The first two differ by one bit, which a division by a large number would round away.
    logits_V = np.array([np.nextafter(np.float32(1), np.float32(0)), 1.0, 0.0, -5.0], np.float32)
    for temperature in (3e38, 1e300, 7.0):
        assert np.flatnonzero(kept(logits_V, temperature=temperature, top_k=1)).tolist() == [1]


def test_filters_that_keep_all_keep_all():
    logits_V = random_logits(50)
    for filters in ({}, {"top_k": 50}, {"top_k": 51}, {"top_k": 10**40}, {"top_p": 1.0}, {"temperature": 1e300}):
        assert kept(logits_V, **filters).all()
    assert np.flatnonzero(kept(logits_V, top_p=1e-300)).tolist() == [int(logits_V.argmax())]


def test_a_seed_and_a_position_give_one_token_whatever_was_drawn_before():
    logits_V, other_V = jnp.asarray(random_logits(200)), jnp.asarray(random_logits(200, 1))
    sampling = sampling_lib.Sampling(1.2, top_p=0.98, seed=11)
    first = [sampling_lib.draw(logits_V, position, sampling) for position in range(30)]
    for position in reversed(range(30)):
        sampling_lib.draw(other_V, position * 31, sampling_lib.Sampling(seed=position))
        assert sampling_lib.draw(logits_V, position, sampling) == first[position]
    assert len(set(first)) > 5


def test_each_bit_of_seed_and_position_counts():
    logits_V = jnp.zeros(5000)
    seeds = [0, *(1 << bit for bit in range(64))]
    assert len({sampling_lib.draw(logits_V, 0, sampling_lib.Sampling(seed=seed)) for seed in seeds}) > 60
    positions = [0, *(1 << bit for bit in range(32))]
    assert len({sampling_lib.draw(logits_V, position, sampling_lib.Sampling()) for position in positions}) > 30


@pytest.mark.parametrize(
    "settings",
    [
        lambda: jax.threefry_partitionable(False),
        lambda: jax.threefry_partitionable(True),
        lambda: jax.default_prng_impl("rbg"),
        lambda: jax.enable_x64(True),
        lambda: jax.transfer_guard("disallow"),
        lambda: jax.default_matmul_precision("bfloat16"),
    ],
    ids=["one stream", "many streams", "rbg", "x64", "no transfers", "precision"],
)
def test_options_of_jax_change_no_draw(settings):
    logits_V = jnp.asarray(random_logits(300))
    samplings = [sampling_lib.Sampling(seed=3), sampling_lib.Sampling(0.8, 30, 0.9)]
    draws = [(position, sampling) for position in range(10) for sampling in samplings]
    wanted = [sampling_lib.draw(logits_V, *given) for given in draws]
    with settings():
        assert [sampling_lib.draw(logits_V, *given) for given in draws] == wanted


@pytest.mark.parametrize(
    ("environment", "devices"),
    [
        ({"NPROC": "3", "JAX_THREEFRY_PARTITIONABLE": "0", "JAX_DEFAULT_PRNG_IMPL": "rbg"}, 1),
        ({"NPROC": "1", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}, 2),
    ],
    ids=["options and threads", "mesh"],
)
def test_another_process_draws_the_same(environment, devices):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    wanted = outcome(jnp.asarray(random_logits(1000)))
    assert done.stdout.split("\n")[-2] == f"{json.dumps(wanted)} {devices}"
    assert len(set(wanted[:20])) > 5


def chi_square(counts_V: np.ndarray, p_V: np.ndarray) -> float:
    wanted_V = counts_V.sum() * p_V
    return float(((counts_V - wanted_V) ** 2 / wanted_V).sum())


# Limits are those that chance exceeds once in ten thousand; seeds and positions are fixed, so each run is the same.
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_tokens_are_drawn_in_proportion_to_their_probability(temperature):
    logits_V = np.array([0.3, -1.0, 1.2, 0.0, 0.9, -0.5, 1.1, -2.0], np.float32)
    p_V = np.exp(logits_V / temperature)
    on_device_V = jnp.asarray(logits_V)
    for draws in (
        [(position, sampling_lib.Sampling(temperature, seed=1)) for position in range(1000)],
        [(17, sampling_lib.Sampling(temperature, seed=seed)) for seed in range(1000)],
    ):
        tokens = [sampling_lib.draw(on_device_V, *given) for given in draws]
        counts_V = np.bincount(tokens, minlength=8)
        assert chi_square(counts_V, p_V / p_V.sum()) < 29.9
        squared_V = p_V**2 / (p_V**2).sum()
        assert chi_square(counts_V, squared_V) > 100  # The check sees another distribution.


def test_draws_are_exponentially_distributed_and_unrelated_between_positions():
    draw = jax.jit(sampling_lib.exponentials, static_argnums=0)
    words = np.array([0, 0, 1, 2], np.uint32)
    e_V, next_V = (np.asarray(draw(1 << 16, position, *words[2:]), np.float64) for position in words[[0, 2]])
    for values_V in (e_V, next_V):
        counts = np.bincount((32 * -np.expm1(-values_V)).astype(int), minlength=32)
        assert chi_square(counts, np.full(32, 1 / 32)) < 69.1
        assert values_V.min() > 0 and np.isfinite(values_V).all()
    for a_V, b_V in ((e_V, next_V), (e_V[1:], e_V[:-1])):
        assert abs(np.corrcoef(a_V, b_V)[0, 1]) < 4 / 256
    np.testing.assert_array_equal(np.asarray(draw(64, *words[[0, 2, 3]]), np.float64), e_V[:64])


def test_both_ends_of_the_bits_give_finite_draws(monkeypatch):
    bits_V = np.array([0, 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1] + [5] * 10, np.uint32)
    monkeypatch.setattr(sampling_lib, "threefry", lambda *_: jnp.asarray(bits_V))
    found_V = sampling_lib.exponentials(16, *np.zeros(3, np.uint32))
    wanted_V = -np.log1p(-(bits_V.astype(np.float64) + 0.5) / 2**32)
    np.testing.assert_allclose(np.asarray(found_V), wanted_V, rtol=3e-7)


def test_threefry_is_that_of_its_authors_and_of_jax():
    def words(*values: int) -> tuple[jax.Array, ...]:
        return tuple(jnp.asarray(value, jnp.uint32) for value in values)

    known = {
        (0, 0, 0, 0): 0x6B200159,
        (2**32 - 1,) * 4: 0x1CB996FC,
        (0x13198A2E, 0x03707344, 0x243F6A88, 0x85A308D3): 0xC4923A9C,
    }
    for given, wanted in known.items():
        assert int(sampling_lib.threefry(*words(*given))) == wanted
    x_M, y_M = np.random.default_rng(0).integers(1 << 32, size=(2, 500), dtype=np.uint32)
    wanted_M = random.threefry_2x32(words(9, 2**32 - 3), jnp.concatenate([x_M, y_M]))[:500]
    np.testing.assert_array_equal(sampling_lib.threefry(*words(9, 2**32 - 3), x_M, y_M), wanted_M)


@pytest.mark.parametrize(
    "greedy",
    [
        *(sampling_lib.Sampling(temperature=temperature) for temperature in (0, -0.0, 1e-9, 1e-30, 1e-300, 5e-324)),
        sampling_lib.Sampling(top_k=1),
        sampling_lib.Sampling(3.0, top_k=1, top_p=0.5, seed=9),
        sampling_lib.Sampling(top_p=1e-9),
    ],
    ids=str,
)
def test_these_settings_take_the_largest_logit(greedy):
    for seed in range(20):
        logits_V = jnp.asarray(random_logits(100, seed) * (1 + seed**5))
        wanted = sampling_lib.argmax(logits_V, (4, 5), 80)
        assert sampling_lib.draw(logits_V, seed, greedy, (4, 5), 80) == wanted


@pytest.mark.parametrize("greedy", [sampling_lib.Sampling(0), sampling_lib.Sampling(top_k=1)], ids=str)
def test_of_equal_largest_logits_the_lowest_id_is_taken(greedy):
    logits_V = jnp.asarray([1.0, 3.0, 3.0, 2.0, 3.0])
    found = [sampling_lib.draw(logits_V, 0, greedy, ids) for ids in ((), (1,), (1, 2), (1, 2, 4))]
    assert found == [1, 2, 4, 3]


def test_a_low_temperature_draws_among_equal_largest_logits():
    logits_V = jnp.asarray([1.0, 3e38, 3e38, -3e38, 3e38])
    drawn = {sampling_lib.draw(logits_V, position, sampling_lib.Sampling(1e-30)) for position in range(50)}
    assert drawn == {1, 2, 4}


def test_infinite_logits():
    below, above = -np.inf, np.inf
    for logits, wanted in (
        ([below, 1.0, below, 1.0, below], {1, 3}),
        ([0.0, above, 5.0, above, below], {1, 3}),
        ([below] * 5, {0, 1, 3, 4}),
    ):
        for sampling in (sampling_lib.Sampling(), sampling_lib.Sampling(2.0, top_k=4, top_p=0.9999)):
            logits_V = jnp.asarray(logits)
            drawn = {sampling_lib.draw(logits_V, position, sampling, (2,)) for position in range(60)}
            assert drawn == wanted


def test_tokens_that_may_not_be_drawn_are_not():
    logits_V = jnp.zeros(20).at[jnp.asarray([3, 7, 19])].set(50.0)
    for sampling in (sampling_lib.Sampling(), sampling_lib.Sampling(1e300, 30, 0.999)):
        drawn = [sampling_lib.draw(logits_V, position, sampling, (3, 7), 15) for position in range(300)]
        assert set(drawn) == set(range(15)) - {3, 7}


def test_logits_below_all_others_at_the_end_change_no_draw():
    logits_V = random_logits(100)
    longer_V = np.concatenate([logits_V, np.full(45, -np.inf, np.float32)])
    for position in range(30):
        short, long = (
            sampling_lib.draw(jnp.asarray(given_V), position, sampling_lib.Sampling())
            for given_V in (logits_V, longer_V)
        )
        assert short == long


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_no_token_is_drawn_out_of_nan(temperature):
    logits_V = jnp.asarray([1.0, np.nan, 2.0, 0.0])
    with pytest.raises(errors.WeightsError, match="logit of token 1: got NaN .*float32"):
        sampling_lib.draw(logits_V, 0, sampling_lib.Sampling(temperature))
    assert sampling_lib.draw(logits_V, 0, sampling_lib.Sampling(temperature), (1,)) in (0, 2, 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(({"temperature": bad}, "temperature: got .*, wanted a finite number") for bad in (-1e-9, np.nan, np.inf)),
        *(({"temperature": bad}, "temperature: got") for bad in (None, "1", True, 1j, 10**400, [1.0])),
        *(({"top_k": bad}, "top_k: got .*, wanted an int, 1 or more") for bad in (0, -3, -(10**5000))),
        *(({"top_k": bad}, "top_k: got") for bad in (1.0, "5", True, np.True_, [5], np.float32(2))),
        *(({"top_p": bad}, "top_p: got .*, wanted a number above 0") for bad in (0, 0.0, -0.1, 1.0000001, np.nan)),
        *(({"top_p": bad}, "top_p: got") for bad in (None, "0.9", True, np.inf, 10**400)),
        *(({"seed": bad}, "seed: got .*, wanted an int from 0 to") for bad in (-1, 1 << 64, 10**5000)),
        *(({"seed": bad}, "seed: got") for bad in (None, 0.0, "1", False)),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(errors.InputError, match=message):
        sampling_lib.Sampling(**settings)


def test_settings_are_plain_values():
    plain = kg.Sampling(0.5, 40, 0.25, 2**64 - 1)
    assert plain == kg.Sampling(np.float32(0.5), np.int64(40), np.float64(0.25), np.uint64(2**64 - 1))
    assert [type(value) for value in vars(kg.Sampling(1, np.int8(3), 1, np.uint8(4))).values()] == [
        float,
        int,
        float,
        int,
    ]
    assert kg.Sampling() == kg.Sampling(1.0, None, 1.0, 0) and hash(plain) == hash(
        kg.Sampling(0.5, 40, 0.25, 2**64 - 1)
    )


def test_one_program_serves_all_settings():
    logits_V = jnp.asarray(random_logits(77))
    sampling_lib.draw(logits_V, 0, sampling_lib.Sampling())
    with count_traces() as traces:
        for position, sampling in enumerate((sampling_lib.Sampling(0.3, 5, 0.5, 2**40), sampling_lib.Sampling(9.0))):
            sampling_lib.draw(logits_V, position, sampling, (3,), 70)
        assert traces == []
        sampling_lib.draw(logits_V[:-1], 0, sampling_lib.Sampling())
        assert traces != []


@contextlib.contextmanager
def count_traces():
    """Yields a list that grows with each call of `weights`, which only tracing makes."""
    traces, weights = [], sampling_lib.weights
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling_lib, "weights", lambda *given: traces.append(1) or weights(*given))
        yield traces


def test_the_fingerprint_is_that_of_the_program(monkeypatch):
    first = sampling_lib.fingerprint(300)
    assert len(first) == 64 and sampling_lib.fingerprint(300) == first != sampling_lib.fingerprint(301)
    for settings in (jax.threefry_partitionable(False), jax.default_prng_impl("rbg")):
        with settings:
            assert sampling_lib.fingerprint(300) == first
    assert fresh_fingerprint(monkeypatch) == first
    monkeypatch.setattr(sampling_lib, "_MOST_CHUNKS", 2)
    assert fresh_fingerprint(monkeypatch) != first


def fresh_fingerprint(monkeypatch) -> str:
    """Returns the fingerprint for 300 tokens, the program traced anew and nothing remembered."""
    program = sampling_lib._draw.__wrapped__

    def _draw(*given):
        return program(*given)

    with monkeypatch.context() as patch:
        patch.setattr(sampling_lib, "_draw", jax.jit(_draw))
        return sampling_lib._fingerprint.__wrapped__(300, None)
